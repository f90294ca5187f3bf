"""The quick ways for models with many tensors check what the slow ones check."""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from itertools import chain
from operator import is_

import pytest
import torch
from torch import nn

from aiosync.engines.streamed import plan_of
from aiosync.errors import AiosyncError, Coverage, Validation
from aiosync.feed import SourceFeed
from aiosync.metadata import Validated
from aiosync.module_walk import named_members, outline
from aiosync.sinks import StagedSink, make_sink
from aiosync.source_side import SourceSide
from aiosync.sources import ModuleSource
from transports.lane import Lane
from transports.plain_memory import addresses_of
from transports.shared_memory import ShmReceiver, ShmSender
from transports.sharing import share_tensors


def model() -> nn.Module:
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    whole = nn.ModuleDict({"layers": nn.ModuleList([inner, nn.Linear(4, 1)]), "again": inner})
    whole["layers"][1].weight = inner[2].weight
    return whole


class Renaming(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._wrapped = inner

    def named_parameters(self, *args, **kwargs):
        for name, tensor in super().named_parameters(*args, **kwargs):
            yield name.removeprefix("_wrapped."), tensor


def test_the_walk_finds_what_torch_finds():
    net = model()
    parameters, buffers = named_members(net)
    assert list(parameters) == [n for n, _ in net.named_parameters(remove_duplicate=False)]
    assert list(buffers) == [n for n, _ in net.named_buffers(remove_duplicate=False)]
    assert all(net.get_parameter(name) is tensor for name, tensor in parameters.items())


def test_a_module_that_names_its_parameters_itself_is_asked():
    assert set(named_members(Renaming(nn.Linear(2, 2)))[0]) == {"weight", "bias"}


def change_shape(net: nn.Module) -> None:
    net["layers"][0][0].bias.data = torch.zeros(5)


def change_dtype(net: nn.Module) -> None:
    net["layers"][0][0].bias.data = torch.zeros(4, dtype=torch.float64)


def change_tie(net: nn.Module) -> None:
    net["layers"][1].weight = nn.Parameter(torch.zeros(4, 4))


def change_names(net: nn.Module) -> None:
    net["layers"].append(nn.Linear(1, 1))


@pytest.mark.parametrize("change", [change_shape, change_dtype, change_tie, change_names])
def test_an_outline_notices(change):
    net = model()
    before = outline(named_members(net)[0])
    assert before.holds(named_members(net)[0])
    change(net)
    assert not before.holds(named_members(net)[0])


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.int8), "text"])
def test_one_wrong_tensor_of_a_batch_is_named(wrong):
    class Wrong(ModuleSource):
        def iter_groups(self):
            for batch in super().iter_groups():
                yield [(name, wrong if name == "1.bias" else tensor) for name, tensor in batch]

    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(Validation, match=r"^1\.bias "):
        list(SourceFeed(Wrong(net)).iter_batches())


def test_only_the_very_same_metadata_is_not_checked_again():
    metadata = SourceFeed(ModuleSource(nn.Linear(2, 2))).metadata
    check = Validated()
    assert check(metadata) == check(metadata) == metadata
    metadata.append(metadata[0])
    with pytest.raises(Validation, match="repeats"):
        check(metadata)


def looked_at(net: nn.Module) -> SourceFeed:
    feed = SourceFeed(ModuleSource(net))
    feed.look()
    return feed


def test_a_plain_pass_yields_what_the_ordinary_one_does():
    net = model()
    feed = looked_at(net)
    held = {id(parameter) for parameter in net.parameters()}
    assert {id(tensor) for tensor in feed.plain} <= held  # no new object for any of them
    quick = list(feed.iter_plain())
    ordinary = list(feed.iter_batches())
    assert [[i for i, _ in batch] for batch in quick] == [[i for i, _ in b] for b in ordinary]
    for (_, one), (_, two) in zip(chain(*quick), chain(*ordinary), strict=True):
        assert one.data_ptr() == two.data_ptr()
        assert one.shape == two.shape
    assert feed.plain is None


class Halved(ModuleSource):
    def iter_full(self):
        for name, tensor in super().iter_full():
            yield name, tensor / 2


@pytest.mark.parametrize(
    "make",
    [
        lambda net: Halved(net),
        lambda net: ModuleSource(net, dtype=torch.bfloat16),
        lambda net: ModuleSource(net, session=nullcontext),
    ],
    ids=["overridden", "cast", "session"],
)
def test_a_pass_that_does_more_is_not_plain(make):
    feed = SourceFeed(make(model()))
    feed.look()
    assert feed.plain is None


def test_a_strided_tensor_makes_no_plain_pass():
    net = nn.Linear(4, 4)
    net.weight.data = net.weight.data.t()
    assert looked_at(net).plain is None


@pytest.mark.parametrize("change", [change_shape, change_dtype])
def test_a_tensor_that_changes_after_the_round_was_admitted_is_named(change):
    net = model()
    source = ModuleSource(net)
    feed = SourceFeed(source)
    source.notice_changes()
    change(net)
    feed.look()
    assert feed.plain is None
    with pytest.raises(Validation, match=r"layers\.0\.0\.bias changed"):
        list(feed.iter_batches())


def test_known_addresses_count_while_the_tensors_are_there():
    tensors = [torch.ones(4), torch.ones(2)]
    there = [tensor.data_ptr() for tensor in tensors]
    assert addresses_of(tensors, [16, 8], there) == there
    assert addresses_of(tensors, [16, 8], [there[0], 64]) == there
    assert addresses_of(tensors, [16, 9], [there[0], 64]) is None
    strided = torch.ones(4, 4).t()
    assert addresses_of([strided], [64], [64]) is None


def test_a_source_holds_no_tensor_after_the_round():
    net = nn.Linear(2, 2)
    source = ModuleSource(net)
    _ = source.metadata
    source.notice_changes()
    gone = weakref.ref(net.weight)
    source.forget_tensors()
    net.weight = nn.Parameter(torch.zeros(2, 2))
    assert gone() is None


@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_autograd_hears_of_what_is_written(mode):
    net = nn.Linear(2, 2)
    sink = make_sink(net, mode)
    metadata = SourceFeed(ModuleSource(net)).metadata
    loss = net(torch.ones(1, 2)).square().sum()  # keeps the weight for its backward pass
    loss = loss * net.weight.square().sum()
    sink.begin(metadata)
    sink.destinations([0, 1])
    sink.landed([0, 1])
    sink.commit()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_autograd_hears_of_it_as_soon_as_a_parameter_requires_gradients(mode):
    net = nn.Linear(2, 2).requires_grad_(False)
    sink = make_sink(net, mode)
    metadata = SourceFeed(ModuleSource(net)).metadata

    def counted():
        before = net.weight._version
        sink.begin(metadata)
        for target in sink.destinations([0, 1]):
            target.data.zero_()
        sink.landed([0, 1])
        sink.commit()
        return net.weight._version - before

    assert [counted() for _ in range(4)][-1] == 0  # nobody could ask for it
    net.requires_grad_(True)
    assert all(counted() for _ in range(4))


def test_many_destinations_are_those_one_by_one():
    for mode in ("staged", "in_place", "layerwise"):
        one, many = (make_sink(model(), mode) for _ in range(2))
        metadata = SourceFeed(ModuleSource(model())).metadata
        indices = list(range(len(metadata)))
        one.begin(metadata)
        many.begin(metadata)
        single = [one.destination(index) for index in indices]
        for tensor, other in zip(single, many.destinations(indices), strict=True):
            assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
            assert tensor.is_contiguous()
            assert other.is_contiguous()
        assert not many.destination(0).requires_grad
        many.landed(indices[:2])
        with pytest.raises(Coverage, match="has landed"):
            many.destinations(indices)
        with pytest.raises(Coverage, match="landed twice"):
            many.landed(indices)
        with pytest.raises(Validation, match="no tensor"):
            many.destinations([*indices[2:], len(indices)])


def test_a_sink_that_hands_out_its_own_destinations_is_asked_for_each():
    asked = []

    class Own(StagedSink):
        def destination(self, index):
            asked.append(index)
            return super().destination(index)

    sink = Own(nn.Linear(2, 2))
    sink.begin(SourceFeed(ModuleSource(nn.Linear(2, 2))).metadata)
    sink.destinations([0, 1])
    assert asked == [0, 1]


def one_round(sender, receiver, plan, feed, sink, *, number):
    errors = []

    def receive():
        try:
            sink.begin(feed.metadata)
            receiver.receive(plan, sink.destination, sink.landed, round=number, stall=20)
            sink.commit()
        except AiosyncError as error:
            errors.append(error)
            sink.abort()
        finally:
            receiver.close()

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        sender.open(plan, 1, round=number, stall=20)
        for batch in feed.iter_batches():
            sender.write(batch)
        sender.finish()
    finally:
        sender.close()
        thread.join(20)
    assert not errors


@pytest.mark.parametrize("digest", [None, "wsum64"])
def test_a_resident_tensor_that_moved_is_noticed_when_all_were_known(digest):
    net, copy = (nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))) for _ in range(2))
    shared = share_tensors(net)
    feed = SourceFeed(ModuleSource(net))
    plan = plan_of(feed.metadata, 1 << 12)
    sender = ShmSender(buffer_nbytes=1 << 12, digest=digest, shared=(shared,))
    receiver = ShmReceiver(address=sender.address, token=sender.token, name="reader")
    sink = make_sink(copy, "in_place")
    try:
        live = feed.source.resident()
        sender.set_resident({i: sender.locate(live[m.name]) for i, m in enumerate(feed.metadata)})
        for number in (1, 2, 3):
            with torch.no_grad():
                net[2].bias.fill_(number)
            one_round(sender, receiver, plan, feed, sink, number=number)
            assert torch.equal(copy[2].bias, net[2].bias)
        assert sender.statistics()["bytes_copied"] == 0
        net[2].bias.data = net[2].bias.data.clone()
        with pytest.raises(Validation, match="moved or replaced"):
            one_round(sender, receiver, plan, feed, sink, number=4)
    finally:
        sender.release()
        receiver.release()


def test_the_first_round_walks_a_module_once(monkeypatch):
    net, walks = model(), []

    def walked(module):
        walks.append(module)
        return named_members(module)

    for user in ("sources", "module_layout"):
        monkeypatch.setattr(f"aiosync.{user}.named_members", walked)
    source = ModuleSource(net)
    source.notice_changes()
    names = [meta.name for meta in source.metadata]
    assert len(names) == len(set(map(id, net.parameters())))
    assert all(map(is_, source.plain_tensors(), map(net.get_parameter, names)))
    assert walks == [net]
    # What was found is for one round, and not for one in which others had a turn.
    source.notice_changes()
    source.forget_tensors()
    net["layers"][1].bias = nn.Parameter(torch.ones(1))
    assert any(tensor is net["layers"][1].bias for tensor in source.plain_tensors())


def test_what_is_found_before_a_first_round_is_no_pass_with_a_session():
    source = ModuleSource(model(), session=nullcontext)
    source.notice_changes()
    assert source.plain_tensors() is None
    assert "_layout" not in vars(source)


@pytest.mark.asyncio
async def test_a_module_is_described_on_its_lane_alone():
    threads = []

    def rename(name):
        threads.append(threading.get_ident())
        return name

    net = nn.Linear(2, 2)
    side = SourceSide(ModuleSource(net, rename=rename), name="t", rank=0, lane_factory=Lane)
    try:
        first = await side.open_feed(grace=1)
        assert await side.open_feed(grace=1) is first
        del net.bias
        for _ in range(2):  # the first one that notices, and one that knows nothing any more
            side.source._forget()
            changed = await side.open_feed(grace=1)
            assert [meta.name for meta in changed.metadata] == ["weight"]
    finally:
        side.close()
    assert threads
    assert threading.get_ident() not in threads
