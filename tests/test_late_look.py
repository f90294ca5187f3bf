"""Rounds in which both models are looked at while the tensors are on their way."""

from __future__ import annotations

import contextlib
import gc
import operator
import sys
import time
import weakref

import pytest
import torch
from fake_gpu import FakeMemory
from torch import nn

import aiosync
from aiosync import glance as glances
from aiosync.engines import ipc as ipc_engines
from aiosync.engines.ipc import IPCTrainerWeightTransferEngine
from aiosync.feed import SourceFeed
from aiosync.glance import Looking
from aiosync.sinks import InPlaceSink, StagedSink
from aiosync.streaming import stream_in
from aiosync.targets import Writes
from transports import device_copier
from transports.device_receiver import DeviceReceiver
from transports.lane import Lane

KNOWN = 3
"""Rounds until both sides know their models."""


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)


def model(layers=6):
    torch.manual_seed(layers)
    return nn.Sequential(*(Layer() for _ in range(layers)))


@pytest.fixture
def memory(monkeypatch):
    """Device memory that both engines of this process see."""
    found = FakeMemory()
    monkeypatch.setattr(glances, "_RUN", (2, 2))
    monkeypatch.setattr(glances, "_PART", (2, 2))
    monkeypatch.setattr(ipc_engines, "open_memory", lambda device, who: found)
    monkeypatch.setattr(ipc_engines, "own_device", lambda device: (device, "gpu-a"))
    return found


class Pair:
    """A trainer and a worker."""

    def __init__(self, memory, trainer, theirs, worker):
        self.memory, self.trainer, self.theirs, self.worker = memory, trainer, theirs, worker
        self.ours = trainer.source.module
        self.version = 0

    async def round(self):
        self.version += 1
        self.memory.own(*self.ours.parameters())
        with torch.no_grad():
            for parameter in self.ours.parameters():
                parameter.uniform_()
        return await self.trainer.send_weights(version=self.version)

    async def get_known(self):
        """Rounds until both models are looked at late."""
        for _ in range(KNOWN + 1):
            await self.good_round()

    async def good_round(self):
        report = await self.round()
        ours, theirs = self.ours.state_dict(), self.theirs.state_dict()
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name
        assert self.worker.version.label == self.version
        return report


@contextlib.asynccontextmanager
async def pair(memory, *, sink="in_place", verify="digest", make=model, **options):
    ours, theirs = make(), make()
    config = aiosync.WeightTransferConfig("ipc", sink=sink, verify=verify)
    worker = aiosync.WeightTransferEngineFactory.create_engine(
        config, None, torch.device("cpu"), theirs
    )
    async with worker, aiosync.serve(worker) as server:
        trainer = IPCTrainerWeightTransferEngine(
            client=aiosync.HTTPVLLMWeightSyncClient(server.url),
            source=aiosync.ModuleSource(ours),
            packed=True,
            device="cpu",
            **options,
        )
        async with trainer:
            await trainer.initialize()
            yield Pair(memory, trainer, theirs, worker)


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["in_place", "staged"])
@pytest.mark.parametrize("change", ["replace", "move", "start"])
async def test_what_moves_while_readers_are_waited_for_is_not_read_where_it_was(
    memory, monkeypatch, sink, change
):
    async with pair(memory, sink=sink) as both:
        await both.get_known()
        receive, old = DeviceReceiver.receive, []

        def receive_later(self, *args, **named):
            if not old:
                deadline = time.monotonic() + 10
                while not (ahead and ahead[0].is_whole):
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
                monkeypatch.setattr(glances, "FRESH_S", 0.0)
                old.append([tensor.data for tensor in both.ours.parameters()])  # not freed
                if change == "start":
                    both.ours[0].one.weight.data = torch.ones(4, 4)
                else:
                    {"replace": replace, "move": move}[change](both.ours)
                memory.own(*both.ours.parameters())
            return receive(self, *args, **named)

        ahead, goes_on = [], Looking.goes_on

        def noted(self):
            ahead.append(self)
            return goes_on(self)

        monkeypatch.setattr(Looking, "goes_on", noted)
        monkeypatch.setattr(DeviceReceiver, "receive", receive_later)
        report = await both.good_round()
        assert "not as it was" in report.notes[0]


@pytest.fixture
def looked(monkeypatch):
    """How far each look had to go that began late, by what was done with it."""
    calls = []
    original = Looking.reaches

    def reaches(self, count):
        calls.append(count)
        return original(self, count)

    monkeypatch.setattr(Looking, "reaches", reaches)
    return calls


@pytest.mark.asyncio
@pytest.mark.parametrize("verify", ["counts", "digest"])
@pytest.mark.parametrize("sink", ["in_place", "staged"])
async def test_known_models_are_looked_at_as_their_tensors_travel(memory, looked, sink, verify):
    async with pair(memory, sink=sink, verify=verify) as both:
        for _ in range(KNOWN):
            await both.good_round()
        before = len(looked)
        for _ in range(3):
            report = await both.good_round()
            assert not report.notes
        assert len(looked) > before
        assert both.trainer.sender.knows(both.trainer.source._glance.addresses)


def replace(net):
    net[3].one.weight = nn.Parameter(torch.ones(4, 4))


def move(net):
    net[4].two.weight.data = torch.ones(4, 4)


def first(net):
    net[0].one.weight = nn.Parameter(torch.ones(4, 4))


def last(net):
    net[-1].two.weight = nn.Parameter(torch.ones(4, 4))


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["in_place", "staged"])
@pytest.mark.parametrize("change", [replace, move, first, last])
async def test_a_trainer_whose_tensors_moved_begins_again(memory, sink, change):
    async with pair(memory, sink=sink) as both:
        await both.get_known()
        change(both.ours)
        report = await both.good_round()
        assert bool(report.notes) == (change is not first)
        for _ in range(KNOWN):
            assert not (await both.good_round()).notes


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["in_place", "staged"])
@pytest.mark.parametrize("change", [replace, move, first, last])
async def test_a_worker_whose_tensors_moved_is_written_where_they_are(memory, sink, change):
    async with pair(memory, sink=sink) as both:
        await both.get_known()
        change(both.theirs)
        for _ in range(KNOWN):
            assert not (await both.good_round()).notes


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["in_place", "staged"])
async def test_models_that_both_grew_get_the_new_tensors(memory, sink):
    async with pair(memory, sink=sink) as both:
        await both.get_known()
        for net in (both.ours, both.theirs):
            net.append(Layer())
        for _ in range(KNOWN):
            await both.good_round()


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["in_place", "staged"])
async def test_a_worker_that_no_longer_fits_fails_the_round_and_can_be_mended(memory, sink):
    async with pair(memory, sink=sink) as both:
        await both.get_known()
        right = both.theirs[4].two.weight
        both.theirs[4].two.weight = nn.Parameter(torch.ones(2, 4))
        with pytest.raises(aiosync.AiosyncError, match=r"4.two.weight"):
            await both.round()
        if sink == "staged":
            assert both.worker.weights == "intact"
        both.theirs[4].two.weight = right
        await both.good_round()


@pytest.mark.asyncio
@pytest.mark.parametrize("rounds", [1, KNOWN, KNOWN + 2])
async def test_metadata_that_is_rearranged_in_place_still_names_its_tensors(memory, rounds):
    async with pair(memory) as both:
        for _ in range(rounds):
            await both.good_round()
        both.trainer.source.metadata.reverse()
        for _ in range(KNOWN + 2):
            assert not (await both.good_round()).notes


@pytest.mark.asyncio
async def test_freed_memory_is_looked_for_before_anybody_reads_there(memory):
    async with pair(memory) as both:
        await both.get_known()
        addresses = both.trainer.source._glance.addresses
        assert both.trainer.sender.knows(addresses)
        memory.reallocate(both.ours[1].one.weight)
        assert not both.trainer.sender.knows(addresses)
        assert not (await both.good_round()).notes


@pytest.mark.asyncio
async def test_a_trainer_that_recovers_by_hand_looks_first(memory):
    async with pair(memory, recover="manual") as both:
        await both.get_known()
        last(both.ours)
        assert not (await both.good_round()).notes


@pytest.mark.asyncio
async def test_a_model_that_changes_while_its_tensors_arrive_is_not_committed(memory, monkeypatch):
    async with pair(memory) as both:
        await both.get_known()
        seen = Writes.are_seen

        def changed_meanwhile(self, count=None):
            if count is None:
                both.theirs[0].one.weight = nn.Parameter(torch.ones(4, 4))
                self.looking.failed = True  # the run it is in was looked at already
            return seen(self, count)

        with monkeypatch.context() as patch:
            patch.setattr(Writes, "are_seen", changed_meanwhile)
            report = await both.good_round()
        assert "replaced, renamed or moved" in report.notes[0]
        assert not (await both.good_round()).notes


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["in_place", "staged"])
async def test_a_step_of_the_trainer_while_its_tensors_travel_is_noticed(memory, sink, monkeypatch):
    async with pair(memory, sink=sink, verify="counts") as both:  # else a digest may find it first
        await both.get_known()
        sender = both.trainer.sender
        finish = sender.finish

        def stepped():
            with torch.no_grad():
                both.ours[1].one.weight += 1
            return finish()

        with monkeypatch.context() as patch:
            patch.setattr(sender, "finish", stepped)
            patch.setattr(aiosync.ModuleSource, "read", None)  # nobody walks the whole model for it
            with pytest.raises(aiosync.Validation, match=r"^1\.one\.weight changed while"):
                await both.round()
        await both.good_round()


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["in_place", "staged"])
async def test_tensors_without_bytes_travel_with_the_others(memory, sink, monkeypatch):
    def with_empty():
        made = model()
        made[3].one.none = nn.Parameter(torch.ones(8)[4:4])
        made[3].two.dot = nn.Parameter(torch.tensor(2.0))
        return made

    async with pair(memory, sink=sink, make=with_empty) as both:
        for _ in range(KNOWN + 3):
            assert not (await both.good_round()).notes


@pytest.mark.asyncio
async def test_a_module_that_changes_in_every_round_is_looked_at_first(memory):
    async with pair(memory) as both:
        kept = []
        for net in (both.ours, both.theirs):
            net[-1].two.register_buffer("cache", torch.zeros(3))
        for _ in range(KNOWN + 4):
            assert not (await both.good_round()).notes
            kept.append(both.ours[-1].two.cache)
            both.ours[-1].two.cache = torch.zeros(3)


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["in_place", "staged"])
async def test_a_gate_does_not_keep_a_module_from_being_described_anew(memory, sink):
    async with pair(memory, sink=sink) as both:
        await both.get_known()
        both.trainer.gate("start", lambda context: True)
        for net in (both.ours, both.theirs):
            net[-1].two = nn.Linear(4, 8, bias=False)
        await both.good_round()


def replace_all(net):
    for name, parameter in list(net.named_parameters()):
        inside, _, key = name.rpartition(".")
        setattr(net.get_submodule(inside), key, nn.Parameter(parameter.detach().clone()))


def move_two(net):
    for layer in (net[0], net[-1]):
        layer.two.weight.data = torch.ones(4, 4)


@pytest.mark.asyncio
@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("change", [replace_all, move_two])
async def test_what_was_written_to_and_is_the_models_no_more_ends_the_round(
    memory, monkeypatch, change, many
):
    monkeypatch.setattr(device_copier, "_LEAST_NBYTES", 1)
    monkeypatch.setattr(device_copier, "_MOST_NBYTES", 1)
    async with pair(memory, verify="counts") as both:
        await both.get_known()
        destinations = InPlaceSink.destinations

        def changed_meanwhile(self, indices):
            if indices[0] == 4:
                change(both.theirs)
            if many:
                return destinations(self, indices)
            return [self.destination(index) for index in indices]

        with monkeypatch.context() as patch:
            patch.setattr(InPlaceSink, "destinations", changed_meanwhile)
            with pytest.raises(aiosync.AiosyncError, match="replaced, renamed or moved"):
                await both.round()
        assert both.worker.weights == "torn"
        await both.good_round()


@pytest.mark.asyncio
async def test_a_step_while_readers_may_read_already_is_noticed(memory, monkeypatch):
    async with pair(memory, verify="counts") as both:
        await both.get_known()
        memory.reallocate(both.ours[1].one.weight)  # so that all is looked at before
        sender = both.trainer.sender
        opened = sender.open

        def stepped(*args, **options):
            opened(*args, **options)
            with torch.no_grad():
                both.ours[1].one.weight += 1

        with monkeypatch.context() as patch:
            patch.setattr(sender, "open", stepped)
            with pytest.raises(aiosync.Validation, match=r"^1\.one\.weight changed while"):
                await both.round()
        await both.good_round()


@pytest.mark.parametrize("error", [IndexError, ValueError, RuntimeError])
def test_a_module_that_changes_under_the_look_fails_it(monkeypatch, error):
    net = model()
    names = list(dict(net.named_parameters()))
    glance = glances.Glance.of(net, dict(net.named_parameters()), names)
    assert glance.look(net) is not None

    def torn(self, *args):
        raise error

    monkeypatch.setattr(glances._Run, "look", torn)
    looking = Looking(glance, net)
    assert not looking.reaches(1)
    assert looking.failed


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["verify", "check_model"])
@pytest.mark.parametrize("base", [InPlaceSink, StagedSink])
async def test_what_a_sink_of_ones_own_verifies_is_asked(memory, method, base):
    class Picky(base):
        asked = 0

    def counted(self):
        Picky.asked += 1
        getattr(base, method)(self)

    setattr(Picky, method, counted)
    async with pair(memory, sink=lambda net, device: Picky(net, device=device)) as both:
        for number in range(KNOWN + 2):
            await both.good_round()
            assert Picky.asked > number


async def gone(*_, **__):
    raise aiosync.PeerLost("gone", replica="two") from ConnectionRefusedError(111, "refused")


@contextlib.asynccontextmanager
async def fleet(memory, sink):
    """The trainer of a fleet of two, and both models beside its own."""
    nets = [model() for _ in range(3)]
    config = aiosync.WeightTransferConfig("ipc", sink=sink)
    async with contextlib.AsyncExitStack() as stack:
        members = []
        for name, net in zip(("one", "two"), nets[1:], strict=True):
            made = aiosync.WeightTransferEngineFactory.create_engine
            worker = await stack.enter_async_context(made(config, None, torch.device("cpu"), net))
            server = await stack.enter_async_context(aiosync.serve(worker))
            client = aiosync.HTTPVLLMWeightSyncClient(server.url)
            members.append(aiosync.Member(name, client))
        trainer = IPCTrainerWeightTransferEngine(
            client=aiosync.FleetClient(members, retry_without_lost=True),
            source=aiosync.ModuleSource(nets[0]),
            packed=True,
            device="cpu",
        )
        await stack.enter_async_context(trainer)
        await trainer.initialize()
        both = Pair(memory, trainer, nets[1], None)
        yield both, nets, members


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["in_place", "staged"])
@pytest.mark.parametrize("lost", ["nobody", "start_weight_update", "update_weights"])
async def test_a_fleet_begins_again_also_where_it_loses_a_member(memory, sink, lost):
    async with fleet(memory, sink) as (both, nets, members):
        for _ in range(KNOWN + 1):
            assert (await both.round()).outcome == "committed"
        last(both.ours)
        if lost != "nobody":
            setattr(members[1].client, lost, gone)
            members[1].client.capabilities = gone
        for number in range(2):
            report = await both.round()
            assert report.outcome == "committed"
            assert bool(report.notes) == (number == 0)
            left = nets[1:2] if lost != "nobody" else nets[1:]
            for net in left:
                for ours, theirs in zip(nets[0].parameters(), net.parameters(), strict=True):
                    assert torch.equal(ours, theirs)


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["in_place", "staged"])
@pytest.mark.parametrize("change", [None, replace, last])
@pytest.mark.parametrize("side", ["ours", "theirs"])
async def test_nothing_of_a_model_is_held_between_rounds(memory, sink, change, side):
    async with pair(memory, sink=sink) as both:
        await both.get_known()
        net = getattr(both, side)
        if change is not None:
            change(net)
            await both.good_round()
        gc.collect()
        gone = [weakref.ref(tensor) for tensor in net.parameters()]
        for name, parameter in list(net.named_parameters()):
            inside, _, key = name.rpartition(".")
            setattr(net.get_submodule(inside), key, nn.Parameter(parameter.detach().clone()))
        del parameter
        assert not [ref for ref in gone if ref() is not None]
        await both.good_round()


def test_two_engines_of_one_source_do_not_share_a_look():
    source = aiosync.ModuleSource(model())
    feeds = [SourceFeed(source) for _ in range(2)]
    for _ in range(KNOWN):
        source.notice_changes()
        feeds[0].look()
        source.forget_tensors()
    assert source.look_late()
    for feed in feeds:
        feed.look()
    assert feeds[0].looking is not None
    assert feeds[1].looking is None
    late, at_once = ([each for run in feed.iter_plain() for _, each in run] for feed in feeds)
    assert len(late) == 18
    assert all(map(operator.is_, late, at_once))


def test_a_look_ends_with_what_is_not_sent(memory):
    net = model()
    *sent, kept = [name for name, _ in net.named_parameters()]
    source = aiosync.ModuleSource(net, rename=lambda name: name if name in sent else None)
    feed = SourceFeed(source)
    for _ in range(KNOWN):
        source.notice_changes()
        feed.look()
        source.forget_tensors()
    assert source.look_late()
    feed.look()
    owner, _, leaf = kept.rpartition(".")
    setattr(net.get_submodule(owner), leaf, nn.Parameter(torch.ones(4, 4)))
    with pytest.raises(aiosync.Validation, match="not as it was"):
        list(feed.iter_plain())


def tie(net):
    net[-1].two.weight = net[-2].two.weight


def turn(net):
    net[-1].one.weight.data = torch.ones(4, 4).t()


def widen(net):
    net[-1].one.to(torch.float64)


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["in_place", "staged"])
@pytest.mark.parametrize("change", [tie, turn])
async def test_a_worker_whose_tensors_need_other_copies_begins_again(memory, sink, change):
    async with pair(memory, sink=sink) as both:
        await both.get_known()
        if change is tie:  # announced under both names, with one value
            change(both.theirs)
            both.ours[-1].two.weight.data = both.ours[-2].two.weight.data
            change(both.ours)
        else:
            change(both.theirs)
        assert (await both.good_round()).notes
        for _ in range(KNOWN):
            assert not (await both.good_round()).notes


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["in_place", "staged"])
async def test_models_that_both_changed_agree_in_the_same_round(memory, sink):
    async with pair(memory, sink=sink) as both:
        await both.get_known()
        for change in (widen, lambda net: net[-1].one.to(torch.float32)):
            change(both.theirs)
            with pytest.raises(aiosync.Validation, match=r"5\.one"):
                await both.round()
            change(both.ours)  # what the worker has to say comes before the trainer's own look
            await both.get_known()


@pytest.mark.parametrize("fresh", [60.0, 0.0])
def test_a_look_that_paused_for_long_begins_anew(monkeypatch, fresh):
    monkeypatch.setattr(glances, "FRESH_S", 60.0)
    feed = late_feed(monkeypatch, model())
    first = feed.looking
    while first.goes_on():
        pass
    monkeypatch.setattr(glances, "FRESH_S", fresh)
    runs = list(feed.iter_plain())
    assert first.is_whole
    assert (len(runs) == 1) is bool(fresh)
    assert sum(map(len, runs)) == len(feed.metadata)


def late_feed(monkeypatch, net):
    monkeypatch.setattr(glances, "_RUN", (2, 2))
    monkeypatch.setattr(glances, "_PART", (2, 2))
    source = aiosync.ModuleSource(net)
    for _ in range(3):
        source.notice_changes()
        source.plain_tensors()
    feed = SourceFeed(source)
    assert source.look_late()
    feed.look()
    assert feed.looking is not None
    return feed


@pytest.mark.parametrize("ends", ["whole", "left"])
def test_turns_are_short_from_the_first_look_of_a_pass_to_its_end(monkeypatch, ends):
    feed, before = late_feed(monkeypatch, model()), sys.getswitchinterval()
    passing = feed.iter_plain()
    seen = []
    for _ in passing:
        seen.append(sys.getswitchinterval())  # here it is written to a socket
        if ends == "left":
            break
    passing.close()
    assert seen
    assert max(seen) < before
    assert sys.getswitchinterval() == pytest.approx(before)


@pytest.mark.asyncio
@pytest.mark.parametrize("late", [True, False])
async def test_turns_are_short_while_a_sink_that_looks_late_receives(late):
    before, seen = sys.getswitchinterval(), []

    class Receiver:
        def receive(self, plan, destination, landed, **options):
            seen.append(sys.getswitchinterval())

        def close(self):
            pass

    sink = InPlaceSink(net := model())
    sink.looks_late = late
    sink.begin([aiosync.ParamMeta(n, p.dtype, tuple(p.shape)) for n, p in net.named_parameters()])
    async with contextlib.AsyncExitStack() as stack:
        lane = Lane("short")
        stack.callback(lane.close)
        await stream_in(
            Receiver(),
            sink,
            plan=None,
            round=1,
            stall=1.0,
            grace=1.0,
            lane=lane,
            prepare=lambda: None,
        )
    assert (seen[0] < before) is late
    assert sys.getswitchinterval() == pytest.approx(before)
