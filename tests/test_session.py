"""The session of one round on a worker, alone."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from aiosync.concurrency import Supervisor
from aiosync.errors import DigestMismatch, PeerLost, PhaseTimeout, RoundCancelled
from aiosync.session import Session

pytestmark = pytest.mark.asyncio

LONG = 30.0


class Ends(list):
    """What `on_end` was called with, and what each waiter had seen by then."""

    def __init__(self):
        super().__init__()
        self.woken = []
        self.woken_at_end = None

    def __call__(self, error):
        self.append(error)
        self.woken_at_end = list(self.woken)


@asynccontextmanager
async def running(*, lease=LONG, **options):
    ends = Ends()
    session = Session(number=7, lease=lease, on_end=ends, **options)
    task = asyncio.create_task(session.run())
    try:
        yield session, ends, task
    finally:
        session.holding = False
        session.cancel(RoundCancelled("the test is over"))
        async with asyncio.timeout(5):
            await asyncio.wait([task])


class Job:
    """A job that waits for `go`, and counts."""

    def __init__(self, result=None, error=None):
        self.started = asyncio.Event()
        self.go = asyncio.Event()
        self.ended = asyncio.Event()
        self.runs = 0
        self.result, self.error = result, error

    async def __call__(self):
        self.runs += 1
        self.started.set()
        try:
            await self.go.wait()
            if self.error is not None:
                raise self.error
            return self.result
        finally:
            self.ended.set()


async def over(session):
    async with asyncio.timeout(5):
        await session.wait_over()


async def settled():
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.fault("A-SILENT-3")
async def test_jobs_run_one_after_the_other_in_order_of_arrival():
    order = []

    def job(n):
        async def run():
            order.append(("begin", n))
            await asyncio.sleep(0)
            order.append(("end", n))
            return n * 10

        return run

    async with running() as (session, ends, _):
        results = await asyncio.gather(*(session.do(job(n)) for n in range(5)))
        assert results == [0, 10, 20, 30, 40]
        assert order == [(what, n) for n in range(5) for what in ("begin", "end")]
        assert not ends
        assert not session.over


@pytest.mark.fault("A-CANCEL-3")
async def test_first_job_that_raises_ends_the_session_with_its_own_exception():
    error = DigestMismatch("chunk 3 differs", tensor="a.weight", phase="receive", weights="intact")
    async with running() as (session, ends, _):
        first, second = Job(error=error), Job()
        failing = asyncio.create_task(session.do(first))
        waiting = asyncio.create_task(session.do(second))
        await first.started.wait()
        first.go.set()
        with pytest.raises(DigestMismatch) as own:
            await failing
        assert own.value is error
        with pytest.raises(DigestMismatch) as theirs:
            await waiting
        with pytest.raises(DigestMismatch) as later:
            await session.do(second)
        assert second.runs == 0
        assert ends == [error]
        for other in (theirs.value, later.value):
            assert other is not error
            assert (other.message, other.tensor, other.phase) == (
                "chunk 3 differs",
                "a.weight",
                "receive",
            )
        assert theirs.value is not later.value


async def test_exception_of_the_users_own_is_raised_as_it_is_and_named_to_others():
    class Mine(ValueError):
        pass

    async with running() as (session, ends, _):
        error = Mine("no memory for down_proj")
        job = Job(error=error)
        job.go.set()
        with pytest.raises(Mine) as own:
            await session.do(job)
        assert own.value is error
        assert ends == [error]
        with pytest.raises(Exception, match="Mine: no memory for down_proj"):
            await session.do(Job())


async def test_caller_that_is_cancelled_leaves_its_job_running():
    async with running() as (session, ends, _):
        job, after = Job(), Job()
        caller = asyncio.create_task(session.do(job))
        await job.started.wait()
        caller.cancel()
        await asyncio.wait([caller])
        assert caller.cancelled()
        assert not job.ended.is_set()
        next_one = asyncio.create_task(session.do(after))
        await settled()
        assert after.runs == 0
        job.go.set()
        after.go.set()
        await next_one
        assert job.runs == after.runs == 1
        assert not ends


async def test_cancel_ends_the_running_job_and_everybody_gets_the_reason():
    async with running() as (session, ends, _):
        running_job, queued = Job(), Job()
        callers = [asyncio.create_task(session.do(job)) for job in (running_job, queued)]
        await running_job.started.wait()
        reason = RoundCancelled("aborted by the trainer", round=7)
        session.cancel(reason)
        session.cancel(RoundCancelled("a second reason"))
        await over(session)
        assert ends == [reason]
        assert (type(session.error), str(session.error)) == (type(reason), str(reason))
        assert running_job.ended.is_set()
        assert queued.runs == 0
        for caller in callers:
            with pytest.raises(RoundCancelled, match="aborted by the trainer"):
                await caller


async def test_cancel_before_the_first_step_of_the_session_ends_it_too():
    ends = Ends()
    session = Session(number=1, lease=LONG, on_end=ends)
    reason = RoundCancelled("at once")
    session.cancel(reason)
    waiting = asyncio.create_task(session.do(Job()))
    await session.run()
    assert ends == [reason]
    with pytest.raises(RoundCancelled, match="at once"):
        await waiting


async def test_cancel_after_the_end_changes_nothing():
    async with running() as (session, ends, _):
        session.close()
        await over(session)
        session.cancel(RoundCancelled("too late"))
        assert ends == [None]
        assert session.error is None
        with pytest.raises(RoundCancelled, match="the round is over"):
            await session.do(Job())


async def test_job_that_ignores_its_cancellation_does_not_change_the_verdict():
    async with running() as (session, ends, _):

        async def stubborn():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise ValueError("while cleaning up") from None

        started = Job()
        started.go.set()
        await session.do(started)
        caller = asyncio.create_task(session.do(stubborn))
        await settled()
        reason = RoundCancelled("aborted")
        session.cancel(reason)
        await over(session)
        assert ends == [reason]
        with pytest.raises(RoundCancelled, match="aborted"):
            await caller


async def test_lease_expires_without_a_sign_of_life():
    async with running(lease=0.2) as (session, ends, _):
        await over(session)
        (error,) = ends
        assert isinstance(error, PhaseTimeout)
        assert error.phase == "lease"
        assert error.round == 7
        with pytest.raises(PhaseTimeout, match="no sign of life"):
            await session.do(Job())


async def test_lease_ends_a_job_that_makes_no_progress():
    async with running(lease=0.2) as (session, ends, _):
        job = Job()
        with pytest.raises(PhaseTimeout):
            async with asyncio.timeout(5):
                await session.do(job)
        assert job.ended.is_set()
        assert len(ends) == 1


@pytest.mark.parametrize("sign", ["touch", "progress", "call"])
async def test_lease_is_renewed_by(sign):
    last = [time.monotonic()]
    async with running(lease=0.4, progress=lambda: last[0]) as (session, ends, _):
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            await asyncio.sleep(0.05)
            if sign == "touch":
                session.touch()
            elif sign == "progress":
                last[0] = time.monotonic()
            else:
                done = Job()
                done.go.set()
                await session.do(done)
        assert not session.over
        await over(session)  # nobody says anything any more
        assert isinstance(ends[0], PhaseTimeout)


async def test_a_loop_that_stalled_extends_the_lease_once(blocking_detector):
    blocking_detector.deactivate()
    async with running(lease=0.4) as (session, ends, _):
        await asyncio.sleep(0.1)
        time.sleep(0.8)  # nothing could be read meanwhile
        await asyncio.sleep(0.1)
        assert not session.over
        await over(session)
        assert isinstance(ends[0], PhaseTimeout)


async def test_a_loop_that_stalls_again_and_again_does_not_keep_a_session(blocking_detector):
    blocking_detector.deactivate()
    async with running(lease=0.2) as (session, ends, _):
        for _ in range(3):
            await asyncio.sleep(0.05)
            time.sleep(0.3)
        await asyncio.sleep(0.05)
        assert session.over
        assert isinstance(ends[0], PhaseTimeout)


async def test_an_engine_that_cannot_say_how_far_it_is_ends_the_session():
    def broken():
        raise ZeroDivisionError("of the engine's own")

    async with running(lease=0.2, progress=broken) as (session, ends, _):
        await over(session)
        assert isinstance(ends[0], ZeroDivisionError)


async def test_holding_stops_the_lease_and_outlives_a_cancel():
    async with running(lease=0.2) as (session, ends, _):
        job = Job(result="committed")

        async def commit():
            session.holding = True
            return await job()

        caller = asyncio.create_task(session.do(commit))
        await job.started.wait()
        session.cancel(RoundCancelled("too late"))
        await asyncio.sleep(0.6)
        assert not session.over
        job.go.set()
        assert await caller == "committed"
        session.close()
        await over(session)
        assert ends == [None]


async def test_callers_with_one_key_share_one_job():
    async with running() as (session, _, _):
        job, other = Job(result=5), Job(result=6)
        first = asyncio.create_task(session.do(job, key="finish"))
        second = asyncio.create_task(session.do(other, key="finish"))
        await job.started.wait()
        first.cancel()  # its client went away; the second one asks again
        job.go.set()
        assert await second == 5
        assert await session.do(other, key="finish") == 5
        assert (job.runs, other.runs) == (1, 0)


async def test_key_is_answered_from_the_record_after_the_end():
    async with running() as (session, _, _):
        job = Job(result=5)
        job.go.set()
        await session.do(job, key="finish")
        session.close()
        await over(session)
        assert await session.do(Job(), key="finish") == 5
        with pytest.raises(RoundCancelled):
            await session.do(Job(), key="prepare")


async def test_callers_with_one_key_share_its_failure():
    async with running() as (session, ends, _):
        error = DigestMismatch("differs")
        job = Job(error=error)
        callers = [asyncio.create_task(session.do(job, key="finish")) for _ in range(3)]
        await job.started.wait()
        job.go.set()
        for caller in callers:
            with pytest.raises(DigestMismatch, match="differs"):
                await caller
        assert job.runs == 1
        assert ends == [error]


async def test_close_finishes_the_jobs_that_are_queued():
    async with running() as (session, ends, _):
        jobs = [Job(result=n) for n in range(3)]
        callers = [asyncio.create_task(session.do(job)) for job in jobs]
        await jobs[0].started.wait()
        session.close()
        with pytest.raises(RoundCancelled):
            await session.do(Job())
        for job in jobs:
            job.go.set()
        assert await asyncio.gather(*callers) == [0, 1, 2]
        await over(session)
        assert ends == [None]


@pytest.mark.parametrize("how", ["raise", "cancel", "close", "native"])
async def test_on_end_runs_once_and_before_anybody_is_woken(how):
    async with running() as (session, ends, task):
        job, queued = Job(error=DigestMismatch("differs")), Job()
        if how == "close":
            job.error = None

        async def call(work):
            try:
                await session.do(work)
            finally:
                ends.woken.append(work)

        async def wait():
            await session.wait_over()
            ends.woken.append("over")

        waiter = asyncio.create_task(wait())
        callers = [asyncio.create_task(call(job))]
        if how != "close":
            callers.append(asyncio.create_task(call(queued)))
        await job.started.wait()
        if how == "cancel":
            session.cancel(RoundCancelled("aborted"))
        elif how == "native":
            task.cancel()
        elif how == "close":
            job.go.set()
            await callers[0]
            ends.woken.clear()
            session.close()
        else:
            job.go.set()
        await over(session)
        await asyncio.wait([*callers, waiter], timeout=5)
        assert len(ends) == 1
        assert ends.woken_at_end == []
        assert "over" in ends.woken


async def test_on_end_that_raises_leaves_nobody_waiting():
    def broken(_):
        raise RuntimeError("flip refused")

    session = Session(number=1, lease=LONG, on_end=broken)
    task = asyncio.create_task(session.run())
    job = Job()
    caller = asyncio.create_task(session.do(job))
    await job.started.wait()
    session.cancel(RoundCancelled("aborted"))
    await over(session)
    with pytest.raises(RoundCancelled):
        await caller
    with pytest.raises(RuntimeError, match="flip refused"):
        await task


async def test_native_cancellation_of_the_session_leaves_nobody_waiting():
    async with running() as (session, ends, task):
        job, queued = Job(), Job()
        callers = [asyncio.create_task(session.do(each)) for each in (job, queued)]
        await job.started.wait()
        task.cancel()
        await over(session)
        assert len(ends) == 1
        assert job.ended.is_set()
        for caller in callers:
            with pytest.raises((RoundCancelled, PeerLost)):
                async with asyncio.timeout(5):
                    await caller


async def test_job_that_raises_a_cancellation_by_itself_is_an_error_for_its_caller():
    async def odd():
        raise asyncio.CancelledError

    async with running() as (session, ends, _):
        with pytest.raises(RoundCancelled):
            async with asyncio.timeout(5):
                await session.do(odd)
        assert len(ends) == 1


async def test_session_whose_task_never_began_ends_too():
    ends = Ends()
    session = Session(number=1, lease=LONG, on_end=ends)
    supervisor = Supervisor()
    task = supervisor.start(session.run(), name="session", after=session.ensure_over)
    caller = asyncio.create_task(session.do(Job()))
    task.cancel()  # as a loop that shuts down does
    await over(session)
    assert len(ends) == 1
    with pytest.raises(RoundCancelled, match="worker stopped"):
        await caller


async def test_what_awaits_nothing_is_done_at_once():
    async with running() as (session, ends, _):
        steps = []
        asyncio.get_running_loop().call_soon(steps.append, "another")
        await session.do_now(lambda: steps.append("done"), key="start")
        assert steps == ["done"]
        assert session.asked == ["start"]
        again = Job()
        await session.do(again, key="start")  # the same call again: answered from the record
        assert again.runs == 0
        assert not ends


async def test_what_awaits_nothing_has_its_turn_behind_other_jobs():
    async with running() as (session, _, _):
        job, steps = Job(), []
        first = asyncio.create_task(session.do(job))
        await job.started.wait()
        second = asyncio.create_task(session.do_now(lambda: steps.append("done"), key="prepare"))
        await settled()
        assert not steps
        job.go.set()
        await asyncio.wait([first, second], timeout=5)
        assert steps == ["done"]


async def test_what_is_not_done_at_once_may_be_done_in_another_way():
    async with running() as (session, _, _):
        job, steps = Job(), []
        first = asyncio.create_task(session.do(job))
        await job.started.wait()

        async def later():
            await settled()  # in its turn it may wait
            steps.append("later")

        now = session.do_now(lambda: steps.append("now"), key="finish", later=later)
        second = asyncio.create_task(now)
        await settled()
        job.go.set()
        await asyncio.wait([first, second], timeout=5)
        assert steps == ["later"]
        await session.do_now(lambda: steps.append("now"), key="other", later=later)
        assert steps == ["later", "now"]


async def test_what_finds_that_it_has_to_wait_after_all_is_done_in_its_turn():
    async with running() as (session, _, _):
        steps = []

        async def later():
            await settled()
            steps.append("later")

        def now():
            steps.append("now")
            return False

        await session.do_now(now, key="finish", later=later)
        await session.do_now(now, key="finish", later=later)
        assert steps == ["now", "later"]


@pytest.mark.parametrize("begun", [False, True])
async def test_an_error_of_what_awaits_nothing_ends_the_session(begun):
    def bad():
        raise DigestMismatch("bytes differ")

    async with running() as (session, ends, _):
        if begun:
            await settled()
        with pytest.raises(DigestMismatch, match="bytes differ"):
            async with asyncio.timeout(5):
                await session.do_now(bad, key="prepare")
        await over(session)
        assert len(ends) == 1
        assert isinstance(ends[0], DigestMismatch)


async def test_nothing_is_done_at_once_in_a_session_that_is_told_to_end():
    async with running() as (session, ends, _):
        steps = []
        await settled()
        session.cancel(PeerLost("the trainer is gone"))
        with pytest.raises(PeerLost):
            async with asyncio.timeout(5):
                await session.do_now(lambda: steps.append("done"), key="prepare")
        assert not steps
        assert len(ends) == 1
