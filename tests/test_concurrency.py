"""Legs, collapse, clean-up that survives, free tasks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import types
import weakref

import anyio
import anyio.lowlevel
import pytest

from aiosync.concurrency import (
    Milestone,
    Supervisor,
    Task,
    collapse,
    first_line,
    hold_on,
    quietly,
    rank_errors,
    run_legs,
    run_to_end,
)
from aiosync.errors import (
    DigestMismatch,
    PeerLost,
    PhaseTimeout,
    RemoteError,
    RoundCancelled,
    TransportAborted,
    Validation,
)
from aiosync.foreign import stoppable
from aiosync.liveness import accompanied
from aiosync.members import fan_out

pytestmark = pytest.mark.asyncio

LINGER = 5.0


class Leg:
    """A leg that waits until it is told how to end, and knows how it ended."""

    def __init__(self, *, cleanup=None):
        self.started = asyncio.Event()
        self.go = asyncio.Event()
        self.left = asyncio.Event()
        self.result = None
        self.error = None
        self.cancelled = False
        self.cleanup = cleanup

    async def __call__(self):
        self.started.set()
        try:
            await self.go.wait()
            if self.error is not None:
                raise self.error
            return self.result
        except asyncio.CancelledError:
            self.cancelled = True
            if self.cleanup is not None:
                with anyio.CancelScope(shield=True):
                    await self.cleanup.wait()
            raise
        finally:
            self.left.set()


def legs(linger=LINGER, **options):
    control, data = Leg(**options), Leg(**options)
    return control, data, asyncio.create_task(run_legs(control, data, linger=linger))


async def both_started(control, data):
    await control.started.wait()
    await data.started.wait()


async def settled():
    for _ in range(20):
        await asyncio.sleep(0)


async def ended(task):
    async with asyncio.timeout(10):
        await asyncio.wait([task])
    return task


# -- run_legs


@pytest.mark.parametrize("first", ["control", "data"])
async def test_both_legs_end_well(first):
    control, data, task = legs()
    control.result = "answer"
    await both_started(control, data)
    order = [control, data] if first == "control" else [data, control]
    order[0].go.set()
    await order[0].left.wait()
    await settled()
    assert not task.done()
    order[1].go.set()
    assert await task == "answer"


@pytest.mark.fault("A-CANCEL-6")
async def test_control_fails_and_the_data_leg_is_cancelled():
    control, data, task = legs()
    await both_started(control, data)
    control.error = RemoteError("no memory")
    control.go.set()
    await ended(task)
    assert task.exception() is control.error
    assert data.cancelled


async def test_data_fails_and_the_answer_that_says_why_wins():
    control, data, task = legs()
    await both_started(control, data)
    data.error = PeerLost("connection reset")
    data.go.set()
    await data.left.wait()
    await settled()
    assert not task.done()
    control.error = RemoteError("no memory for down_proj")
    control.go.set()
    await ended(task)
    assert task.exception() is control.error
    assert not control.cancelled
    assert task.exception().__notes__ == ["also: PeerLost: connection reset"]


async def test_data_fails_and_the_answer_never_comes():
    control, data, task = legs(linger=0.1)
    await both_started(control, data)
    data.error = PeerLost("connection reset")
    data.go.set()
    await ended(task)
    assert task.exception() is data.error
    assert control.cancelled


async def test_data_fails_although_the_answer_was_good():
    control, data, task = legs()
    await both_started(control, data)
    control.go.set()
    await control.left.wait()
    data.error = ValueError("gather failed")
    data.go.set()
    began = time.monotonic()
    await ended(task)
    assert task.exception() is data.error
    assert time.monotonic() - began < LINGER  # the control leg is over: nothing to wait for


async def test_both_fail_at_once():
    control, data, task = legs()
    await both_started(control, data)
    control.error = RemoteError("no memory")
    data.error = TransportAborted("aborted")
    data.go.set()
    control.go.set()
    await ended(task)
    assert task.exception() is control.error
    assert "aborted" in task.exception().__notes__[0]


async def test_data_leg_that_fails_in_its_clean_up_is_noted_only():
    control = Leg()
    waiting = asyncio.Event()

    async def data():
        try:
            waiting.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise TransportAborted("woken by the abort") from None

    task = asyncio.create_task(run_legs(control, data, linger=LINGER))
    await waiting.wait()
    control.error = RemoteError("no memory")
    control.go.set()
    await ended(task)
    assert task.exception() is control.error


async def test_group_of_a_leg_becomes_one_exception():
    async def control():
        async with anyio.create_task_group():
            raise DigestMismatch("chunk 1")

    with pytest.raises(DigestMismatch, match="chunk 1"):
        await run_legs(control, Leg(), linger=LINGER)


async def test_scope_around_the_legs_cancels_both():
    control, data = Leg(), Leg()
    with anyio.move_on_after(0.05) as scope:
        await run_legs(control, data, linger=LINGER)
    assert scope.cancelled_caught
    assert control.cancelled
    assert data.cancelled


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_native_cancel_waits_for_both_legs(times):
    cleanup = asyncio.Event()
    control, data, task = legs(cleanup=cleanup)
    await both_started(control, data)
    for _ in range(times):
        task.cancel()
        await settled()
    assert not task.done()
    assert control.cancelled
    assert data.cancelled
    cleanup.set()
    await ended(task)
    assert task.cancelled()


# -- rank_errors, collapse


@pytest.mark.parametrize(
    ("errors", "best"),
    [
        ([PeerLost("a"), RemoteError("b")], 1),
        ([TransportAborted("a"), PhaseTimeout("b")], 1),
        ([PhaseTimeout("a"), Validation.remote("b")], 1),
        ([RemoteError("a"), ValueError("b")], 1),
        ([ValueError("a"), RemoteError("b")], 0),
        ([Validation("a"), PhaseTimeout("b")], 0),
        ([PeerLost("a"), TransportAborted("b")], 0),
        ([DigestMismatch.remote("a"), DigestMismatch.remote("b")], 0),
        ([PeerLost.remote("a"), DigestMismatch("b")], 1),
        ([KeyboardInterrupt(), ValueError("b")], 1),
        (
            [
                PhaseTimeout.remote("w2 did not come", detail={"replicas": ["w2"]}),
                PhaseTimeout("w2"),
            ],
            1,
        ),
        ([PhaseTimeout("a"), PhaseTimeout.remote("b")], 1),
    ],
)
async def test_rank_errors(errors, best):
    assert rank_errors(errors) is errors[best]
    loser = errors[1 - best]
    assert errors[best].__notes__ == [f"also: {type(loser).__name__}: {first_line(loser)}"]
    assert not hasattr(loser, "__notes__")


async def test_one_error_is_ranked_without_a_note():
    error = ValueError("alone")
    assert rank_errors([error]) is error
    assert not hasattr(error, "__notes__")


async def test_collapse_of_nested_groups():
    cause = RemoteError("no memory")
    others = [TransportAborted("one"), PeerLost("two"), PhaseTimeout("three")]
    group = BaseExceptionGroup(
        "outer",
        [ExceptionGroup("a", [others[0], ExceptionGroup("b", [others[1], cause])]), others[2]],
    )
    assert collapse(group) is cause
    assert len(cause.__notes__) == 3


async def test_collapse_leaves_a_plain_error_alone():
    error = ValueError("plain")
    assert collapse(error) is error
    assert not hasattr(error, "__notes__")


async def test_first_line():
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"


# -- run_to_end, hold_on


class Cleanup:
    def __init__(self):
        self.started = asyncio.Event()
        self.go = asyncio.Event()
        self.ended = False

    async def __call__(self):
        self.started.set()
        await self.go.wait()
        self.ended = True


async def test_run_to_end_says_whether_it_finished():
    async def fine():
        await asyncio.sleep(0)

    async def broken():
        raise ValueError("dropped")

    assert await run_to_end(fine, seconds=5)
    assert not await run_to_end(broken, seconds=5)
    assert not await run_to_end(asyncio.Event().wait, seconds=0.05)


async def test_run_to_end_under_a_cancelled_scope():
    cleanup = Cleanup()
    with anyio.CancelScope() as scope:
        scope.cancel()
        asyncio.get_running_loop().call_later(0.05, cleanup.go.set)
        await run_to_end(cleanup, seconds=5)
    assert cleanup.ended


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_run_to_end_under_native_cancellation(times):
    cleanup = Cleanup()
    task = asyncio.create_task(run_to_end(cleanup, seconds=5))
    await cleanup.started.wait()
    for _ in range(times):
        task.cancel()
        await settled()
    assert not task.done()
    cleanup.go.set()
    await ended(task)
    assert task.cancelled()
    assert cleanup.ended


async def test_run_to_end_is_bounded_whatever_cancels():
    cleanup = Cleanup()
    task = asyncio.create_task(run_to_end(cleanup, seconds=0.2))
    await cleanup.started.wait()
    task.cancel()
    await ended(task)
    assert task.cancelled()
    assert not cleanup.ended


@pytest.mark.parametrize("how", ["scope", "native", "native twice"])
async def test_hold_on_gives_grace(how):
    cleanup = Cleanup()
    scope = anyio.CancelScope()

    async def body():
        with scope:
            await hold_on(cleanup, grace=5)

    task = asyncio.create_task(body())
    await cleanup.started.wait()
    if how == "scope":
        scope.cancel()
    else:
        task.cancel()
    await settled()
    if how == "native twice":
        task.cancel()
        await settled()
    assert not task.done()
    cleanup.go.set()
    await ended(task)
    assert cleanup.ended
    assert scope.cancelled_caught if how == "scope" else task.cancelled()


@pytest.mark.parametrize("how", ["scope", "native"])
async def test_hold_on_gives_up_after_the_grace(how):
    cleanup = Cleanup()
    scope = anyio.CancelScope()

    async def body():
        with scope:
            await hold_on(cleanup, grace=0.1)

    task = asyncio.create_task(body())
    await cleanup.started.wait()
    if how == "scope":
        scope.cancel()
    else:
        task.cancel()
    await ended(task)
    assert not cleanup.ended
    assert scope.cancelled_caught if how == "scope" else task.cancelled()


async def test_hold_on_without_a_cancellation():
    cleanup = Cleanup()
    cleanup.go.set()
    await hold_on(cleanup, grace=0.1)
    assert cleanup.ended


async def test_hold_on_raises_what_it_ran_raised():
    async def broken():
        raise Validation("at fault")

    with pytest.raises(Validation, match="at fault"):
        await hold_on(broken, grace=0.1)


# -- stoppable, accompanied


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_stoppable_waits_for_what_it_cancelled(times):
    leg = Leg(cleanup=asyncio.Event())
    task = asyncio.create_task(stoppable(leg, grace=5, what="a leg"))
    await leg.started.wait()
    for _ in range(times):
        task.cancel()
        await settled()
    assert leg.cancelled
    assert not task.done()
    leg.cleanup.set()
    await ended(task)
    assert task.cancelled()
    assert leg.left.is_set()


class Companion:
    def __init__(self, error=None):
        self.began = asyncio.Event()
        self.left = asyncio.Event()
        self.error = error

    async def __call__(self):
        self.began.set()
        try:
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()
        finally:
            self.left.set()


async def test_companion_of_something_short_never_begins():
    companion = Companion()
    await accompanied(lambda: asyncio.sleep(0), companion, after=0.05)
    await asyncio.sleep(0.1)
    assert not companion.began.is_set()


@pytest.mark.parametrize("how", ["well", "scope", "native", "error"])
async def test_companion_ends_with_what_it_accompanies(how):
    leg, companion, scope = Leg(), Companion(), anyio.CancelScope()
    leg.error = Validation("mine") if how == "error" else None

    async def body():
        with scope:
            await accompanied(leg, companion, after=0)

    task = asyncio.create_task(body())
    await companion.began.wait()
    if how == "scope":
        scope.cancel()
    elif how == "native":
        task.cancel()
    else:
        leg.go.set()
    await ended(task)
    assert companion.left.is_set()
    if how == "native":
        assert task.cancelled()
    else:
        assert task.exception() is leg.error
        assert scope.cancelled_caught == (how == "scope")


async def test_companion_that_raises_ends_both():
    leg, error = Leg(), PhaseTimeout("no progress")
    task = asyncio.create_task(accompanied(leg, Companion(error), after=0))
    await ended(task)
    assert task.exception() is error
    assert leg.cancelled


async def test_companion_that_raises_while_the_other_cleans_up():
    async def fails_late():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise TransportAborted("woken by the abort") from None

    error = PhaseTimeout("no progress")
    with pytest.raises(PhaseTimeout) as caught:
        await accompanied(fails_late, Companion(error), after=0)
    assert caught.value is error
    assert "woken by the abort" in error.__notes__[0]


async def test_companion_that_somebody_cancels_ends_both():
    leg, companion = Leg(), Companion()
    before = asyncio.all_tasks()
    task = asyncio.create_task(accompanied(leg, companion, after=0))
    await companion.began.wait()
    (alone,) = asyncio.all_tasks() - before - {task}
    alone.cancel()
    await ended(task)
    assert isinstance(task.exception(), RoundCancelled)
    assert leg.cancelled


async def test_quietly_drops_errors_but_not_cancellation():
    async def broken(arg):
        raise ValueError(arg)

    async def cancelled(_):
        raise asyncio.CancelledError

    await quietly(broken, "dropped")
    with pytest.raises(asyncio.CancelledError):
        await quietly(cancelled, None)


# -- Task, Supervisor, Milestone


async def test_task_can_be_waited_for_again_and_again():
    leg = Leg()
    leg.result = 5
    task = Task(leg(), "five")
    assert not await task.wait(timeout=0.01)
    waiter = asyncio.create_task(task.wait())
    await settled()
    waiter.cancel()
    await ended(waiter)
    assert not task.done
    leg.go.set()
    assert await task.wait()
    assert await task.wait(timeout=0.01)
    assert task.result() == 5


async def test_task_that_nobody_holds_runs_to_its_end():
    leg = Leg()
    Task(leg(), "free")
    await leg.started.wait()
    gc.collect()
    leg.go.set()
    await settled()
    assert leg.left.is_set()


async def test_failed_task_that_nobody_asks_stays_quiet():
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    leg = Leg()
    leg.error = ValueError("nobody asks")
    leg.go.set()
    task = Task(leg(), "failing")
    await task.wait()
    with pytest.raises(ValueError, match="nobody asks"):
        task.result()
    del task
    leg.error = None
    await settled()
    gc.collect()
    await settled()
    assert complaints == []


@pytest.mark.fault("A-CANCEL-6")
async def test_supervisor_cancels_what_runs_and_waits_for_it():
    supervisor = Supervisor()
    running, done = Leg(), Leg()
    done.go.set()
    tasks = [supervisor.start(leg(), name="leg") for leg in (running, done)]
    await running.started.wait()
    await tasks[1].wait()
    await supervisor.aclose(seconds=5)
    assert all(task.done for task in tasks)
    assert running.cancelled
    await supervisor.aclose(seconds=5)


async def test_supervisor_does_not_wait_longer_than_it_was_told():
    supervisor = Supervisor()
    cleanup = asyncio.Event()
    stubborn = [Leg(cleanup=cleanup) for _ in range(6)]
    tasks = [supervisor.start(leg(), name="stubborn") for leg in stubborn]
    for leg in stubborn:
        await leg.started.wait()
    began = time.monotonic()
    await supervisor.aclose(seconds=1)
    assert time.monotonic() - began < 6  # a second for each of them
    assert not any(task.done for task in tasks)
    cleanup.set()
    for task in tasks:
        await task.wait(timeout=5)


async def test_milestone():
    milestone = Milestone()
    waiters = [asyncio.ensure_future(milestone.wait()) for _ in range(2)]

    async def await_it():
        await milestone

    waiters.append(asyncio.ensure_future(await_it()))
    await settled()
    assert not milestone.is_set()
    assert not any(waiter.done() for waiter in waiters)
    milestone.set()
    milestone.set()
    await asyncio.wait(waiters, timeout=5)
    assert milestone.is_set()
    assert all(waiter.done() for waiter in waiters)


class Held:
    """Stands for what a frame of a traceback keeps alive: a group's sockets and threads."""


@pytest.mark.parametrize("way", ["legs", "members", "group"])
async def test_an_error_lets_go_of_what_its_frames_held_without_a_garbage_collection(way):
    alive = []

    async def fails(_=None):
        held = Held()
        alive.append(weakref.ref(held))
        raise OSError("gone")

    async def waits():
        await anyio.sleep(5)

    async def attempt():
        if way == "legs":
            await run_legs(waits, fails, linger=0.1)
        elif way == "members":
            link = types.SimpleNamespace(name="w", phase=None, error=None, answered=None, seconds=0)
            await fan_out([link], fails, phase="update", linger=0.1)
        else:
            try:
                await fails()
            except OSError as error:
                collapse(ExceptionGroup("", [ValueError(), error]))
                raise

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(OSError):
            await attempt()
        await anyio.lowlevel.checkpoint()
        assert [ref() for ref in alive] == [None]
    finally:
        gc.enable()
