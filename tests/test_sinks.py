"""Sinks: old or new and never a mix, bit by bit, in the model's own memory."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from aiosync import spare
from aiosync.errors import Busy, Coverage, InvalidTransition, Refused, Torn, Validation
from aiosync.metadata import ParamMeta
from aiosync.sinks import InPlaceSink, LayerwiseSink, StagedSink, make_sink
from aiosync.sources import ModuleSource

MODES = ["staged", "in_place", "layerwise"]
F32 = torch.float32


def raw(tensor):
    return (
        tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    )


def same(one, two):
    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(raw(one), raw(two))


def random_like(tensor):
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype)
    if tensor.numel():
        top = 2 if tensor.dtype == torch.bool else 256
        data = torch.randint(0, top, (tensor.numel() * tensor.element_size(),), dtype=torch.uint8)
        fresh = data.view(tensor.dtype).reshape(tensor.shape)
    return fresh


def announce(tensors):
    return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]


def arrive(sink, tensors, *, upto=None):
    """What a transport does: fill destinations as bytes, two at a time."""
    values = list(tensors.values())[:upto]
    for start in range(0, len(values), 2):
        batch = range(start, min(start + 2, len(values)))
        for index in batch:
            destination = sink.destination(index)
            assert destination.is_contiguous()
            assert not destination.requires_grad
            assert not destination.is_inference()
            assert sink.destination(index) is destination
            if destination.numel():
                destination.reshape(-1).view(torch.uint8).copy_(raw(values[index]))
        sink.landed(list(batch))


def update(sink, tensors, **options):
    sink.begin(announce(tensors), **options)
    arrive(sink, tensors)
    sink.commit()


def snapshot(model):
    tensors = model if isinstance(model, dict) else model.state_dict(keep_vars=True)
    return {name: t.detach().clone() for name, t in tensors.items()}


def unchanged(model, before):
    now = snapshot(model)
    return all(same(now[name], before[name]) for name in before)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.norm = nn.BatchNorm1d(3)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def fresh(net):
    return {name: random_like(p) for name, p in net.named_parameters()}


# --- exactness ---

DTYPES = [
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32,
    torch.int64, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip
SHAPES = [(), (1,), (3,), (5, 4), (0,), (0, 7), (7, 0), (1, 0, 3)]


@pytest.mark.fault("A-LAYOUT-5", "A-LAYOUT-8")
@pytest.mark.parametrize("mode", MODES)
def test_every_dtype_and_shape_arrives_bit_for_bit_three_times(mode):
    model = {
        f"{dtype}{shape}": random_like(torch.empty(shape, dtype=dtype))
        for dtype in DTYPES
        for shape in SHAPES
    }
    views = dict(model)
    addresses = {name: t.data_ptr() for name, t in model.items()}
    sink = make_sink(model, mode)
    first, second = ({n: random_like(t) for n, t in model.items()} for _ in range(2))
    for sent in (first, second, first):
        update(sink, sent)
        for name, tensor in sent.items():
            assert same(views[name], tensor), name
            assert model[name] is views[name]
            assert model[name].data_ptr() == addresses[name]
    assert (sink.applied, sink.skipped) == (len(model), 0)


@pytest.mark.fault("A-LAYOUT-6")
@pytest.mark.parametrize("mode", MODES)
def test_special_values_survive(mode):
    patterns = torch.tensor([0x7FC1, -0x8000, 0x7F80, 0x0001], dtype=torch.int16)
    model = {"w": torch.zeros(4, dtype=torch.bfloat16)}
    update(make_sink(model, mode), {"w": patterns.view(torch.bfloat16)})
    assert model["w"].view(torch.int16).tolist() == patterns.tolist()


@pytest.mark.fault("A-LAYOUT-3")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "destination",
    [
        torch.zeros(4, 3).t(),
        torch.zeros(4, 3, dtype=torch.bfloat16).t(),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(4, 5, 6).permute(2, 0, 1),
        torch.zeros(6, 8)[:, ::2],
        torch.zeros(1, 7)[:, 3:4],
        torch.zeros(1, 7).t()[3:4],
        torch.zeros(3, 2, dtype=torch.uint16).t(),
        torch.zeros(3, 2, dtype=torch.float8_e4m3fn).t(),
        torch.zeros(3, 2, dtype=torch.complex64).t(),
    ],
    ids=lambda t: f"{t.dtype}{tuple(t.stride())}",
)
def test_strided_destinations_keep_their_strides(mode, destination):
    model = {"w": destination}
    strides, address = destination.stride(), destination.data_ptr()
    sent = {"w": random_like(destination)}
    update(make_sink(model, mode), sent)
    assert same(destination, sent["w"])
    assert (destination.stride(), destination.data_ptr()) == (strides, address)


@pytest.mark.fault("A-LAYOUT-11", "A-LIFETIME-7")
@pytest.mark.parametrize("mode", MODES)
def test_flags_gradients_optimizer_and_old_views_stay(mode):
    net = Net()
    net.embed.weight.requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    state = {k: v.clone() for k, v in optimizer.state[net.layers[0].weight].items()}
    gradient, view = net.layers[0].weight.grad.clone(), net.layers[0].weight.detach()[0]
    identities = {name: (id(p), p.data_ptr()) for name, p in net.named_parameters()}
    sent = fresh(net)
    update(make_sink(net, mode), sent)
    assert identities == {name: (id(p), p.data_ptr()) for name, p in net.named_parameters()}
    assert same(view, sent["layers.0.weight"][0])
    assert same(net.layers[0].weight.grad, gradient)
    for key, value in state.items():
        assert same(optimizer.state[net.layers[0].weight][key], value)
    assert not net.embed.weight.requires_grad
    assert net.layers[0].weight.requires_grad
    assert net.layers[0].weight.is_leaf


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sink_in_inference", [False, True])
def test_parameters_made_in_inference_mode(mode, sink_in_inference):
    with torch.inference_mode():
        net = Net()
    mixed = nn.ModuleDict({"old": net, "new": nn.Linear(2, 2)})
    sink = make_sink(mixed, mode)
    sent = fresh(mixed)
    with torch.inference_mode(sink_in_inference):
        sink.begin(announce(sent))
        for index in range(len(sent)):
            sink.destination(index)
    arrive(sink, sent)
    sink.commit()
    assert all(same(p, sent[name]) for name, p in mixed.named_parameters())


# --- what is refused, before anything is touched ---


@pytest.mark.fault("A-LAYOUT-9")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("shape", "announced"),
    [((4, 8), s) for s in [(8,), (4, 1), (1, 8), ()]] + [((8,), (1, 8)), ((8,), (4,))],
)
def test_shapes_are_exact(mode, shape, announced):
    model = {"bias": torch.zeros(shape)}
    with pytest.raises(Validation) as caught:
        make_sink(model, mode).begin([ParamMeta("bias", F32, announced)])
    assert f"bias is of shape {shape}, announced with {announced}" in str(caught.value)
    assert caught.value.tensor == "bias"


@pytest.mark.fault("A-LAYOUT-10")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("here", "sent"),
    [
        (F32, torch.bfloat16), (torch.float16, torch.bfloat16), (torch.float8_e4m3fn, F32),
        (torch.int8, F32), (F32, torch.complex64), (torch.int16, torch.uint16),
    ],
)  # fmt: skip
def test_dtypes_are_exact(mode, here, sent):
    with pytest.raises(Validation, match=r"w is \w+, announced as \w+"):
        make_sink({"w": torch.zeros(2, dtype=here)}, mode).begin([ParamMeta("w", sent, (2,))])


def freed(tensor, left=0):
    tensor.untyped_storage().resize_(left)
    return tensor


def module_with(weight):
    module = nn.Module()
    module.weight = nn.Parameter(weight)
    return module


@pytest.mark.fault("A-LAYOUT-12")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"w": torch.zeros(4, device="meta")}, "w is on the meta device"),
        (nn.LazyLinear(3, bias=False), "weight is not initialised"),
        ({"w": torch.zeros(1).expand(4)}, "w is expanded"),
        ({"w": torch.zeros(4).to_sparse()}, "w is of layout"),
        ({"w": torch.zeros(4, dtype=torch.complex64).conj().imag}, "w is a lazily"),
        ({"w": freed(torch.zeros(4))}, "w is without memory"),
        ({"w": freed(torch.zeros(8)[4:])}, "w is without memory"),
        ({"w": freed(torch.zeros(4), 8)}, "w is without memory"),
        (module_with(freed(torch.zeros(4), 8)), "weight is without memory"),
    ],
)
def test_destinations_that_cannot_be_written(mode, model, text):
    name = "w" if isinstance(model, dict) else "weight"
    with pytest.raises(Validation, match=text):
        make_sink(model, mode).begin([ParamMeta(name, F32, (4,))])


@pytest.mark.fault("A-NAMES-3", "A-NAMES-4")
@pytest.mark.parametrize("mode", MODES)
def test_unknown_and_missing_names_are_listed_together(mode):
    net = Net()
    before = snapshot(net)
    wrapped = {f"_orig_mod.{name}": t for name, t in fresh(net).items()}
    sink = make_sink(net, mode)
    with pytest.raises(Coverage) as caught:
        sink.begin(announce(wrapped))
    text = str(caught.value)
    assert "7 of 7 announced names are unknown here: _orig_mod.embed.weight, " in text
    assert "7 names here are missing from it: embed.weight, " in text
    assert "(+3 more)" in text
    assert caught.value.detail == {"unknown": 7, "missing": 7}
    lacking = fresh(net)
    del lacking["norm.weight"]
    with pytest.raises(Coverage, match=r"1 names here are missing from it: norm\.weight"):
        sink.begin(announce(lacking))
    with pytest.raises(Validation, match="repeats"):
        sink.begin(announce(fresh(net)) * 2)
    with pytest.raises(Validation, match="no tensor"):
        sink.begin([])
    assert unchanged(net, before)
    assert sink.weights == "intact"
    update(sink, fresh(net))  # a refused announcement leaves no round open
    assert sink.left_out == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


@pytest.mark.fault("A-NAMES-2")
@pytest.mark.parametrize("mode", MODES)
def test_buffers_can_be_sent(mode):
    trainer, net = Net(), Net()
    trainer.norm.running_mean.fill_(3)
    trainer.norm.num_batches_tracked.fill_(9)
    sent = dict(ModuleSource(trainer, buffers="persistent").iter_full())
    sink = make_sink(net, mode)
    update(sink, sent)
    assert unchanged(net, snapshot(trainer))
    assert sink.left_out == []


# --- partial updates ---


@pytest.mark.fault("A-NAMES-6")
@pytest.mark.parametrize("mode", MODES)
def test_a_partial_update_must_be_asked_for_and_counts(mode):
    net = Net()
    before = snapshot(net)
    sink = make_sink(net, mode)
    sent = {n: t for n, t in fresh(net).items() if n.startswith("layers.1")}
    sent["elsewhere.weight"] = torch.ones(2)
    with pytest.raises(Coverage):
        sink.begin(announce(sent))
    update(sink, sent, partial=True)
    assert (sink.applied, sink.skipped) == (2, 1)
    assert "embed.weight" in sink.left_out
    assert same(net.layers[1].weight, sent["layers.1.weight"])
    assert unchanged(net, {n: t for n, t in before.items() if not n.startswith("layers.1")})


@pytest.mark.fault("A-NAMES-6")
@pytest.mark.parametrize("mode", MODES)
def test_a_partial_update_covers_touched_modules_whole_and_hits_something(mode):
    sink = make_sink(Net(), mode)
    with pytest.raises(Coverage, match=r"partial .* missing from it: layers\.1\.bias"):
        sink.begin([ParamMeta("layers.1.weight", F32, (3, 3))], partial=True)
    with pytest.raises(Coverage, match="2 of 2 announced names are unknown here: x, y"):
        sink.begin([ParamMeta("x", F32, ()), ParamMeta("y", F32, ())], partial=True)
    with pytest.raises(Validation, match="shape"):
        sink.begin([ParamMeta("embed.weight", F32, (3, 5))], partial=True)


# --- tied and overlapping tensors ---


class Tied(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Linear(3, 4, bias=False)
        self.head = nn.Linear(3, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.fault("A-NAMES-1")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_ties_on_either_side_or_both(mode, here, there):
    net, sink = Tied(here), None
    sink = make_sink(net, mode)
    for _ in range(2):
        trainer = Tied(there)
        if here and not there:
            trainer.head.weight.data.copy_(trainer.embed.weight.data)
        source = ModuleSource(trainer)
        sent = dict(source.iter_full())
        assert len(sent) == (1 if there else 2)
        update(sink, sent, aliases=source.aliases)
        assert same(net.embed.weight, trainer.embed.weight)
        assert same(net.head.weight, trainer.head.weight)
        assert (net.head.weight is net.embed.weight) is here


@pytest.mark.parametrize("mode", MODES)
def test_an_announced_name_is_no_alias(mode):
    net = Tied(tied=False)
    sent = fresh(net)
    update(make_sink(net, mode), sent, aliases={"head.weight": "embed.weight"})
    assert all(same(p, sent[name]) for name, p in net.named_parameters())


@pytest.mark.parametrize("mode", MODES)
def test_without_aliases_a_separate_parameter_is_missing(mode):
    with pytest.raises(Coverage, match=r"missing from it: head\.weight"):
        make_sink(Tied(tied=False), mode).begin([ParamMeta("embed.weight", F32, (4, 3))])


@pytest.mark.parametrize("mode", MODES)
def test_the_canonical_name_may_be_the_one_that_is_absent_here(mode):
    model = {"head": torch.zeros(2)}
    update(
        make_sink(model, mode), {"embed": torch.ones(2)}, aliases={"head": "embed", "x": "embed"}
    )
    assert model["head"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "order", [("embed.weight", "head.weight"), ("head.weight", "embed.weight")]
)
def test_tied_names_must_agree(mode, order):
    net = Tied(tied=True)
    before = snapshot(net)
    sink = make_sink(net, mode)
    sent = {order[0]: torch.zeros(4, 3), order[1]: torch.full((4, 3), -0.0)}  # equal, not in bits
    sink.begin(announce(sent))
    with pytest.raises(Coverage, match=f"{order[0]} and {order[1]} are one tensor here"):
        arrive(sink, sent)  # here where a layer is judged as soon as it is whole
        sink.commit()
    sink.abort()
    if mode != "in_place":
        assert unchanged(net, before)
        assert sink.weights == "intact"
    else:
        assert sink.weights == "torn"


@pytest.mark.fault("A-NAMES-1")
@pytest.mark.parametrize("mode", MODES)
def test_partly_shared_destinations_are_refused_and_columns_are_fine(mode):
    flat = torch.zeros(10)
    overlapping = {"a": flat[:6], "b": flat[5:], "c": torch.zeros(1)}
    sink = make_sink(overlapping, mode)
    with pytest.raises(Validation, match="b shares part of its memory with a"):
        sink.begin(announce(overlapping))
    square = torch.zeros(3, 3)
    with pytest.raises(Validation, match="shares part of its memory"):
        make_sink({"w": square, "t": square.t()}, mode).begin(
            announce({"w": square, "t": square.t()})
        )
    mixed = {"a": flat[:6], "bytes": flat.view(torch.uint8)[20:30]}
    with pytest.raises(Validation, match="shares part of its memory"):
        make_sink(mixed, mode).begin(announce(mixed))
    fused = torch.zeros(4, 6)
    columns = {"q": fused[:, :2], "k": fused[:, 2:5], "v": fused[:, 5:], "flat": flat}
    sent = {name: random_like(t) for name, t in columns.items()}
    update(make_sink(columns, mode), sent)
    assert same(fused, torch.cat([sent["q"], sent["k"], sent["v"]], 1))


# --- rounds ---


@pytest.mark.parametrize("mode", MODES)
def test_nothing_unlanded_is_ever_committed(mode):
    net = Net()
    before = snapshot(net)
    sink = make_sink(net, mode)
    sent = fresh(net)
    sink.begin(announce(sent))
    with pytest.raises(Coverage, match=r"7 of 7 tensors never landed: embed\.weight"):
        sink.commit()
    with pytest.raises(Coverage, match="nobody asked where to put it"):
        sink.landed([0])
    assert unchanged(net, before)
    assert sink.weights == "intact"
    arrive(sink, sent, upto=6)
    with pytest.raises(Coverage, match=r"1 of 7 tensors never landed: norm\.bias") as caught:
        sink.verify()
    assert caught.value.tensor == "norm.bias"
    with pytest.raises(Coverage, match=r"embed\.weight landed twice"):
        sink.landed([0])
    with pytest.raises(Coverage, match=r"embed\.weight has landed"):
        sink.destination(0)
    for bad in (7, -1, True):
        with pytest.raises(Validation, match="no tensor"):
            sink.destination(bad)
        with pytest.raises(Validation, match="no tensor"):
            sink.landed([bad])
    sink.abort()
    assert unchanged(net, before) is (mode == "staged")


@pytest.mark.parametrize("mode", MODES)
def test_calls_out_of_order(mode):
    sink = make_sink({"w": torch.zeros(2)}, mode)
    sink.abort()
    for call in (sink.verify, sink.commit, lambda: sink.destination(0), lambda: sink.landed([0])):
        with pytest.raises(InvalidTransition, match="call begin first"):
            call()
    sink.begin([ParamMeta("w", F32, (2,))])
    assert "round of 0/1" in repr(sink)
    with pytest.raises(Busy):
        sink.begin([ParamMeta("w", F32, (2,))])
    sink.abort()
    update(sink, {"w": torch.ones(2)})
    with pytest.raises(InvalidTransition):
        sink.commit()
    assert "no round" in repr(sink)


@pytest.mark.fault("A-STATE-5")
def test_staged_forward_is_old_until_the_commit():
    net = Net()
    ids = torch.tensor([0, 4])
    before, answer = snapshot(net), net(ids).detach()
    sink = make_sink(net)
    sent = {name: torch.randn(p.shape) for name, p in net.named_parameters()}
    sink.begin(announce(sent))
    arrive(sink, sent, upto=4)
    assert torch.equal(net(ids), answer)
    sink.abort()
    assert sink.weights == "intact"
    assert unchanged(net, before)
    update(sink, sent)
    expected = Net()
    expected.load_state_dict(sent, strict=False)
    assert torch.equal(net(ids), expected(ids))


def test_staged_marks_the_weights_torn_while_it_copies(monkeypatch):
    model = {"a": torch.zeros(2), "b": torch.zeros(2)}
    sink = make_sink(model)
    seen = []

    def copy(batches):
        seen.append(sink.weights)
        batches[0].move()
        raise RuntimeError("device lost")

    monkeypatch.setattr("aiosync.same_copies.copy_together", copy)
    sent = {"a": torch.ones(2), "b": torch.ones(2)}
    with pytest.raises(RuntimeError, match="device lost"):
        update(sink, sent)
    assert seen == ["torn"]
    assert sink.weights == "torn"
    monkeypatch.undo()
    with pytest.raises(Torn, match="partial"):
        sink.begin(announce(sent), partial=True)
    update(sink, sent)
    assert sink.weights == "intact"


def test_in_place_is_torn_from_the_first_destination_and_mended_by_a_full_update():
    net = Net()
    sink = make_sink(net, "in_place")
    sent = fresh(net)
    sink.begin(announce(sent))
    assert sink.weights == "intact"
    assert sink.destination(0).data_ptr() == net.embed.weight.data_ptr()
    assert sink.weights == "torn"
    sink.abort()
    assert sink.weights == "torn"
    update(sink, sent)
    assert sink.weights == "intact"
    assert all(same(p, sent[name]) for name, p in net.named_parameters())


def test_in_place_that_needs_a_copy_is_torn_from_the_first_copy():
    model = {"a": torch.zeros(3, 2).t(), "b": torch.zeros(3, 2).t()}
    sent = {name: random_like(t) for name, t in model.items()}
    sink = make_sink(model, "in_place")
    sink.begin(announce(sent))
    sink.destination(0).copy_(sent["a"])
    sink.destination(1)
    assert sink.weights == "intact"
    assert not model["a"].any()
    sink.landed([0])
    assert sink.weights == "torn"
    assert same(model["a"], sent["a"])
    sink.abort()
    assert sink.weights == "torn"


@pytest.mark.fault("A-VERSION-5")
@pytest.mark.parametrize("mode", MODES)
def test_after_load_runs_once_per_commit_after_the_last_write(mode):
    model = {name: torch.zeros(2) for name in "abcdefgh"}
    derived, fail = [], []

    def hook():
        derived.append([float(t[0]) for t in model.values()])
        if fail:
            raise ValueError("cannot quantise")

    sink = make_sink(model, mode, after_load=hook)
    sent = {name: torch.ones(2) for name in model}
    update(sink, sent)
    assert derived == [[1.0] * 8]
    sink.begin(announce(sent))
    arrive(sink, sent, upto=6)
    with pytest.raises(Coverage):
        sink.commit()
    sink.abort()
    assert len(derived) == 1
    fail.append(True)
    with pytest.raises(ValueError, match="cannot quantise"):
        update(sink, sent)
    assert len(derived) == 2
    assert sink.weights == "torn"
    fail.clear()
    update(sink, sent)
    assert sink.weights == "intact"

    async def later():
        pass

    with pytest.raises(TypeError, match="after_load must be a plain function"):
        update(make_sink(model, mode, after_load=later), sent)


@pytest.mark.parametrize("mode", MODES)
def test_replaced_parameters_are_found_again(mode):
    net = nn.Linear(2, 2)
    sink = make_sink(net, mode)
    update(sink, fresh(net))
    net.weight = nn.Parameter(torch.zeros(2, 2))
    sent = fresh(net)
    update(sink, sent)
    assert same(net.weight, sent["weight"])


@pytest.mark.parametrize("mode", MODES)
def test_a_match_is_made_again_when_the_model_or_the_announcement_changed(mode):
    model = {"a": torch.zeros(2), "b": torch.zeros(2)}
    sink = make_sink(model, mode)
    sent = {"a": torch.ones(2), "b": torch.ones(2)}
    update(sink, sent)
    model["b"].data = torch.zeros(3)
    with pytest.raises(Validation, match=r"b is of shape \(3,\)"):
        sink.begin(announce(sent))
    model["b"] = model["a"][:]
    update(sink, sent)
    model["b"] = torch.zeros(2)
    with pytest.raises(Coverage):
        sink.begin(announce({"a": sent["a"]}))
    update(sink, {"a": sent["a"]}, aliases={"b": "a"})
    assert model["b"].tolist() == [1.0, 1.0]
    model["c"] = torch.zeros(1)
    with pytest.raises(Coverage, match="missing from it: c"):
        sink.begin(announce({"a": sent["a"]}), aliases={"b": "a"})


@pytest.mark.parametrize("mode", MODES)
def test_between_rounds_a_sink_holds_none_of_the_models_memory(mode):
    memory = np.zeros(4, dtype=np.float32)
    gone = weakref.ref(memory)
    model = {"w": torch.from_numpy(memory)}
    sink = make_sink(model, mode)
    update(sink, {"w": torch.ones(4)})
    assert memory.tolist() == [1.0] * 4
    model["w"].data = torch.zeros(4)  # as offloading does
    del memory
    gc.collect()
    assert gone() is None


# --- spare memory ---


def test_spare_memory_is_kept_until_the_metadata_changes():
    net = Net()
    sink = make_sink(net)
    places = []
    for _ in range(2):
        sent = fresh(net)
        sink.begin(announce(sent))
        places.append([sink.destination(i).data_ptr() for i in range(len(sent))])
        assert all(place % 64 == 0 for place in places[-1])
        assert not {p.data_ptr() for p in net.parameters()} & set(places[-1])
        sink.abort()
    assert places[0] == places[1]
    assert sink.memory(announce(sent)) == 64 * 7  # each tensor fits one aligned slot
    sent = {n: t for n, t in fresh(net).items() if n.startswith("embed")}
    update(sink, sent, partial=True)
    sink.release()
    update(sink, fresh(net))


def test_spare_memory_is_given_back_before_other_memory_is_asked_for(monkeypatch):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sink = make_sink(net)
    sent = fresh(net)
    sink.begin(announce(sent))
    gone = weakref.ref(sink.destination(0))
    sink.abort()
    seen = []
    monkeypatch.setattr(spare, "free_memory", lambda _: seen.append(gone() is None))
    update(sink, {n: t for n, t in sent.items() if n.startswith("0.")}, partial=True)
    assert seen == [True]


@pytest.mark.fault("A-LIFETIME-8")
def test_too_little_memory_is_refused_with_numbers_and_advice(monkeypatch):
    net = nn.Linear(16, 16)
    sent = fresh(net)
    monkeypatch.setattr(spare, "free_memory", lambda _: 1000)
    sink = make_sink(net)
    need = sink.memory(announce(sent))
    with pytest.raises(Refused, match=f"needs {need} bytes on cpu, 1000 are free") as caught:
        sink.begin(announce(sent))
    assert "in_place" in caught.value.next_step
    assert sink.weights == "intact"
    update(make_sink(net, "in_place"), sent)
    monkeypatch.setattr(spare, "free_memory", lambda _: need)
    update(sink, sent)
    monkeypatch.setattr(spare, "free_memory", lambda _: 0)
    update(sink, sent)  # already allocated


def test_free_memory_reads_the_system_and_the_cgroup(monkeypatch):
    assert spare.free_memory(torch.device("meta")) is None
    assert 0 < spare.free_memory(torch.device("cpu")) < 1 << 60
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:     100 kB\n",
        "/proc/self/cgroup": "4:cpu:/x\n0::/a/b\n",
        "/sys/fs/cgroup/a/memory.max": "50000\n",
        "/sys/fs/cgroup/a/memory.current": "20000\n",
        "/sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 1000\n",
        "/sys/fs/cgroup/a/b/memory.max": "max\n",
        "/sys/fs/cgroup/a/b/memory.current": "20000\n",
    }
    monkeypatch.setattr(spare, "_read", lambda path: files.get(str(path), ""))
    cpu = torch.device("cpu")
    assert spare.free_memory(cpu) == 31000
    files["/proc/self/cgroup"] = "0::/elsewhere\n5:memory:/job\n"
    assert spare.free_memory(cpu) == 102400
    root = "/sys/fs/cgroup/memory"
    files |= {f"{root}/memory.limit_in_bytes": "3000", f"{root}/memory.usage_in_bytes": "9000"}
    assert spare.free_memory(cpu) == 0
    files.clear()
    assert spare.free_memory(cpu) is None


def test_in_place_memory_is_the_largest_temporary():
    model = {"a": torch.zeros(100), "t": torch.zeros(3, 2).t()}
    metas = announce(model)
    assert make_sink(model, "in_place").memory(metas) == 24
    assert make_sink({"a": model["a"]}, "in_place").memory(metas[:1]) == 0
    assert make_sink(Loader(), "in_place").memory(metas) == 400


# --- models with a loader of their own ---


class Loader:
    """Keeps what it is given, as loaders that wait for a whole layer do."""

    def __init__(self, fail_at=None, take=None):
        self.calls, self.kept, self.fail_at, self.take = [], {}, fail_at, take

    def load_weights(self, weights):
        self.calls.append([])
        for name, tensor in weights:
            if len(self.kept) == self.fail_at:
                raise KeyError(f"no parameter {name}")
            self.calls[-1].append(name)
            self.kept[name] = tensor
            if len(self.kept) == self.take:
                return


def small():
    return {f"model.{i}": torch.full((i + 1,), float(i)) for i in range(4)} | {
        "empty": torch.empty(0, 7)
    }


@pytest.mark.parametrize("mode", MODES)
def test_a_loader_gets_everything_and_may_keep_it(mode):
    model = Loader()
    sink = make_sink(model, mode)
    first = small()
    update(sink, first, aliases={"head": "model.0"})
    _, *rest = first
    batches = {  # the tied name too: this loader may know nothing of the tie
        "staged": [["model.0", "head", *rest]],
        "in_place": [["model.0", "head", rest[0]], rest[1:3], rest[3:]],
        "layerwise": [["model.0", "head"], *([name] for name in rest)],
    }
    assert model.calls == batches[mode]
    kept = dict(model.kept)
    second = {name: t + 1 for name, t in small().items()}
    update(sink, second)
    assert all(same(kept[name], first[name]) for name in first)
    assert all(same(model.kept[name], second[name]) for name in second)
    assert (sink.applied, sink.skipped, sink.weights) == (5, 0, "intact")


@pytest.mark.parametrize("mode", MODES)
def test_a_loaders_own_error_surfaces_and_tears(mode):
    sink = make_sink(Loader(fail_at=2), mode)
    with pytest.raises(KeyError, match=r"no parameter model\.2"):
        update(sink, small())
    sink.abort()
    assert sink.weights == "torn"
    sink.model.fail_at = None
    update(sink, small())
    assert sink.weights == "intact"


@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_a_loader_that_stops_early_is_not_believed(mode):
    sink = make_sink(Loader(take=1), mode)
    with pytest.raises(Coverage, match=r"load_weights took 1 of \d tensors and left model\.1"):
        update(sink, small())
    assert sink.weights == "torn"


@pytest.mark.parametrize("mode", MODES)
def test_an_async_loader_is_refused(mode):
    class Async:
        async def load_weights(self, weights):
            pass

    with pytest.raises(TypeError, match="load_weights must be a plain function"):
        update(make_sink(Async(), mode), small())


@pytest.mark.parametrize("mode", MODES)
def test_a_module_with_a_loader_is_written_through_it(mode):
    class Model(nn.Linear):
        def load_weights(self, weights):
            for name, tensor in weights:
                self.get_parameter(name.removeprefix("model.")).copy_(tensor)  # needs no_grad

    model = Model(2, 2)
    sent = {f"model.{name}": t for name, t in fresh(model).items()}
    update(make_sink(model, mode), sent)
    assert same(model.weight, sent["model.weight"])


def test_a_staged_loader_is_not_called_before_the_commit():
    model = Loader()
    sink = make_sink(model)
    sink.begin(announce(small()))
    arrive(sink, small())
    sink.verify()
    sink.abort()
    assert model.calls == []
    assert sink.weights == "intact"


def test_make_sink():
    assert isinstance(make_sink({}), StagedSink)
    assert isinstance(make_sink({}, "in_place", "cpu"), InPlaceSink)
    assert isinstance(make_sink({}, "layerwise"), LayerwiseSink)
    with pytest.raises(Validation, match="'sideways'"):
        make_sink({}, "sideways")
    with pytest.raises(TypeError, match="not list"):
        make_sink([torch.ones(1)])
    with pytest.raises(TypeError, match=r"model\['w'\] is no tensor but float"):
        make_sink({"w": 1.0})


@pytest.mark.filterwarnings("ignore")  # torch.distributed's own
def test_a_sharded_destination_is_refused():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = {"w": distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (1,)), [Shard(0)])}
        with pytest.raises(Validation, match="w is a DTensor"):
            make_sink(model).begin([ParamMeta("w", F32, (2,))])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("mode", MODES)
def test_parameters_replaced_during_a_round_are_noticed(mode):
    net = Net()
    sink, tensors = make_sink(net, mode), fresh(net)
    sink.begin(announce(tensors))
    arrive(sink, tensors)
    net.layers[0].weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(Coverage, match="replaced"):
        sink.verify()
    sink.abort()
    update(sink, tensors)
    assert same(net.layers[0].weight, tensors["layers.0.weight"])
