"""A worker whose trainer goes away leaves ``updating`` by itself and serves the old version."""

from __future__ import annotations

import asyncio
import signal

import models
import pytest
from processes import program, replica

import aiosync


async def line(process):
    async with asyncio.timeout(30):
        return (await process.stdout.readline()).decode().strip()


async def holding_trainer(process):
    assert await line(process) == "connected"
    assert await line(process) == "holding"


async def assert_a_new_trainer_gets_through(worker, version=1):
    model = models.make("small", 9)
    async with aiosync.connect(model, workers=[worker.url]) as sync:
        await sync.send_weights(version=version)
    facts = await worker.facts()
    assert facts["prints"] == models.fingerprint(model)


@pytest.mark.fault("A-HANG-8", "A-STATE-2")
@pytest.mark.asyncio
@pytest.mark.parametrize("at", [0, 3, 6], ids=["first", "middle", "after-last"])
async def test_trainer_killed(at):
    async with replica(seed=2, lease=5) as worker:
        old = await worker.facts()
        async with program("trainer.py", worker.url, "--hold", str(at)) as trainer:
            await holding_trainer(trainer)
            assert (await worker.facts())["state"] == "updating"
            await trainer.kill()
            facts = await worker.wait_state("initialized", "failed", seconds=10)
            assert facts["prints"] == old["prints"]
            assert facts["weights"] == "intact"
            assert facts["version"] is None
        await assert_a_new_trainer_gets_through(worker)


@pytest.mark.fault("A-HANG-8")
@pytest.mark.asyncio
async def test_trainer_stopped_the_lease_ends_the_round():
    async with replica(seed=2, lease=1) as worker:
        old = await worker.facts()
        async with program("trainer.py", worker.url, "--hold", "3") as trainer:
            await holding_trainer(trainer)
            trainer.signal(signal.SIGSTOP)
            facts = await worker.wait_state("initialized", "failed", seconds=10)
            assert facts["prints"] == old["prints"]
            await assert_a_new_trainer_gets_through(worker)
            fresh = await worker.facts()
            trainer.signal(signal.SIGCONT)
            # The fenced trainer wakes up: it fails by name, and its bytes do not land.
            word = await line(trainer)
            assert word not in ("", "committed")
            assert (await worker.facts())["prints"] == fresh["prints"]


@pytest.mark.asyncio
async def test_trainer_that_lives_and_is_slow_keeps_its_lease():
    async with replica(seed=2, lease=1) as worker:
        async with program("trainer.py", worker.url, "--hold", "3", "--lease", "1") as trainer:
            await holding_trainer(trainer)
            await asyncio.sleep(2.5)
            assert (await worker.facts())["state"] == "updating"
            await trainer.kill()


@pytest.mark.fault("A-CANCEL-4")
@pytest.mark.asyncio
async def test_ctrl_c_ends_the_trainer_and_frees_the_worker(free_shm):
    async with replica(seed=2) as worker:
        async with program("trainer.py", worker.url, "--hold", "3") as trainer:
            await holding_trainer(trainer)
            trainer.signal(signal.SIGINT)
            assert await line(trainer) == "interrupted"
            await trainer.wait()
            facts = await worker.wait_state("idle", "initialized", "failed")
            assert facts["weights"] == "intact"
        await assert_a_new_trainer_gets_through(worker)


@pytest.mark.fault("A-STATE-1")
@pytest.mark.asyncio
async def test_second_trainer_during_a_round_is_refused_and_the_first_is_unharmed():
    async with replica(seed=2) as worker:
        async with program("trainer.py", worker.url, "--hold", "3") as trainer:
            await holding_trainer(trainer)
            with pytest.raises(aiosync.Busy) as caught:
                async with aiosync.connect(models.make("small", 9), workers=[worker.url]):
                    pass
            assert caught.value.detail["owner"]
            assert (await worker.facts())["state"] == "updating"
            await trainer.kill()


@pytest.mark.fault("A-RDZV-5")
@pytest.mark.asyncio
async def test_trainer_taken_over_between_rounds_is_fenced():
    first, second = models.make("small", 8), models.make("small", 9)
    async with replica(seed=2) as worker:
        async with aiosync.connect(first, workers=[worker.url]) as old:
            await old.send_weights(version=1)
            async with aiosync.connect(second, workers=[worker.url]) as new:
                await new.send_weights(version=1)
                with pytest.raises(aiosync.Fenced) as caught:
                    await old.send_weights(version=2)
                assert "another trainer has the workers now" in caught.value.next_step
                assert (await worker.facts())["prints"] == models.fingerprint(second)
                await new.send_weights(version=2)


@pytest.mark.asyncio
async def test_restarted_worker_is_noticed_before_a_byte_moves(tmp_path):
    model = models.make("small", 8)
    path = tmp_path / "control.sock"
    async with replica(seed=2, path=path) as worker:
        sync = await aiosync.WeightTransferTrainerFactory.trainer_init(
            aiosync.IPCTrainerInitInfo(rank=0),
            client=aiosync.HTTPVLLMWeightSyncClient(worker.url),
            source=model,
        )
        await sync.send_weights(version=1)
        await worker.kill()
    async with replica(seed=3, path=path) as worker, sync:
        report = await sync.send_weights(version=2)
        assert report.recovered
        assert (await worker.facts())["prints"] == models.fingerprint(model)


@pytest.mark.asyncio
async def test_a_fenced_trainer_does_not_take_the_worker_back_by_itself():
    first, second = models.make("small", 8), models.make("small", 9)
    async with replica(seed=2) as worker:
        async with aiosync.connect(first, workers=[worker.url]) as old:
            async with aiosync.connect(second, workers=[worker.url]) as new:
                for version in (1, 2):
                    with pytest.raises(aiosync.Fenced):
                        await old.send_weights(version=version)
                await new.send_weights(version=1)
            await old.initialize()
            await old.send_weights(version=3)
            assert (await worker.facts())["prints"] == models.fingerprint(first)
