"""A round given up k turns of the loop after each of its transitions, in both ways."""

from __future__ import annotations

import asyncio

import anyio
import models
import pytest
from looped import BUDGET, looped

from aiosync import State

pytestmark = pytest.mark.asyncio

TURNS = [*range(12), 15, 20, 30, 45, 70, 110, 160, 230]


class After:
    """Cancels `turns` of the loop after a trigger of the trainer."""

    def __init__(self, trigger, turns):
        self.trigger, self.turns = trigger, turns
        self.cancel = None
        self.fired = False

    def __call__(self, transition):
        if transition.trigger == self.trigger and self.cancel is not None and not self.fired:
            self.fired = True
            self._wait(self.turns)

    def _wait(self, left):
        if left:
            asyncio.get_running_loop().call_soon(self._wait, left - 1)
        elif self.cancel is not None:
            self.cancel()


async def give_up(pair, how, after, version):
    """True if the round was cancelled, False if it was faster."""
    scope = anyio.CancelScope()
    finished = False

    async def send():
        nonlocal finished
        with scope:
            await pair.trainer.send_weights(version=version, budget=BUDGET)
            finished = True

    task = asyncio.create_task(send())
    after.cancel = task.cancel if how == "native" else scope.cancel
    remove = pair.trainer.on_transition(after)
    await asyncio.wait([task], timeout=10)
    after.cancel = None
    remove()
    assert task.done()
    return not finished


@pytest.mark.fault("A-CANCEL-1")
@pytest.mark.parametrize("trigger", ["start", "update", "finalize"])
@pytest.mark.parametrize("how", ["scope", "native"])
@pytest.mark.parametrize("sink", ["staged", "in_place"])
async def test_round_given_up_after_k_turns(sink, how, trigger):
    cancelled = 0
    async with looped(workers=2, sink=sink) as pair:
        await pair.assert_next_round_works()
        for turns in TURNS:
            before = [models.fingerprint(copy) for copy in pair.copies]
            order = pair.trainer.version.order + 1
            was_cancelled = await give_up(pair, how, After(trigger, turns), order)
            cancelled += was_cancelled
            report = pair.trainer.last_report
            assert pair.illegal == []
            assert pair.trainer.state in (State.INITIALIZED, State.FAILED)
            if not was_cancelled:
                assert report.outcome == "committed"
            for index, (worker, copy) in enumerate(zip(pair.workers, pair.copies, strict=True)):
                async with asyncio.timeout(5):
                    await worker.wait_for(State.INITIALIZED, State.FAILED)
                now = models.fingerprint(copy)
                if worker.version.order == order:
                    assert now == models.fingerprint(pair.model)
                elif worker.weights == "intact":
                    assert now == before[index]
                if report.members[index].outcome == "committed":
                    assert worker.version.order == order
                if report.members[index].outcome == "failed":
                    assert worker.version.order < order
            await pair.assert_next_round_works()
    assert cancelled >= 2
