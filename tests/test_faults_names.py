"""Faults of names: which tensor goes where (docs/faults.md)."""

from __future__ import annotations

import unicodedata

import pytest
import torch
from carried import ALL, Plain, assert_same, carried, like
from torch import nn

import aiosync
from aiosync import Coverage, ModuleSource, Validation

pytestmark = pytest.mark.asyncio
on_every_backend = pytest.mark.parametrize("backend", ALL)
on_every_sink = pytest.mark.parametrize("sink", ["staged", "in_place", "layerwise"])


class Net(nn.Module):
    def __init__(self, names=("embed", "head"), *, tied=False, value=0.0):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(3, 5, bias=False))
        if tied:
            first = getattr(self, names[0])
            for name in names[1:]:
                getattr(self, name).weight = first.weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)


class Loading(Net):
    """Loads by itself; knows only the names it holds apart."""

    def load_weights(self, pairs):
        held = dict(self.named_parameters())
        for name, tensor in pairs:
            held[name].copy_(tensor)


class Shelf:
    """No module at all: keeps what it is given."""

    def __init__(self):
        self.held = {}

    def load_weights(self, pairs):
        self.held |= {name: tensor.clone() for name, tensor in pairs}


def fill(module, value):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


@on_every_backend
@pytest.mark.parametrize("names", [("embed", "head"), ("embed", "head", "third")], ids=len)
@pytest.mark.parametrize("tied_here", [False, True], ids=["apart", "tied-here-too"])
@pytest.mark.parametrize("cls", [Net, Loading])
async def test_a_names_1_every_name_of_a_tied_tensor(cls, tied_here, names, backend):
    source, model = Net(names, tied=True), cls(names, tied=tied_here)
    async with carried(source, model, backend) as (sync, _):
        for value in (1.0, 2.0):
            fill(source, value)
            await sync.send_weights(timeout=20)
            for name in names:
                assert getattr(model, name).weight.unique().tolist() == [value], name


@on_every_sink
async def test_a_names_1_a_loader_that_is_no_module(sink):
    source, shelf = Net(("a", "b", "c"), tied=True, value=3.0), Shelf()
    async with carried(source, shelf, sink=sink) as (sync, _):
        await sync.send_weights(timeout=20)
    assert set(shelf.held) == {"a.weight", "b.weight", "c.weight"}
    assert all(tensor.unique().tolist() == [3.0] for tensor in shelf.held.values())


@on_every_backend
async def test_a_names_1_names_that_share_a_part_travel_by_value(backend):
    whole = torch.arange(10.0)
    sent = {"whole": whole, "front": whole[:6], "back": whole[4:], "copy": whole.view(2, 5)}
    model = like(sent)
    async with carried(sent, model, backend) as (sync, _):
        await sync.send_weights(timeout=20)
        assert_same(sent, model)
        whole.mul_(2)
        await sync.send_weights(timeout=20)
    assert_same(sent, model)


class Buffers(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.gate = nn.Linear(2, 4, bias=False)
        self.gate.register_buffer("e_score_correction_bias", torch.full((4,), value))
        self.register_buffer("running_mean", torch.full((16,), value))
        self.register_buffer("num_batches", torch.tensor(int(value)))
        self.register_buffer("inv_freq", torch.full((3,), value), persistent=False)
        fill(self, value)


async def test_a_names_2_buffers_are_left_out_by_name_unless_asked_for():
    source, model = Buffers(7.0), Buffers(1.0)
    async with carried(source, model) as (sync, _):
        report = await sync.send_weights(timeout=20)
    assert set(report.left_out) == {
        "gate.e_score_correction_bias",
        "running_mean",
        "num_batches",
        "inv_freq",
    }
    assert model.gate.weight.unique().tolist() == [7]
    assert model.running_mean.unique().tolist() == [1]


@on_every_sink
async def test_a_names_2_persistent_buffers_on_request(sink):
    source, model = Buffers(7.0), Buffers(1.0)
    async with carried(ModuleSource(source, buffers="persistent"), model, sink=sink) as (sync, _):
        for value in (7, 8):
            for buffer in source.buffers():
                buffer.fill_(value)
            report = await sync.send_weights(timeout=20)
            assert report.left_out == ["inv_freq"]
            assert model.gate.e_score_correction_bias.unique().tolist() == [value]
            assert model.running_mean.unique().tolist() == [value]
            assert model.num_batches.item() == value
            assert model.inv_freq.unique().tolist() == [1]


class Wrapped(nn.Module):
    """What DDP, FSDP1 and adapters look like from outside."""

    def __init__(self, attribute, inner):
        super().__init__()
        self.add_module(attribute, inner)


def wrap(path):
    inner = Net(value=5.0)
    for attribute in reversed(path.split(".")):
        inner = Wrapped(attribute, inner)
    return inner


PREFIXES = [
    "_orig_mod",
    "module",
    "_fsdp_wrapped_module",
    "base_model.model",
    "model.language_model",
    "module._orig_mod",
]


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_a_names_3_prefixes_of_wrappers(prefix):
    model = Net()
    async with carried(wrap(prefix), model) as (sync, worker):
        with pytest.raises(Coverage) as caught:
            await sync.send_weights(timeout=10)
        text = str(caught.value)
        assert f"2 of 2 announced names are unknown here: {prefix}.embed.weight" in text
        assert "2 names here are missing from it: embed.weight, head.weight" in text
        assert worker.version is None
    seen = []

    def stripped(name):
        seen.append(name)
        return name.removeprefix(f"{prefix}.")

    source = ModuleSource(wrap(prefix), rename=stripped)
    async with carried(source, model) as (sync, _):
        for _ in range(2):
            await sync.send_weights(timeout=20)
    assert sorted(seen) == sorted(set(seen))  # once, the same for announcement and data
    assert model.head.weight.unique().tolist() == [5.0]


@pytest.mark.parametrize(
    ("rename", "problem"),
    [
        (lambda _: "embed.weight", r"two tensors one name: embed\.weight and head\.weight"),
        ({"head.weight": "embed.weight"}, "two tensors one name"),
        (lambda _: None, "nothing to send"),
        ({"head.weight": ""}, "non-empty"),
        (lambda _: 3, "not a name"),
    ],
)
async def test_a_names_3_mappings_that_cannot_be_right(rename, problem):
    model = Net()
    async with carried(ModuleSource(Net(value=5.0), rename=rename), model) as (sync, worker):
        with pytest.raises(Validation, match=problem):
            await sync.send_weights(timeout=10)
        assert worker.version is None
        assert model.head.weight.unique().tolist() == [0]


def three(value):
    return {name: torch.full((4,), value) for name in ("q.weight", "norm.weight", "down.weight")}


@on_every_backend
@on_every_sink
async def test_a_names_4_a_name_that_is_missing(sink, backend):
    sent, model = three(2.0), three(1.0)
    source = Plain({name: t for name, t in sent.items() if name != "norm.weight"})
    async with carried(source, model, backend, sink=sink) as (sync, worker):
        with pytest.raises(Coverage, match=r"missing from it: norm\.weight"):
            await sync.send_weights(version=1, timeout=10)
        assert worker.version is None
        if sink != "layerwise":
            assert_same(three(1.0), model)
        source.tensors = sent
        await sync.send_weights(version=1, timeout=20)
    assert_same(sent, model)


@on_every_backend
async def test_a_names_4_no_tensors_at_all(backend):
    model = three(1.0)
    async with carried(Plain({}), model, backend) as (sync, worker):
        with pytest.raises(Validation, match="announces no tensor"):
            await sync.send_weights(version=1, timeout=10)
        assert worker.version is None
        sync.source.tensors = three(2.0)
        await sync.send_weights(version=1, timeout=20)
    assert_same(three(2.0), model)


class Listed(Plain):
    """Announces and yields exactly what it is told, twins included."""

    def __init__(self, announced, yielded):
        super().__init__(dict(yielded))
        self.announced, self.yielded = announced, yielded

    @property
    def metadata(self):
        return [aiosync.ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.announced]

    def iter_full(self):
        yield from self.yielded


W, V = ("w", torch.ones(2)), ("v", torch.ones(2))


@on_every_backend
@pytest.mark.parametrize(
    ("announced", "yielded"),
    [([W, V, W], [W, V, W]), ([W, W], [W, W]), ([W, V], [W, V, W]), ([W, V], [W, W])],
    ids=["both", "all", "data, at the end", "data, instead"],
)
async def test_a_names_5_twins(announced, yielded, backend):
    model = {"w": torch.zeros(2), "v": torch.zeros(2)}
    async with carried(Listed(announced, yielded), model, backend) as (sync, worker):
        with pytest.raises(Validation, match="w"):
            await sync.send_weights(version=1, timeout=10)
        assert worker.version is None
        assert all(tensor.tolist() == [0, 0] for tensor in model.values())
        sync.source.announced = sync.source.yielded = [W, V]
        await sync.send_weights(version=1, timeout=20)
        assert all(tensor.tolist() == [1, 1] for tensor in model.values())


@on_every_backend
async def test_a_names_5_names_that_differ_in_any_byte_are_different(backend):
    accent = "layer.caf\N{LATIN SMALL LETTER E WITH ACUTE}"
    names = [accent, unicodedata.normalize("NFD", accent), "Layer.x", "layer.x", "layer.x "]
    sent = {name: torch.full((3,), float(n)) for n, name in enumerate(names)}
    assert len(sent) == len(names)
    model = like(sent)
    async with carried(sent, model, backend) as (sync, _):
        await sync.send_weights(timeout=20)
    assert_same(sent, model)


def ten(prefix="layers.0", shape=(4,)):
    return {f"{prefix}.p{n}": torch.ones(shape) for n in range(10)}


@pytest.mark.parametrize("owned", [7, 0], ids=["seven", "none"])
@on_every_sink
async def test_a_names_6_names_the_worker_does_not_have(sink, owned):
    model = like(ten() if owned else ten("other"))
    for name in list(model)[7 if owned else 10 :]:
        del model[name]
    async with carried(ten(), model, sink=sink) as (sync, worker):
        unknown = "3 of 10" if owned else "10 of 10"
        with pytest.raises(Coverage, match=f"{unknown} announced names are unknown here"):
            await sync.send_weights(version=1, timeout=10)
        assert worker.version is None
        assert all(tensor.sum() == 0 for tensor in model.values())


async def test_a_names_6_shapes_of_another_layer():
    sent, model = ten(), like(ten(shape=(2, 3)))
    async with carried(sent, model) as (sync, worker):
        with pytest.raises(Validation, match=r"layers\.0\.p0 is of shape \(2, 3\)"):
            await sync.send_weights(version=1, timeout=10)
        assert (worker.weights, worker.version) == ("intact", None)
