"""Deferred: order, backpressure, errors, cancellation."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint

from statemachines.errors import InvalidTransition, Validation
from transports.deferred import Deferred
from transports.errors import TransportAborted

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


class Consumer:
    """Processes when it is let; notes what it got."""

    def __init__(self, *, held: bool = False, fails_at: object = None) -> None:
        self.got: list[object] = []
        self.gate = anyio.Event()
        self.fails_at = fails_at
        self.error = ValueError("load failed")
        if not held:
            self.gate.set()

    async def __call__(self, item: object) -> None:
        self.got.append(item)
        await self.gate.wait()
        await checkpoint()
        if item == self.fails_at:
            raise self.error


async def test_processes_in_order_and_ends_when_closed():
    consumer = Consumer()
    queue = Deferred(consumer, depth=2)
    async with anyio.create_task_group() as tg:
        tg.start_soon(queue.run)
        for item in range(10):
            await queue.put(item)
        queue.close()
    assert consumer.got == list(range(10))
    assert queue.statistics().accepted == queue.statistics().done == 10
    await queue.drain()  # also after the end
    assert "closed" in repr(queue)


async def test_close_of_an_idle_queue_ends_run():
    queue = Deferred(Consumer(), depth=1)
    async with anyio.create_task_group() as tg:
        tg.start_soon(queue.run)
        await wait_all_tasks_blocked()
        queue.close()
        queue.close()


async def test_backpressure_and_line():
    consumer = Consumer(held=True)
    queue = Deferred(consumer, depth=2)
    async with anyio.create_task_group() as tg:
        tg.start_soon(queue.run)
        for item in range(6):
            tg.start_soon(queue.put, item)
            await wait_all_tasks_blocked()
        stats = queue.statistics()
        # one in process, two queued, the others wait
        assert (stats.accepted, stats.queued, stats.waiting) == (3, 2, 3)
        consumer.gate.set()
        await wait_all_tasks_blocked()
        assert queue.statistics().waiting == 0
        queue.close()
    assert consumer.got == list(range(6))


async def test_put_before_run():
    consumer = Consumer()
    queue = Deferred(consumer, depth=1)
    await queue.put("early")
    assert queue.statistics().queued == 1
    async with anyio.create_task_group() as tg:
        tg.start_soon(queue.put, "waits")
        await wait_all_tasks_blocked()
        assert queue.statistics().waiting == 1
        tg.start_soon(queue.run)
        await wait_all_tasks_blocked()
        queue.close()
    assert consumer.got == ["early", "waits"]


async def test_drain_waits_for_what_was_accepted_before():
    consumer = Consumer(held=True)
    queue = Deferred(consumer, depth=3)
    events: list[str] = []

    async def drain() -> None:
        await queue.drain()
        events.append(f"drained at {queue.statistics().done}")

    async with anyio.create_task_group() as tg:
        await queue.drain()  # nothing was accepted
        tg.start_soon(queue.run)
        await queue.put(0)
        await queue.put(1)
        tg.start_soon(drain)
        tg.start_soon(drain)
        await wait_all_tasks_blocked()
        assert events == []
        await queue.put(2)  # after the drains began: not theirs
        consumer.gate.set()
        await wait_all_tasks_blocked()
        assert len(events) == 2
        queue.close()
    await queue.drain()


async def test_first_error_reaches_run_put_and_drain():
    consumer = Consumer(held=True, fails_at=1)
    queue = Deferred(consumer, depth=2)
    caught: dict[str, BaseException] = {}

    async def note(name: str, fn, *args) -> None:
        try:
            await fn(*args)
        except ValueError as exc:
            caught[name] = exc

    async with anyio.create_task_group() as tg:
        tg.start_soon(note, "run", queue.run)
        for item in range(4):
            tg.start_soon(note, f"put {item}", queue.put, item)
            await wait_all_tasks_blocked()
        tg.start_soon(note, "drain", queue.drain)
        await wait_all_tasks_blocked()
        assert queue.statistics().waiting == 1  # one in process, two queued
        consumer.fails_at = 0
        consumer.gate.set()
    assert set(caught) == {"run", "put 3", "drain"}
    assert consumer.got == [0]  # what was queued is not processed
    for _ in range(2):
        await note("again", queue.put, 9)
        assert caught.pop("again") is consumer.error
        await note("again", queue.drain)
        assert caught.pop("again") is consumer.error
    assert set(caught.values()) == {consumer.error}
    stats = queue.statistics()
    assert (stats.accepted, stats.done, stats.dropped, stats.queued) == (3, 0, 2, 0)
    assert stats.failed
    assert "failed" in repr(queue)


async def test_error_outlives_close():
    consumer = Consumer(fails_at=0)
    queue = Deferred(consumer, depth=1)
    await queue.put(0)
    queue.close()
    with pytest.raises(ValueError, match="load failed"):
        await queue.run()
    with pytest.raises(ValueError, match="load failed"):
        await queue.put(1)
    with pytest.raises(ValueError, match="load failed"):
        await queue.drain()


async def test_cancelled_consumer_hangs_nobody():
    consumer = Consumer(held=True)
    queue = Deferred(consumer, depth=1)
    outcomes: list[str] = []

    async def expect_aborted(fn, *args) -> None:
        with pytest.raises(TransportAborted, match="cancelled"):
            await fn(*args)
        outcomes.append("aborted")

    async with anyio.create_task_group() as tg:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as inner:
                inner.start_soon(queue.run)
                await queue.put(0)
                await wait_all_tasks_blocked()
                await queue.put(1)
                tg.start_soon(expect_aborted, queue.put, 2)
                tg.start_soon(expect_aborted, queue.drain)
                await wait_all_tasks_blocked()
                scope.cancel()
    assert outcomes == ["aborted", "aborted"]
    await expect_aborted(queue.drain)
    assert queue.statistics().dropped == 2


async def test_put_after_close():
    queue = Deferred(Consumer(), depth=1)
    queue.close()
    with pytest.raises(InvalidTransition, match="closed") as caught:
        await queue.put(0)
    assert caught.value.detail["state"] == "closed"
    assert queue.statistics().accepted == 0


async def test_close_sends_the_line_away():
    consumer = Consumer(held=True)
    queue = Deferred(consumer, depth=1)

    async def refused() -> None:
        with pytest.raises(InvalidTransition):
            await queue.put(9)

    async with anyio.create_task_group() as tg:
        tg.start_soon(queue.run)
        await queue.put(0)
        await wait_all_tasks_blocked()
        await queue.put(1)
        tg.start_soon(refused)
        await wait_all_tasks_blocked()
        queue.close()
        await wait_all_tasks_blocked()
        consumer.gate.set()
    assert consumer.got == [0, 1]
    assert queue.statistics().accepted == 2


async def test_cancelled_put_leaves_the_counts_right():
    consumer = Consumer(held=True)
    queue = Deferred(consumer, depth=1)
    async with anyio.create_task_group() as tg:
        tg.start_soon(queue.run)
        await queue.put(0)
        await wait_all_tasks_blocked()
        await queue.put(1)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as inner:
                inner.start_soon(queue.put, 2)
                await wait_all_tasks_blocked()
                assert queue.statistics().waiting == 1
                scope.cancel()
        stats = queue.statistics()
        assert (stats.accepted, stats.waiting) == (2, 0)
        tg.start_soon(queue.put, 3)
        await wait_all_tasks_blocked()
        consumer.gate.set()
        await wait_all_tasks_blocked()
        await queue.drain()
        queue.close()
    assert consumer.got == [0, 1, 3]
    assert queue.statistics().accepted == queue.statistics().done == 3


async def test_cancelled_before_it_waits():
    queue = Deferred(Consumer(), depth=1)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await queue.put(0)
    with anyio.CancelScope() as drain_scope:
        drain_scope.cancel()
        await queue.drain()
    assert scope.cancelled_caught
    assert drain_scope.cancelled_caught
    assert queue.statistics().accepted == 0


async def test_one_consumer():
    queue = Deferred(Consumer(), depth=1)
    queue.close()
    await queue.run()
    with pytest.raises(InvalidTransition, match="one consumer"):
        await queue.run()


@pytest.mark.parametrize("depth", [0, -1, True, 1.5, None])
async def test_bad_depth(depth):
    with pytest.raises(Validation, match="depth"):
        Deferred(Consumer(), depth=depth)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_native_cancellation_in_the_moment_of_acceptance():
    """The item got its place in the turn in which its put was cancelled: it counts."""
    consumer = Consumer(held=True)
    queue = Deferred(consumer, depth=1)
    async with anyio.create_task_group() as tg:
        tg.start_soon(queue.run)
        await queue.put(0)
        await wait_all_tasks_blocked()
        await queue.put(1)
        put = asyncio.create_task(queue.put(2))
        await wait_all_tasks_blocked()
        consumer.gate.set()
        while queue.statistics().accepted < 3:
            await asyncio.sleep(0)
            if queue.statistics().accepted == 3:
                put.cancel()
        await asyncio.gather(put, return_exceptions=True)
        await queue.drain()
        queue.close()
    assert consumer.got == [0, 1, 2]
    assert queue.statistics().accepted == queue.statistics().done == 3


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_cancel_sweep_keeps_accepted_equal_to_done():
    """Cancel a waiting put k turns after the consumer moves: counts and items agree."""
    for turns in range(8):
        consumer = Consumer(held=True)
        queue = Deferred(consumer, depth=1)
        async with anyio.create_task_group() as tg:
            tg.start_soon(queue.run)
            await queue.put("a")
            await wait_all_tasks_blocked()
            await queue.put("b")
            put = asyncio.create_task(queue.put("c"))
            await wait_all_tasks_blocked()
            consumer.gate.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            put.cancel()
            await asyncio.gather(put, return_exceptions=True)
            await queue.drain()
            queue.close()
        stats = queue.statistics()
        assert stats.accepted == stats.done == len(consumer.got)
        assert stats.waiting == 0
