"""Sources over iterators, vLLM's earlier and present ones, and groups that do not fit."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from dataclasses import dataclass, field
from functools import cached_property

import models
import pytest
import torch
from looped import BUDGET, change, looped
from paced import Paced

import aiosync
from aiosync import IteratorSource, LegacySource, ParamMeta, Validation, WeightSource
from aiosync.agreement import Holding, check_holdings, holding_of
from aiosync.errors import Busy
from aiosync.feed import SourceFeed
from aiosync.source_kinds import as_source

F32 = torch.float32


def lists_of(model):
    named = dict(model.named_parameters())
    return list(named), [p.dtype for p in named.values()], [p.shape for p in named.values()]


class Watched:
    """A plain iterator that knows whether it was closed, and where it was walked."""

    def __init__(self, model, *, error_at=None):
        self.pairs = iter(list(model.named_parameters()))
        self.closed, self.threads, self.at, self.error_at = 0, set(), 0, error_at

    def __iter__(self):
        return self

    def __next__(self):
        self.threads.add(threading.get_ident())
        if self.at == self.error_at:
            raise KeyError("mine")
        self.at += 1
        return next(self.pairs)

    def close(self):
        self.closed += 1


class AsyncWatched(Watched):
    __iter__ = None
    __next__ = None
    close = None

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        try:
            return Watched.__next__(self)
        except StopIteration:
            raise StopAsyncIteration from None

    async def aclose(self):
        self.closed += 1


BOTH = pytest.mark.parametrize("kind", [Watched, AsyncWatched])


@pytest.fixture
def iterating():
    """A pair whose trainer sends from an `IteratorSource`."""
    return lambda **options: looped(
        source=lambda model: IteratorSource(*lists_of(model)), **options
    )


# --- iterators ---


@pytest.mark.asyncio
@BOTH
async def test_one_iterator_a_round(kind, iterating):
    async with iterating(workers=2) as pair:
        for number in (1, 2):
            change(pair.model)
            iterator = kind(pair.model)
            pair.trainer.source.set(iterator)
            report = await pair.trainer.send_weights(budget=BUDGET)
            assert (report.outcome, report.round) == ("committed", number)
            assert pair.is_equal(0)
            assert pair.is_equal(1)
            assert iterator.closed == 1
            on_loop = iterator.threads == {threading.get_ident()}
            assert on_loop is (kind is AsyncWatched)


@pytest.mark.asyncio
async def test_the_kind_may_change_from_round_to_round(iterating):
    async with iterating() as pair:
        source = pair.trainer.source
        for make in (
            lambda m: list(m.named_parameters()),
            AsyncWatched,
            lambda m: dict(m.named_parameters()).items(),
            lambda m: ((n, p) for n, p in m.named_parameters()),
            lambda m: m.named_parameters(),
        ):
            change(pair.model)
            source.set(make(pair.model))
            await pair.trainer.send_weights(budget=BUDGET)
            assert pair.is_equal()


@pytest.mark.asyncio
async def test_a_round_without_a_new_iterator_is_refused_before_it_starts(iterating):
    async with iterating() as pair:
        with pytest.raises(Validation, match=r"it has no iterator yet; call source\.set") as caught:
            await pair.trainer.send_weights(budget=BUDGET)
        assert caught.value.report.outcome == "failed"
        pair.trainer.source.set(Watched(pair.model))
        await pair.trainer.send_weights(budget=BUDGET)
        with pytest.raises(Validation, match="its iterator has been used up"):
            await pair.trainer.send_weights(budget=BUDGET)
        assert pair.path.count("start") == 1
        assert pair.trainer.state == "initialized"


@pytest.mark.fault("A-HANG-2")
@pytest.mark.asyncio
@BOTH
@pytest.mark.parametrize("fault", ["raises", "short", "start", "cancel", "gate"])
async def test_the_iterator_is_closed_on_every_path(kind, fault, iterating):
    async def before(_, method):
        if active and method == "start_weight_update":
            if fault == "start":
                raise OSError("no room")
            if fault == "cancel":
                reached.set()
                await asyncio.Event().wait()

    active, reached = True, asyncio.Event()
    async with iterating(before=before) as pair:
        iterator = kind(pair.model, error_at=2 if fault == "raises" else None)
        if fault == "short":
            iterator.pairs = iter(list(pair.model.named_parameters())[:2])
        remove = pair.trainer.gate("start", lambda _: fault != "gate")
        pair.trainer.source.set(iterator)
        sending = asyncio.ensure_future(pair.trainer.send_weights(budget=BUDGET))
        if fault == "cancel":
            async with asyncio.timeout(20):
                await reached.wait()
            sending.cancel()
        errors = (KeyError, aiosync.AiosyncError, OSError, asyncio.CancelledError)
        with pytest.raises(errors):
            await sending
        assert iterator.closed == 1
        remove()
        active = False
        pair.trainer.source.set(kind(pair.model))
        await pair.trainer.send_weights(budget=BUDGET)
        assert pair.is_equal()


@pytest.mark.asyncio
async def test_the_next_iterator_may_be_set_while_a_round_runs(iterating):
    reached, go = asyncio.Event(), asyncio.Event()

    async def before(_, method):
        if method == "finish_weight_update" and not go.is_set():
            reached.set()
            await go.wait()

    async with iterating(before=before) as pair:
        source = pair.trainer.source
        first, second, third = (Watched(pair.model) for _ in range(3))
        source.set(first)
        update = pair.trainer.begin_update(budget=BUDGET)
        async with asyncio.timeout(20):
            await reached.wait()
        source.set(second)
        with pytest.raises(Busy):
            await pair.trainer.send_weights()
        go.set()
        await update
        assert (first.closed, second.closed) == (1, 0)
        await pair.trainer.send_weights(budget=BUDGET)
        assert second.closed == 1
        source.set(third)
        source.set(Watched(pair.model))
        assert third.closed == 1


def test_an_iterator_source_outside_of_a_round():
    source = IteratorSource(["a", "b"], [F32, "int8"], [(2,), ()])
    assert [(m.name, m.dtype, m.shape) for m in source.metadata] == [
        ("a", F32, (2,)), ("b", torch.int8, ()),
    ]  # fmt: skip
    given = [("a", torch.ones(2)), ("b", torch.tensor(1, dtype=torch.int8))]
    source.set(given)
    assert list(source.iter_full()) == given
    with pytest.raises(Validation, match="used up"):
        list(source.iter_full())
    for bad in ((["a"], [], [()]), (["a"], ["x"], [()]), (["a", "a"], [F32] * 2, [()] * 2)):
        with pytest.raises(Validation):
            IteratorSource(*bad)
    with pytest.raises(TypeError, match="int is no iterable"):
        source.set(3)


# --- vLLM's earlier generation ---


class Exporting:
    """As written for it: see the four rules of `LegacySource`."""

    def __init__(self, model, mine=None, exports=None):
        self.exporter = exports or (lambda: model.named_parameters())
        self.mine, self.calls = mine, 0

    def metadata(self):
        self.calls += 1
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.exporter()]

    def held_names(self):
        return self.mine

    def __iter__(self):
        for name, tensor in self.exporter():
            held = self.mine is None or name in self.mine
            yield name, tensor.detach() if held else None


@pytest.mark.asyncio
async def test_an_earlier_source_sends_the_whole_model():
    async with looped(kind="odd", source=lambda m: LegacySource(Exporting(m))) as pair:
        for _ in range(2):
            change_floats(pair.model)
            await pair.trainer.send_weights(budget=BUDGET)
            assert pair.is_equal()
        assert pair.trainer.source.obj.calls == 1


def change_floats(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dtype.is_floating_point:
                parameter.add_(1)


def test_as_source_knows_an_earlier_source():
    for cls in (Exporting, type("Static", (Exporting,), {"metadata": staticmethod(list)})):
        source = as_source(cls(None))
        assert isinstance(source, LegacySource)
        assert isinstance(source.obj, cls)
    both = type("Both", (Exporting,), {"iter_full": lambda _: iter(())})
    with pytest.raises(TypeError, match=r"Both\.metadata is a method: make it a property"):
        as_source(both(None))
    wrapped = LegacySource(Exporting(models.make("small", 1)))
    assert as_source(wrapped) is wrapped
    assert not wrapped.implements_iter_local()
    for other in (object(), [("a", torch.ones(1))]):
        with pytest.raises(TypeError, match="no earlier source"):
            LegacySource(other)


@pytest.mark.asyncio
async def test_a_single_rank_must_hold_every_name():
    names = [name for name, _ in models.make("small", 1).named_parameters()]
    mine = [name for name in names if name not in ("0.bias", "2.bias")]
    async with looped(source=lambda m: LegacySource(Exporting(m, mine))) as pair:
        with pytest.raises(
            Validation, match=r"does not hold 0\.bias, which is announced"
        ) as caught:
            await pair.trainer.send_weights(budget=BUDGET)
        assert caught.value.tensor == "0.bias"
        assert pair.trainer.state == "initialized"
        assert "start" not in pair.path


LIES = {
    "not held, yet there": ([("a", 1), ("b", 1), ("c", 1)], "b is not in held_names"),
    "held, yet None": ([("a", None), ("b", None), ("c", 1)], "a is in held_names.*None"),
    "left out": ([("a", 1), ("c", 1)], "position 1: expected b, got c"),
    "order": ([("b", None), ("a", 1), ("c", 1)], "position 0: expected a, got b"),
    "short": ([("a", 1), ("b", None)], "ended after 2 of 3 names: c is missing"),
    "nothing": ([], "ended after 0 of 3 names: a is missing"),
    "long": ([("a", 1), ("b", None), ("c", 1), ("d", 1)], "position 3: expected the end, got d"),
    "no pair": ([("a", 1), "bb!"], r"position 1: expected \(name, tensor or None\)"),
}


class Scripted:
    held = ("a", "c")

    def __init__(self, script):
        self.script, self.closed = script, 0

    def metadata(self):
        return [ParamMeta(name, F32, (1,)) for name in "abc"]

    def held_names(self):
        return iter(self.held)

    def __iter__(self):
        try:
            for item in self.script:
                yield (item[0], item[1] and torch.ones(1)) if isinstance(item, tuple) else item
        finally:
            self.closed += 1


def read(source, **options):
    return [i for batch in SourceFeed(source, **options).iter_batches() for i, _ in batch]


@pytest.mark.parametrize("lie", LIES)
def test_none_for_unheld_names_in_order(lie):
    script, text = LIES[lie]
    obj = Scripted(script)
    with pytest.raises(Validation, match=text):
        read(LegacySource(obj))
    assert obj.closed == 1
    good = Scripted([("a", 1), ("b", None), ("c", 1)])
    assert read(LegacySource(good)) == [0, 2]
    assert good.closed == 1


def test_held_names_must_be_announced_and_tensors_must_be_as_announced():
    obj = Scripted([])
    obj.held = ("a", "z", "y")
    with pytest.raises(Validation, match=r"held_names\(\) has 'y', which metadata\(\)"):
        SourceFeed(LegacySource(obj))

    class Halves(Exporting):
        def __iter__(self):
            return ((n, t.half()) for n, t in self.exporter())

    with pytest.raises(Validation, match="announced as float32, yielded as float16"):
        read(LegacySource(Halves(models.make("small", 1))))


# --- who holds what ---


def metas(n, **owners):
    return [ParamMeta(f"t{i}", F32, (1,), owners=owners.get(f"t{i}")) for i in range(n)]


def holding(*lacks, sends=False):
    return Holding(sends=sends, lacks=list(lacks))


def test_holdings_are_runs_of_what_is_lacked():
    class Feed:
        metadata = metas(7)

    for owned, lacks in (
        ([0, 1, 2, 3, 4, 5, 6], []),
        ([], [(0, 7)]),
        ([2, 3], [(0, 2), (4, 7)]),
        ([0, 2, 6], [(1, 2), (3, 6)]),
    ):
        Feed.owned = owned
        assert holding_of(Feed, sends=True) == holding(*lacks, sends=True)


def test_a_tensor_that_nobody_sends_is_named():
    every, check = metas(6, t4=(7,)), check_holdings
    check(every, [holding(sends=True), holding((0, 6))], backend="ipc")
    check(every, [holding((0, 3), sends=True), holding((3, 6), sends=True)], backend="ipc")
    with pytest.raises(
        Validation, match=r"t2 is held by ranks 1, 2 only, .*'ipc' only rank 0 sends"
    ):
        check(every, [holding((2, 3), sends=True), holding((0, 1)), holding()], backend="ipc")
    ranks = [holding((0, 5), sends=True), holding((3, 6)), holding((1, 2), (4, 5))]
    with pytest.raises(
        Validation, match=r"no trainer rank holds t4.*its owners are rank 7"
    ) as caught:
        check(every, ranks, backend="ipc")
    assert caught.value.tensor == "t4"


@pytest.mark.asyncio
async def test_owners_that_do_not_include_the_sender_are_refused():
    class Stage(Paced):
        @cached_property
        def metadata(self):
            owners = {"1.weight": (0,), "1.bias": (1, 2)}
            return [
                ParamMeta(n, p.dtype, tuple(p.shape), owners=owners.get(n))
                for n, p in self.module.named_parameters()
            ]

    async with looped(source=Stage) as pair:
        with pytest.raises(Validation, match=r"does not hold 1\.bias.*its owners are ranks 1, 2"):
            await pair.trainer.send_weights(budget=BUDGET)
        assert pair.trainer.source.passes == 0


# --- vLLM's own classes ---


@dataclass(frozen=True)
class TheirShard:
    dim: int


TheirShard.__name__ = "Shard"


@dataclass(frozen=True)
class TheirMeta:
    name: str
    dtype: torch.dtype
    shape: tuple
    owners: tuple | None = field(default=None, kw_only=True)
    mesh_shape: tuple | None = field(default=None, kw_only=True)
    placements: tuple | None = field(default=None, kw_only=True)


class TheirSource:
    """The members of vLLM's `WeightSource`, and nothing of ours."""

    def __init__(self, module):
        self.module, self.reads = module, 0

    @cached_property
    def metadata(self):
        self.reads += 1
        sharded = {"owners": (0, 1), "mesh_shape": (2,), "placements": (TheirShard(0),)}
        return [
            TheirMeta(n, p.dtype, tuple(p.shape), **(sharded if p.ndim == 2 else {}))
            for n, p in self.module.named_parameters()
        ]

    def owned_names(self, rank):
        return [m.name for m in self.metadata if m.owners is None or rank in m.owners]

    def implements_iter_full(self):
        return True

    def implements_iter_local(self):
        return False

    def iter_full(self):
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()

    def iter_local(self):
        raise NotImplementedError


@pytest.mark.asyncio
async def test_vllms_own_sources_work_unchanged():
    async with looped(workers=2, source=TheirSource) as pair:
        for _ in range(2):
            await pair.assert_next_round_works()
        assert pair.trainer.source.reads == 1
        async with pair.trainer.session(budget=BUDGET) as session:
            change(pair.model)
            for name, tensor in pair.trainer.source.iter_full():
                await session.send(name, tensor)
        assert pair.is_equal()
        await pair.assert_next_round_works()
    feed = SourceFeed(TheirSource(models.make("small", 1)))
    assert feed.metadata[0].placements == (aiosync.Shard(0),)
    assert all(type(meta) is ParamMeta for meta in feed.metadata)


# --- groups ---


class Grouped(WeightSource):
    def __init__(self, names, groups):
        self.names, self.cut = names, groups

    @cached_property
    def metadata(self):
        return [ParamMeta(name, F32, (1,)) for name in self.names]

    def iter_full(self):
        return ((name, torch.ones(1)) for name in self.names)

    def groups(self):
        return self.cut


NAMES = ["l.1.a", "l.0.a", "l.1.b", "l.0.b", "n.0", "n.1", "n.2"]


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (
            aiosync.layerwise_groups(NAMES),
            r"metadata has l\.1\.a, groups\(\) has l\.0\.a; .* l\.0\.a, l\.0\.b, .*\(\+1 more\)",
        ),
        ([NAMES[:3]], r"it lacks l\.0\.b, n\.0, n\.1, n\.2"),
        ([NAMES, ["x"]], "'x' is not announced"),
        ([NAMES, ["n.0"]], r"it repeats 'n\.0'"),
    ],
)
def test_groups_that_are_no_partition_in_order(groups, text):
    with pytest.raises(Validation, match=text):
        SourceFeed(Grouped(NAMES, groups)).group_cut()
    assert SourceFeed(Grouped(NAMES, [NAMES[:3], [], NAMES[3:]])).group_counts() == [3, 0, 4]


@pytest.mark.asyncio
async def test_such_groups_are_refused_before_the_round_starts():
    backwards = lambda m: [[n] for n, _ in list(m.named_parameters())[::-1]]  # noqa: E731

    class Odd(Paced):
        def groups(self):
            return backwards(self.module)

    async with looped(source=Odd) as pair:
        with pytest.raises(Validation, match=r"in this order would fit: 2\.bias, 2\.weight"):
            await pair.trainer.send_weights(budget=BUDGET)
        assert "start" not in pair.path


class Alive:
    """How many of the objects that were added are still there."""

    def __init__(self):
        self.refs = []

    def add(self, obj):
        self.refs.append(weakref.ref(obj))

    def __len__(self):
        return sum(ref() is not None for ref in self.refs)


@pytest.mark.asyncio
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_gathered_tensor_is_let_go_before_the_next_is_made(is_async):
    alive, most = Alive(), []

    class Gathering(Paced):
        def gathered(self):
            for name, parameter in self.module.named_parameters():
                gc.collect()
                most.append(len(alive))
                memory = parameter.detach().numpy().copy()
                alive.add(memory)  # lives as long as any tensor over it
                tensor = torch.from_numpy(memory)
                del memory
                yield name, tensor
                del tensor

    class Plain(Gathering):
        def iter_full(self):
            return self.gathered()

    class Async(Gathering):
        async def iter_full(self):
            for pair in self.gathered():
                yield pair
                del pair

    gc.collect()
    gc.freeze()  # what other tests have left takes long to walk, once for each tensor
    try:
        async with looped(source=Async if is_async else Plain) as pair:
            await pair.assert_next_round_works()
    finally:
        gc.unfreeze()
    assert len(most) == 6
    assert max(most) == 0
