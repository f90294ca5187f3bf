"""One trainer engine under several event loops, and in a forked child."""

from __future__ import annotations

import asyncio
import os

import models
import pytest
import torch
from paced import Hold, Paced

import aiosync
from aiosync import RoundCancelled, State, WrongLoop, WrongProcess
from aiosync.testing import DirectClient
from transports.loopback import LoopbackLink


@pytest.fixture
def engines():
    model, copy = models.make("small", 1), models.make("small", 2)
    with LoopbackLink() as link:
        worker = aiosync.WeightTransferEngineFactory.create_engine(
            aiosync.WeightTransferConfig("loopback"), None, torch.device("cpu"), copy
        )
        trainer = aiosync.LoopbackTrainerWeightTransferEngine(
            client=DirectClient(worker), source=Paced(model), link=link, buffer_size_bytes=4096
        )
        yield trainer, worker, model, copy

        async def close():
            await trainer.aclose()
            await worker.aclose()

        asyncio.run(close())


def check(trainer, worker, model, copy):
    assert models.fingerprint(copy) == models.fingerprint(model)
    assert trainer.state is worker.state is State.INITIALIZED


async def held(hold):
    async with asyncio.timeout(20):
        while not hold.reached.is_set():
            await asyncio.sleep(0.005)


def test_two_loops_one_after_the_other(engines):
    trainer, worker, model, copy = engines
    for label in (1, 2, 3):
        with torch.no_grad():
            next(model.parameters()).add_(1)
        report = asyncio.run(trainer.send_weights(version=label))
        assert report.outcome == "committed"
        assert not report.recovered
        check(trainer, worker, model, copy)


def test_loop_that_ends_during_a_round_leaves_a_usable_engine(engines):
    trainer, worker, model, copy = engines
    hold = Hold(2)
    trainer.source.before = hold

    async def abandon():
        trainer.begin_update(version=1)
        await held(hold)
        asyncio.get_running_loop().call_later(0.1, hold.released.set)

    asyncio.run(abandon())
    assert trainer.state in (State.INITIALIZED, State.FAILED)
    hold.released.set()
    trainer.source.before = lambda _: None
    assert asyncio.run(trainer.send_weights(version=1)).outcome == "committed"
    check(trainer, worker, model, copy)


def test_round_that_was_cancelled_before_its_first_step(engines):
    trainer, worker, model, copy = engines

    async def abandon():
        update = trainer.begin_update(version=1)
        update._task.cancel()  # as a loop that shuts down does
        with pytest.raises(RoundCancelled):
            await update
        assert update.released.is_set()

    asyncio.run(abandon())
    assert asyncio.run(trainer.send_weights(version=1)).outcome == "committed"
    check(trainer, worker, model, copy)


def test_worker_whose_loop_ended_in_a_round_can_be_used_again(engines):
    trainer, worker, model, copy = engines

    async def abandon():
        await worker.init_transfer_engine({"link": "none", "reader": 0, "buffer_size_bytes": 64})

    with pytest.raises(aiosync.Validation):
        asyncio.run(abandon())
    assert worker.state is State.FAILED
    assert asyncio.run(trainer.send_weights()).outcome == "committed"
    check(trainer, worker, model, copy)


@pytest.mark.asyncio
async def test_round_under_way_under_another_loop():
    model, copy = models.make("small", 1), models.make("small", 2)
    hold = Hold(2)
    with LoopbackLink() as link:
        worker = aiosync.WeightTransferEngineFactory.create_engine(
            aiosync.WeightTransferConfig("loopback"), None, torch.device("cpu"), copy
        )
        trainer = aiosync.LoopbackTrainerWeightTransferEngine(
            client=DirectClient(worker), source=Paced(model, hold), link=link
        )
        async with worker, trainer:
            update = trainer.begin_update(version=1)
            await held(hold)
            for on_busy in ("raise", "wait", "supersede"):
                with pytest.raises(WrongLoop):
                    await asyncio.to_thread(
                        lambda how=on_busy: asyncio.run(trainer.send_weights(on_busy=how))
                    )
            assert not update.done
            hold.released.set()
            assert (await update).outcome == "committed"


def test_forked_child(engines):
    trainer, worker, model, copy = engines
    asyncio.run(trainer.send_weights(version=1))
    seq = worker.machine.seq

    async def child() -> list[str]:
        found = []
        for call in (
            trainer.send_weights,
            trainer.initialize,
            trainer.shutdown,
            trainer.reset,
            trainer.aclose,
        ):
            try:
                await call()
            except Exception as error:
                found.append(type(error).__name__)
            else:
                found.append("nothing")
        try:
            trainer.begin_update()
        except Exception as error:
            found.append(type(error).__name__)
        return found

    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            names = asyncio.run(child())
            text = ",".join(names) + f" {worker.machine.seq}"
        except BaseException as error:
            text = repr(error)
        os.write(writable, text.encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    assert text == ",".join([WrongProcess.__name__] * 6) + f" {seq}"
    assert asyncio.run(trainer.send_weights(version=2)).outcome == "committed"
    check(trainer, worker, model, copy)
