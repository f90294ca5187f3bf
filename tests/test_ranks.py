"""Sharded trainers of several ranks: every exit is taken by all of them together."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import pytest
from limits import SLACK
from processes import lines, program, replica
from proxy import proxy

import aiosync
from aiosync.ranks import TrainerRanks


async def train(size, tmp_path, worker, **options):
    """Run all ranks to their end; what each said."""
    args = []
    for name, value in options.items():
        args += [f"--{name}", str(value)]
    async with AsyncExitStack() as stack:
        ranks = [
            await stack.enter_async_context(
                program(
                    "rank.py",
                    worker.url,
                    "--rank",
                    str(rank),
                    "--size",
                    str(size),
                    "--store",
                    str(tmp_path / "store"),
                    *args,
                )
            )
            for rank in range(size)
        ]
        return await asyncio.gather(*(lines(process, 60) for process in ranks))


@pytest.fixture(scope="module")
def losses():
    return {}


async def undisturbed(size, tmp_path, losses):
    """Losses of a step after rounds in which nothing went wrong."""
    if size not in losses:
        (tmp_path / "calm").mkdir()
        async with replica(kind="ranks", seed=2) as worker:
            said = await train(size, tmp_path / "calm", worker)
        losses[size] = [rank[-1]["loss"] for rank in said]
    return losses[size]


@pytest.mark.fault("A-HANG-6")
@pytest.mark.asyncio
@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [2, 4])
async def test_all_ranks_commit_together(size, tmp_path):
    async with replica(kind="ranks", seed=2) as worker:
        said = await train(size, tmp_path, worker, rounds=3)
        for rank in said:
            assert [word.get("outcome") for word in rank] == ["committed"] * 3 + [None]
            assert [word.get("state") for word in rank[:3]] == ["initialized"] * 3
        facts = await worker.facts()
        assert facts["version"] == 3


@pytest.mark.fault("A-HANG-6")
@pytest.mark.asyncio
@pytest.mark.timeout(120)
@pytest.mark.parametrize("at", [0, 2, 5])
@pytest.mark.parametrize("me", [0, 1])
async def test_one_rank_is_cancelled(me, at, tmp_path, losses):
    calm = await undisturbed(2, tmp_path, losses)
    async with replica(kind="ranks", seed=2) as worker:
        said = await train(2, tmp_path, worker, fault="cancel", me=me, at=at)
        assert said[me][0]["kind"] == "CancelledError"
        assert said[1 - me][0]["kind"] == "RoundCancelled"
        for rank, loss in zip(said, calm, strict=True):
            assert rank[0]["seconds"] < 10 + SLACK
            assert rank[1]["outcome"] == "committed"
            assert rank[2]["loss"] == loss
        assert (await worker.facts())["version"] == 2


@pytest.mark.fault("A-HANG-6")
@pytest.mark.asyncio
@pytest.mark.timeout(120)
@pytest.mark.parametrize("me", [0, 1])
async def test_source_raises_between_gathers_on_one_rank(me, tmp_path, losses):
    calm = await undisturbed(2, tmp_path, losses)
    async with replica(kind="ranks", seed=2) as worker:
        old = await worker.facts()
        said = await train(2, tmp_path, worker, fault="raise", me=me, at=5, rounds=1)
        assert said[me][0]["kind"] == "ValueError"
        assert all("gather failed" in rank[0]["error"] for rank in said)
        for rank, loss in zip(said, calm, strict=True):
            assert rank[1]["loss"] == loss
        facts = await worker.facts()
        assert facts["prints"] == old["prints"]


@pytest.mark.asyncio
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("odd", "text"), [("dtype", "metadata differs"), ("source", "source differs")]
)
async def test_what_differs_on_one_rank_is_refused_before_anything_moves(odd, text, tmp_path):
    async with replica(kind="ranks", seed=2) as worker:
        old = await worker.facts()
        said = await train(2, tmp_path, worker, odd=odd, me=1, rounds=1)
        for rank in said:
            assert rank[0]["kind"] == "Validation"
            assert text in rank[0]["error"]
            assert rank[0]["state"] == "initialized"
            assert "loss" in rank[1]
        assert (await worker.facts())["prints"] == old["prints"]


@pytest.mark.fault("A-HANG-6")
@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_a_rank_that_dies_is_named_and_the_others_end_in_time(tmp_path):
    async with replica(kind="ranks", seed=2) as worker:
        old = await worker.facts()
        said = await train(2, tmp_path, worker, fault="die", me=1, at=0, rounds=1, total=8)
        assert said[1] == []
        assert said[0][0]["kind"] is not None
        assert said[0][0]["seconds"] < 8 + 1 + 3 + SLACK
        facts = await worker.wait_state("initialized", "failed", "idle")
        assert facts["prints"] == old["prints"]
        assert facts["weights"] == "intact"


@pytest.mark.asyncio
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("size", "me", "at", "options"),
    [
        (2, 1, "admit", {}),
        (2, 0, "admit", {}),
        (3, 1, "admit", {}),
        (2, 1, "end", {}),
        (2, 1, "end", {"next": "yes"}),
    ],
)
async def test_a_rank_cancelled_inside_a_meeting_takes_part_in_the_next_round(
    size, me, at, options, tmp_path, losses
):
    calm = await undisturbed(size, tmp_path, losses)
    async with replica(kind="ranks", seed=2) as worker:
        said = await train(size, tmp_path, worker, fault=at, me=me, **options)
        assert said[me][0]["kind"] == "CancelledError"
        for rank, loss in zip(said, calm, strict=True):
            assert rank[0]["seconds"] < 10 + SLACK
            assert rank[1]["outcome"] == "committed"
            assert any("sat down again (epoch 2)" in note for note in rank[1]["notes"])
            assert rank[2]["loss"] == loss
        if at == "admit":
            for rank in (rank for n, rank in enumerate(said) if n != me):
                assert rank[0]["kind"] == "PeerLost"
                assert f"rank {me} left a meeting: was cancelled" in rank[0]["error"]
        assert (await worker.facts())["version"] == 2


@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_a_rank_that_was_killed_is_named_in_every_later_round_in_time(tmp_path):
    async with replica(kind="ranks", seed=2) as worker:
        said = await train(2, tmp_path, worker, fault="die", me=1, at=0, rounds=3, total=4)
        assert said[1] == []
        for word in said[0][:3]:
            assert word["outcome"] is None
            assert "rank 1" in word["error"]
            assert word["seconds"] < 4 + 1 + 3 + SLACK
        assert said[0][1]["kind"] == said[0][2]["kind"] == "PhaseTimeout"
        facts = await worker.wait_state("initialized", "failed", "idle")
        assert facts["weights"] == "intact"


@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_all_ranks_carry_out_the_same_ticket(tmp_path):
    async with replica(kind="ranks", seed=2) as worker:
        said = await train(2, tmp_path, worker, ticket="same", rounds=2)
        for rank in said:
            assert [word.get("outcome") for word in rank[:2]] == ["committed"] * 2
            assert [word["round"] for word in rank[:2]] == [1, 2]
        assert (await worker.facts())["version"] == 2


@pytest.mark.asyncio
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("which", "me"),
    [("other", 1), ("stale", 0), ("stale", 1), ("garbled", 1), ("contradicted", 0)],
)
async def test_a_ticket_that_one_rank_cannot_take_ends_the_round_on_all(which, me, tmp_path):
    async with replica(kind="ranks", seed=2) as worker:
        old = await worker.facts()
        said = await train(2, tmp_path, worker, ticket=which, me=me, rounds=2)
        expected = {
            "other": ("Validation", "ticket differs"),
            "stale": ("PhaseTimeout", "expired"),
            "garbled": ("Validation", "ticket is damaged"),
            "contradicted": ("Validation", "version=99 was given"),
        }
        kind, text = expected[which]
        for rank in said:
            assert rank[0]["kind"] == kind
            assert text in rank[0]["error"]
            assert rank[0]["error"] == said[0][0]["error"]
            assert rank[0]["state"] == "initialized"
            assert rank[1]["outcome"] == "committed"
        assert (await worker.facts())["prints"] != old["prints"]


@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_a_rank_that_left_before_the_end_learns_from_the_ticket_what_became_of_it(tmp_path):
    async with replica(kind="ranks", seed=2) as worker:
        said = await train(
            2, tmp_path, worker, ticket="same", again="yes", fault="end", me=1, rounds=2
        )
        assert said[1][0]["kind"] == "CancelledError"
        for rank in said:
            assert rank[1]["outcome"] == "committed"
            assert (rank[1]["round"], rank[1]["version"]) == (1, 1)
        assert (await worker.facts())["version"] == 1


def test_the_cause_of_a_broken_connection_is_waited_for():
    ranks = TrainerRanks.alone()
    symptom, cause = aiosync.PeerLost("hung up"), aiosync.AiosyncError.remote("no memory")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ranks.stop_if_unexplained, symptom, seconds=30)
        while not ranks._reason:
            time.sleep(0.001)
        ranks.stop()  # a cancellation that follows is none
        assert not waiting.done()
        ranks.stop(cause)
        waiting.result(timeout=10)
    ranks.stop(symptom)
    with pytest.raises(aiosync.RemoteError) as caught:
        ranks.meet("here")
    assert caught.value is cause


@pytest.mark.fault("A-HANG-6")
@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_a_send_that_fails_on_rank_0_ends_the_round_on_all_ranks(tmp_path, losses):
    calm = await undisturbed(2, tmp_path, losses)
    async with replica(kind="ranks", seed=2) as worker, proxy(worker.url) as middle:
        old = await worker.facts()

        async def soon():
            await asyncio.sleep(0.02)

        middle.break_route("update_weights", "500", soon)
        said = await train(2, tmp_path, middle, rounds=1)
        for rank, loss in zip(said, calm, strict=True):
            assert rank[0]["kind"] == said[0][0]["kind"] == "RemoteError"
            assert "no memory for down_proj" in rank[0]["error"]
            assert rank[0]["seconds"] < 10 + SLACK
            assert rank[1]["loss"] == loss
        assert (await worker.facts())["prints"] == old["prints"]
