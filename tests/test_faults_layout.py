"""Faults of dtypes, shapes, strides and sizes (docs/faults.md)."""

from __future__ import annotations

import itertools

import pytest
import torch
from carried import ALL, Plain, assert_same, carried, like
from torch import nn

import aiosync
from aiosync import Validation

pytestmark = pytest.mark.asyncio
on_every_backend = pytest.mark.parametrize("backend", ALL)
# What is judged before a byte moves does not depend on what would have moved it.
on_two_backends = pytest.mark.parametrize("backend", ["loopback", "ipc"])


def filled(dtype, *shape, seed=1):
    """Any bits; a bool has only two values."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


async def arrives(tensors, backend, *, buffer=4096, sink="staged"):
    model = like(tensors)
    async with carried(tensors, model, backend, buffer=buffer, sink=sink) as (sync, _):
        await sync.send_weights(version=1, timeout=20)
    assert_same(tensors, model)


MIXED = {
    "bf16": filled(torch.bfloat16, 3),
    "fp32": filled(torch.float32, 64, 64),
    "int8": filled(torch.int8, 5),
    "complex": filled(torch.complex64, 2),
    "bool": filled(torch.bool, 1),
    "fp64": filled(torch.float64, 2),
    "fp8": filled(torch.float8_e4m3fn, 7),
}


@pytest.mark.parametrize("first", [None, torch.tensor(0.125)], ids=["plain", "after-a-scalar"])
async def test_a_layout_1_every_order_of_mixed_dtypes(first):
    source = Plain({})
    model = like(MIXED) | {"first": torch.zeros(())}
    rest = {name: MIXED[name] for name in ("bool", "fp64", "fp8")}
    async with carried(source := Plain(dict(MIXED)), model, buffer=256) as (sync, _):
        if first is None:
            del model["first"]
        for order in itertools.permutations(["bf16", "fp32", "int8", "complex"]):
            tensors = {} if first is None else {"first": first}
            tensors |= {name: MIXED[name] for name in order} | rest
            source.tensors = tensors
            for tensor in model.values():
                tensor.zero_()
            await sync.send_weights(timeout=20)
            assert_same(tensors, {name: model[name] for name in tensors})


@on_every_backend
@pytest.mark.parametrize("buffer", [64, 1 << 20])
async def test_a_layout_1_mixed_dtypes_in_one_buffer(buffer, backend):
    await arrives(MIXED, backend, buffer=buffer)


@on_every_backend
async def test_a_layout_2_nothing_but_empty_tensors(backend):
    await arrives({"none": torch.empty(0, 4), "nil": torch.empty(0)}, backend)


SCALARS = {
    "scale": torch.tensor(0.125),
    "step": torch.tensor(7),
    "flag": torch.tensor(True),
    "phase": torch.tensor(1 - 2j, dtype=torch.complex64),
}


@on_every_backend
@pytest.mark.parametrize("where", ["alone", "first", "middle", "last"])
async def test_a_layout_2_scalars(where, backend):
    big = {"one": filled(torch.bfloat16, 97, 16), "two": filled(torch.float32, 5)}
    one, two = ({name: big[name]} for name in big)
    orders = {
        "alone": SCALARS,
        "first": SCALARS | big,
        "middle": one | SCALARS | two,
        "last": big | SCALARS,
    }
    await arrives(orders[where], backend)


def strided():
    base = torch.arange(120.0)
    return {
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "turned16": torch.arange(12.0).reshape(3, 4).to(torch.bfloat16).t(),
        "channels": base.reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "permuted": base.reshape(4, 5, 6).permute(2, 0, 1),
        "columns": base.reshape(10, 12)[:, 3:7],
        "every third": base[::3],
        "expanded": torch.tensor([1.5, 2.5]).expand(4, 2),
        "conjugated": torch.view_as_complex(base.reshape(60, 2)).conj(),
        "flipped": base.reshape(10, 12).flip(0),
        "one column": base.reshape(10, 12)[:, 5:6],
    }


@on_every_backend
async def test_a_layout_3_what_is_not_contiguous(backend):
    tensors = strided()
    before = {name: (t.stride(), t.clone()) for name, t in tensors.items()}
    await arrives(tensors, backend)
    for name, (stride, values) in before.items():
        assert tensors[name].stride() == stride
        assert torch.equal(tensors[name], values)


@on_every_backend
@pytest.mark.parametrize("sink", ["staged", "in_place", "layerwise"])
async def test_a_layout_3_receivers_keep_their_strides(sink, backend):
    sent = {"w": torch.arange(12.0).reshape(3, 4), "v": torch.arange(24.0).reshape(2, 3, 4)}
    model = {"w": torch.zeros(4, 3).t(), "v": torch.zeros(4, 2, 3).permute(1, 2, 0)}
    strides = {name: tensor.stride() for name, tensor in model.items()}
    async with carried(sent, model, backend, sink=sink) as (sync, _):
        await sync.send_weights(version=1, timeout=20)
    assert_same(sent, model)
    assert {name: tensor.stride() for name, tensor in model.items()} == strides


@on_every_backend
async def test_a_layout_4_tensors_around_the_size_of_the_buffer(backend):
    tensors = {
        "small": filled(torch.int8, 5),
        "embed": filled(torch.bfloat16, 97, 16),
        "exact": filled(torch.uint8, 1024),
        "between": filled(torch.float32, 3),
        "one more": filled(torch.uint8, 1025),
        "last": filled(torch.int16, 1),
    }
    await arrives(tensors, backend, buffer=1024)


@on_every_backend
@pytest.mark.parametrize("bad", [0, -1, 1, "1GB", float("nan"), 2**63, True, None, 1024.0])
async def test_a_layout_4_sizes_that_cannot_be_right(bad, backend):
    model = {"w": torch.zeros(2)}
    with pytest.raises(Validation, match="buffer_size_bytes must be an int"):
        async with carried({"w": torch.ones(2)}, model, backend, buffer=bad):
            pass
    assert model["w"].tolist() == [0, 0]


def integers():
    dtypes = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.int64, torch.uint8]
    found = {str(dtype): filled(dtype, 5, seed=n) for n, dtype in enumerate(dtypes)}
    mask = torch.tril(torch.ones(8, 8)).bool()
    mixed = {"w": filled(torch.bfloat16, 33, 3), "mask": mask, "is_init": torch.tensor(True)}
    return found | mixed | {"packed int4": filled(torch.uint8, 6)}


@on_every_backend
@pytest.mark.parametrize("sink", ["staged", "in_place"])
async def test_a_layout_5_bools_and_small_integers(sink, backend):
    await arrives(integers(), backend, sink=sink)


def special():
    values = [float("nan"), -0.0, 0.0, float("inf"), -float("inf"), 1e-40, 1.0]
    found = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        found[str(dtype)] = torch.tensor(values, dtype=dtype)
    nan = torch.tensor([0x7FC1, 0xFFC1, 0x7F81, 0x8000, 0x0001], dtype=torch.int32)
    found["payloads"] = nan.to(torch.uint16).view(torch.bfloat16)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"):
        found[name] = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name))
    return found


@on_every_backend
@pytest.mark.parametrize("sink", ["staged", "in_place", "layerwise"])
async def test_a_layout_6_every_bit_of_a_float(sink, backend):
    await arrives(special(), backend, sink=sink)


@on_every_backend
@pytest.mark.parametrize("device", ["cuda:0", "meta", "cpu"])
async def test_a_layout_7_bytes_land_on_the_cpu_whatever_the_engine_is_told(device, backend):
    sent = {"w": filled(torch.float32, 7)}
    model = like(sent)
    if (device, backend) == ("cuda:0", "ipc") and not torch.cuda.is_available():
        # This one could do more with it, so it has to be there.
        with pytest.raises(aiosync.Validation, match="there is no CUDA device here"):
            async with carried(sent, model, backend, device=torch.device(device)):
                pass
        return
    async with carried(sent, model, backend, device=torch.device(device)) as (sync, _):
        await sync.send_weights(version=1, timeout=20)
    assert_same(sent, model)


EMPTY = {
    "a": torch.zeros(0, 7, dtype=torch.bfloat16),
    "b": torch.zeros(7, 0),
    "c": torch.zeros(0, dtype=torch.int64),
    "d": torch.zeros(1, 0, 3, dtype=torch.bool),
}


@on_every_backend
@pytest.mark.parametrize("where", ["only", "one", "first", "last"])
async def test_a_layout_8_tensors_without_elements(where, backend):
    big = {"w": filled(torch.float32, 9)}
    chosen = {"only": EMPTY, "one": {"a": EMPTY["a"]}, "first": EMPTY | big, "last": big | EMPTY}
    await arrives(chosen[where], backend)


async def refused(sent, model, backend, *parts, sink="staged"):
    """Nothing changes, the error names what `parts` says, and the right tensors go through."""
    before = {name: tensor.clone() for name, tensor in model.items()}
    async with carried(sent, model, backend, sink=sink) as (sync, worker):
        with pytest.raises(aiosync.AiosyncError) as caught:
            await sync.send_weights(version=1, timeout=10)
        for part in parts:
            assert part in str(caught.value)
        assert isinstance(caught.value, Validation | aiosync.Coverage)
        assert all(torch.equal(model[name], tensor) for name, tensor in before.items())
        assert (worker.weights, worker.version) == ("intact", None)
        right = {name: torch.ones_like(tensor) for name, tensor in model.items()}
        sync.source.tensors = right
        await sync.send_weights(version=1, timeout=20)
        assert_same(right, model)


@on_two_backends
@pytest.mark.parametrize(
    ("here", "there"),
    [
        ((4, 8), (8,)),
        ((4, 8), (4, 1)),
        ((4, 8), (1, 8)),
        ((4, 8), ()),
        ((4, 8), (8, 4)),
        ((4, 8), (32,)),
        ((8,), (1, 8)),
        ((8,), (4,)),
        ((), (1,)),
        ((0, 7), (7, 0)),
    ],
    ids=str,
)
async def test_a_layout_9_shapes_are_exact(here, there, backend):
    model = {"other": torch.zeros(3), "bias": torch.zeros(here)}
    sent = {"other": torch.ones(3), "bias": torch.ones(there)}
    await refused(sent, model, backend, "bias", str(here), str(there))


@on_two_backends
@pytest.mark.parametrize(
    ("here", "there", "value"),
    [
        (torch.float32, torch.bfloat16, 1.0),
        (torch.float16, torch.bfloat16, 1.0),
        (torch.float8_e4m3fn, torch.float32, 1e6),
        (torch.int8, torch.float32, 300.0),
        (torch.int32, torch.float32, 1.0),
        (torch.float32, torch.complex64, 1 + 1j),
        (torch.bool, torch.uint8, 1),
    ],
)
async def test_a_layout_10_dtypes_are_exact(here, there, value, backend):
    model = {"bias": torch.zeros(4).to(here)}
    sent = {"bias": torch.full((4,), value).to(there)}
    names = [str(dtype).removeprefix("torch.") for dtype in (here, there)]
    if here == torch.float8_e4m3fn:
        model = {"bias": torch.zeros(4, dtype=torch.uint8)}
        names[0] = "uint8"
    await refused(sent, model, backend, "bias", *names)


@on_every_backend
async def test_a_layout_10_a_stream_of_another_dtype_than_announced(backend):
    class Lying(Plain):
        def iter_full(self):
            for name, tensor in self.tensors.items():
                yield name, tensor.view(torch.float16) if self.lies else tensor

    sent = {"w": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}
    source, model = Lying(sent), like(sent)
    source.lies = True
    async with carried(source, model, backend) as (sync, _):
        with pytest.raises(Validation, match="announced as bfloat16, yielded as float16"):
            await sync.send_weights(version=1, timeout=10)
        assert model["w"].tolist() == [0, 0]
        source.lies = False
        await sync.send_weights(version=1, timeout=20)
    assert_same(sent, model)


@on_every_backend
async def test_a_layout_11_the_trainers_graph_goes_on(backend):
    leaf = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    derived, view = leaf * 1.0, leaf[1]
    loss = (derived**2).sum() + view.sum()
    sent = {"leaf": leaf, "derived": derived, "view": view}
    versions = {name: tensor._version for name, tensor in sent.items()}
    model = nn.ParameterDict(
        {
            "leaf": nn.Parameter(torch.zeros(2, 3)),
            "derived": nn.Parameter(torch.zeros(2, 3), requires_grad=False),
            "view": nn.Parameter(torch.zeros(3)),
        }
    )
    async with carried(sent, model, backend) as (sync, _):
        await sync.send_weights(version=1, timeout=20)
        loss.backward()
        assert torch.equal(leaf.grad, 2 * leaf.detach() + torch.tensor([[0.0], [1.0]]))
        await sync.send_weights(version=2, timeout=20)
    assert_same(sent, {name: model[name] for name in sent})
    assert {name: tensor._version for name, tensor in sent.items()} == versions
    assert {n for n, p in model.items() if p.requires_grad} == {"leaf", "view"}
    assert all(p.grad is None for p in model.values())


@on_every_backend
async def test_a_layout_12_no_data_at_the_trainer(backend):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = [p.clone() for p in model.parameters()]
    async with carried(module, model, backend) as (sync, worker):
        with pytest.raises(Validation, match=r"1\.weight is on the meta device"):
            await sync.send_weights(version=1, timeout=10)
        assert worker.version is None
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        module[1] = nn.Linear(2, 2)
        await sync.send_weights(version=1, timeout=20)


@on_two_backends
@pytest.mark.parametrize("sink", ["staged", "in_place", "layerwise"])
async def test_a_layout_12_no_data_at_the_worker(sink, backend):
    sent = {"a": torch.ones(3), "b": torch.ones(2)}
    model = {"a": torch.zeros(3), "b": torch.zeros(2, device="meta")}
    async with carried(sent, model, backend, sink=sink) as (sync, worker):
        with pytest.raises(Validation, match="b is on the meta device"):
            await sync.send_weights(version=1, timeout=10)
        assert worker.version is None
        if sink != "layerwise":
            assert model["a"].tolist() == [0, 0, 0]
        model["b"] = torch.zeros(2)
        await sync.send_weights(version=1, timeout=20)
    assert_same(sent, model)
