"""A group beside its rounds: pauses, labels, checks and targets reach every rank."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from by_hand import by_hand, header, owned, tensors, values, whole_round

import aiosync
from aiosync import Refused, WorkerGroup
from aiosync.testing import DirectClient

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def grouped(ranks=2, **options):
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(by_hand(**options)) for _ in range(ranks)]
        clients = [DirectClient(engine, name=f"r{n}") for n, engine in enumerate(engines)]
        group = await stack.enter_async_context(WorkerGroup(clients, heartbeat_s=5.0))
        yield group, engines


async def test_the_groups_gate_is_what_a_caller_pauses():
    async with grouped() as (group, engines):
        await owned(group)
        await group.pause_generation(mode="keep", header=header(group, 0))
        assert group.peer_state().detail["paused"]
        await whole_round(group, 1, 1)  # the swap runs under the pause
        assert [values(engine.model) for engine in engines] == [{1.0}, {1.0}]
        assert await group.is_paused()
        await group.resume_generation(header=header(group, 0))
        async with group.generation.request() as request:
            assert request.version.label == 1
        assert not group.peer_state().detail["paused"]


async def test_ranks_that_write_early_hold_the_groups_generation():
    async with grouped(sink="in_place") as (group, engines):
        await owned(group)
        this = header(group, 1, 1)
        await group.start_weight_update(header=this)
        assert group.generation.state == "running"
        await group.update_weights({"value": 1.0}, header=this)
        assert group.generation.state == "paused"
        await group.finish_weight_update("1", header=this)
        assert group.generation.state == "running"
        assert [engine.generation.state for engine in engines] == ["running"] * 2


async def test_a_group_whose_ranks_are_torn_stays_paused():
    async with grouped(sink="in_place") as (group, _):
        await owned(group)
        this = header(group, 1, 1)
        await group.start_weight_update(header=this)
        with pytest.raises(aiosync.AiosyncError, match="tensor 3"):
            await group.update_weights({"value": 1.0, "fail_at": 3, "batch": 2}, header=this)
        with pytest.raises(aiosync.Paused, match="torn"):
            async with group.generation.request():
                pytest.fail("entered")
        with pytest.raises(aiosync.Torn):
            await group.resume_generation()
        await owned(group)
        await whole_round(group, 1, 2)
        async with group.generation.request():
            pass


async def test_labels_and_checksums_are_of_all_ranks():
    async with grouped(3) as (group, engines):
        await owned(group)
        await whole_round(group, 1, 1)
        this = header(group, 0)
        await group.update_weight_version("one", header=this)
        assert {engine.version.label for engine in engines} == {"one"}
        assert group.version.label == "one"
        sums = (await group.weight_checker("checksum", header=this))["checksums"]
        assert len(sums) == 3 * len(engines[0].model)
        assert {key.rpartition(":")[0] for key in sums} == {f"dp0:pp0:pcp0:tp{n}" for n in range(3)}
        engines[2].model["t07"][0] = 9.0
        found = await group.weight_checker("compare", sums, header=this)
        assert found == {"match": False, "mismatches": ["dp0:pp0:pcp0:tp2:t07"]}
        await group.weight_checker("reset", header=this)
        assert [values(engine.model) for engine in engines] == [{0.0}] * 3
        assert group.weights == "unknown"
        assert group.generation.state == "paused"
        await whole_round(group, 2, 2)
        assert (group.weights, group.generation.state) == ("intact", "running")


async def test_a_draft_round_needs_a_draft_on_every_rank():
    async with grouped() as (group, engines):
        engines[0].set_draft_model(tensors())
        await owned(group)
        this = header(group, 1, 1)
        with pytest.raises(Refused, match="rank 1 cannot update draft") as caught:
            await group.start_draft_weight_update(header=this)
        assert caught.value.rank == 1
        engines[1].set_draft_model(tensors())
        await owned(group)  # asks the ranks anew
        this = header(group, 1, 1)
        await group.start_draft_weight_update(header=this)
        await group.update_weights({"value": 4.0}, header=this)
        await group.finish_weight_update("1", header=this)
        assert [values(engine.draft_model) for engine in engines] == [{4.0}, {4.0}]
        assert [values(engine.model) for engine in engines] == [{0.0}, {0.0}]
        assert (group.version, group.target_versions["draft"].label) == (None, 1)
        with pytest.raises(Refused, match="adapter:x"):
            lora = aiosync.Adapter("x")
            await group.start_weight_update(header=header(group, 2, 2, target=lora))
        await whole_round(group, 2, 2)
        assert [values(engine.model) for engine in engines] == [{2.0}, {2.0}]
