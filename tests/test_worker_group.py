"""A replica of several ranks: one state, one version, and no rank that is forgotten."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import by_hand
import models
import pytest
import sliced
import torch
from by_hand import ByHand
from processes import replica
from rank_groups import BEAT, BUDGET, MISSES, PHASES, parallel

import aiosync
from aiosync import (
    Coverage,
    Fenced,
    HTTPVLLMWeightSyncClient,
    InvalidTransition,
    OutcomeUnknown,
    PeerLost,
    ProtocolMismatch,
    Refused,
    RoundHeader,
    State,
    Torn,
    Validation,
    WorkerGroup,
)
from aiosync.testing import DirectClient

# --- ranks of this process, driven by hand ---


@dataclass
class Group:
    group: WorkerGroup
    engines: list[ByHand]
    calls: list[tuple[int, str]]

    def header(self, round: int, order: int | None = None, **options: Any) -> RoundHeader:
        return by_hand.header(self.group, round, order, **options)

    async def owned(self) -> None:
        await by_hand.owned(self.group)

    def values(self) -> list[set[float]]:
        return [by_hand.values(engine.model) for engine in self.engines]

    async def whole_round(self, number: int, order: int) -> None:
        await by_hand.whole_round(self.group, number, order)
        assert self.values() == [{float(order)}] * len(self.engines)


@asynccontextmanager
async def grouped(ranks: int = 2, *, before=None, **options: Any):
    calls: list[tuple[int, str]] = []
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(by_hand.by_hand()) for _ in range(ranks)]

        def client(index: int) -> DirectClient:
            async def called(method: str) -> None:
                calls.append((index, method))
                if before is not None:
                    await before(index, method)

            return DirectClient(engines[index], name=f"r{index}", before=called)

        options = {"heartbeat_s": 5.0, **options}
        group = WorkerGroup([client(n) for n in range(ranks)], **options)
        yield Group(await stack.enter_async_context(group), engines, calls)


@pytest.mark.asyncio
async def test_every_rank_takes_every_round():
    async with grouped(3) as g:
        await g.owned()
        for order in (1, 2, 3):
            await g.whole_round(order, order)
            peer = g.group.peer_state()
            assert (peer.state, peer.weights, peer.world_size) == ("initialized", "intact", 3)
            assert peer.version == g.group.version == by_hand.version(order)
            assert [rank["version"] for rank in peer.detail["ranks"]] == [str(order)] * 3
            assert all(engine.version == by_hand.version(order) for engine in g.engines)
        asked = [method for rank, method in g.calls if rank == 1 and "status" not in method]
        per_round = ["start", "update", "prepare", "finish"]
        assert [name.split("_")[0] for name in asked] == ["init", *per_round * 3]


@pytest.mark.asyncio
async def test_a_list_is_dealt_out_by_rank():
    async with grouped(3) as g:
        await g.owned()
        this = g.header(1, 1)
        await g.group.start_weight_update(header=this)
        with pytest.raises(Validation, match="2 entries for 3 ranks"):
            await g.group.update_weights([{"value": 1.0}] * 2, header=this)
        payload = [{"value": 10.0 + rank} for rank in range(3)]
        await g.group.update_weights(payload, header=this)
        await g.group.finish_weight_update("1", header=this)
        assert g.values() == [{10.0}, {11.0}, {12.0}]


@pytest.mark.asyncio
async def test_a_rank_learns_how_long_a_finish_may_take():
    async with grouped(2) as g:
        await g.owned()
        limits = []
        for engine in g.engines:
            note = engine.cycle.ending.note_limit

            def noted(header, note=note):
                limits.append(header.deadline_s)
                note(header)

            engine.cycle.ending.note_limit = noted
        this = g.header(1, 1)
        await g.group.start_weight_update(header=this)
        await g.group.update_weights({"value": 1.0}, header=this)
        await g.group.finish_weight_update("1", header=g.header(1, 1, deadline_s=20.0))
        assert len(limits) == 2
        assert all(limit <= 20 for limit in limits)


@pytest.mark.asyncio
async def test_the_init_info_is_each_ranks_own():
    seen = []

    class Asks(ByHand):
        async def init_transfer_engine(self, init_info):
            seen.append(init_info.address)

    async with by_hand.by_hand(Asks) as one, by_hand.by_hand(Asks) as two:
        ranks = [DirectClient(one), DirectClient(two)]
        own = lambda info, rank: {"address": f"{info['address']}-{rank}"}  # noqa: E731
        async with WorkerGroup(ranks, init_info_of=own) as group:
            await group.init_transfer_engine({"address": "a"})
    assert sorted(seen) == ["a-0", "a-1"]


@pytest.mark.asyncio
async def test_a_rank_that_fails_prepare_leaves_the_old_version_everywhere():
    async with grouped() as g:
        await g.owned()
        await g.whole_round(1, 1)
        this = g.header(2, 2)
        await g.group.start_weight_update(header=this)
        await g.group.update_weights({"value": 2.0}, header=this)
        g.engines[1].errors["drain"] = Coverage("half of it is missing", tensor="t03")
        with pytest.raises(Coverage, match="half of it") as caught:
            await g.group.prepare_weight_update(header=this)
        assert (caught.value.rank, caught.value.tensor, caught.value.phase) == (1, "t03", "prepare")
        assert g.values() == [{1.0}, {1.0}]
        peer = g.group.peer_state()
        assert (peer.state, peer.weights) == ("initialized", "intact")
        assert peer.version == by_hand.version(1)
        await g.whole_round(3, 2)


@pytest.mark.asyncio
@pytest.mark.parametrize("step", ["start", "update"])
async def test_a_rank_that_fails_before_the_commit_costs_the_round_only(step):
    async with grouped() as g:
        await g.owned()
        await g.whole_round(1, 1)
        g.engines[0].errors[step] = OSError("no more memory")
        this = g.header(2, 2)
        with pytest.raises(aiosync.AiosyncError, match="no more memory") as caught:
            await g.group.start_weight_update(header=this)
            await g.group.update_weights({"value": 2.0}, header=this)
        assert caught.value.rank == 0
        assert g.values() == [{1.0}, {1.0}]
        assert [engine.state for engine in g.engines] == [State.INITIALIZED] * 2
        await g.whole_round(3, 3)


@pytest.mark.asyncio
async def test_ranks_that_end_apart_are_torn_until_a_complete_round():
    async with grouped() as g:
        await g.owned()
        await g.whole_round(1, 1)
        this = g.header(2, 2)
        await g.group.start_weight_update(header=this)
        await g.group.update_weights({"value": 2.0}, header=this)
        await g.group.prepare_weight_update(header=this)
        g.engines[1].errors["finish"] = OSError("lost my disk")
        with pytest.raises(Torn, match=r"rank 1 did not commit.*new version: 0") as caught:
            await g.group.finish_weight_update("2", header=this)
        assert (caught.value.rank, caught.value.weights) == (1, "torn")
        peer = g.group.peer_state()
        assert (peer.state, peer.weights, peer.version) == ("failed", "torn", None)
        service = aiosync.WeightUpdateService(g.group)
        assert (await service.dispatch("GET", "/ready", {}, {}, b"")).status == 503
        await g.owned()  # the same version again, to all
        await g.whole_round(1, 2)
        assert g.group.weights == "intact"


@pytest.mark.asyncio
async def test_a_finish_that_no_rank_took_changes_nothing():
    async with grouped() as g:
        await g.owned()
        await g.whole_round(1, 1)
        this = g.header(2, 2)
        await g.group.start_weight_update(header=this)
        await g.group.update_weights({"value": 2.0}, header=this)
        for engine in g.engines:
            engine.errors["finish"] = OSError("not today")
        with pytest.raises(aiosync.AiosyncError, match="not today"):
            await g.group.finish_weight_update("2", header=this)
        assert (g.group.weights, g.group.version) == ("intact", by_hand.version(1))
        assert g.values() == [{1.0}, {1.0}]


@pytest.mark.asyncio
async def test_a_lost_answer_to_finish_is_asked_for():
    lost = []

    async def before(rank: int, method: str) -> None:
        if rank == 1 and method == "weight_update_status" and lost == ["sent"]:
            lost.append("asked")

    async with grouped(before=before) as g:
        await g.owned()
        client = g.group.ranks[1].link.client
        finish = client.finish_weight_update

        async def deaf(*args: Any, **options: Any):
            await finish(*args, **options)
            lost.append("sent")
            raise ProtocolMismatch("the answer was garbled")

        client.finish_weight_update = deaf
        await g.whole_round(1, 1)
        assert lost == ["sent", "asked"]
        assert g.group.weights == "intact"


@pytest.mark.asyncio
async def test_owner_and_order_are_the_groups_own():
    async with grouped() as g:
        await g.owned()
        await g.whole_round(1, 5)
        stranger = RoundHeader(owner="somebody", epoch=1, round=2)
        with pytest.raises(Fenced):
            await g.group.start_weight_update(header=stranger)
        with pytest.raises(Refused, match="goes back"):
            await g.group.start_weight_update(header=g.header(2, 4))
        with pytest.raises(InvalidTransition):
            await g.group.update_weights({"value": 1.0}, header=g.header(2))
        before = list(g.calls)
        await g.group.finish_weight_update("5", header=g.header(1, 5))  # the same call again
        assert g.calls == before
        owners = {engine.cycle.ownership.owner for engine in g.engines}
        assert owners == {g.group.owner}
        with pytest.raises(Fenced):  # the trainer does not go past the group
            await g.engines[0].start_weight_update(header=g.header(9, 9))
        await by_hand.owned(g.group, "next")
        with pytest.raises(Fenced):
            await g.group.start_weight_update(header=g.header(2, 6, owner="trainer"))
        await g.whole_round(1, 6)


@pytest.mark.asyncio
async def test_four_bare_methods_are_enough():
    async with grouped() as g:
        await g.group.init_transfer_engine({"address": "here"})
        for label in ("a", "b"):
            await g.group.start_weight_update()
            await g.group.update_weights({"value": 3.0})
            await g.group.finish_weight_update(label)
            assert g.group.version.label == label  # one version, not one per rank
        assert (g.group.version.order, g.group.weights) == (2, "intact")


@pytest.mark.asyncio
async def test_a_trainer_that_falls_silent_ends_the_round_on_all_ranks():
    async with grouped(heartbeat_s=BEAT, misses=MISSES) as g:
        await g.owned()
        this = g.header(1, 1, lease_s=0.5)
        await g.group.start_weight_update(header=this)
        await g.group.update_weights({"value": 1.0}, header=this)
        await asyncio.wait_for(g.group.wait_for("initialized"), 10)
        assert [engine.state for engine in g.engines] == [State.INITIALIZED] * 2
        assert g.values() == [{0.0}, {0.0}]
        beats = [rank for rank, method in g.calls if method == "weight_update_status"]
        assert set(beats) == {0, 1}


@pytest.mark.asyncio
async def test_a_trainers_touch_keeps_the_ranks_round_open():
    async with grouped(heartbeat_s=BEAT, misses=MISSES) as g:
        await g.owned()
        this = g.header(1, 1, lease_s=0.6)
        await g.group.start_weight_update(header=this)
        sessions = [engine.cycle.session for engine in g.engines]
        for _ in range(12):  # twice the lease
            await asyncio.sleep(0.1)
            g.group.touch(this)
        assert [engine.cycle.session for engine in g.engines] == sessions
        assert [session.over for session in sessions] == [False, False]
        await g.group.update_weights({"value": 1.0}, header=this)
        await g.group.finish_weight_update("1", header=this)
        assert g.values() == [{1.0}, {1.0}]


@pytest.mark.asyncio
async def test_requests_of_the_group_keep_the_swap_out():
    async with grouped() as g:
        await g.owned()
        this = g.header(1, 1)
        await g.group.start_weight_update(header=this)
        await g.group.update_weights({"value": 1.0}, header=this)
        await g.group.prepare_weight_update(header=this)
        async with asyncio.TaskGroup() as tasks:
            async with g.group.generation.request():
                tasks.create_task(g.group.finish_weight_update("1", header=this))
                while g.group.generation.state == "running":
                    await asyncio.sleep(0)
                assert g.values() == [{0.0}, {0.0}]
        assert g.values() == [{1.0}, {1.0}]


@pytest.mark.asyncio
async def test_abort_and_close_reach_every_rank():
    async with grouped() as g:
        await g.owned()
        this = g.header(1, 1)
        await g.group.start_weight_update(header=this)
        for engine in g.engines:
            engine.hold("update")
        updating = asyncio.create_task(g.group.update_weights({"value": 1.0}, header=this))
        for engine in g.engines:
            await engine.reached["update"].wait()
        await g.group.abort_weight_update("enough", header=this)
        with pytest.raises(aiosync.RoundCancelled, match="enough"):
            await updating
        assert [engine.state for engine in g.engines] == [State.INITIALIZED] * 2
        assert g.group.state is State.INITIALIZED
        for engine in g.engines:
            engine.holds["update"].set()
        await g.group.start_weight_update(header=g.header(2, 2))
        await g.group.aclose()
        assert [engine.state for engine in g.engines] == [State.IDLE] * 2
        assert g.group.state is State.CLOSED


@pytest.mark.asyncio
async def test_what_cannot_be_a_group():
    with pytest.raises(Validation, match="at least one rank"):
        WorkerGroup([])
    with pytest.raises(Validation, match="list of"):
        WorkerGroup("unix:///one.sock")
    async with by_hand.by_hand() as engine:
        group = WorkerGroup([DirectClient(engine)])
        with pytest.raises(InvalidTransition, match="enter the group first"):
            await group.init_transfer_engine({"address": "here"})
        await group.aclose()
    with pytest.raises(PeerLost) as caught:
        async with WorkerGroup(["unix:///nowhere/at-all.sock"], wait_s=0.1):
            pass
    assert caught.value.rank == 0

    class Plain:
        async def init_weight_transfer_engine(self, init_info): ...
        async def start_weight_update(self): ...
        async def update_weights(self, update_info): ...
        async def finish_weight_update(self, weight_version=None): ...

    with pytest.raises(ProtocolMismatch, match="rank 0 of a group must be an aiosync worker"):
        async with WorkerGroup([Plain()]):
            pass


# --- ranks in processes of their own, with a tensor-parallel model ---


@pytest.mark.fault("A-SILENT-4")
@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("size", [2, 4])
async def test_each_rank_holds_its_slice(size, free_shm):
    async with parallel(size) as tp:
        async with aiosync.connect(tp.model, workers=[tp.url]) as sync:
            report = await sync.send_weights(version=1, budget=BUDGET)
            assert (report.outcome, len(report.members)) == ("committed", 1)
            await tp.assert_ranks_hold(7, 1)
            tp.set(8)
            await sync.send_weights(version=2, budget=BUDGET)
            await tp.assert_ranks_hold(8, 2)
        client = HTTPVLLMWeightSyncClient(tp.url)
        assert await client.get_world_size() == size
        assert (await client.ready()).ready
        assert (await client.weight_info()).message["weight_version"] == "2"


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_slices_together_compute_what_the_whole_does():
    model = sliced.full(3)
    x = torch.randn(5, sliced.WIDTH)
    parts = [sliced.Slice(rank, 2, 3) for rank in range(2)]
    with torch.no_grad():
        whole = model["down"](torch.relu(model["up"](x)))
        sums = sum(
            torch.relu(x @ part.up_weight.T + part.up_bias) @ part.down_weight.T for part in parts
        )
    assert torch.allclose(whole, sums, atol=1e-3)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_groups_and_single_workers_in_one_fleet():
    """Two replicas of two ranks and one of one: five readers, and all of them are asked."""
    async with parallel() as one, parallel() as two, replica(kind="full", seed=1) as single:
        workers = [one.url, two.url, single.url]
        async with aiosync.connect(one.model, workers=workers) as sync:
            report = await sync.send_weights(version=1, budget=BUDGET)
            assert len(report.members) == 3
            for tp in (one, two):
                await tp.assert_ranks_hold(7, 1)
            assert (await single.facts())["prints"] == models.fingerprint(one.model)


@pytest.mark.fault("A-HANG-9")
@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("phase", [*PHASES])
async def test_a_rank_killed_in_a_phase(phase):
    async with parallel() as tp:
        async with aiosync.connect(tp.model, workers=[tp.url]) as sync:
            await sync.send_weights(version=1, budget=BUDGET)
            tp.set(8)
            tp.clients[1].before[PHASES[phase]] = tp.ranks[1].kill
            with pytest.raises(aiosync.AiosyncError) as caught:
                await sync.send_weights(version=2, budget=BUDGET)
            assert caught.value.rank == 1, caught.value
            tp.assert_not_ready("unknown")
            assert not (await HTTPVLLMWeightSyncClient(tp.url).ready()).ready
            if phase == "finish":
                assert isinstance(caught.value, OutcomeUnknown)
                await tp.assert_ranks_hold(8, 2, only=[0])
            else:
                await tp.assert_ranks_hold(7, 1, only=[0])
            # A new process takes its place, and the next round mends the replica.
            async with tp.replaced(1):
                await tp.assert_mended(sync, 9, 3, BUDGET)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_rank_killed_between_prepare_and_finish_leaves_the_others_old():
    async with parallel() as tp:
        async with aiosync.connect(tp.model, workers=[tp.url]) as sync:
            await sync.send_weights(version=1, budget=BUDGET)
            tp.set(8)

            async def kill(_: Any) -> None:
                await tp.ranks[1].kill()

            tp.group.gate("complete", kill)
            with pytest.raises(PeerLost) as caught:
                await sync.send_weights(version=2, budget=BUDGET)
            assert caught.value.rank == 1
            tp.assert_not_ready("unknown")
            await tp.assert_ranks_hold(7, 1, only=[0])


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_rank_that_ends_between_rounds_is_noticed():
    async with parallel() as tp:
        async with aiosync.connect(tp.model, workers=[tp.url]) as sync:
            await sync.send_weights(version=1, budget=BUDGET)
            await tp.ranks[1].kill()
            await asyncio.wait_for(tp.group.wait_for("failed"), 10)
            tp.assert_not_ready("unknown")
            with pytest.raises(aiosync.AiosyncError) as caught:
                await sync.send_weights(version=2, budget=BUDGET)
            assert caught.value.rank == 1
            with pytest.raises(InvalidTransition, match="rank 1 is lost"):
                await tp.group.start_weight_update(header=by_hand.header(tp.group, 9, 9))
            async with tp.replaced(1):
                await tp.assert_mended(sync, 9, 3, BUDGET)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_rank_that_restarts_between_rounds_costs_no_round():
    async with parallel() as tp:
        async with aiosync.connect(tp.model, workers=[tp.url]) as sync:
            await sync.send_weights(version=1, budget=BUDGET)
            await tp.ranks[1].kill()
            async with tp.replaced(1):
                await tp.until_found(1, restarted=True)
                assert tp.group.peer_state().weights == "torn"  # v1 beside a fresh process
                tp.set(9)
                report = await sync.send_weights(version=2, budget=BUDGET)
                assert report.recovered
                await tp.assert_ranks_hold(9, 2)


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("phase", [*PHASES])
async def test_a_rank_stopped_in_a_phase_is_lost_and_comes_back(phase):
    async with parallel() as tp:
        async with aiosync.connect(tp.model, workers=[tp.url]) as sync:
            await sync.send_weights(version=1, budget=BUDGET)
            tp.set(8)

            async def stop() -> None:
                tp.ranks[1].signal(signal.SIGSTOP)

            tp.clients[1].before[PHASES[phase]] = stop
            with pytest.raises(aiosync.AiosyncError) as caught:
                await sync.send_weights(version=2, budget=BUDGET)
            assert caught.value.rank == 1, caught.value
            tp.assert_not_ready("unknown")
            tp.ranks[1].signal(signal.SIGCONT)
            await tp.until_found(1)
            await tp.assert_mended(sync, 9, 3, BUDGET)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_new_group_over_old_ranks_adopts_their_version():
    async with parallel() as tp:
        async with aiosync.connect(tp.model, workers=[tp.url], lineage="run") as sync:
            await sync.send_weights(version=4, budget=BUDGET)
        async with WorkerGroup([rank.url for rank in tp.ranks]) as second:
            peer = second.peer_state()
            assert (peer.version.order, peer.weights, peer.state) == (4, "intact", "idle")
            async with aiosync.serve(second) as server:
                async with aiosync.connect(tp.model, workers=[server.url], lineage="run") as sync:
                    with pytest.raises(Refused, match="goes back"):
                        await sync.send_weights(version=3, budget=BUDGET)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_nothing_is_left_open():
    before = len(list(Path("/proc/self/fd").iterdir()))
    tasks = len(asyncio.all_tasks())
    async with parallel() as tp:
        async with aiosync.connect(tp.model, workers=[tp.url]) as sync:
            await sync.send_weights(version=1, budget=BUDGET)
    assert len(asyncio.all_tasks()) == tasks
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
