"""The first chunk of an NCCL round, made ready while the workers are told to start."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import asynccontextmanager

import fake_nccl
import models
import pytest
import torch
from fake_nccl import FakeGroup, Hub
from limits import PATIENT
from nccl_cases import FIXTURE, Recorder, create, described, tensor_of

import aiosync
from aiosync import ModuleSource
from aiosync.errors import Busy
from aiosync.feed import SourceFeed
from aiosync.glance import FRESH_S
from aiosync.messages import RoundHeader
from aiosync.metadata import ParamMeta
from aiosync.ranks import TrainerRanks
from aiosync.session import Session
from aiosync.snapshots import Keeper
from aiosync.source_pass import SourcePass
from aiosync.testing import DirectClient
from transports.nccl_receiver import NcclReceiver
from transports.nccl_sender import NcclSender
from transports.planning import EACH, GRADED, plan_chunks

OPTIONS = {"backend": "nccl", "packed_buffer_size_bytes": 1 << 12}


@pytest.fixture
def fake(monkeypatch):
    fake_nccl.install(monkeypatch)


# -- the sender


def opened(case):
    metas, plan = described(case)
    group = Recorder()
    group.hub = Hub()
    sender = NcclSender(group)
    sender.lean_on(stays=True)
    sender.describe(metas)
    sender.open(plan, 1, round=1, stall=5)
    pairs = [(i, tensor_of(*t)) for i, t in enumerate(case["tensors"])]
    return sender, group, plan, pairs, plan.chunks[0].pieces[-1].tensor + 1


@pytest.mark.parametrize("name", FIXTURE)
def test_what_is_held_leaves_when_it_is_told_to(name):
    sender, group, _, pairs, first = opened(FIXTURE[name])
    sender.hold()
    sender.write(pairs[:first])
    assert group.hub.wire == []
    sender.go()
    assert len(group.hub.wire) == (1 if FIXTURE[name]["broadcasts"][0][1] else 0)
    sender.write(pairs[first:])
    sender.finish()
    held = [raw for _, raw in group.hub.wire]
    sender, group, _, pairs, _ = opened(FIXTURE[name])
    sender.write(pairs)
    sender.finish()
    assert held == [raw for _, raw in group.hub.wire]


def test_a_round_that_ends_with_a_held_chunk_ends_the_group():
    sender, group, _, pairs, first = opened(FIXTURE["one chunk"])
    sender.hold()
    sender.write(pairs[:first])
    sender.close()
    assert group.is_aborted
    assert group.hub.wire == []


# -- the receiver


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("ring_nbytes", "ahead"), [(900, 0), (1024, 1), (2048, 2)])
def test_a_first_chunk_of_one_tensor_is_taken_before_its_place_is_known(early, ring_nbytes, ahead):
    sizes = [1000, 40, 40, 40]
    plan = plan_chunks(sizes, [1] * 4, limit=320, rule=GRADED)
    assert [chunk.nbytes for chunk in plan.chunks] == [1000, 80, 40]
    group = FakeGroup(1, 2)
    sent = [
        torch.full((chunk.nbytes,), chunk.index + 1, dtype=torch.uint8) for chunk in plan.chunks
    ]
    group.hub.queues[1] = waiting = deque(sent)
    receiver = NcclReceiver(group, ring_nbytes=ring_nbytes, early=early)
    receiver.describe([ParamMeta(str(at), torch.uint8, (size,)) for at, size in enumerate(sizes)])
    into = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    for _ in range(2):
        receiver.prefetch(plan, round=1, stall=5)
        assert len(waiting) == 3 - (ahead if early else 0)
    receiver.receive(plan, into.__getitem__, lambda done: None, round=1, stall=5)
    assert torch.equal(torch.cat(into), torch.cat(sent))


def test_what_travels_as_its_own_dtype_is_not_taken_as_bytes():
    plan = plan_chunks([8, 8], [4, 4], limit=320, rule=EACH)
    group = FakeGroup(1, 2)
    group.hub.queues[1] = waiting = deque(torch.zeros(8, dtype=torch.uint8) for _ in range(2))
    receiver = NcclReceiver(group, ring_nbytes=1 << 10, early=True)
    receiver.describe([ParamMeta(str(at), torch.float32, (2,)) for at in range(2)])
    receiver.prefetch(plan, round=1, stall=5)
    assert len(waiting) == 2


# -- the pass


def prepared(source):
    class Sender:
        takes_parameters = True
        took = []

        def write(self, batch):
            self.took.append(list(batch))

    sender = Sender()
    sender.took = []
    the_pass = SourcePass(SourceFeed(source), TrainerRanks.alone(), sender)
    the_pass.prepare()
    return the_pass, sender.took


@pytest.mark.parametrize("count", range(1, 13))
def test_a_pass_goes_on_where_it_got_ahead_to(count):
    net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(6)))
    the_pass, took = prepared(ModuleSource(net))
    the_pass.get_ahead(count)
    assert sum(map(len, took)) == count
    the_pass.run()
    pairs = [pair for batch in took for pair in batch]
    assert [index for index, _ in pairs] == list(range(12))
    for (_, tensor), parameter in zip(pairs, net.parameters(), strict=True):
        assert tensor.data_ptr() == parameter.data_ptr()


def test_a_source_that_has_to_be_run_is_not_run_ahead():
    class Own(ModuleSource):
        def iter_full(self):
            yield from super().iter_full()

    the_pass, took = prepared(Own(torch.nn.Linear(2, 2)))
    the_pass.get_ahead(1)
    assert took == []
    the_pass.run()
    assert len(took) == 2


# -- whole rounds


class Scene:
    """A trainer and a worker, and what the group's wire has by each call."""

    def __init__(self, monkeypatch):
        self.model, self.target = models.make("small", seed=1), models.make("small", seed=2)
        self.fails = {}
        self.seen = {}
        self.ahead = asyncio.Event()
        loop, self.writes, write = asyncio.get_running_loop(), [], NcclSender.write

        def noted(sender, batch):
            write(sender, batch)
            self.writes.append(len(batch))
            loop.call_soon_threadsafe(self.ahead.set)

        monkeypatch.setattr(NcclSender, "write", noted)

    async def before(self, method):
        if method == "start_weight_update":
            await asyncio.wait_for(self.ahead.wait(), 20)
        self.seen[method] = len(FakeGroup.made[0].hub.wire)
        if method in self.fails:
            raise self.fails.pop(method)

    @asynccontextmanager
    async def joined(self, before=None):
        """The worker and the trainer; `before` is awaited before each call to the worker."""
        async with create(self.target) as worker:
            clients = [DirectClient(worker, before=before)]
            async with aiosync.connect(self.model, workers=clients, **OPTIONS) as sync:
                yield worker, sync

    async def sends(self, sync, version):
        self.ahead.clear()
        FakeGroup.made[-1].hub.wire.clear()
        report = await sync.send_weights(version=version, budget=PATIENT)
        assert report.outcome == "committed"
        assert models.fingerprint(self.target) == models.fingerprint(self.model)


@pytest.mark.asyncio
async def test_the_first_chunk_is_packed_but_not_sent_while_workers_are_told_to_start(
    fake, monkeypatch
):
    scene = Scene(monkeypatch)
    async with scene.joined(scene.before) as (_, sync):
        for version in (1, 2, 3):
            scene.writes.clear()
            with torch.no_grad():
                next(scene.model.parameters()).add_(1)
            await scene.sends(sync, version)
            assert scene.seen["start_weight_update"] == 0
    assert len(FakeGroup.made) == 2


@pytest.mark.asyncio
async def test_a_start_that_is_refused_sends_nothing_and_the_next_round_works(fake, monkeypatch):
    scene = Scene(monkeypatch)
    async with scene.joined(scene.before) as (_, sync):
        await scene.sends(sync, 1)
        scene.fails["start_weight_update"], sender = Busy("not now"), sync.sender
        with pytest.raises(Busy, match="not now"):
            await scene.sends(sync, 2)
        assert FakeGroup.made[0].hub.wire == []
        assert not sender._is_open
        with torch.no_grad():
            next(scene.model.parameters()).add_(1)
        await scene.sends(sync, 3)


@pytest.mark.asyncio
async def test_an_update_that_is_refused_ends_the_round_and_the_next_one_works(fake, monkeypatch):
    scene = Scene(monkeypatch)
    async with scene.joined(scene.before) as (worker, sync):
        for version in (1, 4):  # the second time the worker has begun to take bytes
            scene.fails["update_weights"] = Busy("not now")
            with pytest.raises(Busy, match="not now"):
                await scene.sends(sync, version)
            async with asyncio.timeout(20):  # nobody waits for its bytes any more
                while version > 1 and worker.receiver._is_open:
                    await asyncio.sleep(0.001)
            await scene.sends(sync, version + 1)
            await scene.sends(sync, version + 2)


def header(worker, **fields):
    digest = worker._known[2].digest
    return RoundHeader(**({"owner": "t", "round": 9, "digest": digest} | fields))


@pytest.mark.asyncio
async def test_a_worker_is_ready_for_a_round_like_the_last_one_before_its_update(fake, monkeypatch):
    scene, ready = Scene(monkeypatch), []
    prefetch = NcclReceiver.prefetch

    def noted(receiver, plan, *, round, stall, posts=True):
        ready.append(round)
        prefetch(receiver, plan, round=round, stall=stall, posts=posts)

    async def before(method):
        await scene.before(method)
        if method == "update_weights" and sync.rounds > 1:
            async with asyncio.timeout(20):
                while sync.rounds not in ready:
                    await asyncio.sleep(0.001)

    monkeypatch.setattr(NcclReceiver, "prefetch", noted)
    async with scene.joined(before) as (worker, sync):
        for version in (1, 2, 3):
            with torch.no_grad():
                next(scene.model.parameters()).add_(1)
            await scene.sends(sync, version)
        assert ready == [2, 2, 3, 3]  # by the start, and once more by the update
        asked = []

        async def note(session, metadata, plan):
            asked.append((session.number, plan))

        monkeypatch.setattr(worker, "_get_ahead", note)
        worker.cycle.session = Session(number=9, lease=9.0, on_end=lambda _: None)
        worker.round_began(header(worker))
        for other in (
            None,
            header(worker, ticket="t"),  # its driver may take its time
            header(worker, digest="another plan"),
        ):
            worker.round_began(other)
        await asyncio.sleep(0)
        assert asked == [(9, worker._known[2])]
        worker.cycle.session = None


@pytest.mark.asyncio
@pytest.mark.parametrize("ends", ["before", "meanwhile"])
async def test_a_worker_whose_round_is_over_waits_for_no_bytes(fake, monkeypatch, ends):
    scene, ready = Scene(monkeypatch), []
    free, busy = threading.Event(), threading.Event()
    prefetch = NcclReceiver.prefetch

    def late(receiver, plan, *, round, stall, posts):
        ready.append(round)
        busy.set()
        assert free.wait(20)
        prefetch(receiver, plan, round=round, stall=stall, posts=False)

    async def before(method):
        if method == "update_weights" and ends == "meanwhile" and sync.rounds == 2:
            await asyncio.to_thread(busy.wait, 20)
        await scene.before(method)

    async with scene.joined(before) as (worker, sync):
        await scene.sends(sync, 1)
        monkeypatch.setattr(NcclReceiver, "prefetch", late)
        if ends == "before":
            held = asyncio.create_task(worker.lane.run(free.wait, 20))
        scene.fails["update_weights"] = Busy("not now")
        with pytest.raises(Busy, match="not now"):
            await scene.sends(sync, 2)
        free.set()
        await worker.lane.run(lambda: None)
        assert ready == ([] if ends == "before" else [2])
        async with asyncio.timeout(20):
            while worker.receiver._is_open:
                await asyncio.sleep(0.001)
        if ends == "before":
            await held
        monkeypatch.setattr(NcclReceiver, "prefetch", prefetch)
        await scene.sends(sync, 3)


@pytest.mark.asyncio
async def test_a_round_that_is_cancelled_while_workers_are_told_to_start(fake, monkeypatch):
    scene = Scene(monkeypatch)
    asked = asyncio.Event()

    async def hang(method):
        await scene.before(method)
        if method == "start_weight_update" and not asked.is_set():
            asked.set()
            await asyncio.Event().wait()

    async with scene.joined(hang) as (_, sync):
        sending = asyncio.create_task(sync.send_weights(version=1, budget=PATIENT))
        await asyncio.wait_for(asked.wait(), 20)
        sending.cancel()
        await asyncio.wait([sending])
        assert sending.cancelled()
        await scene.sends(sync, 2)


@pytest.mark.asyncio
async def test_what_goes_wrong_ahead_is_the_updates_failure(fake, monkeypatch):
    scene = Scene(monkeypatch)
    async with scene.joined() as (_, sync):
        await scene.sends(sync, 1)

        def fail(sender, batch):
            raise OSError("no room for a chunk")

        with monkeypatch.context() as patch:
            patch.setattr(NcclSender, "write", fail)
            with pytest.raises(OSError, match="no room") as caught:
                await scene.sends(sync, 2)
        assert "update" in caught.value.report.seconds
        await scene.sends(sync, 3)


@pytest.mark.asyncio
async def test_a_worker_that_lost_its_channel_is_initialised_again(fake, monkeypatch):
    scene = Scene(monkeypatch)
    async with scene.joined(scene.before) as (worker, sync):
        await scene.sends(sync, 1)
        await DirectClient(worker).shutdown_weight_transfer_engine()
        with torch.no_grad():
            next(scene.model.parameters()).add_(1)
        await scene.sends(sync, 2)
        assert "initialised again" in sync.last_report.notes[0]
        await scene.sends(sync, 3)


def replaced(net):
    net[0].weight = torch.nn.Parameter(net[0].weight + 1)


def written(net):
    with torch.no_grad():
        net[0].weight.add_(1)


@pytest.mark.asyncio
@pytest.mark.parametrize("change", [replaced, written])
async def test_a_module_that_changes_while_a_start_takes_its_time_is_not_sent_as_it_was(
    fake, monkeypatch, change
):
    scene = Scene(monkeypatch)

    async def before(method):
        await scene.before(method)
        if method == "start_weight_update" and scene.fails.pop("slow", False):
            await asyncio.sleep(3 * FRESH_S)
            change(scene.model)

    async with scene.joined(before) as (_, sync):
        await scene.sends(sync, 1)
        scene.fails["slow"] = True
        if change is replaced:
            await scene.sends(sync, 2)
            assert "begun again" in sync.last_report.notes[0]
        else:
            with pytest.raises(aiosync.Validation, match="weight changed while the round"):
                await scene.sends(sync, 2)
        await scene.sends(sync, 3)


@pytest.mark.asyncio
async def test_a_module_that_stays_while_a_start_takes_its_time_is_sent(fake, monkeypatch):
    scene = Scene(monkeypatch)

    async def before(method):
        await scene.before(method)
        if method == "start_weight_update":
            await asyncio.sleep(3 * FRESH_S)

    async with scene.joined(before) as (_, sync):
        for version in (1, 2, 3):
            await scene.sends(sync, version)
        assert sync.last_report.notes == []


@pytest.mark.asyncio
async def test_what_ends_a_round_before_its_transmit_ends_what_was_begun(fake, monkeypatch):
    scene = Scene(monkeypatch)

    def fail(engine, round):
        raise OSError("no payload")

    async with scene.joined() as (_, sync):
        await scene.sends(sync, 1)
        sender = sync.sender
        with monkeypatch.context() as patch:
            patch.setattr(type(sync), "update_payload", fail)
            with pytest.raises(OSError, match="no payload"):
                await scene.sends(sync, 2)
        assert not sender._is_open
        await scene.sends(sync, 3)


@pytest.mark.asyncio
async def test_what_is_kept_of_a_round_is_not_copied_ahead(fake, monkeypatch):
    scene, counts = Scene(monkeypatch), []

    async def before(method):
        counts.append((method, len(scene.writes)))

    async with scene.joined(before) as (_, sync):
        monkeypatch.setattr(sync, "keeper", lambda round: Keeper())
        await scene.sends(sync, 1)
    assert dict(counts)["start_weight_update"] == 0
    assert scene.writes
