"""Trainers that write to their parameters while a round reads them."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager

import pytest
import torch
from ranked import ranks_over
from torch import nn

import aiosync
from aiosync import ModuleSource, State, Validation, WeightTransferConfig
from aiosync.reading import Reading
from aiosync.testing import DirectClient
from transports.loopback import LoopbackLink

pytestmark = pytest.mark.asyncio


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@asynccontextmanager
async def pair(source, *, sink="staged", dtype=torch.float32):
    """A trainer's engine over shared memory, and the worker's."""
    config = WeightTransferConfig(backend="ipc", sink=sink)
    model = net().to(dtype)
    async with aiosync.IPCWeightTransferEngine(config, None, "cpu", model) as worker:
        async with aiosync.connect(source, workers=[DirectClient(worker)]) as sync:
            yield sync, worker


@contextmanager
def before_the_sender(sync, method, act):
    """The trainer acts when the sender's `method` is called."""
    sender, bare = sync.sender, getattr(sync.sender, method)

    def acted(*args):
        act()
        return bare(*args)

    setattr(sender, method, acted)
    try:
        yield
    finally:
        setattr(sender, method, bare)


def at_the_end_of_the_pass(sync, act):
    """The workers have nearly all of it when the trainer acts."""
    return before_the_sender(sync, "finish", act)


def step(model, kind=torch.optim.SGD, **options):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    kind(model.parameters(), lr=0.1, **options).step()


def add_to_the_last(model):
    with torch.no_grad():
        model[1].bias += 1


WAYS = {
    "sgd": (step, "0.weight and 3 more"),
    "adamw": (lambda model: step(model, torch.optim.AdamW), "0.weight and 3 more"),
    "one by one": (lambda model: step(model, foreach=False), "0.weight and 3 more"),
    "checkpoint": (lambda model: model.load_state_dict(net().state_dict()), "0.weight and 3 more"),
    "one tensor": (add_to_the_last, "1.bias"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("before", [0, 1, 3])  # rounds: the module is looked at otherwise each time
async def test_a_step_in_the_middle_of_a_round_is_no_version(way, before):
    act, named = WAYS[way]
    model = net()
    async with pair(model) as (sync, worker):
        for _ in range(before):
            await sync.send_weights()
        held = [parameter.clone() for parameter in worker.model.parameters()]
        with at_the_end_of_the_pass(sync, lambda: act(model)):
            with pytest.raises(Validation, match=f"^{named} changed while .* mixture") as caught:
                await sync.send_weights(version=7)
        error = caught.value
        assert (error.tensor, error.rank, error.phase) == (named.split()[0], 0, "update")
        assert "released" in error.next_step
        assert error.report.outcome == "failed"
        assert (sync.state, worker.weights) == (State.INITIALIZED, "intact")
        assert all(map(torch.equal, worker.model.parameters(), held))
        report = await sync.send_weights(version=7)
        assert (report.outcome, report.recovered) == ("committed", False)
        assert all(map(torch.equal, worker.model.parameters(), model.parameters()))


async def test_a_cast_does_not_hide_it():
    model = net()
    source = ModuleSource(model, dtype=torch.bfloat16, rename=lambda name: f"model.{name}")
    worker_model = nn.Module()
    worker_model.model = net().to(torch.bfloat16)
    config = WeightTransferConfig("loopback")
    with LoopbackLink() as link:
        async with aiosync.LoopbackWeightTransferEngine(
            config, None, torch.device("cpu"), worker_model
        ) as worker:
            trainer = aiosync.LoopbackTrainerWeightTransferEngine(
                client=DirectClient(worker), source=source, link=link
            )
            async with trainer:
                await trainer.send_weights()
                with at_the_end_of_the_pass(trainer, lambda: add_to_the_last(model)):
                    with pytest.raises(Validation, match=r"^model\.1\.bias changed"):
                        await trainer.send_weights()
                await trainer.send_weights()
                assert torch.equal(worker_model.model[1].bias, model[1].bias.to(torch.bfloat16))


async def test_a_worker_that_writes_at_once_is_torn_and_says_so():
    model = net()
    async with pair(model, sink="in_place") as (sync, worker):
        with at_the_end_of_the_pass(sync, lambda: step(model)):
            with pytest.raises(Validation, match="mixture") as caught:
                await sync.send_weights(version=1)
        assert caught.value.report.members[0].weights == worker.weights == "torn"
        await sync.send_weights(version=2)
        assert worker.weights == "intact"


async def test_who_waits_for_the_release_may_step_at_once():
    model = net()
    async with pair(model) as (sync, worker):
        sync.gate("start", lambda _: add_to_the_last(model))  # before the pass
        worker.gate("complete", lambda _: step(model))  # after it
        sent = model[1].bias.detach() + 1
        update = sync.begin_update(version=1)
        await update.released
        step(model)
        assert (await update).outcome == "committed"
        assert torch.equal(worker.model[1].bias, sent)


class Merging(ModuleSource):
    """Writes to the module while it yields, and undoes it."""

    def iter_full(self):
        with torch.no_grad():
            self.module[0].weight += 1
        yield from super().iter_full()
        with torch.no_grad():
            self.module[0].weight -= 1


@pytest.mark.parametrize("how", ["overridden", "session", "buffer", "session of the caller"])
async def test_sources_that_write_by_themselves_raise_no_alarm(how):
    model = net()
    names = [name for name, _ in model.named_parameters()]
    tensors = [parameter.detach() for parameter in model.parameters()]

    @contextmanager
    def merged():
        with torch.no_grad():
            model[0].weight += 1
        yield
        with torch.no_grad():
            model[0].weight -= 1

    def reused():
        for name, tensor in zip(names, tensors, strict=True):
            yield name, torch.empty_like(tensor).copy_(tensor)

    source = {
        "overridden": lambda: Merging(model),
        "session": lambda: ModuleSource(model, session=merged),
        "buffer": lambda: aiosync.IteratorSource(
            names, [t.dtype for t in tensors], [tuple(t.shape) for t in tensors]
        ),
        "session of the caller": lambda: model,
    }[how]()
    async with pair(source) as (sync, _):
        for _ in range(3):
            if how == "session of the caller":
                async with sync.session() as session:
                    for name, parameter in model.named_parameters():
                        await session.send(name, parameter)
                        step(model)
                continue
            if how == "buffer":
                source.set(reused())
            assert (await sync.send_weights()).outcome == "committed"


@pytest.mark.parametrize("method", ["write", "finish"])
async def test_all_trainer_ranks_hear_of_it(method):
    async with ranks_over(1) as (it, engines):
        await it.send()
        held = it.holders()
        finishing = []
        with at_the_end_of_the_pass(it.trainer, lambda: finishing.append(method)):
            with before_the_sender(it.trainer, method, lambda: step(it.model)):
                errors = await it.send()
        assert finishing == ["finish"] * (method == "finish")  # else nobody got that far
        assert [type(error).kind for error in errors] == [Validation] * 2
        assert [error.rank for error in errors] == [0, 0]
        assert all("changed while" in str(error) for error in errors)
        assert [engine.state for engine in engines] == [State.INITIALIZED] * 2
        assert [report.outcome for report in await it.send()] == ["committed"] * 2
        assert it.holders() == held == {"w0"}


async def test_tensors_that_count_nothing_do_not_hide_those_that_do():
    with torch.inference_mode():
        model = net()
    model[1] = nn.Linear(4, 4)
    async with pair(model) as (sync, worker):
        await sync.send_weights()
        with at_the_end_of_the_pass(sync, lambda: add_to_the_last(model)):
            with pytest.raises(Validation, match=r"^1\.bias changed"):
                await sync.send_weights()
        await sync.send_weights()
        assert torch.equal(worker.model[0].weight, model[0].weight)


async def test_nothing_is_compared_where_a_pass_may_write():
    def feed(source):
        return aiosync.feed.SourceFeed(source)

    assert Reading.of(feed(Merging(net()))) is None
    assert Reading.of(feed(ModuleSource(net(), session=torch.no_grad))) is None
    assert Reading.of(feed(ModuleSource(net()))) is not None


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
async def test_of_very_many_tensors_every_other_is_asked(monkeypatch, batch):
    monkeypatch.setattr("aiosync.reading._MOST", 5)
    tensors = [torch.zeros(1) for _ in range(10)]
    names = [f"t{at}" for at in range(10)]
    few = Reading(5, lambda: names[:5], tensors[:5])
    tensors[3].add_(1)
    with pytest.raises(Validation, match=r"^t3 changed"):
        few.check(rank=0)
    for known in (True, False):
        reading = Reading(len(names), lambda: names, tensors if known else None)
        for first in range(0, 0 if known else 10, batch):
            reading.note(tensors[first : first + batch])
        reading.check(rank=0)
        tensors[6].add_(1)
        with pytest.raises(Validation, match=r"^t6 changed"):
            reading.check(rank=0)
