"""Sources: the contract of subclasses, and what a module is announced and yielded as."""

from __future__ import annotations

import threading
import weakref
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property, partial

import pytest
import torch
from torch import nn

from aiosync import sources
from aiosync.errors import Validation
from aiosync.metadata import ParamMeta, Replicate, Shard
from aiosync.source_kinds import as_source
from aiosync.sources import ModuleSource, WeightSource


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.register_buffer("bias_correction", torch.arange(4.0))
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.layers = nn.ModuleList([Block(), Block()])
        self.register_buffer("step", torch.tensor(7))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


class Listed(WeightSource):
    """Names with a layer number, one float each."""

    def __init__(self, names, owners=None):
        self.names, self.owners = names, owners or {}

    @cached_property
    def metadata(self):
        return [ParamMeta(n, torch.float32, (1,), owners=self.owners.get(n)) for n in self.names]

    def iter_full(self):
        for name in self.names:
            yield name, torch.zeros(1)


# --- the contract of subclasses ---


def test_metadata_must_be_a_cached_property():
    for bad in (property(lambda _: []), lambda _: [], []):
        with pytest.raises(TypeError, match="cached_property"):
            type("Bad", (WeightSource,), {"metadata": bad})
    with pytest.raises(TypeError, match="abstract"):
        type("NoMetadata", (WeightSource,), {})()


def test_implements_looks_at_the_class():
    source = Listed(["a"])
    assert source.implements_iter_full()
    assert not source.implements_iter_local()
    source.iter_local = lambda: iter(())
    assert not source.implements_iter_local()
    with pytest.raises(NotImplementedError, match="Listed does not define iter_local"):
        WeightSource.iter_local(source)


def test_owned_names_keep_metadata_order():
    source = Listed(["c", "a", "b"], {"a": (1,), "b": (0, 2)})
    assert source.owned_names(0) == ["c", "b"]
    assert source.owned_names(1) == ["c", "a"]


def test_groups_keep_metadata_order():
    assert Listed(["e", "l.0.a", "l.0.b", "l.1.a", "n"]).groups() == [
        ["e"], ["l.0.a", "l.0.b"], ["l.1.a"], ["n"],
    ]  # fmt: skip
    # sorted as text, and a layer that comes back: runs, never reordered
    names = ["l.1.a", "l.10.a", "l.2.a", "l.1.b"]
    assert Listed(names).groups() == [[name] for name in names]


def test_by_default_a_group_is_one_pair_even_if_the_tensor_is_reused():
    class Reusing(Listed):
        closed = 0

        def iter_full(self):
            tensor = torch.zeros(1)
            try:
                for i, name in enumerate(self.names):
                    yield name, tensor.fill_(i)
            finally:
                self.closed += 1

    source = Reusing(["l.0.a", "l.0.b", "l.0.c"])
    seen = [[(n, float(t)) for n, t in batch] for batch in source.iter_groups()]
    assert seen == [[("l.0.a", 0.0)], [("l.0.b", 1.0)], [("l.0.c", 2.0)]]
    early = source.iter_groups()
    next(early)
    early.close()
    assert source.closed == 2


@pytest.mark.asyncio
async def test_async_generators_group_as_well():
    class Async(Listed):
        async def iter_full(self):
            for name in self.names:
                yield name, torch.zeros(1)

    assert [[n for n, _ in batch] async for batch in Async(["a", "b"]).iter_groups()] == [
        ["a"],
        ["b"],
    ]


# --- modules ---


def test_module_source_announces_and_yields_parameters():
    net = Net()
    source = ModuleSource(net)
    names = [name for name, _ in net.named_parameters()]
    assert [m.name for m in source.metadata] == names
    assert source.owned_names(3) == names
    assert source.aliases == {"head.weight": "embed.weight"}
    assert source.left_out == [
        "step", "layers.0.bias_correction", "layers.0.inv_freq",
        "layers.1.bias_correction", "layers.1.inv_freq",
    ]  # fmt: skip
    for iterate in (source.iter_full, source.iter_local):
        pairs = dict(iterate())
        assert list(pairs) == names
        for name, parameter in net.named_parameters():
            assert bits(pairs[name]) == bits(parameter)
            assert not pairs[name].requires_grad
    grouped = [[name for name, _ in batch] for batch in source.iter_groups()]
    assert grouped == source.groups()
    assert [len(group) for group in grouped] == [1, 2, 2]


@pytest.mark.fault("A-NAMES-2")
def test_persistent_buffers_travel_with_their_layer():
    source = ModuleSource(Net(), buffers="persistent")
    assert [m.name for m in source.metadata] == [
        "embed.weight",
        "layers.0.fc.weight", "layers.0.fc.bias", "layers.0.bias_correction",
        "layers.1.fc.weight", "layers.1.fc.bias", "layers.1.bias_correction",
        "step",
    ]  # fmt: skip
    assert source.left_out == ["layers.0.inv_freq", "layers.1.inv_freq"]
    step = dict(source.iter_full())["step"]
    assert (step.dtype, step.shape, step.item()) == (torch.int64, (), 7)


def test_a_module_of_buffers_only():
    norm = nn.BatchNorm1d(2, affine=False)
    assert [m.name for m in ModuleSource(norm, buffers="persistent").metadata] == [
        "running_mean", "running_var", "num_batches_tracked",
    ]  # fmt: skip
    with pytest.raises(Validation, match="nothing to send; left out: running_mean"):
        _ = ModuleSource(norm).metadata


def test_dtype_casts_floating_point_only():
    net = Net()
    source = ModuleSource(net, dtype=torch.bfloat16, buffers="persistent")
    pairs = dict(source.iter_full())
    for meta in source.metadata:
        assert pairs[meta.name].dtype == meta.dtype
    assert pairs["step"].dtype == torch.int64
    expected = net.embed.weight.detach().to(torch.bfloat16)
    assert bits(pairs["embed.weight"]) == bits(expected)
    assert net.embed.weight.dtype == torch.float32
    with pytest.raises(Validation, match="int64"):
        ModuleSource(net, dtype=torch.int64)


@pytest.mark.fault("A-NAMES-3")
def test_rename_is_applied_once_to_names_and_aliases():
    net = Net()
    source = ModuleSource(net, rename=lambda name: f"model.{name}")
    assert [name for name, _ in source.iter_full()] == [m.name for m in source.metadata]
    assert source.metadata[0].name == "model.embed.weight"
    assert source.aliases == {"model.head.weight": "model.embed.weight"}
    swap = {"layers.0.fc.weight": "layers.1.fc.weight", "layers.1.fc.weight": "layers.0.fc.weight"}
    swapped = dict(ModuleSource(net, rename=swap).iter_full())
    assert bits(swapped["layers.1.fc.weight"]) == bits(net.layers[0].fc.weight)


@pytest.mark.fault("A-NAMES-3")
def test_rename_collisions_are_listed_and_ties_are_none():
    source = ModuleSource(Net(), rename={"layers.1.fc.bias": "layers.0.fc.bias"})
    with pytest.raises(Validation, match=r"layers\.0\.fc\.bias and layers\.1\.fc\.bias -> "):
        _ = source.metadata
    tied = ModuleSource(Net(), rename={"head.weight": "embed.weight"})
    assert tied.aliases == {}
    dropped = ModuleSource(Net(), rename={"embed.weight": None})
    assert "embed.weight" in dropped.left_out
    assert dropped.aliases == {}
    assert dropped.metadata[-1].name == "head.weight"
    with pytest.raises(Validation, match="nothing to send"):
        _ = ModuleSource(Net(), rename=lambda _: None).metadata
    with pytest.raises(Validation, match="gave 3"):
        _ = ModuleSource(Net(), rename=lambda _: 3).metadata


@pytest.mark.fault("A-NAMES-1")
def test_three_names_for_one_tensor():
    net = nn.Module()
    net.a = net.b = net.c = nn.Parameter(torch.ones(2))
    source = ModuleSource(net)
    assert [m.name for m in source.metadata] == ["a"]
    assert source.aliases == {"b": "a", "c": "a"}


@pytest.mark.fault("A-NAMES-1")
def test_a_module_that_contains_itself_is_refused():
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].back = net
    with pytest.raises(Validation, match="Sequential contains itself"):
        _ = ModuleSource(net).metadata


@pytest.mark.fault("A-LAYOUT-12")
def test_tensors_without_data_are_named():
    net = Net()
    net.layers[1].fc.to("meta")
    with pytest.raises(Validation, match=r"layers\.1\.fc\.weight is on the meta device"):
        _ = ModuleSource(net).metadata
    with pytest.raises(Validation, match="weight is not initialised"):
        _ = ModuleSource(nn.LazyLinear(2)).metadata
    sparse = nn.Module()
    sparse.w = nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)
    with pytest.raises(Validation, match=r"w has layout torch\.sparse_coo"):
        _ = ModuleSource(sparse).metadata


def test_replaced_parameters_are_read_anew_and_lost_ones_are_named():
    net = Net()
    source = ModuleSource(net)
    _ = source.metadata
    net.layers[0].fc.bias = nn.Parameter(torch.full((2,), 9.0))
    assert dict(source.iter_full())["layers.0.fc.bias"].tolist() == [9.0, 9.0]
    del net.layers[0].fc.bias
    with pytest.raises(Validation, match=r"layers\.0\.fc\.bias is no longer"):
        list(source.iter_full())


def test_the_session_is_held_around_each_pass_and_the_metadata():
    log = []

    @contextmanager
    def session():
        log.append("in")
        try:
            yield
        finally:
            log.append("out")

    source = ModuleSource(Net(), session=session)
    assert not source.is_async
    _ = source.metadata
    assert log == ["in", "out"]
    one = source.iter_groups()
    next(one)
    assert log == ["in", "out", "in"]
    one.close()
    assert log == ["in", "out"] * 2
    list(source.iter_full())
    assert log == ["in", "out"] * 3


@pytest.mark.asyncio
async def test_an_async_session():
    log = []

    @asynccontextmanager
    async def session(what):
        log.append(f"in {what}")
        yield
        log.append(f"out {what}")

    source = ModuleSource(Net(), session=partial(session, "x"))
    assert source.is_async
    assert log == []
    names = [name async for name, _ in source.iter_full()]
    assert names == [m.name for m in source.metadata]
    assert log == ["in x", "out x"]
    assert [len(batch) async for batch in source.iter_groups()] == [1, 2, 2]
    hidden = ModuleSource(Net(), session=lambda: session("y"))
    with pytest.raises(TypeError, match="async context manager"):
        _ = hidden.metadata


def test_resident_is_the_modules_own_memory():
    net = Net()
    net.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    source = ModuleSource(net, buffers="persistent")
    resident = source.resident()
    assert "turned" not in resident
    assert set(resident) == {m.name for m in source.metadata} - {"turned"}
    assert resident["embed.weight"].data_ptr() == net.embed.weight.data_ptr()
    assert not resident["embed.weight"].requires_grad
    cast = ModuleSource(net, dtype=torch.bfloat16, buffers="persistent")
    assert set(cast.resident()) == {"step"}
    assert ModuleSource(net, session=contextmanager(lambda: iter([None]))).resident() == {}

    class Doubled(ModuleSource):
        def iter_full(self):
            for name, tensor in super().iter_full():
                yield name, tensor * 2

    assert Doubled(net).resident() == {}


def test_bad_arguments():
    with pytest.raises(TypeError, match="not dict"):
        ModuleSource({})
    with pytest.raises(Validation, match="'all'"):
        ModuleSource(Net(), buffers="all")
    assert ModuleSource(Net(), run_in="lane").run_in == "lane"


def test_a_gathered_layer_is_let_go_before_the_next_is_made(monkeypatch):
    net = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    refs, alive = [], []

    def gather(tensor, _dtype):
        alive.append(sum(ref() is not None for ref in refs))
        gathered = tensor.clone()
        refs.append(weakref.ref(gathered))
        return gathered

    monkeypatch.setattr(sources, "full_piece", gather)
    for batch in ModuleSource(net).iter_groups():
        assert len(batch) == 2
        del batch
    assert alive == [0, 1] * 3


# --- as_source ---


def test_as_source():
    source = Listed(["a"])
    assert as_source(source) is source
    assert isinstance(as_source(nn.Linear(1, 1)), ModuleSource)

    class Duck:
        @cached_property
        def metadata(self):
            raise AssertionError("not read: it may be a collective")

        def iter_full(self):
            return iter(())

    duck = Duck()
    assert as_source(duck) is duck

    class Older:
        def metadata(self):
            return []

        def iter_full(self):
            return iter(())

    with pytest.raises(TypeError, match=r"Older\.metadata is a method: make it a property"):
        as_source(Older())
    for other in ({}, [("a", torch.ones(1))], object()):
        with pytest.raises(TypeError, match="is no source"):
            as_source(other)


# --- sharded tensors ---


@pytest.fixture
def mesh():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1, 1))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # torch.distributed's own
def test_dtensors(mesh):
    from torch.distributed import tensor as dt

    full = torch.arange(12.0).reshape(4, 3)
    net = nn.Module()
    net.s = nn.Parameter(dt.distribute_tensor(full, mesh, [dt.Replicate(), dt.Shard(1)]))
    net.r = nn.Parameter(dt.distribute_tensor(full, mesh, [dt.Replicate(), dt.Replicate()]))
    net.p = nn.Parameter(dt.DTensor.from_local(full, mesh, [dt.Partial(), dt.Replicate()]))
    net.plain = nn.Parameter(full.clone())
    for dtype in (None, torch.bfloat16):
        source = ModuleSource(net, dtype=dtype)
        by_name = {m.name: m for m in source.metadata}
        assert by_name["s"].placements == (Replicate(), Shard(1))
        assert (by_name["s"].owners, by_name["s"].mesh_shape) == ((0,), (1, 1))
        assert by_name["r"].placements is None
        assert by_name["p"].placements is None
        assert by_name["plain"].owners is None
        assert source.owned_names(1) == ["plain"]
        for pairs in (dict(source.iter_full()), dict(source.iter_local())):
            assert list(pairs) == ["s", "r", "p", "plain"]
            for tensor in pairs.values():
                assert type(tensor) is torch.Tensor
                assert bits(tensor) == bits(full.to(dtype or full.dtype))
    assert set(ModuleSource(net).resident()) == {"plain"}


def test_a_pass_runs_where_it_is_driven():
    threads = []

    @contextmanager
    def session():
        threads.append(threading.get_ident())
        yield
        threads.append(threading.get_ident())

    source = ModuleSource(nn.Linear(1, 1), session=session)
    _ = source.metadata
    threads.clear()
    worker = threading.Thread(target=lambda: list(source.iter_full()))
    worker.start()
    worker.join()
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
