"""The same job for trainers without an event loop."""

from __future__ import annotations

import asyncio
import signal
import threading

import models
import pytest
import torch
from paced import Hold, Paced
from processes import program, replica

import aiosync
import aiosync.blocking


async def in_thread(fn):
    """Run a synchronous trainer beside the loop that watches the replica."""
    return await asyncio.get_running_loop().run_in_executor(None, fn)


@pytest.mark.asyncio
async def test_rounds_from_synchronous_code_and_from_four_threads():
    model = models.make("small", 1)
    async with replica(seed=2) as worker:

        def train():
            with aiosync.blocking.connect(model, workers=[worker.url]) as sync:
                assert sync.send_weights(version=1).outcome == "committed"
                outcomes = []

                def send():
                    outcomes.append(sync.send_weights(on_busy="wait").outcome)

                threads = [threading.Thread(target=send) for _ in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(30)
                assert outcomes == ["committed"] * 4
                assert sync.state == "initialized"

        await in_thread(train)
        facts = await worker.facts()
        assert facts["prints"] == models.fingerprint(model)
        assert facts["version"] == 5


@pytest.mark.asyncio
async def test_handle_timeout_leaves_the_round_running_and_cancel_ends_it():
    hold = Hold(3)
    source = Paced(models.make("small", 1), hold)
    async with replica(seed=2) as worker:

        def train():
            with aiosync.blocking.connect(source, workers=[worker.url]) as sync:
                update = sync.begin_update(version=1)
                assert hold.reached.wait(20)
                with pytest.raises(TimeoutError):
                    update.wait(timeout=0.2)
                assert not update.done
                assert not update.wait_released(timeout=0.1)
                hold.released.set()
                assert update.wait(timeout=20).outcome == "committed"
                assert update.wait_released(timeout=1)
                hold.reached.clear()
                hold.released.clear()
                update = sync.begin_update(version=2)
                assert hold.reached.wait(20)
                update.cancel()
                hold.released.set()
                with pytest.raises(aiosync.RoundCancelled):
                    update.wait(timeout=20)
                assert sync.send_weights(version=2).outcome == "committed"

        await in_thread(train)
        assert (await worker.facts())["prints"] == models.fingerprint(source.module)


@pytest.mark.fault("A-CANCEL-8")
@pytest.mark.asyncio
async def test_inside_a_running_loop_it_refuses_with_advice():
    with pytest.raises(aiosync.WrongLoop, match="await"):
        with aiosync.blocking.connect(torch.nn.Linear(2, 2), workers=["unix:///nowhere"]):
            pass


@pytest.mark.fault("A-CANCEL-4")
@pytest.mark.asyncio
async def test_ctrl_c_in_a_synchronous_trainer():
    async with replica(seed=2) as worker:
        old = await worker.facts()
        async with program("blocking_trainer.py", worker.url) as trainer:
            assert (await trainer.stdout.readline()).decode().strip() == "holding"
            trainer.signal(signal.SIGINT)
            async with asyncio.timeout(20):
                assert (await trainer.stdout.readline()).decode().strip() == "interrupted"
            await trainer.wait()
        facts = await worker.wait_state("idle", "initialized", "failed")
        assert facts["prints"] == old["prints"]
        assert facts["weights"] == "intact"
