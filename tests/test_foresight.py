"""What a worker finds out about its model before a first round changes nothing that round does."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import sys
import threading
import weakref
from contextlib import asynccontextmanager

import msgspec
import pytest
import torch
from torch import nn

import aiosync
from aiosync import (
    AiosyncError,
    Coverage,
    ModuleSource,
    Validation,
    WeightTransferConfig,
    targets,
    worker_sinks,
)
from aiosync.engines import streamed_worker
from aiosync.engines.streamed import StreamedTrainerEngine
from aiosync.feed import SourceFeed
from aiosync.foresight import Foresight
from aiosync.glance import Glance
from aiosync.metadata import ParamMeta, Replicate, Shard, dtype_name, metadata_digest
from aiosync.sinks import make_sink
from aiosync.testing import DirectClient
from statemachines.tables import State

Engine = aiosync.IPCWeightTransferEngine


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4, bias=False)


def trained():
    net = Net()
    for number, tensor in enumerate(net.parameters()):
        tensor.data.fill_(number + 1)
    return net


@asynccontextmanager
async def pair(model=None, source=None, *, sink="staged", backend="ipc"):
    """A worker whose look ahead is over, and its trainer's side."""
    config = WeightTransferConfig(backend=backend, sink=sink)
    made = aiosync.WeightTransferEngineFactory.create_engine(
        config, None, "cpu", Net() if model is None else model
    )
    source = trained() if source is None else source
    async with made as worker:
        async with aiosync.connect(source, workers=[DirectClient(worker)], backend=backend) as sync:
            await looked(worker)
            yield worker, sync


async def looked(worker):
    for task in [t for t in asyncio.all_tasks() if t.get_name().endswith("-foresight")]:
        await asyncio.wait([task])


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# -- what may become of a model before its first round --------------------------------------------


def nothing(net):
    pass


def replace(net):
    net.last.weight = nn.Parameter(torch.zeros(4, 4))


def move(net):
    net.last.weight.data = torch.zeros(4, 4)


def load(net):
    net.load_state_dict(Net().state_dict())


def load_by_assignment(net):
    net.load_state_dict(Net().state_dict(), assign=True)


def swap_module(net):
    net.last = nn.Linear(4, 4, bias=False)


def add(net):
    net.more = nn.Linear(2, 2)


def add_buffer(net):
    net.register_buffer("more", torch.zeros(3))


def remove(net):
    del net.last


def rename(net):
    net.other = net.last
    del net.last


def reorder(net):
    first = net.first
    del net.first
    net.first = first


def tie(net):
    net.last.weight = net.first.weight


def overlap(net):
    memory = torch.zeros(28)
    net.first.weight.data = memory[:16].view(4, 4)
    net.last.weight.data = memory[12:].view(4, 4)


def reshape(net):
    net.last.weight.data = torch.zeros(4, 5)


def transpose(net):
    net.last.weight.data = net.last.weight.data.t()


def cast(net):
    net.last.double()


def free(net):
    net.last.weight.untyped_storage().resize_(0)


def to_meta(net):
    net.last.to("meta")


def expand(net):
    net.last.weight.data = torch.zeros(4).expand(4, 4)


def to_inference(net):
    with torch.inference_mode():
        net.last.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)


def freeze(net):
    net.requires_grad_(False)


CHANGES = [
    nothing,
    replace,
    move,
    load,
    load_by_assignment,
    swap_module,
    add,
    add_buffer,
    remove,
    rename,
    reorder,
    tie,
    overlap,
    reshape,
    transpose,
    cast,
    free,
    to_meta,
    expand,
    to_inference,
    freeze,
]


async def outcome(change, sink, backend="ipc"):
    """What the first round does with a model that was changed right before it."""
    model = Net()
    async with pair(model, sink=sink, backend=backend) as (worker, sync):
        was_foreseen = worker._foreseen is not None
        change(model)
        try:
            report = await sync.send_weights(version=1)
        except AiosyncError as error:
            return was_foreseen, (type(error), str(error), error.report.notes)
        assert not report.notes  # it did not have to begin again
        assert {m.name for m in sync.source.metadata} <= model.state_dict().keys()
        assert worker._foreseen is None
        again = await sync.send_weights(version=2)
        assert again.outcome == "committed"
        return was_foreseen, values(model)


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["staged", "in_place", "layerwise"])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_model_that_changes_before_the_first_round_is_seen_as_it_is(
    change, sink, monkeypatch
):
    was_foreseen, found = await outcome(change, sink)
    assert was_foreseen
    monkeypatch.setattr(Engine, "foresees", False)
    was_foreseen, expected = await outcome(change, sink)
    assert not was_foreseen
    if isinstance(expected, tuple):
        assert found == expected
        return
    assert found.keys() == expected.keys()
    assert torch.equal(found["last.weight"], trained().last.weight)
    names = [name for name, _ in trained().named_parameters()]
    assert all(torch.equal(found[name], expected[name]) for name in names)


@pytest.mark.asyncio
async def test_gloo_workers_look_ahead_as_well():
    was_foreseen, found = await outcome(swap_module, "staged", "gloo")
    assert was_foreseen
    assert torch.equal(found["last.weight"], trained().last.weight)


# -- what is announced ----------------------------------------------------------------------------


class Held(nn.Module):
    """The same tensors by other names, and in another order."""

    def __init__(self):
        super().__init__()
        self.net = trained()


@pytest.mark.asyncio
@pytest.mark.parametrize("foresees", [True, False])
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (lambda: ModuleSource(trained(), buffers="persistent"), None),
        (lambda: ModuleSource(Held(), rename=lambda name: name.removeprefix("net.")), None),
        (lambda: ModuleSource(trained(), dtype=torch.float64), "float32, announced as float64"),
        (Held, "unknown"),
    ],
)
async def test_another_announcement_is_taken_as_it_is(source, problem, foresees, monkeypatch):
    monkeypatch.setattr(Engine, "foresees", foresees)
    async with pair(source=source()) as (worker, sync):
        if problem is not None:
            with pytest.raises(AiosyncError, match=problem):
                await sync.send_weights()
            return
        await sync.send_weights()
        assert torch.equal(worker.model.last.weight, trained().last.weight)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"names": []}, "differ in length"),
        ({"names": [], "dtype_names": [], "shapes": []}, "announces no tensor"),
        ({"names": ["a", "b", "c", "d", "e"]}, "does not match"),
        ({"dtype_names": ["int32"] * 5}, "does not match"),
        ({"shapes": [[1], [1], [1], [1], [1]]}, "does not match"),
        ({"metadata_digest": "0"}, "does not match"),
        ({"plan_digest": "0"}, "both sides must agree"),
    ],
)
async def test_lists_that_are_not_what_their_digest_says_are_refused(wrong, problem, monkeypatch):
    plain = StreamedTrainerEngine.update_payload
    monkeypatch.setattr(
        StreamedTrainerEngine, "update_payload", lambda self, round: plain(self, round) | wrong
    )
    async with pair() as (worker, sync):
        assert worker._foreseen is not None
        with pytest.raises(Validation, match=problem):
            await sync.send_weights()


@pytest.mark.asyncio
async def test_a_first_round_of_what_was_foreseen_looks_for_nothing_again(monkeypatch):
    async with pair() as (worker, sync):

        def never(*args, **kwargs):
            raise AssertionError("this was known")

        with monkeypatch.context() as patched:
            patched.setattr(streamed_worker, "from_wire", never)
            patched.setattr(streamed_worker, "plan_of", never)
            patched.setattr(targets, "_matched", never)
            patched.setattr(Glance, "of", never)  # which a second round needs at the earliest
            await sync.send_weights()
        worker_sink = worker.know_sink()
        assert torch.equal(worker.model.last.weight, trained().last.weight)
        await sync.send_weights()
        assert worker_sink._matcher._glance is not None


@pytest.mark.asyncio
async def test_another_trainer_may_come_before_the_first_round():
    model = Net()
    async with pair(model) as (worker, _):
        pass
    config = WeightTransferConfig(backend="ipc")
    async with Engine(config, None, "cpu", model) as worker:
        for _ in range(2):
            async with aiosync.connect(trained(), workers=[DirectClient(worker)]):
                await looked(worker)
                assert worker._foreseen is not None
        async with aiosync.connect(trained(), workers=[DirectClient(worker)]) as sync:
            await sync.send_weights()
        async with aiosync.connect(trained(), workers=[DirectClient(worker)]) as sync:
            await looked(worker)
            assert worker._foreseen is None  # what the round found is better
            await sync.send_weights()


# -- whose code runs ------------------------------------------------------------------------------


class Loads(Net):
    calls = 0

    def load_weights(self, pairs):
        Loads.calls += 1
        self.load_state_dict(dict(pairs), strict=False)

    def named_parameters(self, *args, **kwargs):
        Loads.calls += 1
        return super().named_parameters(*args, **kwargs)


class OnlyLoads(Net):
    calls = 0

    def load_weights(self, pairs):
        OnlyLoads.calls += 1
        self.load_state_dict(dict(pairs), strict=False)


class Renames(Net):
    calls = 0

    def named_modules(self, *args, **kwargs):
        Renames.calls += 1
        return super().named_modules(*args, **kwargs)


class Holds(nn.Sequential):
    """Not itself, but something in it walks in its own way."""

    @property
    def calls(self):
        return Renames.calls


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [Loads, OnlyLoads, Renames, lambda: Holds(Renames())])
async def test_a_model_with_code_of_its_own_is_not_called_before_a_round(make):
    config, model = WeightTransferConfig(backend="ipc"), make()
    source = Holds(trained()) if isinstance(model, Holds) else trained()
    async with Engine(config, None, "cpu", model) as worker:
        before = model.calls
        async with aiosync.connect(source, workers=[DirectClient(worker)]) as sync:
            await looked(worker)
            assert (model.calls, worker._foreseen) == (before, None)
            await sync.send_weights()
            assert model.calls > before


def give_a_loader(model):
    model.load_weights = lambda pairs: model.__dict__.setdefault("taken", list(pairs))


def become_one_that_loads(model):
    model.__class__ = Takes


class Takes(Net):
    def load_weights(self, pairs):
        self.__dict__.setdefault("taken", list(pairs))


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["staged", "in_place", "layerwise"])
@pytest.mark.parametrize("change", [give_a_loader, become_one_that_loads])
@pytest.mark.parametrize("kind", [Net, OnlyLoads])
async def test_a_loader_that_a_model_gets_before_the_first_round_is_the_one(kind, change, sink):
    model = kind()
    before = values(model)
    async with pair(model, sink=sink) as (worker, sync):
        assert (worker._foreseen is None) == (kind is OnlyLoads)
        assert not worker.has_sink
        change(model)
        await sync.send_weights()
    assert "last.weight" in dict(model.taken)
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())


@pytest.mark.asyncio
async def test_a_sink_that_is_there_already_keeps_what_it_knows():
    async with pair() as (worker, sync):
        matcher = worker.know_sink()._matcher
        await sync.send_weights()
        assert worker.know_sink()._matcher is matcher


@pytest.mark.asyncio
async def test_a_draft_takes_nothing_over_of_the_model():
    draft, model = Net(), Net()
    async with Engine(WeightTransferConfig(backend="ipc"), None, "cpu", model) as worker:
        worker.set_draft_model(draft)
        async with aiosync.connect(trained(), workers=[DirectClient(worker)]) as sync:
            await looked(worker)
            foreseen = worker._foreseen[1]
            await sync.send_weights(target=aiosync.Draft())
            assert worker._sinks[id(draft)]._matcher is not foreseen.matcher
            assert torch.equal(draft.last.weight, trained().last.weight)
            assert not torch.equal(model.last.weight, draft.last.weight)
            await sync.send_weights()
            assert torch.equal(model.last.weight, draft.last.weight)


@pytest.mark.asyncio
async def test_a_sink_of_ones_own_is_not_made_before_a_round():
    made = []

    def make(model, device):
        made.append(make_sink(model, device=device))
        return made[-1]

    async with pair(sink=make) as (_, sync):
        assert not made
        await sync.send_weights()
        assert len(made) == 1


@pytest.mark.asyncio
async def test_a_dict_of_tensors_is_left_alone():
    model = {name: torch.zeros_like(value) for name, value in trained().named_parameters()}
    async with pair(model) as (worker, sync):
        assert not worker.has_sink
        await sync.send_weights()
        assert torch.equal(model["last.weight"], trained().last.weight)


# -- what may go wrong ----------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [RuntimeError("dict changed"), RecursionError(), Validation("x")])
@pytest.mark.parametrize("place", ["plain_members", "plain_metas"])
async def test_a_look_ahead_that_fails_is_harmless(place, error, monkeypatch):
    from aiosync import foresight

    def fails(*args):
        raise error

    monkeypatch.setattr(foresight, place, fails)
    async with pair() as (worker, sync):
        assert (worker._foreseen, worker.lane.statistics().failed) == (None, 1)
        await sync.send_weights()
        assert torch.equal(worker.model.last.weight, trained().last.weight)


@pytest.mark.asyncio
async def test_a_model_without_parameters_has_nothing_to_foresee():
    async with pair(nn.BatchNorm1d(2, affine=False)) as (worker, sync):
        assert (worker._foreseen, worker.lane.statistics().failed) == (None, 0)
        with pytest.raises(Coverage):
            await sync.send_weights()


@pytest.mark.asyncio
async def test_what_changes_while_it_is_matched_is_matched_again(monkeypatch):
    model, plainly = Net(), targets._matched_plainly
    seen = []

    def then_overlap(*args):
        found = plainly(*args)
        if not seen:
            overlap(model)
        seen.append(found)
        return found

    monkeypatch.setattr(targets, "_matched_plainly", then_overlap)
    async with pair(model) as (worker, sync):
        assert worker._foreseen is not None
        assert seen[0] is not None
        with pytest.raises(Validation, match="shares part of its memory"):
            await sync.send_weights()


@pytest.mark.asyncio
async def test_a_look_ahead_keeps_no_tensor():
    async with pair() as (worker, _):
        assert worker._foreseen is not None
        before = weakref.ref(worker.model.last.weight)
        replace(worker.model)
        gc.collect()
        assert before() is None


class Slow:
    """A look ahead that waits on its lane until it is told to go on."""

    def __init__(self, monkeypatch):
        self.began, self.goes_on = threading.Event(), threading.Event()
        plainly = Foresight.of

        def of(model):
            self.began.set()
            assert self.goes_on.wait(10)
            return plainly(model)

        monkeypatch.setattr(Foresight, "of", of)

    async def has_begun(self):
        assert await asyncio.to_thread(self.began.wait, 10)


@pytest.mark.asyncio
async def test_an_init_does_not_wait_for_it_but_a_round_does(monkeypatch):
    slow = Slow(monkeypatch)
    async with Engine(WeightTransferConfig(backend="ipc"), None, "cpu", Net()) as worker:
        async with aiosync.connect(trained(), workers=[DirectClient(worker)]) as sync:
            await slow.has_begun()
            sending = sync.begin_update()
            while worker.lane.statistics().waiting < 1:
                await asyncio.sleep(0.001)
            slow.goes_on.set()
            await sending
            assert torch.equal(worker.model.last.weight, trained().last.weight)


@pytest.mark.asyncio
async def test_an_engine_that_is_closed_meanwhile_leaves_no_task(monkeypatch):
    slow = Slow(monkeypatch)
    mine = asyncio.all_tasks()
    worker = Engine(WeightTransferConfig(backend="ipc"), None, "cpu", Net())
    async with aiosync.connect(trained(), workers=[DirectClient(worker)]):
        await slow.has_begun()
        [looking] = [t for t in asyncio.all_tasks() if t.get_name().endswith("-foresight")]
        closing = asyncio.create_task(worker.aclose())
        for _ in range(1000):
            await asyncio.sleep(0.001)
            if looking.cancelling():
                break
        slow.goes_on.set()
        await closing
        assert looking.cancelled()
    assert not [t for t in asyncio.all_tasks() - mine if "foresight" in t.get_name()]


@pytest.mark.parametrize("closes", [True, False])
def test_a_loop_that_is_closed_meanwhile_keeps_neither_engine_nor_model(closes, monkeypatch):
    slow = Slow(monkeypatch)
    worker = Engine(WeightTransferConfig(backend="ipc"), None, "cpu", Net())
    model = weakref.ref(worker.model)
    where = {"address": "unix:///nowhere", "token": "0" * 32, "reader": "w"}
    loop = asyncio.new_event_loop()
    loop.run_until_complete(worker.init_transfer_engine(where | {"buffer_size_bytes": 4096}))
    loop.run_until_complete(slow.has_begun())
    loop.close()
    if closes:
        slow.goes_on.set()
        asyncio.run(worker.aclose())
        assert worker.state is State.CLOSED
    else:
        lane = worker.lane
        slow.goes_on.set()
        asyncio.run(lane.run(int))
    del worker
    gc.collect()
    assert model() is None


def test_a_model_that_is_swapped_while_its_sink_is_made_gets_no_sink_of_another(monkeypatch):
    one, two = Net(), Net()
    worker = Engine(WeightTransferConfig(backend="ipc"), None, "cpu", one)
    build = worker_sinks.build_sink

    def swaps(*args, **kwargs):
        worker.set_weight_update_target(two)
        return build(*args, **kwargs)

    monkeypatch.setattr(worker_sinks, "build_sink", swaps)
    assert worker.know_sink().model is one
    assert worker.know_sink().model is two
    worker.reset_weight_update_target()
    assert worker.know_sink().model is one


# -- what else is done while others wait ----------------------------------------------------------


@pytest.mark.asyncio
async def test_the_trainers_own_look_lets_its_requests_out(monkeypatch):
    seen, plainly = [], SourceFeed.look
    usual = sys.getswitchinterval()

    def look(feed):
        seen.append(sys.getswitchinterval())
        plainly(feed)

    monkeypatch.setattr(SourceFeed, "look", look)
    async with pair() as (_, sync):
        await sync.send_weights()
    assert len(seen) == 1
    assert seen[0] < usual
    assert sys.getswitchinterval() == pytest.approx(usual)


@pytest.mark.parametrize("count", [1, 14, 15, 16, 31])
def test_a_digest_is_that_of_all_rows_one_after_the_other(count):
    mesh = {"owners": (0, 1), "placements": (Shard(0),)}
    metadata = [ParamMeta(f"n{at}", torch.int8, (at, 2), **mesh) for at in range(count)]
    metadata[-1] = ParamMeta("last", torch.bfloat16, (3,), owners=(4,), placements=(Replicate(),))
    rows = [
        (m.name, dtype_name(m.dtype), m.shape, m.owners, m.mesh_shape, m.placements and [0])
        for m in metadata
    ]
    packed = b"".join(map(msgspec.msgpack.encode, rows))
    assert metadata_digest(metadata) == hashlib.blake2b(packed, digest_size=16).hexdigest()
