"""Known faults of versions and of what was computed under them, in whole rounds."""

from __future__ import annotations

import asyncio

import pytest
from looped import BUDGET, change, looped

import aiosync
from aiosync import Pause, Refused, State, Validation, Version

pytestmark = pytest.mark.asyncio


class Cache:
    """Answers that were computed under some weights; `flush` empties it, slowly or not at all."""

    def __init__(self, worker):
        self.worker = worker
        self.answers = {}
        self.flushed = []
        self.errors = []
        self.seconds = 0.0
        worker.generation.tie_cache("flush", self.flush)

    async def flush(self, weights_id):
        if self.errors:
            raise self.errors.pop()
        await asyncio.sleep(self.seconds)
        self.flushed.append(weights_id)
        self.answers.clear()

    async def ask(self, prompt):
        async with self.worker.generation.request():
            if prompt not in self.answers:
                self.answers[prompt] = float(next(self.worker.model.parameters()).detach().sum())
            return self.answers[prompt]


@pytest.mark.parametrize("pause", [None, Pause(clear_cache=False), Pause(mode="wait")])
async def test_a_version_6_a_cache_is_emptied_with_the_swap(pause):
    async with looped() as pair:
        cache = Cache(pair.worker)
        old = await cache.ask("x")
        change(pair.model)
        await pair.trainer.send_weights(version=1, pause=pause, budget=BUDGET)
        if pause is not None and not pause.clear_cache:
            assert (cache.flushed, await cache.ask("x")) == ([], old)  # as the caller said
            return
        assert cache.flushed[-1] == pair.worker.generation.weights.weights_id
        assert len(cache.flushed) == (1 if pause is None else 2)
        assert await cache.ask("x") != old


async def test_a_version_6_a_cache_that_cannot_be_emptied_costs_the_round():
    async with looped(workers=2) as pair:
        caches = [Cache(worker) for worker in pair.workers]
        await pair.trainer.send_weights(version=1)
        old = await caches[1].ask("x")
        change(pair.model)
        caches[1].errors.append(RuntimeError("the cache is stuck"))
        with pytest.raises(aiosync.AiosyncError, match="the cache is stuck") as caught:
            await pair.trainer.send_weights(version=2, budget=BUDGET)
        assert [(m.outcome, m.weights) for m in caught.value.report.members] == [
            ("committed", "intact"),
            ("failed", "intact"),
        ]
        # Its weights are the old ones, whole; what is cached fits them, and both go on serving.
        assert [worker.version.label for worker in pair.workers] == [2, 1]
        assert await caches[1].ask("x") == old
        assert [worker.generation.state for worker in pair.workers] == ["running"] * 2
        await pair.trainer.send_weights(version=2, budget=BUDGET)  # a mixed round is repeated
        assert await caches[1].ask("x") != old


async def test_a_version_6_a_slow_hook_and_a_request_across_the_update():
    async with looped() as pair:
        cache = Cache(pair.worker)
        cache.seconds = 1.0
        await pair.trainer.send_weights(version=1)
        entered, go = asyncio.Event(), asyncio.Event()

        async def generate():
            async with pair.worker.generation.request() as request:
                request.produced()
                entered.set()
                await go.wait()
                await request.checkpoint()  # parked here, over the swap
                request.produced()
                return request.spans
            return None

        generating = asyncio.create_task(generate())
        await entered.wait()
        sending = asyncio.create_task(pair.trainer.send_weights(version=2, budget=BUDGET))
        await pair.worker.generation.wait_for("pausing")
        go.set()
        report = await sending
        spans = await generating
        assert [span.version for span in spans] == ["1", "2"]
        assert len({span.weights_id for span in spans}) == 2
        assert report.pause_seconds >= 0.9  # the hook's time is time without generation


@pytest.mark.parametrize("lineage", ["the run", "another run"])
async def test_a_version_2_a_trainer_that_counts_from_one_again(lineage):
    async with looped(lineage="the run") as pair:
        await pair.trainer.send_weights(version=57)
        await pair.trainer.shutdown()
        async with aiosync.LoopbackTrainerWeightTransferEngine(
            client=pair.trainer.links[0].client,
            source=pair.model,
            link=pair.link,
            buffer_size_bytes=4096,
            lineage=lineage,
        ) as fresh:
            await fresh.initialize()
            if lineage == "another run":
                assert (await fresh.send_weights()).version.order == 1
                return
            for version in (1, 57):
                with pytest.raises(Refused) as caught:
                    await fresh.send_weights(version=version)
                assert caught.value.detail["version"]["order"] == 57
                assert caught.value.weights == "intact"
            for version in (-1, 2**63, None, True, 1.5):
                with pytest.raises(Validation):
                    await fresh.send_weights(version=version)
            assert (await fresh.send_weights()).version.order == 58  # it has read the worker's
            report = await fresh.send_weights(version=9, rollback=True)
            assert report.version == Version(9, "the run", 9)
            assert fresh.state is State.INITIALIZED
