"""Code of others that swallows its cancellation: it keeps nobody, and gets into no later round."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
from by_hand import ByHand, by_hand, header, owned, values, whole_round
from elsewhere import Elsewhere, holds
from looped import BUDGET, looped

import aiosync
from aiosync import (
    AiosyncError,
    GenerationGate,
    PhaseTimeout,
    Refused,
    RelaySink,
    RoundCancelled,
    State,
    foreign,
    generation_cache,
    relay,
    worker_cycle,
)
from aiosync.foreign import LeftBehind

pytestmark = pytest.mark.asyncio


class Stubborn:
    """Something to await that ends when it is told to, and not before."""

    def __init__(self):
        self.stays = True
        self._over = asyncio.Event()

    async def __call__(self, *_):
        while self.stays and not self._over.is_set():
            with suppress(asyncio.CancelledError):
                await self._over.wait()

    def end(self):
        self.stays = False
        self._over.set()


async def end(stubborn):
    """Let it end, and whatever else was left behind."""
    stubborn.end()
    while foreign._LEFT:
        await asyncio.sleep(0.001)


@pytest.fixture
def short(monkeypatch):
    """Commits of receivers and flushes of caches have a fraction of a second."""
    for module in (relay, generation_cache):
        short = msgspec.structs.replace(module.DEFAULTS, finish_s=0.2, cleanup_s=0.5)
        monkeypatch.setattr(module, "DEFAULTS", short)


class Receiver(Elsewhere):
    """Its call of one kind stays for good; the others are as they should be."""

    def __init__(self, stays):
        super().__init__()
        self.stays, self.stubborn = stays, Stubborn()

    async def _meet(self, what):
        await super()._meet(what)
        if what == self.stays and self.stubborn.stays:
            await self.stubborn()


@pytest.mark.parametrize(
    ("what", "weights"), [("begin", "intact"), ("put", "intact"), ("commit", "unknown")]
)
async def test_a_receiver_that_swallows_cancellation_holds_nobody(what, weights, short):
    receiver = Receiver(what)
    async with looped(sink=RelaySink(receiver, timeout=0.2)) as it:
        try:
            with pytest.raises(PhaseTimeout, match=f"{what} of the receiver.*left behind"):
                await it.trainer.send_weights(version=1, budget=BUDGET)
            assert it.worker.weights == weights
            assert not it.worker.lane_poisoned
            with pytest.raises(
                Refused, match=f"start has to wait: {what} of the receiver .*still runs"
            ) as e:
                await it.trainer.send_weights(version=2, budget=BUDGET)
            assert e.value.replica == "w0"
            assert e.value.retryable
            assert receiver.log.count("begin") == 1
        finally:
            await end(receiver.stubborn)
        await it.trainer.send_weights(version=3, budget=BUDGET)
        assert it.worker.weights == "intact"
        assert holds(receiver, it.model)


async def test_an_abort_that_swallows_cancellation_leaves_the_weights_unknown(short):
    receiver = Receiver("abort")
    receiver.errors["put"] = OSError("no")
    async with looped(sink=RelaySink(receiver)) as it:
        try:
            with pytest.raises(AiosyncError):  # whose cause the trainer may not hear in time
                await it.trainer.send_weights(version=1, budget=BUDGET)
            assert it.worker.weights == "unknown"
            with pytest.raises(Refused, match="abort of the receiver"):
                await it.trainer.send_weights(version=2, budget=BUDGET)
        finally:
            await end(receiver.stubborn)
        await it.trainer.send_weights(version=3, budget=BUDGET)
        assert it.worker.weights == "intact"


async def test_a_cache_that_swallows_cancellation_costs_the_round_only(short):
    flush = Stubborn()
    async with looped() as it:
        gate = it.worker.generation
        gate.tie_cache("flush", flush)
        try:
            with pytest.raises(PhaseTimeout, match="emptying the cache took longer than"):
                await it.trainer.send_weights(version=1, budget=BUDGET)
            assert (it.worker.weights, it.worker.version) == ("intact", None)
            async with gate.request():
                pass  # the old weights serve
            with pytest.raises(Refused, match="start has to wait: emptying the cache"):
                await it.trainer.send_weights(version=2, budget=BUDGET)
            with pytest.raises(Refused, match="emptying the cache"):
                await gate.pause("keep", owner="me", clear_cache=True)
            assert gate.holds == ()
        finally:
            await end(flush)
        await it.assert_next_round_works(3)


async def test_a_pause_is_not_held_by_a_cache_either(short):
    gate, flush = GenerationGate(), Stubborn()
    gate.tie_cache("keep", flush)
    try:
        with pytest.raises(PhaseTimeout, match="left behind"):
            await gate.pause("keep", owner="me", clear_cache=True)
        assert (gate.state, gate.holds) == ("running", ())
    finally:
        await end(flush)
    hold = await gate.pause("keep", owner="me", clear_cache=True)
    hold.release()


class Late(ByHand):
    """Its first receive stays beyond its round, and then writes where it was told to."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.stubborn = Stubborn()
        self.began, self.wrote = asyncio.Event(), asyncio.Event()

    async def receive_weights(self, update_info):
        if not self.stubborn.stays:
            await super().receive_weights(update_info)
            return
        sink = self.sink
        metadata = [aiosync.ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.model.items()]
        await self.lane.run(sink.begin, metadata)
        destination = sink.destination(0)
        self.began.set()
        await self.stubborn()
        destination.fill_(99.0)
        if update_info.fail_at is None:
            await self.lane.run(sink.begin, metadata)  # a round of its own, that nobody opened
        self.wrote.set()


async def under_way(engine, receiving):
    began = asyncio.ensure_future(engine.began.wait())
    await asyncio.wait([receiving, began], return_when=asyncio.FIRST_COMPLETED)
    assert began.done(), receiving


@asynccontextmanager
async def left_behind(**payload):
    """An engine whose first round was given up while its `receive_weights` stays."""
    async with by_hand(Late) as engine:
        try:
            await owned(engine)
            await engine.start_weight_update(header=header(engine, 1, 1))
            update = {"value": 1.0, **payload}
            receiving = asyncio.create_task(
                engine.update_weights(update, header=header(engine, 1, 1))
            )
            await asyncio.wait(
                [receiving, asyncio.ensure_future(engine.began.wait())],
                return_when=asyncio.FIRST_COMPLETED,
            )
            assert not receiving.done(), receiving
            await engine.abort_weight_update("enough", header=header(engine, 1, 1))
            with pytest.raises(RoundCancelled):
                await receiving
            yield engine
        finally:
            await end(engine.stubborn)


@pytest.mark.parametrize("reopens", [False, True])
async def test_a_receive_that_was_left_behind_writes_into_no_later_round(reopens):
    async with left_behind(**({} if reopens else {"fail_at": 0})) as engine:
        # Its channel is in doubt: it may still read from it.
        assert (engine.state, engine.weights) == (State.FAILED, "intact")
        await owned(engine)
        with pytest.raises(Refused, match="has to wait: receive_weights of Late was cancelled"):
            await engine.start_weight_update(header=header(engine, 1, 2))
        assert engine.state is State.INITIALIZED
        await end(engine.stubborn)
        assert engine.wrote.is_set()
        await engine.start_weight_update(header=header(engine, 1, 2))
        await engine.update_weights({"value": 2.0}, header=header(engine, 1, 2))
        await engine.finish_weight_update(header=header(engine, 1, 2))
        assert values(engine.model) == {2.0}
        await whole_round(engine, 2, 3, value=3.0)
        assert values(engine.model) == {3.0}


async def test_a_start_waits_a_moment_for_what_is_about_to_end(monkeypatch):
    patient = msgspec.structs.replace(worker_cycle.DEFAULTS, cleanup_s=20.0)
    async with left_behind() as engine:
        await owned(engine)
        monkeypatch.setattr(worker_cycle, "DEFAULTS", patient)
        starting = asyncio.create_task(engine.start_weight_update(header=header(engine, 1, 2)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not starting.done()
        engine.stubborn.end()
        await starting
        assert engine.wrote.is_set()
        monkeypatch.undo()


async def test_a_plain_step_that_returns_something_to_await_is_stoppable_too():
    class Plain(Late):
        def receive_weights(self, update_info):
            return Late.receive_weights(self, update_info)

    async with by_hand(Plain) as engine:
        await owned(engine)
        await engine.start_weight_update(header=header(engine, 1, 1))
        receiving = asyncio.create_task(
            engine.update_weights({"value": 1.0}, header=header(engine, 1, 1))
        )
        await asyncio.wait(
            [receiving, asyncio.ensure_future(engine.began.wait())],
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert not receiving.done(), receiving
        async with asyncio.timeout(20):
            await engine.abort_weight_update("enough", header=header(engine, 1, 1))
        with pytest.raises(RoundCancelled):
            await receiving
        assert engine.cycle.left.running
        await end(engine.stubborn)


async def test_those_of_a_loop_that_was_closed_are_over():
    left = LeftBehind()

    def elsewhere():
        loop = asyncio.new_event_loop()
        task = loop.create_task(asyncio.sleep(60), name="gone")
        left.add(task)
        assert left.running == [task]
        task._log_destroy_pending = False
        task.get_coro().close()
        loop.close()

    await asyncio.to_thread(elsewhere)
    assert left.running == []
    left.check("a round")
