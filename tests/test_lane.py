"""Lanes: order, results, cancellation of every kind, poisoning, ends of loops and processes."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio.lowlevel import checkpoint

from statemachines.errors import InvalidTransition, Validation
from transports.errors import LanePoisoned
from transports.lane import Lane

if TYPE_CHECKING:
    from transports.lane import LaneLike

PROGRAMS = Path(__file__).parent / "lane_programs"
ROOT = Path(__file__).parent.parent


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


@pytest.fixture
def lane():
    lane = Lane("test-lane")
    yield lane
    lane.close()


class Blocking:
    """A call that blocks until it is told to end."""

    def __init__(self, *, heeds_abort: bool = True) -> None:
        self.began = threading.Event()
        self.end = threading.Event()
        self.heeds_abort = heeds_abort
        self.abort_threads: list[str] = []
        self.discarded: list[object] = []
        self.was_discarded = threading.Event()

    def __call__(self, value: object = "value") -> object:
        self.began.set()
        assert self.end.wait(30)
        return value

    def abort(self) -> None:
        self.abort_threads.append(threading.current_thread().name)
        if self.heeds_abort:
            self.end.set()

    def discard(self, value: object) -> None:
        self.discarded.append((value, threading.current_thread().name))
        self.was_discarded.set()


async def until(ready, *args) -> None:
    with anyio.fail_after(10):
        while not ready(*args):
            await anyio.sleep(0.001)


async def cancel_once_begun(lane: Lane, call: Blocking, fn=None, **kwargs) -> None:
    """Run `fn` (or the call) and cancel it by a scope when it is on the thread."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tg:
            tg.start_soon(lambda: lane.run(fn or call, **kwargs))
            await until(call.began.is_set)
            scope.cancel()
    assert scope.cancelled_caught


def block_until(ready) -> None:
    """Hold the loop on purpose, so that what is ready for it waits."""
    deadline = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < deadline


def threads_named(name: str) -> list[object]:
    return [thread for thread in threading.enumerate() if thread.name == name]


# -- results


@pytest.mark.anyio
async def test_returns_the_value_on_one_daemon_thread(lane):
    seen = [await lane.run(threading.current_thread) for _ in range(3)]
    assert len(set(seen)) == 1
    assert seen[0].name == "test-lane"
    assert seen[0].daemon
    assert await lane.run(divmod, 7, 3) == (2, 1)
    assert lane.statistics().calls == 4


@pytest.mark.anyio
async def test_thread_starts_with_the_first_call(anyio_backend_name):
    name = f"lazy-lane-{anyio_backend_name}"
    lane = Lane(name)
    assert not threads_named(name)
    await lane.run(int)
    assert threads_named(name)
    lane.close()


@pytest.mark.anyio
async def test_setup_runs_once_on_the_thread():
    seen: list[str] = []
    lane = Lane("set-up", setup=lambda: seen.append(threading.current_thread().name))
    await lane.run(int)
    await lane.run(int)
    assert seen == ["set-up"]
    lane.close()


@pytest.mark.anyio
async def test_failing_setup_is_raised_and_tried_again():
    attempts: list[int] = []

    def setup() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("no device")

    lane = Lane("bad-setup", setup=setup)
    with pytest.raises(OSError, match="no device"):
        await lane.run(int)
    assert await lane.run(int) == 0
    lane.close()


@pytest.mark.anyio
async def test_own_exception_not_a_group(lane):
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        await lane.run(fail)
    assert caught.value.__context__ is None
    assert lane.statistics().failed == 1
    assert await lane.run(int) == 0


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.anyio
async def test_base_exceptions_reach_the_caller(lane, kind):
    def fail() -> None:
        raise kind("from the lane")

    try:
        await lane.run(fail)
    except BaseException as exc:
        caught: BaseException = exc
    assert type(caught) is kind
    assert await lane.run(int) == 0


@pytest.mark.fault("A-CANCEL-5")
@pytest.mark.anyio
async def test_stop_iteration_becomes_runtime_error(lane):
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        await lane.run(next, iter(()))
    assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.asyncio
async def test_cancellation_raised_by_the_call_cancels_nobody(lane):
    def fail() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="CancelledError"):
        await lane.run(fail)


@pytest.mark.anyio
async def test_no_event_loop_and_no_context_on_the_thread(lane):
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("v", default="unset")
    variable.set("caller's")
    assert await lane.run(variable.get) == "unset"
    with pytest.raises(anyio.NoEventLoopError):
        await lane.run(anyio.lowlevel.current_token)
    with pytest.raises(RuntimeError, match="no running event loop"):
        await lane.run(asyncio.get_running_loop)


@pytest.mark.anyio
async def test_nothing_of_the_last_call_lives_on(lane):
    class Tensor:
        def method(self) -> Tensor:
            return Tensor()

        def fail(self) -> None:
            raise ValueError

    tensor = Tensor()
    result = await lane.run(tensor.method)
    with pytest.raises(ValueError):  # noqa: PT011 - the kind does not matter here
        await lane.run(tensor.fail)
    refs = [weakref.ref(tensor), weakref.ref(result)]
    await lane.run(int)
    del tensor, result
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


@pytest.mark.parametrize("grace", [-1.0, float("inf"), float("nan")])
@pytest.mark.anyio
async def test_bad_grace_is_refused(lane, grace):
    with pytest.raises(Validation, match="grace"):
        await lane.run(int, grace=grace)


@pytest.mark.anyio
async def test_coroutine_function_is_refused(lane):
    with pytest.raises(Validation, match="coroutine"):
        await lane.run(anyio.sleep, 0)


# -- order


@pytest.mark.anyio
async def test_first_in_first_out_one_at_a_time(lane):
    order: list[int] = []
    inside: list[int] = []
    overlaps: list[int] = []

    def work(index: int) -> None:
        inside.append(index)
        overlaps.append(len(inside))
        order.append(index)
        inside.remove(index)

    first = Blocking()
    async with anyio.create_task_group() as tg:
        tg.start_soon(lane.run, first)
        await until(first.began.is_set)
        for index in range(20):
            tg.start_soon(lane.run, work, index)
            await until(lambda n=index: lane.statistics().waiting == n + 1)
        assert lane.busy
        first.end.set()
    assert order == list(range(20))
    assert set(overlaps) == {1}
    assert not lane.busy


@pytest.mark.anyio
async def test_cancelled_in_the_queue_is_withdrawn(lane):
    first, second = Blocking(), Blocking()
    async with anyio.create_task_group() as tg:
        tg.start_soon(lane.run, first)
        await until(first.began.is_set)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as inner:
                inner.start_soon(lambda: lane.run(second, abort=second.abort))
                await until(lambda: lane.statistics().waiting == 1)
                scope.cancel()
        assert lane.statistics().waiting == 0
        first.end.set()
    assert await lane.run(int) == 0
    assert not second.began.is_set()
    assert second.abort_threads == []
    assert not lane.poisoned
    assert lane.statistics().calls == 2


@pytest.mark.anyio
async def test_cancelled_before_the_call_runs_nothing(lane):
    with anyio.CancelScope() as scope:
        scope.cancel()
        await lane.run(int)
    assert scope.cancelled_caught
    assert lane.statistics().calls == 0


# -- cancellation while the call runs


@pytest.mark.anyio
async def test_scope_cancellation_aborts_on_its_own_thread_and_waits(lane):
    call = Blocking()
    await cancel_once_begun(lane, call, abort=call.abort, discard=call.discard, grace=10.0)
    assert call.abort_threads == ["test-lane-abort"]
    assert not lane.poisoned
    assert await lane.run(int) == 0  # the lane is usable, and FIFO: the discard has been done
    assert call.discarded == [("value", "test-lane")]
    assert lane.statistics().aborts == lane.statistics().discarded == 1


@pytest.mark.anyio
async def test_fail_after_raises_even_if_the_call_then_succeeds(lane):
    call = Blocking()
    await lane.run(int)  # the thread is there, so the call begins well before the deadline
    with pytest.raises(TimeoutError):
        with anyio.fail_after(0.5):
            await lane.run(call, abort=call.abort, grace=10.0)
    assert not lane.poisoned


@pytest.mark.anyio
async def test_abort_induced_error_is_dropped(lane, caplog):
    caplog.set_level(logging.DEBUG, "transports.lane_thread")
    call = Blocking()

    def body() -> None:
        call()
        raise OSError("communicator was aborted")

    await cancel_once_begun(lane, call, body, abort=call.abort, discard=call.discard, grace=10.0)
    assert await lane.run(int) == 0
    assert call.discarded == []
    assert "communicator was aborted" in caplog.text


@pytest.mark.anyio
async def test_raising_abort_is_logged_only(lane, caplog):
    caplog.set_level(logging.DEBUG, "transports.lane_thread")
    call = Blocking()

    def abort() -> None:
        call.abort()
        raise SystemExit("abort failed")

    await cancel_once_begun(lane, call, abort=abort, grace=10.0)
    assert not lane.poisoned
    await until(lambda: "abort raised" in caplog.text)
    assert {record.levelname for record in caplog.records} == {"DEBUG"}


@pytest.mark.anyio
async def test_raising_discard_is_logged_only(lane, caplog):
    caplog.set_level(logging.DEBUG, "transports.lane_thread")
    call = Blocking()

    def discard(_value: object) -> None:
        raise OSError("discard failed")

    await cancel_once_begun(lane, call, abort=call.abort, discard=discard, grace=10.0)
    assert await lane.run(int) == 0
    assert "discard raised" in caplog.text


@pytest.mark.anyio
async def test_abort_has_returned_when_run_raises(lane):
    call, let_abort_end = Blocking(), threading.Event()
    aborted: list[str] = []

    def abort() -> None:
        call.abort()
        assert let_abort_end.wait(30)
        aborted.append("returned")

    async def cancelled() -> None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await lane.run(call, abort=abort, grace=20.0)
        aborted.append("raised")

    scopes: list[anyio.CancelScope] = []
    async with anyio.create_task_group() as tg:
        tg.start_soon(cancelled)
        await until(call.began.is_set)
        scopes[0].cancel()
        await until(lambda: not lane.busy)
        assert aborted == []
        let_abort_end.set()
    assert aborted == ["returned", "raised"]
    assert not lane.poisoned


@pytest.mark.anyio
async def test_hanging_abort_of_a_call_that_returned_poisons_nothing(lane):
    call, let_abort_end = Blocking(), threading.Event()

    def abort() -> None:
        call.abort()
        let_abort_end.wait(30)

    with anyio.fail_after(10):
        await cancel_once_begun(lane, call, abort=abort, grace=1.0)
        assert await lane.run(int) == 0
    let_abort_end.set()


@pytest.mark.anyio
async def test_without_abort_the_call_has_its_grace(lane):
    call = Blocking()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tg:
            tg.start_soon(lambda: lane.run(call, grace=10.0))
            await until(call.began.is_set)
            scope.cancel()
            call.end.set()
    assert not lane.poisoned


@pytest.mark.asyncio
async def test_native_cancellation_aborts_and_waits(lane):
    call = Blocking()
    task = asyncio.create_task(lane.run(call, abort=call.abort, grace=10.0))
    await until(call.began.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(call.abort_threads) == 1
    assert call.end.is_set()
    assert not lane.poisoned
    assert not lane.busy


@pytest.mark.asyncio
async def test_native_cancellation_twice_aborts_once_and_still_waits(lane):
    call = Blocking(heeds_abort=False)
    task = asyncio.create_task(lane.run(call, abort=call.abort, grace=10.0))
    await until(call.began.is_set)
    task.cancel()
    await until(lambda: call.abort_threads)
    task.cancel()
    for _ in range(5):
        await checkpoint()
    assert not task.done()
    call.end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(call.abort_threads) == 1
    assert not lane.poisoned


@pytest.mark.fault("A-CANCEL-2")
@pytest.mark.parametrize("how", ["wait_for", "timeout"])
@pytest.mark.asyncio
async def test_asyncio_timeouts(lane, how):
    call = Blocking()
    await lane.run(int)  # the thread is there, so the call begins well before the deadline
    run = lane.run(call, abort=call.abort, grace=10.0)
    with pytest.raises(TimeoutError):
        if how == "wait_for":
            await asyncio.wait_for(run, 0.5)
        else:
            async with asyncio.timeout(0.5):
                await run
    assert len(call.abort_threads) == 1
    assert not lane.poisoned
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.asyncio
async def test_cancelled_when_the_result_was_there_already(lane):
    """The call is done, its caller has not been resumed yet, and is cancelled."""
    call = Blocking()
    task = asyncio.create_task(lane.run(call, abort=call.abort, discard=call.discard))
    await until(call.began.is_set)
    call.end.set()
    block_until(lambda: not lane.busy)  # the result waits behind the cancellation
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await lane.run(int) == 0
    assert call.discarded == [("value", "test-lane")]
    assert call.abort_threads == []
    assert not lane.poisoned


@pytest.mark.fault("A-CANCEL-7")
@pytest.mark.asyncio
async def test_cancelled_at_every_turn_receives_or_discards(lane):
    """Sweep: cancel k turns after the call ended; exactly one of the two has the value."""
    for turns in range(12):
        call = Blocking()
        call.end.set()
        task = asyncio.create_task(lane.run(call, turns, abort=call.abort, discard=call.discard))
        for _ in range(turns):
            await asyncio.sleep(0)
            block_until(lambda: not (lane.statistics().waiting or lane.busy))
        task.cancel()
        received = await asyncio.gather(task, return_exceptions=True)
        await lane.run(int)
        values = [value for value in received if value == turns]
        assert len(values) + len(call.discarded) == call.began.is_set()
        assert call.abort_threads == []
        assert not lane.poisoned


@pytest.mark.anyio
async def test_received_value_is_never_discarded(lane):
    call = Blocking()
    call.end.set()
    assert await lane.run(call, discard=call.discard) == "value"
    await lane.run(int)
    assert call.discarded == []


@pytest.mark.asyncio
async def test_late_discard_after_close_still_happens():
    lane = Lane("closing")
    call = Blocking()
    task = asyncio.create_task(lane.run(call, discard=call.discard))
    await until(call.began.is_set)
    call.end.set()
    lane.close()
    block_until(lambda: not threads_named("closing"))  # before the caller is resumed
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(call.was_discarded.is_set)
    assert call.discarded == [("value", "closing")]
    await until(lambda: not threads_named("closing"))


@pytest.mark.asyncio
async def test_native_cancellation_during_the_grace_outranks_the_scope(lane):
    """A scope of the caller's own must not swallow what somebody else asked for."""
    call = Blocking(heeds_abort=False)
    went_on: list[bool] = []

    async def caller() -> None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await lane.run(call, abort=call.abort, grace=10.0)
        went_on.append(True)

    scopes: list[anyio.CancelScope] = []
    task = asyncio.create_task(caller())
    await until(call.began.is_set)
    scopes[0].cancel()
    await until(lambda: call.abort_threads)
    task.cancel()
    await checkpoint()
    call.end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert went_on == []
    assert not lane.poisoned


@pytest.mark.asyncio
async def test_cancelled_over_and_over_the_grace_ends_all_the_same(lane):
    call = Blocking(heeds_abort=False)
    task = asyncio.create_task(lane.run(call, abort=call.abort, grace=0.1))
    await until(call.began.is_set)
    with anyio.fail_after(10):
        while not task.done():
            task.cancel()
            await checkpoint()
    assert task.cancelled()
    assert lane.poisoned
    call.end.set()


@pytest.mark.asyncio
async def test_closed_coroutine_aborts_and_poisons(lane):
    """What is left of a task when its loop went away without a word."""
    call = Blocking(heeds_abort=False)
    running = lane.run(call, abort=call.abort, discard=call.discard, grace=600.0)
    running.send(None)
    block_until(call.began.is_set)
    running.close()
    assert lane.poisoned
    await until(lambda: call.abort_threads)
    call.end.set()
    await until(call.was_discarded.is_set)


# -- poisoning


@pytest.mark.anyio
async def test_call_that_ignores_abort_poisons_the_lane(lane):
    call, queued = Blocking(heeds_abort=False), Blocking()
    errors: list[BaseException] = []

    async def wait_in_queue() -> None:
        try:
            await lane.run(queued)
        except LanePoisoned as exc:
            errors.append(exc)

    async with anyio.create_task_group() as tg:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as inner:
                inner.start_soon(
                    lambda: lane.run(call, abort=call.abort, discard=call.discard, grace=0.02)
                )
                await until(call.began.is_set)
                tg.start_soon(wait_in_queue)
                await until(lambda: lane.statistics().waiting == 1)
                scope.cancel()
        assert scope.cancelled_caught  # the cancellation propagates, not LanePoisoned
        assert lane.poisoned
        with pytest.raises(LanePoisoned, match="never came back"):
            await lane.run(int)
    assert len(errors) == 1
    assert lane.statistics().waiting == 0
    assert "poisoned" in repr(lane)
    call.end.set()  # it does come back, late
    await until(call.was_discarded.is_set)
    assert call.discarded == [("value", "test-lane")]
    await until(lambda: not threads_named("test-lane"))
    assert lane.poisoned
    assert not queued.began.is_set()


@pytest.mark.anyio
async def test_abort_that_hangs_does_not_hold_the_caller(lane):
    call, hung = Blocking(heeds_abort=False), threading.Event()
    with anyio.fail_after(10):
        await cancel_once_begun(lane, call, abort=lambda: hung.wait(30), grace=0.02)
    assert lane.poisoned
    hung.set()
    call.end.set()


@pytest.mark.asyncio
async def test_poisoned_while_an_unreceived_value_waits_for_its_discard():
    lane = Lane("two")
    first, stuck = Blocking(), Blocking(heeds_abort=False)
    first_task = asyncio.create_task(lane.run(first, discard=first.discard))
    stuck_task = asyncio.create_task(lane.run(stuck, grace=0.02))
    left_task = asyncio.create_task(lane.run(int))
    await until(lambda: lane.statistics().waiting == 2)
    left_task.cancel()
    await asyncio.gather(left_task, return_exceptions=True)
    lane.close()
    first.end.set()
    block_until(stuck.began.is_set)  # the first caller cannot take its value
    first_task.cancel()
    stuck_task.cancel()
    await asyncio.gather(first_task, stuck_task, return_exceptions=True)
    assert lane.poisoned
    assert first.discarded == []
    stuck.end.set()
    await until(first.was_discarded.is_set)
    await until(lambda: not threads_named("two"))


@pytest.mark.anyio
async def test_no_thread_for_the_abort(lane, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "transports.lane_thread")
    call = Blocking()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tg:
            tg.start_soon(lambda: lane.run(call, abort=call.abort, grace=0.02))
            await until(call.began.is_set)

            def refuse(_self) -> None:
                raise RuntimeError("can't start new thread")

            monkeypatch.setattr("threading.Thread.start", refuse)
            scope.cancel()
    monkeypatch.undo()
    assert scope.cancelled_caught
    assert lane.poisoned
    assert "no thread for the abort" in caplog.text
    call.end.set()


# -- close, drop, fork


@pytest.mark.anyio
async def test_close_is_idempotent_and_ends_the_thread_once_idle():
    lane = Lane("closed-lane")
    first, second = Blocking(), Blocking()
    second.end.set()
    async with anyio.create_task_group() as tg:
        tg.start_soon(lane.run, first)
        await until(first.began.is_set)
        tg.start_soon(lane.run, second)
        await until(lambda: lane.statistics().waiting == 1)
        lane.close()
        lane.close()
        with pytest.raises(InvalidTransition, match="closed") as caught:
            await lane.run(int)
        assert caught.value.detail["state"] == "closed"
        assert threads_named("closed-lane")
        first.end.set()
    assert second.began.is_set()
    await until(lambda: not threads_named("closed-lane"))
    assert "closed" in repr(lane)


@pytest.mark.anyio
async def test_async_with_closes():
    async with Lane("with-lane") as lane:
        assert await lane.run(int) == 0
        assert "idle" in repr(lane)
    assert lane.statistics().closed


@pytest.mark.anyio
async def test_dropped_open_lane_warns_and_its_thread_ends():
    lane = Lane("dropped")
    await lane.run(int)
    gc.disable()  # reference counting alone must do: no cycle may keep the lane
    try:
        with pytest.warns(ResourceWarning, match="dropped"):
            del lane
    finally:
        gc.enable()
    await until(lambda: not threads_named("dropped"))


def test_dropped_unused_lane_is_silent():
    ref = weakref.ref(Lane("unused"))
    assert ref() is None


@pytest.mark.anyio
async def test_fork_refuses_at_once(lane, monkeypatch):
    await lane.run(int)
    real = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: real + 1)
    with pytest.raises(LanePoisoned, match="fork"):
        await lane.run(int)
    monkeypatch.undo()


# -- loops and processes


@pytest.mark.parametrize(
    "backends", [("asyncio", "asyncio"), ("asyncio", "trio"), ("trio", "asyncio")]
)
def test_one_lane_under_one_loop_after_another(lane, backends):
    threads = {anyio.run(lane.run, threading.current_thread, backend=b) for b in backends}
    assert len(threads) == 1


def test_loop_that_is_gone_when_the_call_ends(lane):
    """The loop is closed over a pending call; the lane discards its value and works on."""
    call = Blocking()
    loop = asyncio.new_event_loop()

    async def start() -> None:
        task = loop.create_task(lane.run(call, abort=call.abort, discard=call.discard))
        kept.append(task)
        await until(call.began.is_set)

    kept: list[asyncio.Task[object]] = []
    loop.run_until_complete(start())
    loop.close()
    call.end.set()
    assert call.was_discarded.wait(10)
    assert call.discarded == [("value", "test-lane")]
    assert anyio.run(lane.run, int) == 0
    kept[0]._log_destroy_pending = False
    coroutine = kept[0].get_coro()
    kept.clear()
    with pytest.raises(RuntimeError):
        coroutine.close()  # it sits in a task group of a loop that is gone


def test_loop_that_stopped_does_not_hold_the_thread(lane):
    """Between two runs of one loop the result waits in the loop, not in the lane's thread."""
    call = Blocking()
    loop = asyncio.new_event_loop()

    async def start() -> asyncio.Task[object]:
        task = loop.create_task(lane.run(call))
        await until(call.began.is_set)
        return task

    task = loop.run_until_complete(start())
    call.end.set()
    assert anyio.run(lane.run, int, backend="trio") == 0
    assert loop.run_until_complete(task) == "value"
    loop.close()


def run_program(*argv: str) -> str:
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.strip()


@pytest.mark.fault("A-CANCEL-4")
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("stuck", ["call", "abort"])
def test_process_exits_with_stuck_threads(backend, stuck):
    began = time.monotonic()
    assert run_program(str(PROGRAMS / "stuck_exit.py"), backend, stuck) == "poisoned"
    assert time.monotonic() - began < 15


@pytest.mark.slow
def test_loop_shutdown_in_the_grace_period_poisons():
    assert run_program(str(PROGRAMS / "loop_shutdown.py")) == "poisoned"


def test_lane_is_lane_like():
    lane: LaneLike = Lane("typed")
    assert (lane.name, lane.poisoned, lane.busy) == ("typed", False, False)


def test_module_needs_no_torch():
    code = "import sys, transports.lane, transports.planning; assert 'torch' not in sys.modules"
    run_program("-c", code)


@pytest.mark.anyio
async def test_an_error_that_is_kept_keeps_nothing_of_its_call():
    class Held:
        pass

    alive = []

    def fails():
        held = Held()
        alive.append(weakref.ref(held))
        try:
            raise OSError("inner")
        except OSError as error:
            raise ValueError("outer") from error

    async with Lane("keeps-nothing") as lane:
        with pytest.raises(ValueError, match="outer") as caught:
            await lane.run(fails)
    assert alive[0]() is None
    assert caught.traceback[-1].name == "fails"  # where it came from can still be told
