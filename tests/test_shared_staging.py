"""A `WorkerGroup` whose ranks stage one copy together, as processes and in this one."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import by_hand
import models
import pytest
import sliced
import torch
from near_groups import fill, held, near_group, trained
from paced import Hold, Paced
from processes import replica
from rank_groups import LONG as BUDGET
from rank_groups import PHASES, unhurried
from torch import nn

import aiosync
from aiosync import (
    Coverage,
    OutcomeUnknown,
    PeerLost,
    Refused,
    RoundCancelled,
    Validation,
    WeightTransferConfig,
    WorkerGroup,
)
from transports.segments import Segment

SHARED = {"staging": "shared_host"}
CHUNKS = {"packed": True, "packed_buffer_size_bytes": 4096}  # so that a round has many


def group_of(size: int = 2, **options):
    return unhurried(size, **{"rank": SHARED, **options})


# --- processes ---


def memfds(pid: int) -> set[str]:
    """Anonymous files that a process maps, by inode."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:aiosync" in line}


@pytest.mark.slow
@pytest.mark.asyncio
async def test_each_rank_takes_its_part_of_one_copy(free_shm):
    size = 4
    async with group_of(size) as tp:
        nbytes = sum(p.nbytes for p in tp.model.parameters())
        seen: list[set[str]] = []

        def look(index: int) -> None:
            if index == 0:  # nothing has been sent yet
                seen.extend(memfds(rank.process.pid) for rank in tp.ranks)

        source = Paced(tp.model, look)
        async with aiosync.connect(source, workers=[tp.url]) as sync:
            report = await sync.send_weights(version=7, budget=BUDGET)
            await tp.assert_ranks_hold(7, 7)
            plan = await sync.plan()
        lead, *others = seen
        assert len(others) == size - 1
        assert all(len(other) == 1 and other <= lead for other in others)
        text = f"{tp.url}: {size} ranks share 1 staging copy of {nbytes} bytes in host memory"
        assert report.notes == [text]
        assert (plan.worker_bytes, plan.shared_staging) == ({tp.url: nbytes}, [tp.url])
        client = aiosync.HTTPVLLMWeightSyncClient(tp.url)
        assert await client.get_world_size() == size


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_memory_is_kept_between_rounds():
    async with group_of(rank={**SHARED, "kind": "full"}) as tp:
        async with aiosync.connect(tp.model, workers=[tp.url]) as sync:
            maps = []
            for version in (1, 2):
                await sync.send_weights(version=version, budget=BUDGET)
                maps.append(memfds(tp.ranks[1].process.pid))
            assert len(maps[0]) == 1
            assert maps[0] == maps[1]
            await tp.ranks[1].kill()
            async with tp.replaced(1) as fresh:
                await tp.until_found(1, restarted=True)
                report = await sync.send_weights(version=3, budget=BUDGET)
                assert report.outcome == "committed"
                new = memfds(fresh.process.pid)
                assert len(new) == 1
                assert new != maps[0]  # the process before may be anywhere in its copy
                assert new <= memfds(tp.ranks[0].process.pid)


@pytest.mark.fault("A-HANG-9")
@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("rank", "phase"),
    [(0, "update"), (0, "bytes"), (0, "finish"), (1, "bytes"), (1, "prepare"), (1, "finish")],
)
async def test_a_rank_killed_in_a_phase(rank, phase):
    """Rank 0 receives for both."""
    async with group_of() as tp:
        armed = False

        def kill_at(index: int) -> None:
            if armed and phase == "bytes" and index == 3:
                tp.ranks[rank].signal(signal.SIGKILL)

        source = Paced(tp.model, kill_at)
        async with aiosync.connect(source, workers=[tp.url], **CHUNKS) as sync:
            await sync.send_weights(version=1, budget=BUDGET)
            tp.set(8)
            armed = True
            if phase != "bytes":
                tp.clients[rank].before[PHASES[phase]] = tp.ranks[rank].kill
            with pytest.raises(aiosync.AiosyncError) as caught:
                await sync.send_weights(version=2, budget=BUDGET)
            assert caught.value.rank in (rank, None), caught.value  # None: the trainer saw it first
            tp.assert_not_ready("unknown")
            if phase == "finish":  # the data is still there for the one that lives
                assert isinstance(caught.value, OutcomeUnknown)
                await tp.assert_ranks_hold(8, 2, only=[1 - rank])
            else:
                await tp.assert_ranks_hold(7, 1, only=[1 - rank])
            armed = False
            async with tp.replaced(rank):
                await tp.assert_mended(sync, 9, 3, BUDGET)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_rank_that_dies_in_its_own_swap_tears_nobody_else():
    async with AsyncExitStack() as stack:
        own = [{"kind": "slice-0-2-down.weight"}, {"kind": "slice-1-2"}]
        ranks = [await stack.enter_async_context(replica(seed=7, **o, **SHARED)) for o in own]
        group = WorkerGroup([rank.url for rank in ranks], heartbeat_s=5.0)
        await stack.enter_async_context(group)
        server = await stack.enter_async_context(aiosync.serve(group))
        async with aiosync.connect(sliced.full(8), workers=[server.url]) as sync:
            with pytest.raises(OutcomeUnknown):
                await sync.send_weights(version=1, budget=BUDGET)
        facts = await ranks[1].facts()
        assert facts["prints"] == models.fingerprint(sliced.Slice(1, 2, 8))
        assert (facts["version"], facts["weights"]) == (1, "intact")


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_stopped_while_bytes_arrive_is_lost_and_comes_back(rank):
    async with group_of(heartbeat_s=0.4, misses=6) as tp:
        armed = False

        def stop_at(index: int) -> None:
            if armed and index == 3:
                tp.ranks[rank].signal(signal.SIGSTOP)

        source = Paced(tp.model, stop_at)
        async with aiosync.connect(source, workers=[tp.url], **CHUNKS) as sync:
            await sync.send_weights(version=1, budget=BUDGET)
            tp.set(8)
            armed = True
            with pytest.raises(aiosync.AiosyncError):
                await sync.send_weights(version=2, budget=BUDGET)
            await tp.assert_ranks_hold(7, 1, only=[1 - rank])
            armed = False
            tp.ranks[rank].signal(signal.SIGCONT)
            await tp.until_found(rank)
            await tp.assert_mended(sync, 9, 3, BUDGET)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_over_gloo_the_ranks_are_one_member_of_the_group():
    rank = {**SHARED, "backend": "gloo"}
    async with group_of(rank=rank) as tp, replica(kind="full", backend="gloo") as single:
        workers = [tp.url, single.url]
        async with aiosync.connect(tp.model, workers=workers) as sync:
            for version in (7, 8):
                tp.set(version)
                await sync.send_weights(version=version, budget=BUDGET)
                await tp.assert_ranks_hold(version, version)
            assert (await single.facts())["version"] == 8


# --- ranks of this process ---


class Greedy:
    """A loader that keeps what it is given, and writes to it."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def load_weights(self, weights) -> None:
        self.kept = dict(weights)
        for tensor in self.kept.values():
            tensor.mul_(-1.0)


class Careful:
    """A loader that copies, but only once the one before it has had its turn."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}

    def load_weights(self, weights) -> None:
        self.held = {name: tensor.clone() for name, tensor in weights}


def shared(*parts, backend: str = "ipc", others=SHARED, **options):
    """A group of this process; `others` is what all ranks but the first are told."""
    configs = [WeightTransferConfig(backend, **own) for own in (SHARED, others)]
    return near_group(*parts, configs=configs, **options)


@pytest.mark.asyncio
@pytest.mark.parametrize("greedy", [0, 1])
async def test_what_a_loader_keeps_and_writes_is_its_own(greedy, free_shm):
    parts = [Careful(), Careful()]
    parts[greedy] = Greedy()
    source = trained(1.0)
    async with shared(*parts) as (_, _, url), aiosync.connect(source, workers=[url]) as sync:
        await sync.send_weights(version=1, budget=BUDGET)
        kept = parts[greedy].kept
        fill(source, 2.0)
        await sync.send_weights(version=2, budget=BUDGET)
        assert all(tensor.eq(-1.0).all() for tensor in kept.values())
        assert all(tensor.eq(-2.0).all() for tensor in parts[greedy].kept.values())
        assert all(tensor.eq(2.0).all() for tensor in parts[1 - greedy].held.values())
    kept.clear()
    parts[greedy].kept.clear()


@pytest.mark.asyncio
async def test_a_round_that_is_cancelled_while_bytes_arrive(free_shm):
    parts = [trained(0.0) for _ in range(3)]
    source = trained(1.0)
    async with shared(*parts) as (_, group, url):
        async with aiosync.connect(Paced(source, hold := Hold(1)), workers=[url]) as sync:
            update = sync.begin_update(version=1, budget=BUDGET)
            await asyncio.to_thread(hold.reached.wait, 20)
            update.cancel()
            hold.released.set()
            with pytest.raises(RoundCancelled):
                await update
            assert [held(model) for model in parts] == [{0.0}] * 3
            assert group.weights == "intact"
            await sync.send_weights(version=2, budget=BUDGET)
            assert [held(model) for model in parts] == [{1.0}] * 3


@pytest.mark.asyncio
async def test_a_rank_whose_model_differs_costs_the_round_only():
    other = nn.Linear(64, 64, bias=False)
    fill(other, 0.0)
    parts = [trained(0.0), other]
    async with shared(*parts) as (engines, group, url):
        async with aiosync.connect(trained(1.0), workers=[url]) as sync:
            with pytest.raises(Coverage, match="bias") as caught:
                await sync.send_weights(version=1, budget=BUDGET)
            assert (caught.value.rank, group.weights) == (1, "intact")
            assert [held(model) for model in parts] == [{0.0}] * 2
            other.bias = nn.Parameter(torch.zeros(64))
            engines[1].drop_sinks()
            await sync.send_weights(version=2, budget=BUDGET)
            assert [held(model) for model in parts] == [{1.0}] * 2


@pytest.mark.asyncio
async def test_nothing_is_left_of_many_rounds(free_shm):
    parts = [trained(0.0), Careful()]
    source = trained(1.0)
    async with shared(*parts) as (_, _, url), aiosync.connect(source, workers=[url]) as sync:
        await sync.send_weights(version=1, budget=BUDGET)
        before = len([*Path("/proc/self/fd").iterdir()])
        for version in range(2, 12):
            await sync.send_weights(version=version, budget=BUDGET)
        assert len([*Path("/proc/self/fd").iterdir()]) <= before + 1
        assert len(memfds("self")) <= 3


@pytest.mark.asyncio
@pytest.mark.parametrize("fresh", [0, 1])
async def test_the_copy_before_is_given_back_before_the_next_is_made(fresh, free_shm, monkeypatch):
    """Where a rank is another process, say: both may not fit."""
    parts = [trained(0.0), trained(0.0)]
    create, left = Segment.create.__func__, []

    def noted(cls, nbytes, **options):
        left.append(memfds("self"))
        return create(cls, nbytes, **options)

    async with shared(*parts) as (engines, _, url):
        async with aiosync.connect(trained(1.0), workers=[url], direct=False) as sync:
            await sync.send_weights(version=1, budget=BUDGET)
            segment = engines[0].sink._shared._memory.segment
            before = {str(os.fstat(segment.fileno()).st_ino)}
            assert before < memfds("self")
            engines[fresh].drop_sinks()
            monkeypatch.setattr(Segment, "create", classmethod(noted))
            await sync.send_weights(version=2, budget=BUDGET)
            assert [before & those for those in left] == [set()]
            assert [held(model) for model in parts] == [{1.0}] * 2


# --- what cannot be ---


@pytest.mark.parametrize("sink", ["in_place", "layerwise", lambda model, device: None])
def test_only_the_staged_sink_shares(sink):
    with pytest.raises(Validation, match='"shared_host" needs sink="staged"'):
        WeightTransferConfig("ipc", sink=sink, **SHARED)
    with pytest.raises(Validation, match=r"one of private, shared_host, not 'both'"):
        WeightTransferConfig("ipc", staging="both")


def test_a_backend_that_receives_elsewhere_is_refused():
    config = WeightTransferConfig("by_hand", **SHARED)
    with pytest.raises(Refused, match="'by_hand' does not receive into that"):
        by_hand.ByHand(config, None, "cpu", by_hand.tensors())
    from aiosync.engines.nccl_worker import NCCLWeightTransferEngine

    assert not NCCLWeightTransferEngine.shares_staging


@pytest.mark.parametrize("staging", ["private", "shared_host"])
def test_over_ipc_a_model_on_a_gpu_is_filled_from_the_hosts_copy(staging, monkeypatch):
    own = lambda _: (torch.device("cpu"), "GPU-1")  # noqa: E731
    monkeypatch.setattr("aiosync.engines.ipc.own_device", own)
    config = WeightTransferConfig("ipc", staging=staging)
    create = aiosync.WeightTransferEngineFactory.create_engine
    engine = create(config, model=trained(0.0))
    assert engine.peer_state().detail.get("gpu") == {"private": "GPU-1"}.get(staging)


@pytest.mark.asyncio
async def test_a_worker_without_a_group_is_told():
    config = WeightTransferConfig("ipc", **SHARED)
    create = aiosync.WeightTransferEngineFactory.create_engine
    async with create(config, model=trained(0.0)) as engine, aiosync.serve(engine) as server:
        with pytest.raises(Refused, match="is for ranks of a WorkerGroup"):
            async with aiosync.connect(trained(1.0), workers=[server.url]):
                pass


@pytest.mark.asyncio
async def test_all_ranks_share_or_none_does():
    parts = [trained(0.0), trained(0.0)]
    async with shared(*parts, others={}) as (_, _, url):
        with pytest.raises(Validation, match=r"rank 0 has .* rank 1 has not") as caught:
            async with aiosync.connect(trained(1.0), workers=[url]):
                pass
        assert caught.value.rank == 1


@pytest.mark.asyncio
async def test_ranks_on_different_hosts_are_refused(monkeypatch):
    from aiosync import worker_group

    give = worker_group.give_places

    def elsewhere(ranks):
        places = give(ranks)
        return [places[0], *give(ranks)[1:]]

    monkeypatch.setattr(worker_group, "give_places", elsewhere)
    async with shared(trained(0.0), trained(0.0)) as (_, _, url):
        with pytest.raises(Refused, match=r"rank 1 cannot reach rank 0.*one\s+host") as caught:
            async with aiosync.connect(trained(1.0), workers=[url]):
                pass
        assert caught.value.rank == 1


@pytest.mark.asyncio
async def test_one_update_for_all_ranks():
    async with shared(trained(0.0), trained(0.0)) as (_, group, url):
        async with aiosync.connect(trained(1.0), workers=[url]) as sync:
            with pytest.raises(Validation, match="one update_info for all, not a list"):
                group.parse_update_info([{}, {}])
            await sync.send_weights(version=1, budget=BUDGET)


@pytest.mark.asyncio
async def test_too_little_memory_is_refused_with_the_weights_intact(monkeypatch):
    parts = [trained(0.0), trained(0.0)]
    async with shared(*parts, backend="gloo") as (_, _, url):
        async with aiosync.connect(trained(1.0), workers=[url]) as sync:
            with monkeypatch.context() as patch:
                patch.setattr("transports.segments.available_memory", lambda: 100)
                with pytest.raises(Refused, match="staging for all ranks of this host") as caught:
                    await sync.send_weights(version=1, budget=BUDGET)
                assert caught.value.weights == "intact"
            await sync.send_weights(version=2, budget=BUDGET)
            assert [held(model) for model in parts] == [{1.0}] * 2


def test_a_place_keeps_its_secret():
    place = aiosync.StagingPlace(rank=1, ranks=2, address="@here", token="hush")
    assert "hush" not in repr(place)


@pytest.mark.asyncio
async def test_a_lost_lead_is_named_by_the_others():
    """Whichever of the two answers comes first."""
    async with shared(trained(0.0), trained(0.0)) as (engines, _, url):
        hold = Hold(1)
        async with aiosync.connect(Paced(trained(1.0), hold), workers=[url]) as sync:
            update = sync.begin_update(version=1, budget=BUDGET)
            await asyncio.to_thread(hold.reached.wait, 20)
            follower = engines[1].receiver
            follower._link.shutdown()
            hold.released.set()
            with pytest.raises(PeerLost) as caught:
                await update
            assert caught.value.rank in (0, 1)
            await sync.send_weights(version=2, budget=BUDGET)
