"""The calls of the first weight transfer API, between two engines of today."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from looped import change

import aiosync
from aiosync import legacy
from aiosync.testing import DirectClient

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("free_shm")]


@asynccontextmanager
async def worker_of(model, **config):
    engine = aiosync.WeightTransferEngineFactory.create_engine(
        config=aiosync.WeightTransferConfig("ipc", **config),
        vllm_config=None,
        device=torch.device("cpu"),
        model=model,
    )
    async with engine:
        yield engine


@dataclass(slots=True)
class SendArgs:
    workers: Any
    version: int | None = None
    packed: bool = True
    post_iter_func: Any = None


async def walked(model):
    for name, parameter in model.named_parameters():
        await asyncio.sleep(0)
        yield name, parameter


ITERATORS = {
    "generator": lambda model: model.named_parameters(),
    "list": lambda model: list(model.named_parameters()),
    "async": walked,
}
ARGS = {
    "mapping": lambda client: {"workers": [client], "version": None},
    "object": lambda client: SimpleNamespace(url=[client], timeout=20, packed=False),
    "dataclass": lambda client: SendArgs([client], version=4),
}


@pytest.mark.parametrize("iterator", ITERATORS)
@pytest.mark.parametrize("args", ARGS)
async def test_the_static_sender(iterator, args):
    model, copy = models.make("odd", 1), models.make("odd", 2)
    async with worker_of(copy) as worker:
        trainer_args = ARGS[args](DirectClient(worker))
        report = await legacy.trainer_send_weights(ITERATORS[iterator](model), trainer_args)
        assert report.outcome == "committed"
        assert report.version.label == (4 if args == "dataclass" else 1)
        assert models.fingerprint(copy) == models.fingerprint(model)


@pytest.mark.parametrize("iterator", ITERATORS)
async def test_with_lists_the_iterator_is_not_gathered_first(iterator):
    model, copy = models.make("small", 1), models.make("small", 2)
    named = dict(model.named_parameters())
    halved = [str(p.dtype).removeprefix("torch.") for p in named.values()]
    async with worker_of(copy) as worker:
        report = await legacy.trainer_send_weights(
            ITERATORS[iterator](model),
            {
                "workers": [DirectClient(worker)],
                "names": list(named),
                "dtype_names": halved,
                "shapes": [list(p.shape) for p in named.values()],
                "post_iter_func": lambda pair: pair[1].detach() * 2,
            },
        )
        assert report.outcome == "committed"
    for (_, tensor), twice in zip(copy.named_parameters(), named.values(), strict=True):
        assert torch.equal(tensor, twice * 2)


async def test_bad_arguments_are_named_and_the_iterator_is_closed():
    closed = []

    def iterator():
        try:
            yield "a", torch.ones(1)
            yield "b", torch.ones(1)
        finally:
            closed.append(1)

    async with worker_of(models.make("small", 1)) as worker:
        client = DirectClient(worker)
        for bad, text in (
            ({}, "where the workers are"),
            ({"workers": [client], "group": 3}, "has no group"),
            ({"workers": [client], "names": ["a"]}, "names, dtype_names, shapes come together"),
            ({"workers": [client]}, "does not cover the model"),
        ):
            one = iterator()
            next(one)
            with pytest.raises(ValueError, match=text):
                await legacy.trainer_send_weights(one, bad)
            assert closed.pop() == 1


class Handing:
    """A worker of that age: it hands its loader to the receiver."""

    def __init__(self, engine, load, whole):
        self.inner, self.load, self.whole = DirectClient(engine), load, whole

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def start_weight_update(self, *, header=None):
        if not self.whole:
            return await self.inner.start_weight_update(header=header)
        return None

    async def finish_weight_update(self, weight_version=None, *, header=None):
        if not self.whole:
            return await self.inner.finish_weight_update(weight_version, header=header)
        return None

    async def prepare_weight_update(self, *, header=None):
        if not self.whole:
            return await self.inner.prepare_weight_update(header=header)
        return None

    async def update_weights(self, update_info, *, header=None):
        await legacy.receive_weights(
            update_info, self.load, engine=self.inner.engine, header=header
        )


@pytest.mark.parametrize("sink", ["staged", "in_place"])
@pytest.mark.parametrize("whole", [False, True])
async def test_the_receiver_is_handed_the_loader(whole, sink):
    model, loaded = models.make("odd", 1), {}

    def load_weights(pairs):
        for name, tensor in pairs:
            loaded[name] = tensor.clone()

    async with worker_of(None, sink=sink) as worker:
        client = Handing(worker, load_weights, whole)
        info = aiosync.IPCTrainerInitInfo(rank=0, packed=True)
        async with await aiosync.WeightTransferTrainerFactory.trainer_init(
            init_info=info, client=client, source=model
        ) as trainer:
            for _ in range(2):
                loaded.clear()
                await trainer.send_weights(timeout=20)
                assert set(loaded) == {name for name, _ in model.named_parameters()}
                for name, parameter in model.named_parameters():
                    assert torch.equal(loaded[name], parameter)
                change_floats(model)
            assert worker.state == "initialized"


def change_floats(model):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dtype.is_floating_point:
            parameter.add_(1)


async def test_a_loader_that_raises_ends_the_round():
    model = models.make("small", 1)

    def load_weights(pairs):
        raise KeyError("no such layer")

    async with worker_of(None) as worker:
        client = Handing(worker, load_weights, whole=True)
        info = aiosync.IPCTrainerInitInfo(rank=0, packed=True)
        async with await aiosync.WeightTransferTrainerFactory.trainer_init(
            init_info=info, client=client, source=model
        ) as trainer:
            with pytest.raises(Exception, match="no such layer"):
                await trainer.send_weights(timeout=20)
            assert worker.state == "failed"
            change(model)
            with pytest.raises(aiosync.Fenced):
                await legacy.receive_weights({}, load_weights, engine=worker)
