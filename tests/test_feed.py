"""A source that differs from its announcement ends in one sentence, before anything is sent."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import cached_property

import anyio
import pytest
import torch
from anyio.lowlevel import checkpoint
from torch import nn

from aiosync import glance
from aiosync.errors import Validation
from aiosync.feed import SourceFeed
from aiosync.metadata import ParamMeta
from aiosync.ranks import TrainerRanks
from aiosync.snapshots import Keeper
from aiosync.source_pass import SourcePass
from aiosync.sources import ModuleSource, WeightSource
from transports.lane import Lane

F32 = torch.float32


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8).tolist()


def good():
    return [("a", torch.ones(2)), ("l.0.b", torch.ones(3)), ("l.0.c", torch.ones(()))]


class Scripted(WeightSource):
    """Announces `good()` and yields a script; an exception in it is raised."""

    def __init__(self, script, owners=()):
        self.script, self.owners, self.closed = script, dict(owners), []

    @cached_property
    def metadata(self):
        return [ParamMeta(n, t.dtype, t.shape, owners=self.owners.get(n)) for n, t in good()]

    def iter_full(self):
        try:
            for item in self.script:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.closed.append(threading.get_ident())


class AsyncScripted(Scripted):
    async def iter_full(self):
        try:
            for item in self.script:
                await checkpoint()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            await checkpoint()
            self.closed.append(threading.get_ident())


class Grouped(Scripted):
    """The same script as one list."""

    def iter_groups(self):
        yield list(self.script)


async def drain(feed):
    """Everything a feed hands out, whichever kind it is."""
    if feed.is_async:
        return [pair async for batch in feed.aiter_batches() for pair in batch]
    return [pair for batch in feed.iter_batches() for pair in batch]


KINDS = [Scripted, AsyncScripted, Grouped]


def with_pair(at, pair):
    script = good()
    script[at] = pair
    return script


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_true_source_comes_through(kind):
    feed = SourceFeed(kind(good()))
    assert feed.is_async is (kind is AsyncScripted)
    for _ in range(2):
        pairs = await drain(feed)
        assert [i for i, _ in pairs] == [0, 1, 2]
        assert [t.shape for _, t in pairs] == [(2,), (3,), ()]
    assert repr(feed) == "<SourceFeed of 3/3 tensors, rank 0>"


def freed(tensor, left=0):
    """What a sharded module leaves of a layer that is not in use; to read it ends the process."""
    tensor.untyped_storage().resize_(left)
    return tensor


LIES = {
    "too few": (good()[:1], "ended after 1 of 3 tensors: l.0.b is missing", "l.0.b"),
    "nothing": ([], "a is missing", "a"),
    "extra": ([*good(), ("d", torch.ones(1))], r"d \(position 3\) is extra", "d"),
    "twice": (with_pair(1, good()[0]), "a came twice, at positions 0 and 1", "a"),
    "twice at the end": ([*good(), good()[2]], "l.0.c came twice", "l.0.c"),
    "order": (with_pair(1, good()[2]), "position 1: expected l.0.b, got l.0.c(?!,)", "l.0.c"),
    "unknown": (with_pair(0, ("A", torch.ones(2))), "got A, which is not announced", "A"),
    "dtype": (
        with_pair(0, ("a", torch.ones(2).half())),
        r"a \(position 0\): announced as float32, yielded as float16", "a",
    ),
    "shape": (
        with_pair(1, ("l.0.b", torch.ones(1, 3))),
        r"announced with shape \(3,\), yielded with \(1, 3\)", "l.0.b",
    ),
    "meta": (with_pair(0, ("a", torch.ones(2, device="meta"))), "meta device", "a"),
    "none": (with_pair(0, ("a", None)), "expected a tensor, got None", "a"),
    "array": (with_pair(0, ("a", [1.0, 2.0])), "expected a tensor, got a list", "a"),
    "no pair": (with_pair(0, torch.ones(2)), r"position 0: expected \(name, tensor\)", None),
    "no name": (with_pair(0, (b"a", torch.ones(2))), "position 0", None),
    "triple": (with_pair(2, (*good()[2], 1)), "position 2", None),
    "sparse": (with_pair(0, ("a", torch.ones(2).to_sparse())), "layout", "a"),
    "freed": (with_pair(0, ("a", freed(torch.ones(2)))), "storage was freed", "a"),
    "partly freed": (with_pair(0, ("a", freed(torch.ones(2), 4))), "was freed", "a"),
    "freed behind a view": (with_pair(0, ("a", freed(torch.ones(4)[2:]))), "was freed", "a"),
}  # fmt: skip


@pytest.mark.fault("A-HANG-3")
@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lie", LIES)
async def test_lies_are_named_and_not_handed_out(kind, lie):
    script, text, tensor = LIES[lie]
    source = kind(script)
    handed = []
    feed = SourceFeed(source)
    with pytest.raises(Validation, match=text) as caught:
        if feed.is_async:
            async for batch in feed.aiter_batches():
                handed += batch
        else:
            for batch in feed.iter_batches():
                handed += batch
    assert caught.value.tensor == tensor
    for index, value in handed:
        name, true = good()[index]
        assert (name, value.dtype, value.shape) == (
            feed.metadata[index].name,
            true.dtype,
            true.shape,
        )
    if kind is not Grouped:
        assert len(source.closed) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [Scripted, AsyncScripted])
async def test_the_sources_own_exception_comes_through_as_it_is(kind):
    for error in (KeyError("mine"), RuntimeError("gather failed"), GeneratorExit()):
        source = kind([good()[0], error])
        with pytest.raises(type(error)) as caught:
            await drain(SourceFeed(source))
        assert caught.value is error
        assert len(source.closed) == 1


@pytest.mark.fault("A-CANCEL-5")
def test_an_inner_stop_iteration_is_no_end():
    inner = StopIteration("next() on an empty shard list")
    with pytest.raises(RuntimeError) as caught:
        list(SourceFeed(Scripted([good()[0], inner])).iter_batches())
    assert caught.value.__cause__ is inner


@pytest.mark.fault("A-HANG-2")
def test_leaving_early_closes_the_source_once_on_the_same_thread():
    source = Scripted(good())
    batches = SourceFeed(source).iter_batches()

    def drive():
        next(batches)
        batches.close()

    lane = threading.Thread(target=drive)
    lane.start()
    lane.join()
    assert source.closed == [lane.ident]


@pytest.mark.asyncio
async def test_cancelling_an_async_pass_still_runs_its_clean_up():
    class Stuck(AsyncScripted):
        async def iter_full(self):
            try:
                yield good()[0]
                await anyio.sleep_forever()
            finally:
                await checkpoint()  # an await: would be cut off without the shield
                self.closed.append("whole")

    source = Stuck([])
    feed = SourceFeed(source)
    async with anyio.create_task_group() as group:

        async def read():
            async for _ in feed.aiter_batches():
                pass

        group.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    left = SourceFeed(Stuck([]))
    batches = left.aiter_batches()
    await anext(batches)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await batches.aclose()
    assert left.source.closed == ["whole"]


@pytest.mark.asyncio
async def test_the_wrong_kind_of_pass_is_a_type_error():
    with pytest.raises(TypeError, match="is_async = True"):
        list(SourceFeed(AsyncScripted(good())).iter_batches())
    with pytest.raises(TypeError, match="use iter_batches"):
        await anext(SourceFeed(Scripted(good())).aiter_batches())


def test_only_owned_names_are_expected():
    owners = {"a": (0,), "l.0.b": (1,)}
    feed = SourceFeed(Scripted(good()[1:], owners), rank=1)
    assert feed.owned == [1, 2]
    assert [i for batch in feed.iter_batches() for i, _ in batch] == [1, 2]
    with pytest.raises(Validation, match=r"expected l\.0\.b, got a, which rank 1 does not own"):
        list(SourceFeed(Scripted(good(), owners), rank=1).iter_batches())


def test_impossible_ownership_is_refused():
    class Odd(Scripted):
        names = ()

        def owned_names(self, rank):
            return list(self.names)

    for names, text in ((["x"], "'x'"), (["l.0.b", "a"], "order"), (["a", "a"], "repeats")):
        source = Odd(good())
        source.names = names
        with pytest.raises(Validation, match=text):
            SourceFeed(source)


def test_duck_sources_and_older_ones():
    class Duck:
        metadata = Scripted([]).metadata

        def iter_full(self):
            return good()  # any iterable

    assert [i for batch in SourceFeed(Duck()).iter_batches() for i, _ in batch] == [0, 1, 2]

    class Older(Duck):
        def metadata(self):
            return []

    with pytest.raises(TypeError, match="LegacySource"):
        SourceFeed(Older())


def test_groups_are_used_unless_a_subclass_overrides_only_iter_full():
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    class Doubled(ModuleSource):
        def iter_full(self):
            for name, tensor in super().iter_full():
                yield name, tensor * 2

    assert [len(b) for b in SourceFeed(ModuleSource(net)).iter_batches()] == [2, 2]
    doubled = [pair for batch in SourceFeed(Doubled(net)).iter_batches() for pair in batch]
    for (_, tensor), parameter in zip(doubled, net.parameters(), strict=True):
        assert bits(tensor) == bits(parameter.detach() * 2)


def test_a_group_must_be_a_list():
    class Loose(Scripted):
        def iter_groups(self):
            yield from good()

    class Looser(Scripted):
        def iter_groups(self):
            yield torch.ones(2)

    with pytest.raises(Validation, match="position 0: expected"):
        list(SourceFeed(Loose([])).iter_batches())
    with pytest.raises(Validation, match=r"Looser\.iter_groups yielded a Tensor, not a list"):
        list(SourceFeed(Looser([])).iter_batches())


@pytest.mark.fault("A-LAYOUT-11")
def test_the_trainers_graph_gradients_and_versions_are_untouched():
    weight = nn.Parameter(torch.arange(2.0))
    step = weight * 3.0  # not a leaf
    view = step.view(2)

    class Trainer(Scripted):
        def iter_full(self):
            assert not torch.is_grad_enabled()
            yield "a", weight
            assert not torch.is_grad_enabled()
            yield "l.0.b", torch.cat([view, step[:1]])
            yield "l.0.c", step.sum()

    versions = weight._version, step._version
    for batch in SourceFeed(Trainer([])).iter_batches():
        assert torch.is_grad_enabled()
        for _, tensor in batch:
            assert not tensor.requires_grad
            assert tensor.is_leaf
    assert (weight._version, step._version) == versions
    assert weight.requires_grad
    assert weight.grad is None
    (step * step).sum().backward()
    assert weight.grad.tolist() == [0.0, 18.0]


def test_lazy_views_arrive_as_values():
    class Views(WeightSource):
        base = torch.arange(24.0).reshape(2, 3, 4)

        @cached_property
        def metadata(self):
            return [
                ParamMeta("t", F32, (4, 3, 2)),
                ParamMeta("conj", torch.complex64, (1,)),
                ParamMeta("neg", F32, (1,)),
                ParamMeta("column", F32, (1, 1)),
                ParamMeta("grid", F32, (2, 3, 4, 5)),
            ]

        def iter_full(self):
            yield "t", self.base.permute(2, 1, 0)
            yield "conj", torch.tensor([1 + 2j]).conj()
            yield "neg", torch.tensor([1 + 2j]).conj().imag
            yield "column", torch.ones(1, 7)[:, 3:4]
            yield "grid", torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)

    got = dict(pair for batch in SourceFeed(Views()).iter_batches() for pair in batch)
    assert all(t.is_contiguous() and not t.is_conj() and not t.is_neg() for t in got.values())
    assert got[0].tolist() == Views.base.permute(2, 1, 0).tolist()
    assert got[1].view(F32).tolist() == [1.0, -2.0]
    assert bits(got[3]) == bits(torch.ones(1))
    assert bits(got[2]) == bits(torch.tensor([-2.0]))


def test_a_batch_is_let_go_before_the_next_is_made():
    class Gathering(Scripted):
        previous = None

        def iter_full(self):
            for name, tensor in good():
                gc.collect()
                assert self.previous is None or self.previous() is None
                gathered = tensor.clone()
                self.previous = weakref.ref(gathered)
                yield name, gathered
                del gathered

    for batch in SourceFeed(Gathering([])).iter_batches():
        assert len(batch) == 1
        del batch


@pytest.mark.asyncio
async def test_an_async_source_has_nothing_copied_on_the_loop():
    turned = torch.arange(6, dtype=F32).reshape(2, 3).t()

    class Turned(WeightSource):
        @cached_property
        def metadata(self):
            return [ParamMeta("a", F32, (3, 2))]

        async def iter_full(self):
            yield "a", turned

    class Sender:
        def write(self, batch):
            self.tensors = [(tensor, threading.get_ident()) for _, tensor in batch]

    feed, sender = SourceFeed(Turned()), Sender()
    [(_, tensor)] = await drain(feed)
    assert tensor.data_ptr() == turned.data_ptr()
    lane = Lane("lane")
    try:
        await SourcePass(feed, TrainerRanks.alone(), sender).run_async(lane, grace=1)
    finally:
        lane.close()
    [(tensor, thread)] = sender.tensors
    assert tensor.is_contiguous()
    assert torch.equal(tensor, turned)
    assert thread != threading.get_ident()


def test_a_source_may_say_by_itself_what_it_owns():
    source = Scripted(good())
    assert SourceFeed(source).owned == [0, 1, 2]
    source.owned_names = lambda rank: ["a", "l.0.c"]
    assert SourceFeed(source).owned == [0, 2]


def test_a_plain_pass_hands_on_as_many_groups_as_went_before():
    net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(6)))
    feed = SourceFeed(ModuleSource(net))
    feed.look()
    assert feed.group_cut() == [2] * 6
    runs = list(feed.iter_plain())
    assert [len(run) for run in runs] == [2, 2, 4, 4]
    indices = [index for run in runs for index, _ in run]
    assert indices == list(range(12))
    alone = SourceFeed(ModuleSource(torch.nn.Linear(2, 2)))
    alone.look()
    assert [len(run) for run in alone.iter_plain()] == [2]


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_kept_of_a_plain_pass_is_copied_a_group_at_a_time(keeps):
    net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(6)))
    took = []

    class Sender:
        takes_parameters = True

        def write(self, batch):
            took.append(len(batch))

    feed, keeper = SourceFeed(ModuleSource(net)), Keeper() if keeps else None
    the_pass = SourcePass(feed, TrainerRanks.alone(), Sender(), keeper=keeper)
    the_pass.prepare()
    the_pass.run()
    assert took == ([2] * 6 if keeps else [2, 2, 4, 4])


def test_the_names_of_a_wrapped_source_are_asked_for():
    class Inner(WeightSource):
        @cached_property
        def metadata(self):
            return [
                ParamMeta(name, torch.float32, (1,), owners=(at,)) for at, name in enumerate("ab")
            ]

    class Wrapper:
        def __init__(self, inner):
            self.inner = inner
            self.metadata = [ParamMeta(name, torch.float32, (1,)) for name in "ab"]

        def __getattr__(self, name):
            return getattr(self.inner, name)

    assert SourceFeed(Wrapper(Inner())).owned == [0]
    assert SourceFeed(Inner(), rank=1).owned == [1]


def test_all_tensors_before_a_pass_are_those_of_now(monkeypatch):
    net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(100)))
    source = ModuleSource(net)
    for _ in range(3):
        source.notice_changes()
        source.plain_tensors()
    assert source.look_late()
    feed = SourceFeed(source)
    feed.look()
    assert feed.looking is not None
    net[0].weight = torch.nn.Parameter(torch.ones(2, 2))
    monkeypatch.setattr(glance, "FRESH_S", 0.0)
    with pytest.raises(Validation, match="not as it was"):
        feed.look_to_the_end()
