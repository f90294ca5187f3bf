"""The worker's side of one round.

Theory of operation
-------------------
``start``, ``update``, ``prepare``, ``finish`` and ``abort`` arrive as unrelated requests, each in
a task of its own, so nothing lexical can span them. A `Session` does: it is one supervised task
per round, owned by the engine, that lives from ``start`` until the round's end.

* The *flip* to ``updating`` happens in the handler of ``start``, before the session exists: an
  illegal order is thus raised to the caller who caused it and never reaches the session.
* A handler does no work of its own. It hands a job to the session (`do`) and waits for the
  outcome. If the handler's client goes away, the handler dies and the job goes on; a commit is
  therefore never half done because somebody hung up. Only what awaits nothing may be done in the
  handler's own step (`do_now`): nothing can come in between there.
* Jobs run one after the other, in order of arrival. The first job that raises ends the session:
  its own caller gets the exception itself, later and waiting callers get it as their error.
* The *lease* ends a session nobody cares for. It is renewed by requests of the owner and by bytes
  that arrive (`progress`), never by an open connection. Before it expires, the session looks at
  its own loop: if the loop stalled (a debugger, a long GIL hold), requests could not have been
  read, so the lease is extended once. It does not expire while a job of its own makes progress.
* Whatever ends the session, `on_end` runs exactly once, synchronously, in the session's last
  step: the engine flips its state and settles the weights there. Nothing is awaited between the
  verdict and the flip, so no cancellation can fall between them.
* An exception that has been raised to its callers is not kept, only what it said: through its
  traceback it holds the session, and a transport's sockets and threads, until a garbage collection.

Rejected: doing the work in the handlers (a client that disconnects kills a commit; no one owns
the lease), a thread per round (cannot be cancelled), ``asyncio.shield`` (detaches, does not wait).
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any, final

import anyio

from aiosync.concurrency import collapse
from aiosync.errors import AiosyncError, PhaseTimeout, RoundCancelled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from transports.deferred import Deferred


@final
class _Job:
    __slots__ = ("callers", "done", "error", "fn", "result")

    def __init__(self, fn: Callable[[], Awaitable[Any]]) -> None:
        self.fn = fn
        self.done = asyncio.Event()
        self.callers = 0
        self.result: Any = None
        self.error: BaseException | None = None


@final
class Session:
    """One round on a worker.

    Args:
        number: The trainer's round number (0 for clients that have none).
        lease: Seconds without a sign of life after which the session ends itself.
        on_end: Called once, synchronously, with the error that ended the session or None.
        progress: Monotonic time of the last byte that arrived, read by the lease.
        leave: Awaited before `on_end` of a session that failed: what has to be told elsewhere
            before the verdict is known. It must limit itself; what it raises is its own affair.
    """

    def __init__(
        self,
        *,
        number: int,
        lease: float,
        on_end: Callable[[BaseException | None], None],
        progress: Callable[[], float] = lambda: -math.inf,
        leave: Callable[[BaseException], Awaitable[None]] | None = None,
        deferred: Deferred[Any] | None = None,
    ) -> None:
        self.number = number
        self.lease = lease
        self.error: BaseException | None = None
        self.deferred = deferred
        """Work that was accepted and is done later; its first error ends the session."""
        self.holding = False
        """While true the lease does not run: the round is past its point of no return."""
        self._on_end = on_end
        self._progress = progress
        self._leave = leave
        self._renewed = time.monotonic()
        self._current: _Job | None = None
        self._waiting: list[_Job] = []
        self._named: dict[str, _Job] = {}
        self._wake = asyncio.Event()
        self._over = asyncio.Event()
        self._scope = anyio.CancelScope()
        self._reason: BaseException | None = None
        self._closing = False
        self._clock: asyncio.TimerHandle | None = None
        self._extended = -math.inf  # the renewal that was no sign of life but our own

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def touch(self) -> None:
        """Renew the lease."""
        self._renewed = time.monotonic()

    async def run(self) -> None:
        """Serve jobs until the session ends; run by the engine's supervisor."""
        self._tick(time.monotonic())
        try:
            with self._scope:
                if self.deferred is None:
                    await self._serve()
                else:
                    async with anyio.create_task_group() as group:
                        group.start_soon(self.deferred.run)
                        await self._serve()
                        group.cancel_scope.cancel()
            if self._scope.cancelled_caught or self._reason is not None:
                self.error = self._reason or self.error
        except BaseException as error:  # noqa: BLE001  recorded and handed to every waiter below
            self.error = self._reason or collapse(error)
        finally:
            self._stop_clock()
            try:
                if self.error is not None and self._leave is not None:
                    await self._leave(self.error)
            finally:
                self._end()

    def ensure_over(self) -> None:
        """End the session if the task that should have run it never began (the loop ended)."""
        if not self._over.is_set():
            self.error = self._reason or RoundCancelled(
                "the worker stopped during the round", round=self.number
            )
            self._end()

    async def do(self, fn: Callable[[], Awaitable[Any]], *, key: str | None = None) -> Any:
        """Have the session run `fn` and return its result.

        Cancelling the caller leaves `fn` running.

        Args:
            key: A job that may be asked for twice (``"finish"``): the second caller waits for the
                first one's outcome instead of running it again.

        Raises:
            What `fn` raised, or the error that ended the session before `fn` could run.
        """
        self.touch()
        job = self._named.get(key) if key is not None else None
        if job is None:
            if self._over.is_set() or self._closing:
                raise self._ended()
            job = _Job(fn)
            if key is not None:
                self._named[key] = job
            self._waiting.append(job)
            self._wake.set()
        job.callers += 1
        try:
            await job.done.wait()
            error = job.error
        finally:
            job.callers -= 1
            self._let_go(job)
        if error is not None:
            try:
                raise error
            finally:
                del error  # of a frame that its own traceback holds
        return job.result

    async def do_now(
        self,
        fn: Callable[[], object],
        *,
        key: str,
        later: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:
        """`do` of a plain function that does not block; here and now, if nothing else is in hand.

        What it raises ends the session like the error of any job.

        Args:
            later: What is done in its stead where something is in hand, or it returned False.
        """
        errors: list[BaseException] = []

        async def job() -> None:
            if errors:
                raise errors.pop()
            fn()

        ended = self.over or self._closing or self._reason is not None
        if not (ended or self._current or self._waiting or key in self._named):
            try:
                is_done = fn() is not False or later is None
            except BaseException as error:  # noqa: BLE001  raised by the job
                errors.append(error)
                is_done = False
            if is_done:
                self.touch()
                self._named[key] = done = _Job(job)
                done.done.set()
                return
        await self.do(job if errors or later is None else later, key=key)

    @property
    def asked(self) -> list[str]:
        """Which of the named jobs were handed in so far."""
        return list(self._named)

    def was_asked(self, *keys: str) -> bool:
        """Whether a job of one of `keys` was handed in."""
        return any(key in self._named for key in keys)

    def close(self) -> None:
        """Let the session end without error once its jobs are done."""
        self._closing = True
        self._wake.set()

    def cancel(self, reason: BaseException) -> None:
        """End the session now; `reason` becomes its error unless it has one already.

        A session that is `holding` is past its point of no return and is left to finish.
        """
        if not self._over.is_set() and not self.holding and self._reason is None:
            self._reason = reason
            self._scope.cancel()

    async def wait_over(self) -> None:
        """Wait until the session has ended and `on_end` has run."""
        await self._over.wait()

    async def _serve(self) -> None:
        while True:
            while not self._waiting:
                if self._closing:
                    return
                self._wake = asyncio.Event()
                await self._wake.wait()
            job = self._current = self._waiting.pop(0)
            try:
                job.result = await job.fn()
            except BaseException as error:
                job.error = self._reason if self._reason is not None else collapse(error)
                raise
            finally:
                self._current = None
                self.touch()
                if job.error is None:
                    job.done.set()
                else:
                    self._waiting.insert(0, job)  # answered by `_end`, after the flip

    def _tick(self, now: float) -> None:
        """Look at the lease again in a while; by a timer, since most rounds are over by then."""
        tick = min(self.lease / 8, 1.0)
        self._clock = asyncio.get_running_loop().call_later(tick, self._look, now + tick)

    def _look(self, due: float) -> None:
        now = time.monotonic()
        try:
            last = max(self._renewed, self._progress())
        except Exception as error:  # noqa: BLE001  the engine's own: nobody could tell any more
            self.cancel(error)
            return
        if not self.holding and now - last >= self.lease:
            if now - due <= self.lease / 4 or last == self._extended:
                text = f"no sign of life from the trainer for {self.lease:g} s"
                self.cancel(PhaseTimeout(text, phase="lease", round=self.number))
                return
            self.touch()
            self._extended = self._renewed
        self._tick(now)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()

    def _end(self) -> None:
        error = self.error
        try:
            self._on_end(error)
        finally:
            self._over.set()
            waiting, self._waiting = self._waiting, []
            if error is not None:
                self.error = self._ended()
            self._reason = None
            for job in waiting:
                if job.error is None or not isinstance(job.error, Exception):
                    job.error = self._ended()
                job.done.set()
                self._let_go(job)
            del error

    def _let_go(self, job: _Job) -> None:
        if job.error is not None and job.callers == 0 and job.done.is_set():
            job.error = self._ended()

    def _ended(self) -> BaseException:
        cause = self.error
        if cause is None:
            return RoundCancelled("the round is over", round=self.number)
        if isinstance(cause, AiosyncError):
            # A fresh object: one exception raised in several tasks would share its traceback.
            return cause.kind(
                cause.message,
                replica=cause.replica,
                phase=cause.phase,
                tensor=cause.tensor,
                rank=cause.rank,
                round=cause.round,
                weights=cause.weights,
            )
        if isinstance(cause, Exception):
            text = f"the round ended with {type(cause).__name__}: {cause}"
            return RoundCancelled(text, round=self.number)
        return stopped(cause, self.number)


def stopped(cause: BaseException | None, number: int) -> RoundCancelled:
    """What a round ended with that no `Exception` ended: a shutdown, or a ``SystemExit``."""
    text = "the worker stopped during the round"
    if cause is not None and not isinstance(cause, asyncio.CancelledError):
        text += f": its code raised {cause!r}"
    return RoundCancelled(text, round=number)
