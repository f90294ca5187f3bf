"""A glance at a module sees what a walk would see, and keeps nothing alive."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from itertools import islice

import pytest
import torch
from torch import nn

import aiosync
from aiosync import glance as glances
from aiosync.glance import Glance, Looking
from aiosync.module_layout import live_tensors
from aiosync.sinks import make_sink
from aiosync.sources import ModuleSource
from aiosync.targets import Matcher
from transports.stream import Run, columns_of


@pytest.fixture(autouse=True, params=[2, 256])
def run_length(request, monkeypatch):
    monkeypatch.setattr(glances, "_RUN", (1, request.param))
    monkeypatch.setattr(glances, "_PART", (1, request.param))


class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 2, bias=at % 2 == 0) for at in range(4))
        self.norm = nn.BatchNorm1d(2)
        self.tied = self.layers[0]
        self.twin = self.again = self.layers[0].bias
        self.none = None
        self.register_parameter("gap", None)


def glance_at(model):
    live = live_tensors(model)
    found = Glance.of(model, live, list(live))
    assert found is not None
    return found


def test_a_glance_sees_the_same_tensors():
    model = Tree()
    glance = glance_at(model)
    seen = glance.look(model)
    assert [id(t) for t in seen] == [id(t) for t in live_tensors(model).values()]
    assert glance.addresses == [t.data_ptr() for t in seen]
    model.layers[1].weight.data.add_(1)
    assert glance.look(model) is not None


def replace(model):
    model.layers[1].weight = nn.Parameter(torch.zeros(2, 3))


def move(model):
    model.layers[1].weight.data = torch.zeros(2, 3)


def turn(model):
    weight = model.layers[1].weight
    weight.data = weight.data.view(3, 2)


def cast(model):
    weight = model.layers[1].weight
    weight.data = weight.data.view(torch.int32).view(torch.float32)[:1]


def grow(model):
    model.layers.append(nn.Linear(1, 1))


def shrink(model):
    del model.layers[3]


def rename(model):
    bias = model.layers[0].bias
    del model.layers[0].bias
    model.layers[0].offset = bias


def add_bias(model):
    model.layers[1].bias = nn.Parameter(torch.zeros(2))


def buffer(model):
    model.norm.running_mean = torch.ones(2)


def swap(model):
    model.layers[0], model.layers[2] = model.layers[2], model.layers[0]


class Other(nn.Linear):
    pass


def untie(model):
    model.tied = nn.Linear(3, 2)


def tie(model):
    model.layers[2].weight = model.layers[0].weight


def look_alike(model):
    model.again = nn.Parameter(model.twin.data.view(1, 2))


def rename_module(model):
    norm = model.norm
    del model.norm
    model.scale = norm


def new_class(model):
    model.layers[3].__class__ = Other


def first_buffer(model):
    model.layers[2].register_buffer("mask", torch.zeros(2))


def first_child(model):
    model.layers[2].add_module("adapter", nn.Linear(1, 1))


def hand_over(model):
    giver, taker = model.layers[0], model.layers[1]
    bias = giver.bias
    del giver._parameters["bias"]
    del taker._parameters["bias"]
    taker._parameters = {"bias": bias, **taker._parameters}


def freeze(model):
    model.layers[1].weight.requires_grad_(False)


def lose_a_module(model):
    model.layers._modules["1"] = None


@pytest.mark.parametrize(
    "change",
    [
        *(replace, move, turn, cast, grow, shrink, rename, add_bias, buffer, swap, untie, tie),
        *(look_alike, rename_module, new_class, first_buffer, first_child, hand_over, freeze),
        lose_a_module,
    ],
)
def test_a_glance_sees_every_change(change):
    model = Tree()
    glance = glance_at(model)
    change(model)
    assert glance.look(model) is None


def test_some_things_are_not_seen_at_a_glance():
    class Own(nn.Linear):
        def named_parameters(self, *args, **options):
            return super().named_parameters(*args, **options)

    model = nn.Sequential(Own(2, 2))
    live = live_tensors(model)
    assert Glance.of(model, live, list(live)) is None
    assert Glance.of({"a": torch.zeros(1)}, {"a": torch.zeros(1)}, ["a"]) is None


@pytest.mark.asyncio
async def test_rounds_follow_a_model_that_changes_at_both_ends():
    ours, theirs = Tree(), Tree()
    config = aiosync.WeightTransferConfig("ipc", sink="in_place")
    engine = aiosync.WeightTransferEngineFactory.create_engine(
        config, None, torch.device("cpu"), theirs
    )
    async with engine, aiosync.serve(engine) as server:
        async with aiosync.connect(ours, workers=[server.url]) as sync:
            for version, change in enumerate([None, None, None, move, replace, None, move], 1):
                if change is not None:
                    change(ours)
                    change(theirs)
                with torch.no_grad():
                    for parameter in ours.parameters():
                        parameter.add_(version)
                await sync.send_weights(version=version)
                for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
                    assert torch.equal(one, two)


def test_a_glance_returns_what_it_was_asked_for_in_that_order():
    model = Tree()
    live = live_tensors(model)
    names = ["norm.running_mean", "tied.weight", "layers.3.weight"]
    glance = Glance.of(model, live, names)
    assert [id(tensor) for tensor in glance.look(model)] == [id(live[name]) for name in names]
    assert glance.addresses == [live[name].data_ptr() for name in names]


def test_a_glance_is_at_the_module_it_is_given():
    model, other = Tree(), Tree()
    assert glance_at(model).look(other) is None


def test_a_glance_holds_neither_modules_nor_tensors():
    model = Tree()
    glance = glance_at(model)
    gone = [weakref.ref(model.layers[1]), weakref.ref(model.layers[1].weight)]
    model.layers[1] = nn.Linear(3, 2)
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert glance.look(model) is None


def test_a_source_that_is_given_another_module_sends_that():
    source = ModuleSource(nn.Linear(2, 2))
    for _ in range(3):
        source.notice_changes()
        _ = source.metadata
        assert source.plain_tensors() is not None
    assert source.plain_addresses is not None
    source.module = nn.Linear(2, 2)
    source.notice_changes()
    seen = source.plain_tensors()
    assert [id(tensor) for tensor in seen] == [id(t) for t in source.module.parameters()]


@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_destinations_are_known_once_a_model_stays_as_it_is(mode):
    model = Tree()
    sink = make_sink(model, mode)
    live = dict(model.named_parameters())
    metadata = [aiosync.ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in live.items()]
    some = list(range(1, len(metadata)))
    for number in range(3):
        sink.begin(metadata)
        known = sink.known_addresses(some)
        assert (known is not None) == (number == 2 or mode == "staged")
        targets = sink.destinations(some)
        assert known in (None, [tensor.data_ptr() for tensor in targets])
        assert sink.known_addresses([2, 1]) is None
        sink.abort()


def test_a_match_is_kept_for_as_long_as_the_model_is_the_same():
    model, matcher = Tree(), Matcher()
    live = dict(model.named_parameters())
    metadata = [aiosync.ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in live.items()]
    for _ in range(3):
        matcher.find(model, metadata, {}, partial=False)
    assert matcher.holds(model)
    move(model)
    assert not matcher.holds(model)


def test_a_run_is_a_batch_of_pairs():
    tensors = [torch.zeros(1), torch.ones(1)]
    run = Run(5, tensors, [1, 2])
    assert [index for index, _ in run] == [5, 6]
    assert run[1] == (6, tensors[1])
    assert run[:1] == [(5, tensors[0])]
    assert columns_of(run).part(1, 2) == (range(6, 7), tensors[1:], [2])
    assert columns_of(list(run)) == ([5, 6], tensors, None)


def known_sink(mode):
    """A sink that knows its model, in a round that has just begun; and the round's metadata."""
    sink = make_sink(Tree(), mode)
    live = dict(sink.model.named_parameters())
    metadata = [aiosync.ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in live.items()]
    for _ in range(3):
        sink.abort()
        sink.begin(metadata)
    return sink, metadata


@pytest.mark.parametrize("method", ["verify", "verify_stream"])
@pytest.mark.parametrize("mode", ["staged", "in_place"])
@pytest.mark.parametrize("change", [replace, move, grow])
def test_a_model_that_was_looked_at_first_is_looked_at_once_more_at_the_end(mode, change, method):
    sink, metadata = known_sink(mode)
    for index in range(len(metadata)):
        sink.destination(index).zero_()
        sink.landed([index])
    change(sink.model)
    with pytest.raises(aiosync.Coverage, match="replaced, renamed or moved"):
        getattr(sink, method)()


def filled(sink, metadata):
    for index in range(len(metadata)):
        sink.destination(index).zero_()
        sink.landed([index])


@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_the_last_look_may_come_while_the_last_bytes_do(mode, monkeypatch):
    sink, metadata = known_sink(mode)
    looks, holds = [], Matcher.holds
    monkeypatch.setattr(
        Matcher, "holds", lambda self, model: looks.append(model) or holds(self, model)
    )
    for _ in range(2):
        filled(sink, metadata)
        sink.look_meanwhile(1)
        assert not looks  # more is to come
        sink.look_meanwhile(None)
        assert len(looks) == 1
        sink.verify_stream()
        assert len(looks) == 1
        sink.verify_stream()  # counted once
        assert len(looks) == 2
        sink.commit()
        looks.clear()
        sink.begin(metadata)


@pytest.mark.parametrize("mode", ["staged", "in_place"])
@pytest.mark.parametrize("change", [replace, move, grow])
def test_a_change_that_is_found_while_the_last_bytes_come_ends_the_stream(mode, change):
    sink, metadata = known_sink(mode)
    filled(sink, metadata)
    change(sink.model)
    sink.look_meanwhile(None)
    with pytest.raises(aiosync.Coverage, match="replaced, renamed or moved"):
        sink.verify_stream()


@pytest.mark.parametrize("mode", ["staged", "in_place"])
@pytest.mark.parametrize("late", ["verify", "a while ago"])
def test_a_last_look_is_of_use_at_the_end_of_the_stream_only(mode, late, monkeypatch):
    sink, metadata = known_sink(mode)
    filled(sink, metadata)
    sink.look_meanwhile(None)
    if late == "a while ago":
        monkeypatch.setattr("aiosync.late_look._MOMENT_S", 0.0)
    move(sink.model)
    with pytest.raises(aiosync.Coverage, match="replaced, renamed or moved"):
        (sink.verify if late == "verify" else sink.verify_stream)()


@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_what_is_wrong_for_a_moment_does_not_end_the_stream(mode):
    """The transport is in the midst of it: what is still so at the end is said there."""
    model = {"a": torch.zeros(4), "b": torch.zeros(4)}
    sink = make_sink(model, mode)
    metadata = [aiosync.ParamMeta(name, torch.float32, (4,)) for name in model]
    sink.begin(metadata)
    filled(sink, metadata)
    kept, model["b"] = model["b"], None
    sink.look_meanwhile(None)
    model["b"] = kept
    sink.verify_stream()


@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_a_last_look_is_of_no_use_in_the_next_round(mode):
    sink, metadata = known_sink(mode)
    filled(sink, metadata)
    sink.look_meanwhile(None)
    sink.abort()
    sink.begin(metadata)
    filled(sink, metadata)
    move(sink.model)
    with pytest.raises(aiosync.Coverage, match="replaced, renamed or moved"):
        sink.verify_stream()


@pytest.mark.parametrize("rounds", [1, 3])
def test_destinations_are_a_sequence_with_an_end(rounds):
    model, matcher = Tree(), Matcher()
    live = dict(model.named_parameters())
    metadata = [aiosync.ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in live.items()]
    for _ in range(rounds):
        writes = matcher.find(model, metadata, {}, partial=False).writes
    with pytest.raises(IndexError):
        _ = writes[len(metadata)]
    addresses = [tensor.data_ptr() for tensor in live.values()]
    assert [one.data_ptr() for (one,) in islice(writes, 99)] == addresses
    assert writes[-1][0].data_ptr() == addresses[-1]


@pytest.mark.parametrize("rounds", [1, 4])
def test_a_module_whose_names_come_in_another_order_is_passed_as_announced(rounds):
    source = ModuleSource(Tree())
    for _ in range(rounds):
        source.notice_changes()
        announced = list(source.metadata)
        assert source.plain_tensors() is not None
    own = source.module.layers[0]._parameters
    own["weight"] = own.pop("weight")
    modules = source.module._modules
    modules["layers"] = modules.pop("layers")
    source.notice_changes()
    assert source.metadata == announced
    assert [name for name, _ in source.iter_full()] == [meta.name for meta in announced]


class Shelf(dict):
    """A dict as DeepSpeed puts into modules: to take something out of it does more than that."""

    taken = 0

    def __getitem__(self, key):
        type(self).taken += 1
        return super().__getitem__(key)


def test_nothing_is_taken_out_of_dicts_of_other_kinds():
    model = Tree()
    model.layers[1]._parameters = Shelf(model.layers[1]._parameters)
    live = live_tensors(model)
    before = Shelf.taken
    assert Glance.of(model, live, list(live)) is None
    assert Shelf.taken == before
    model.layers[1]._parameters = OrderedDict(model.layers[1]._parameters)
    assert Glance.of(model, live, list(live)) is not None


def test_a_look_goes_on_from_the_beginning_after_a_pause(monkeypatch):
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(400)))
    tensors = live_tensors(net)
    looking = Looking(Glance.of(net, tensors, list(tensors)), net)
    assert looking.begins_well()
    assert looking.known
    assert looking.goes_on()
    net[0].weight = nn.Parameter(torch.ones(2, 2))
    assert looking.goes_on()  # what was seen a moment ago counts
    monkeypatch.setattr(glances, "FRESH_S", 0.0)
    while looking.goes_on():
        monkeypatch.setattr(glances, "FRESH_S", 60.0)
    assert looking.failed
