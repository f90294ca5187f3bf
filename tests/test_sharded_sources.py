"""Trainers of several ranks whose parameters are split, staged, or held here and there."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from processes import lines, program, replica

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


async def run(size, kind, tmp_path, *scenarios):
    """What each rank said, by scenario."""
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(replica(kind=kind, seed=2))
        common = [
            worker.url, "--facts", worker._extra, "--kind", kind, "--size", str(size),
            "--store", str(tmp_path / "store"), "--do", ",".join(scenarios),
        ]  # fmt: skip
        ranks = [
            await stack.enter_async_context(
                program("sharded_rank.py", *common, "--rank", str(rank))
            )
            for rank in range(size)
        ]
        said = await asyncio.gather(*(lines(process, 90) for process in ranks))
    assert [[word["what"] for word in words] for words in said] == [list(scenarios)] * size
    return {what: [words[n] for words in said] for n, what in enumerate(scenarios)}


def committed(words):
    assert [word["outcome"] for word in words] == ["committed"] * len(words), words
    assert words[0]["equal"]
    assert {word["state"] for word in words} == {"initialized"}
    for word in words:
        if word.get("resumes"):
            # upstream's bound: one resume per group, one to end, one to spare
            assert word["groups"] <= word["resumes"] <= word["groups"] + 2


def refused(words, text):
    for word in words:
        assert word["kind"] == "Validation"
        assert text in word["error"]
        assert word["state"] == "initialized"
        assert not word["equal"]


async def test_shards_arrive_whole_on_four_ranks(tmp_path):
    """Width 5: ranks have two rows, one row, or none."""
    said = await run(
        4, "uneven", tmp_path, "fsdp", "hsdp", "rows", "columns", "session", "iterator"
    )
    for words in said.values():
        committed(words)


async def test_shards_of_shards_and_groups_of_layers(tmp_path):
    said = await run(4, "ranks", tmp_path, "fsdp+tp", "hsdp", "pairs")
    for words in said.values():
        committed(words)
    assert {word["groups"] for word in said["hsdp"]} == {6}
    assert {word["groups"] for word in said["pairs"]} == {4}


async def test_every_tensor_is_held_by_the_rank_that_sends(tmp_path):
    said = await run(
        2, "small", tmp_path, "stages", "stages on 0", "no such owner",
        "legacy", "legacy orphan", "legacy elsewhere",
    )  # fmt: skip
    refused(said["stages"], "1.bias is held by rank 1 only, and with backend 'ipc' only rank 0")
    committed(said["stages on 0"])
    refused(said["no such owner"], "no trainer rank holds 1.bias")
    committed(said["legacy"])
    refused(said["legacy orphan"], "no trainer rank holds 1.weight, which is announced")
    refused(said["legacy elsewhere"], "0.weight is held by rank 1 only")
