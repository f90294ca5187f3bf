"""Parameters that a gate's check replaces, on either side: no round counts that missed them."""

from __future__ import annotations

import gc
import weakref
from contextlib import asynccontextmanager

import anyio
import pytest
import torch
from torch import nn

import aiosync
from aiosync import Coverage, Validation, WeightTransferConfig
from aiosync.testing import DirectClient


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def replace(module: nn.Module, value: float, *, rows: int = 4) -> None:
    module[0].weight = nn.Parameter(torch.full((rows, 4), value))


@asynccontextmanager
async def pair(sink: str = "staged"):
    """The trainer's model, its engine, the worker's."""
    config = WeightTransferConfig(backend="ipc", sink=sink)
    async with aiosync.IPCWeightTransferEngine(config, None, "cpu", net()) as worker:
        trained = net()
        async with aiosync.connect(trained, workers=[DirectClient(worker)]) as sync:
            yield trained, sync, worker


@pytest.mark.asyncio
@pytest.mark.parametrize("before", [0, 1, 3])  # rounds: it is looked at otherwise each time
async def test_what_the_check_of_a_start_gate_replaces_is_what_is_sent(before):
    async with pair() as (trained, sync, worker):
        for _ in range(before):
            await sync.send_weights()
        sync.gate("start", lambda context: replace(trained, float(context.version)))
        for version in (7, 8):
            await sync.send_weights(version=version)
            assert torch.equal(worker.model[0].weight, trained[0].weight)
            assert worker.model[0].weight.eq(version).all()


@pytest.mark.asyncio
@pytest.mark.parametrize("before", [0, 3])
async def test_a_start_gate_whose_check_changes_a_shape_costs_the_round(before):
    async with pair() as (trained, sync, worker):
        for _ in range(before):
            await sync.send_weights()
        remove = sync.gate("start", lambda _: replace(trained, 7.0, rows=2))
        with pytest.raises(Validation, match=r"0\.weight"):
            await sync.send_weights()
        remove()
        replace(trained, 8.0)
        await sync.send_weights()
        assert worker.model[0].weight.eq(8).all()


@pytest.mark.asyncio
@pytest.mark.parametrize(("sink", "weights"), [("staged", "intact"), ("in_place", "torn")])
async def test_what_the_check_of_a_complete_gate_replaces_gets_no_version(sink, weights):
    async with pair(sink) as (trained, sync, worker):
        await sync.send_weights(version=1)
        remove = worker.gate("complete", lambda _: replace(worker.model, 9.0))
        with pytest.raises(Coverage, match="replaced"):
            await sync.send_weights(version=2)
        assert (worker.version.order, worker.weights) == (1, weights)
        remove()
        await sync.send_weights(version=3)
        assert torch.equal(worker.model[0].weight, trained[0].weight)
        assert (worker.version.order, worker.weights) == (3, "intact")


@pytest.mark.asyncio
async def test_a_round_that_fails_before_its_pass_keeps_no_parameter():
    async with pair() as (trained, sync, worker):
        for _ in range(2):
            await sync.send_weights()
        worker.model.more = nn.Linear(2, 2)
        with pytest.raises(Coverage, match="more"):
            await sync.send_weights()
        before = weakref.ref(trained[0].weight)
        replace(trained, 7.0)
        gc.collect()
        assert before() is None
        del worker.model.more
        await sync.send_weights()
        assert worker.model[0].weight.eq(7).all()


@pytest.mark.asyncio
@pytest.mark.parametrize("before", [0, 1, 2, 3])
async def test_what_a_context_around_the_round_replaces_is_what_is_sent(before):
    async with pair() as (trained, sync, worker):
        for _ in range(before):
            await sync.send_weights()

        @asynccontextmanager
        async def around(member):
            replace(trained, 7.0)
            yield

        await sync.send_weights(around=[around])
        assert worker.model[0].weight.eq(7).all()


@pytest.mark.asyncio
@pytest.mark.parametrize("before", [0, 1, 2, 3])
async def test_what_is_replaced_while_a_worker_takes_long_to_start_is_what_is_sent(before):
    async with pair() as (trained, sync, worker):
        for _ in range(before):
            await sync.send_weights()

        async def slow(context):
            replace(trained, 7.0)
            await anyio.sleep(0.05)  # longer than a look counts

        worker.gate("start", slow)
        await sync.send_weights()
        assert worker.model[0].weight.eq(7).all()


@pytest.mark.asyncio
async def test_a_plan_keeps_no_tensor():
    async with pair() as (trained, sync, _):
        for _ in range(2):
            await sync.plan()
            gone = weakref.ref(trained[0].weight)
            replace(trained, 7.0)
            gc.collect()
            assert gone() is None
