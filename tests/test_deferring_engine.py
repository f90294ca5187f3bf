"""A worker engine that queues its processing: updates return early, finish waits for all of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import anyio
import pytest

import aiosync
from aiosync import State


@dataclass
class Init(aiosync.WeightTransferInitInfo):
    pass


@dataclass
class Update(aiosync.WeightTransferUpdateInfo):
    value: int


class Deferring(aiosync.WeightTransferEngine[Init, Update]):
    init_info_cls = Init
    update_info_cls = Update
    defers_processing = True

    def init_transfer_engine(self, init_info): ...

    def start_weight_update(self): ...

    async def receive_weights(self, update_info):
        await self.defer(self.load, update_info.value)

    def load(self, value):
        assert self.go.wait(20)
        if value < 0:
            raise ValueError(f"cannot load {value}")
        self.model.append(value)

    def finish_weight_update(self): ...

    def shutdown(self): ...


async def opened():
    engine = Deferring(aiosync.WeightTransferConfig("deferring"), None, None, [])
    engine.go = threading.Event()
    await engine.init_transfer_engine({})
    await engine.start_weight_update()
    return engine


@pytest.mark.asyncio
async def test_updates_return_when_queued_and_finish_waits_for_all():
    engine = await opened()
    async with engine:
        for value in (1, 2, 3):
            await engine.update_weights({"value": value})
        assert engine.model == []
        with anyio.move_on_after(0.2) as scope:  # the queue is full: backpressure
            await engine.update_weights({"value": 4})
        assert scope.cancelled_caught
        engine.go.set()
        await engine.drain_pending()
        await engine.drain_pending()
        assert engine.model[:3] == [1, 2, 3]
        await engine.finish_weight_update("7")
        assert engine.model == [1, 2, 3, 4]  # the caller had left, its accepted work had not
        assert engine.version.label == "7"
        assert engine.weights == "intact"
        await engine.drain_pending()


@pytest.mark.asyncio
async def test_the_first_error_of_deferred_work_ends_the_round():
    engine = await opened()
    async with engine:
        await engine.update_weights({"value": -5})
        engine.go.set()
        with pytest.raises(Exception, match="cannot load -5"):
            await engine.finish_weight_update("1")
        assert engine.state is State.FAILED
        assert engine.version is None
        await engine.init_transfer_engine({})
        await engine.start_weight_update()
        await engine.update_weights({"value": 9})
        await engine.finish_weight_update("1")
        assert engine.model == [9]


@pytest.mark.asyncio
async def test_defer_outside_of_a_round_is_refused():
    engine = await opened()
    async with engine:
        await engine.abort_weight_update()
        with pytest.raises(aiosync.InvalidTransition):
            await engine.defer(print)
