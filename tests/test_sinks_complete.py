"""Layer by layer, handed on to others, and what a crash in the middle of a swap leaves."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import by_hand
import models
import pytest
import sliced
import torch
from elsewhere import Elsewhere, holds
from looped import BUDGET, looped
from processes import replica
from torch import nn

import aiosync
from aiosync import Coverage, LayerwiseSink, RelaySink, Torn, Validation, Version, make_sink
from aiosync.crash_marker import CrashMarker
from aiosync.errors import AiosyncError, InvalidTransition, PhaseTimeout, WrongThread
from aiosync.lane_calls import LaneCalls
from aiosync.metadata import ParamMeta
from aiosync.sinks import StagedSink
from transports.lane import Lane

F32 = torch.float32


def announce(tensors):
    return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]


def arrive(sink, tensors, *, upto=None, batch=1):
    """What a transport does; the destinations of a batch are all asked for before it lands."""
    values = list(tensors.values())[:upto]
    for start in range(0, len(values), batch):
        indices = list(range(start, min(start + batch, len(values))))
        for index in indices:
            sink.destination(index).copy_(values[index])
        sink.landed(indices)


def update(sink, tensors, **options):
    sink.begin(announce(tensors), **options)
    arrive(sink, tensors)
    sink.commit()


def layers(count=3, value=0.0, width=4):
    found = {"embed.weight": torch.full((2, width), value)}
    for n in range(count):
        found[f"layers.{n}.weight"] = torch.full((width, width), value + n)
        found[f"layers.{n}.bias"] = torch.full((width,), value + n)
    return found | {"norm.weight": torch.full((width,), value)}


class Recorder:
    """A `process` that notes its groups and can change or break them."""

    def __init__(self, change=None, fail_at=None):
        self.groups, self.change, self.fail_at = [], change, fail_at

    def __call__(self, names, tensors):
        assert not torch.is_grad_enabled()
        self.groups.append(list(names))
        if len(self.groups) - 1 == self.fail_at:
            raise ZeroDivisionError("scale is zero")
        return None if self.change is None else self.change(names, tensors)


GROUPS = [
    ["embed.weight"],
    *[[f"layers.{n}.weight", f"layers.{n}.bias"] for n in range(3)],
    ["norm.weight"],
]


# --- layerwise ---


@pytest.mark.fault("A-VERSION-5")
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_groups_are_processed_once_as_soon_as_they_are_whole(batch):
    model, process = layers(), Recorder()
    sink = LayerwiseSink(model, process=process)
    sent = layers(value=5.0)
    sink.begin(announce(sent))
    assert sink.weights == "intact"
    arrive(sink, sent, upto=2, batch=2)
    assert process.groups == GROUPS[:1]
    assert sink.weights == "torn"
    assert model["embed.weight"].unique().tolist() == [5.0]
    assert not model["layers.0.weight"].any()
    sink.abort()
    assert len(process.groups) == 1  # a group that is not whole is not processed
    process.groups.clear()
    sink.begin(announce(sent))
    arrive(sink, sent, batch=batch)
    assert process.groups == GROUPS
    assert sink.weights == "torn"
    sink.commit()
    assert sink.weights == "intact"
    assert all(torch.equal(model[name], sent[name]) for name in sent)
    assert (sink.applied, sink.skipped, sink.left_out) == (8, 0, [])


def test_memory_is_that_of_the_largest_group():
    sent = layers(8, 1.0, width=64)
    sink = LayerwiseSink(layers(8, width=64))
    sink.begin(announce(sent))
    peak = 0
    for index, tensor in enumerate(sent.values()):
        sink.destination(index).copy_(tensor)
        peak = max(peak, sink.staged_bytes)
        sink.landed([index])
    need = sink.memory(announce(sent))
    assert 64 * 64 * 4 < peak <= need < 2 * 64 * 64 * 4
    assert sink.staged_bytes == 0
    sink.commit()


def test_what_comes_out_may_differ_from_what_was_announced():
    """Quantised to int8 with a scale, and q, k and v fused into one."""
    model = {
        "layers.0.qkv.weight": torch.zeros(6, 4, dtype=torch.int8),
        "layers.0.qkv.scale": torch.zeros(6),
        "norm.weight": torch.zeros(4),
    }
    sent = {f"layers.0.{x}.weight": torch.randn(2, 4) for x in "qkv"} | {
        "norm.weight": torch.ones(4)
    }

    def fuse(names, tensors):
        if names == ["norm.weight"]:
            return None
        whole = torch.cat(tensors)
        scale = whole.abs().amax(1) / 127
        return iter(
            [
                ("layers.0.qkv.weight", (whole / scale[:, None]).round().to(torch.int8)),
                ("layers.0.qkv.scale", scale),
            ]
        )

    sink = LayerwiseSink(model, process=fuse)
    update(sink, sent)
    back = model["layers.0.qkv.weight"] * model["layers.0.qkv.scale"][:, None]
    whole = torch.cat([sent[f"layers.0.{x}.weight"] for x in "qkv"])
    assert torch.allclose(back, whole, atol=float(model["layers.0.qkv.scale"].max()))
    assert model["norm.weight"].tolist() == [1.0] * 4
    assert (sink.applied, sink.weights) == (3, "intact")


@pytest.mark.fault("A-VERSION-5")
@pytest.mark.parametrize("fail_at", [0, 2, 4])
def test_a_failing_hook_names_its_group_and_is_not_called_again(fail_at):
    process = Recorder(fail_at=fail_at)
    model, sent = layers(), layers(value=5.0)
    sink = LayerwiseSink(model, process=process)
    sink.begin(announce(sent))
    with pytest.raises(AiosyncError, match=r"process failed.*ZeroDivisionError: scale") as caught:
        arrive(sink, sent)
    assert caught.value.tensor == GROUPS[fail_at][0]
    assert GROUPS[fail_at][-1] in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    for call in (lambda: sink.landed([7]), sink.verify, sink.commit, lambda: sink.destination(7)):
        with pytest.raises(InvalidTransition, match="group of this round failed"):
            call()
    assert len(process.groups) == fail_at + 1
    sink.abort()
    assert sink.weights == ("torn" if fail_at else "intact")
    process.fail_at = None
    update(sink, sent)
    assert sink.weights == "intact"


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (lambda n, t: [], Coverage, r"missing from it: embed\.weight"),
        (lambda n, t: [("elsewhere", t[0])], Coverage, "process gave elsewhere, which is unknown"),
        (lambda n, t: [(n[0], t[0])] * 2, Coverage, r"process gave embed\.weight twice"),
        (lambda n, t: [(n[0], t[0][:1])], Validation, r"of shape \(2, 4\), given with \(1, 4\)"),
        (lambda n, t: [(n[0], t[0].half())], Validation, "float32, given as float16"),
        (lambda n, t: [t[0]], Validation, "pairs of a name and a tensor, not Tensor"),
        (lambda n, t: [(n[0], 1.0)], Validation, "pairs of a name and a tensor"),
    ],
)
def test_what_comes_out_must_fit_and_cover_the_model(given, kind, text):
    sent = layers(value=5.0)
    model = layers()

    def change(names, tensors):
        return given(names, tensors) if names == GROUPS[0] else None

    sink = LayerwiseSink(model, process=Recorder(change))
    sink.begin(announce(sent))
    with pytest.raises(kind, match=text):
        arrive(sink, sent)
        sink.commit()
    sink.abort()
    assert not model["embed.weight"].any()


def test_an_async_hook_is_refused():
    async def later(names, tensors):
        return None

    sink = LayerwiseSink(layers(), process=later)
    sink.begin(announce(layers()))
    with pytest.raises(AiosyncError, match="process must be a plain function"):
        arrive(sink, layers())


def test_a_half_generated_group_is_not_written():
    model = layers()

    def broken(names, tensors):
        yield names[0], tensors[0] + 1
        raise OSError("out of scratch")

    sink = LayerwiseSink(model, process=broken)
    sink.begin(announce(layers(value=5.0)))
    with pytest.raises(AiosyncError, match="out of scratch"):
        arrive(sink, layers(value=5.0))
    assert sink.weights == "intact"
    assert not any(t.any() for name, t in model.items() if "0" in name or "embed" in name)


def test_partial_updates_cover_touched_modules_whole():
    model = layers()
    sent = {n: t + 1 for n, t in layers().items() if n.startswith("layers.1")} | {
        "x": torch.ones(1)
    }
    sink = LayerwiseSink(model, process=Recorder())
    update(sink, sent, partial=True)
    assert (sink.applied, sink.skipped) == (2, 1)
    assert "embed.weight" in sink.left_out
    drop_bias = Recorder(lambda n, t: list(zip(n, t, strict=True))[:1])
    sink = LayerwiseSink(model, process=drop_bias)
    with pytest.raises(Coverage, match=r"missing from it: layers\.1\.bias"):
        update(sink, sent, partial=True)
    with pytest.raises(Coverage, match="unknown here"):
        update(LayerwiseSink(model, process=Recorder()), {"x": torch.ones(1)}, partial=True)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4, bias=False)
        self.layers = nn.ModuleList([nn.Linear(3, 3, bias=False)])
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("hook", [None, Recorder()], ids=["plain", "processed"])
def test_ties_across_groups_must_agree(hook):
    net = Tied()
    sink = LayerwiseSink(net, process=hook)
    new = torch.randn(4, 3)
    sent = {"embed.weight": new, "layers.0.weight": torch.ones(3, 3), "head.weight": new.clone()}
    update(sink, sent)
    assert torch.equal(net.head.weight, new)
    sent["head.weight"] = new + 1
    sink.begin(announce(sent))
    with pytest.raises(Coverage, match=r"embed\.weight and head\.weight are one tensor"):
        arrive(sink, sent)
    sink.abort()
    assert sink.weights == "torn"
    update(sink, {k: sent[k] for k in ("embed.weight", "layers.0.weight")})
    assert sink.weights == "intact"


@pytest.mark.fault("A-NAMES-1")
def test_aliases_reach_separate_tensors_through_the_hook():
    model = {"a.w": torch.zeros(2), "b.w": torch.zeros(2)}
    sink = LayerwiseSink(model, process=Recorder(lambda n, t: [(n[0], t[0] * 2)]))
    update(sink, {"a.w": torch.ones(2)}, aliases={"b.w": "a.w"})
    assert model["a.w"].tolist() == model["b.w"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("hook", [None, Recorder()], ids=["plain", "processed"])
def test_awkward_destinations(hook):
    """Inference-mode, transposed, interleaved; and refused where two share bytes."""
    with torch.inference_mode():
        frozen = torch.zeros(3, 2)
    fused = torch.zeros(4, 6)
    model = {
        "layers.0.frozen": frozen,
        "layers.0.turned": torch.zeros(2, 5).t(),
        "layers.1.q": fused[:, :2],
        "layers.2.kv": fused[:, 2:],
    }
    strides = {name: tensor.stride() for name, tensor in model.items()}
    sent = {name: torch.randn(tensor.shape) for name, tensor in model.items()}
    update(LayerwiseSink(model, process=hook), sent)
    assert all(torch.equal(model[name], sent[name]) for name in sent)
    assert strides == {name: tensor.stride() for name, tensor in model.items()}
    flat = torch.zeros(10)
    shared = {"layers.0.a": flat[:6], "layers.1.b": flat[5:]}
    with pytest.raises(Validation, match="shares part of its memory"):
        update(LayerwiseSink(shared, process=hook), {n: t.clone() for n, t in shared.items()})


def test_a_loader_gets_each_group_after_the_hook():
    class Loader:
        calls: list = []

        def load_weights(self, weights):
            self.calls.append([name for name, _ in weights])

    model = Loader()
    hook = Recorder(lambda n, t: [(f"model.{name}", x) for name, x in zip(n, t, strict=True)])
    sink = LayerwiseSink(model, process=hook)
    update(sink, layers())
    assert model.calls == [[f"model.{name}" for name in group] for group in GROUPS]
    model.load_weights = lambda weights: next(iter(weights))
    sink = make_sink(model, "layerwise")
    sink.begin(announce(layers()))
    with pytest.raises(
        Coverage, match=r"load_weights took 1 of 2 tensors and left layers\.0\.bias"
    ):
        arrive(sink, layers())


@pytest.mark.asyncio
async def test_a_layerwise_worker_in_a_round():
    async with looped(sink="layerwise") as it:
        await it.assert_next_round_works()
        await it.assert_next_round_works()


@pytest.mark.asyncio
async def test_config_takes_a_sink_or_a_factory():
    process = Recorder()
    made = []

    def factory(model, device):
        made.append(LayerwiseSink(model, process=process, device=device))
        return made[-1]

    async with looped(sink=factory) as it:
        await it.assert_next_round_works()
        await it.assert_next_round_works()
        assert len(made) == 1
        assert len(process.groups) == 6
        assert it.worker.peer_state().detail["sink"] == "custom"
        process.fail_at = 7
        with pytest.raises(AiosyncError, match="scale is zero") as caught:
            await it.trainer.send_weights(budget=BUDGET)
        assert caught.value.tensor == "1.weight"
        assert it.worker.weights == "torn"
        process.fail_at = None
        await it.assert_next_round_works()
    async with looped(sink=lambda model, device: "staged") as it:
        with pytest.raises(AiosyncError, match="made no Sink but str"):
            await it.trainer.send_weights(budget=BUDGET)
    for bad in ("sideways", 3, None):
        with pytest.raises(Validation, match="sink must be one of staged, in_place, layerwise"):
            aiosync.WeightTransferConfig("ipc", sink=bad)
    with pytest.raises(Validation, match="marker to the sink itself"):
        aiosync.WeightTransferConfig("ipc", sink=factory, marker="x")


# --- relay ---


def relayed(receiver, **options):
    return looped(sink=RelaySink(receiver, **options))


@pytest.mark.asyncio
async def test_a_relay_hands_on_copies_and_commits_the_version():
    receiver = Elsewhere()
    async with relayed(receiver) as it:
        for order in (1, 2):
            with torch.no_grad():
                for parameter in it.model.parameters():
                    parameter.add_(1)
            await it.trainer.send_weights(version=order, budget=BUDGET)
            assert receiver.version.order == order
            assert holds(receiver, it.model)
        kept = dict(receiver.shown)
        with torch.no_grad():
            it.model[0].weight.zero_()
        assert kept["0.weight"].any()  # its own copy
        assert receiver.log == ["begin", *["put"] * 6, "commit"] * 2
        assert it.worker.peer_state().detail["sink"] == "relay"


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["begin", "put"])
async def test_a_receiver_that_fails_is_told_to_abort(what):
    receiver = Elsewhere()
    async with relayed(receiver) as it:
        await it.trainer.send_weights(version=1, budget=BUDGET)
        shown = dict(receiver.shown)
        receiver.log.clear()
        receiver.errors[what] = OSError("queue is gone")
        with pytest.raises(
            AiosyncError, match=f"{what} of the receiver failed: OSError: queue"
        ) as e:
            await it.trainer.send_weights(version=2, budget=BUDGET)
        assert e.value.tensor == ("0.weight" if what == "put" else None)
        assert receiver.log.count("abort") == 1
        assert receiver.log[-1] == "abort"
        assert receiver.shown == shown
        assert it.worker.weights == "intact"
        assert it.worker.version.order == 1
        await it.trainer.send_weights(version=3, budget=BUDGET)
        assert holds(receiver, it.model)


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["abort", "close", "cancel"])
async def test_a_put_that_hangs_does_not_keep_the_lane(how):
    receiver = Elsewhere()
    receiver.hold["put"] = asyncio.Event()
    async with relayed(receiver) as it:
        sending = asyncio.create_task(it.trainer.send_weights(version=1, budget=BUDGET))
        await asyncio.wait_for(receiver.reached.wait(), 10)
        if how == "close":
            await it.worker.aclose()
        elif how == "abort":
            await it.worker.abort_weight_update(header=by_hand.header(it.worker, 1))
        else:
            sending.cancel()
        with pytest.raises((AiosyncError, asyncio.CancelledError)):
            await sending
        assert not it.worker.lane_poisoned
        assert receiver.log == ["begin", "put", "abort"]
        assert it.worker.weights == "intact"
        if how != "close":
            receiver.hold.clear()
            await it.trainer.send_weights(version=2, budget=BUDGET)
            assert holds(receiver, it.model)


@pytest.mark.asyncio
async def test_a_put_is_limited():
    receiver = Elsewhere()
    receiver.hold["put"] = asyncio.Event()
    async with relayed(receiver, timeout=1) as it:
        with pytest.raises(PhaseTimeout, match=r"put of the receiver took longer than 1 s"):
            await it.trainer.send_weights(version=1, budget=BUDGET)
        assert receiver.log[-1] == "abort"


@pytest.mark.asyncio
async def test_a_commit_or_an_abort_that_fails_leaves_the_weights_unknown():
    receiver = Elsewhere()
    async with relayed(receiver) as it:
        receiver.errors["commit"] = OSError("half way")
        with pytest.raises(AiosyncError, match="commit of the receiver failed"):
            await it.trainer.send_weights(version=1, budget=BUDGET)
        assert it.worker.weights == "unknown"
        assert "abort" not in receiver.log
        receiver.errors["put"] = OSError("no")
        with pytest.raises(AiosyncError, match="put of the receiver"):
            await it.trainer.send_weights(version=2, budget=BUDGET)
        assert receiver.log[-1] == "abort"
        assert it.worker.weights == "unknown"  # the abort went well, the commit before did not
        await it.trainer.send_weights(version=2, budget=BUDGET)
        assert it.worker.weights == "intact"
        receiver.errors |= {"put": OSError("no"), "abort": OSError("no again")}
        with pytest.raises(AiosyncError, match="put of the receiver"):
            await it.trainer.send_weights(version=3, budget=BUDGET)
        assert it.worker.weights == "unknown"
        await it.trainer.send_weights(version=4, budget=BUDGET)
        assert it.worker.weights == "intact"
        assert holds(receiver, it.model)


@pytest.mark.asyncio
async def test_plain_functions_run_on_the_lane():
    got, threads, versions = {}, set(), []

    def put(name, tensor):
        threads.add(threading.current_thread().name)
        got[name] = tensor

    sink = RelaySink(put=put, commit=versions.append, abort=got.clear)
    async with looped(sink=sink) as it:
        await it.trainer.send_weights(version=7, budget=BUDGET)
        assert set(got) == {name for name, _ in it.model.named_parameters()}
        assert threads == {"w0-lane"}
        assert [v.order for v in versions] == [7]


@pytest.mark.asyncio
async def test_a_relay_by_hand():
    receiver = Elsewhere()
    sink = RelaySink(receiver)
    with pytest.raises(WrongThread, match="drive it from a lane"):
        sink.begin(announce(layers()))
    sink.abort()
    sent = layers()
    sink.target = Version(1, "run", 1)
    async with Lane("by-hand") as lane:
        with pytest.raises(InvalidTransition, match="must be attached"):
            await lane.run(update, sink, sent)
        await lane.run(sink.abort)
        sink.attach(LaneCalls())
        await lane.run(update, sink, sent)
        assert receiver.version == Version(1, "run", 1)
        assert sink.memory(announce(sent)) == 64
        await lane.run(sink.begin, announce(sent))
        await lane.run(sink.abort)
        assert receiver.log[-1] == "abort"
        assert sink.weights == "intact"
    with pytest.raises(Validation, match="lacks commit, abort"):
        RelaySink(put=print)
    with pytest.raises(Validation, match="not both"):
        RelaySink(receiver, put=print)


# --- crash marker ---


def test_the_marker_lives_exactly_as_long_as_the_swap(tmp_path):
    marker = tmp_path / "swap"
    model = layers()
    seen = []
    sink = make_sink(model, marker=marker, after_load=lambda: seen.append(marker.exists()))
    assert sink.weights == "intact"
    sent = layers(value=5.0)
    sink.begin(announce(sent))
    arrive(sink, sent)
    sink.verify()
    assert not marker.exists()
    sink.commit()
    assert seen == [True]
    assert not marker.exists()
    sink.begin(announce(sent))
    sink.abort()
    assert not marker.exists()


@pytest.mark.parametrize("mode", ["in_place", "layerwise"])
def test_other_modes_leave_it_from_the_first_write_to_the_commit(mode, tmp_path):
    marker = tmp_path / "swap"
    sink = make_sink(layers(), mode, marker=marker)
    sink.begin(announce(layers(value=5.0)))
    assert not marker.exists()
    arrive(sink, layers(value=5.0), upto=4)
    assert marker.exists()
    sink.abort()
    assert marker.exists()
    update(sink, layers(value=6.0))
    assert not marker.exists()


def test_a_failed_swap_leaves_it_until_a_complete_one(tmp_path):
    marker = tmp_path / "swap"
    broken = [True]

    def hook():
        if broken:
            raise OSError("cannot rebuild the cache")

    sink = make_sink(layers(), marker=marker, after_load=hook)
    with pytest.raises(OSError, match="rebuild"):
        update(sink, layers(value=5.0))
    assert marker.exists()
    again = make_sink(layers(), marker=marker)  # the next process
    assert again.weights == "torn"
    with pytest.raises(Torn):
        again.begin(announce(layers()), partial=True)
    again.begin(announce(layers()))
    again.abort()
    assert again.weights == "torn"
    update(again, layers(value=6.0))
    assert again.weights == "intact"
    assert not marker.exists()


def test_a_marker_that_cannot_be_written_stops_the_swap_before_it_begins(tmp_path):
    with pytest.raises(Validation, match="folder does not exist"):
        make_sink({}, marker=tmp_path / "no" / "swap")
    folder = tmp_path / "there"
    folder.mkdir()
    model = layers()
    sink = StagedSink(model, marker=folder / "swap")
    sink.begin(announce(layers(value=5.0)))
    arrive(sink, layers(value=5.0))
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        sink.commit()
    assert sink.weights == "intact"
    assert not model["embed.weight"].any()


def test_setting_and_clearing_twice_is_fine(tmp_path):
    marker = CrashMarker(tmp_path / "swap")
    marker.clear()
    marker.set()
    marker.set()
    assert marker.is_set
    assert Path(marker.path).read_text().startswith("process ")
    marker.clear()
    assert not marker.is_set


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_worker_that_dies_in_its_swap_begins_as_torn(tmp_path):
    marker = tmp_path / "swap"
    model = sliced.full(7)
    async with replica(kind="slice-0-1-down.weight", seed=1, marker=marker) as worker:
        client = aiosync.HTTPVLLMWeightSyncClient(worker.url)
        assert (await client.ready()).ready
        with pytest.raises(AiosyncError):
            async with aiosync.connect(model, workers=[worker.url]) as sync:
                await sync.send_weights(version=1, budget=BUDGET)
        await worker.process.wait()
    assert await asyncio.to_thread(marker.exists)
    async with replica(kind="slice-0-1", seed=1, marker=marker) as worker:
        client = aiosync.HTTPVLLMWeightSyncClient(worker.url)
        ready = await client.ready()
        assert (ready.ready, ready.reasons) == (False, ["the weights are torn"])
        assert (await worker.facts())["weights"] == "torn"
        async with aiosync.connect(model, workers=[worker.url]) as sync:
            await sync.send_weights(version=2, budget=BUDGET)
        assert (await client.ready()).ready
        assert (await worker.facts())["prints"] == models.fingerprint(sliced.Slice(0, 1, 7))
    assert not await asyncio.to_thread(marker.exists)


def test_an_engine_without_a_sink_has_no_use_for_a_marker(tmp_path):
    config = aiosync.WeightTransferConfig("by_hand", marker=tmp_path / "swap")
    with pytest.raises(Validation, match="loads through a sink"):
        by_hand.WithoutSink(config, None, "cpu", by_hand.tensors())
