"""Structured concurrency of a round: legs, collapse, clean-up that survives, free tasks.

Vocabulary: *level* cancellation comes from an anyio scope and is raised at every await until the
scope ends; *native* cancellation is ``task.cancel()``, raised once, and it pierces a shield. We
create only the first and must survive the second, so whatever has to finish runs in a child task:
a native cancel then hits the parent, which waits for the child.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

import anyio

from aiosync.errors import AiosyncError, RemoteError, RoundCancelled
from aiosync.foreign import Stray, stoppable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

T = TypeVar("T")
logger = logging.getLogger(__name__)


async def run_legs(
    control: Callable[[], Awaitable[T]], data: Callable[[], Awaitable[Any]], *, linger: float
) -> T:
    """Run the control leg and the data leg together; the first failure cancels the other.

    A peer that fails closes its data connection a moment before its answer arrives, and the
    answer says why. So when the data leg fails first, the control leg gets `linger` seconds to
    end by itself before it is cancelled.

    Returns:
        What the control leg returned.

    Raises:
        One plain exception: the root cause (`rank_errors`), the other failure as its note.
    """
    failures: list[BaseException] = []
    results: list[T] = []
    sent = False
    control_over = anyio.Event()

    async def run_control() -> None:
        try:
            results.append(await uncancelled(control))
        except Exception as error:  # noqa: BLE001  collected; raised below as one exception
            failures.append(collapse(error))
            group.cancel_scope.cancel()
        finally:
            control_over.set()

    async def run_data() -> None:
        nonlocal sent
        try:
            await uncancelled(data)
            sent = True
        except Exception as error:  # noqa: BLE001  collected; raised below as one exception
            failures.append(collapse(error))
            with anyio.move_on_after(linger):
                await control_over.wait()
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(run_control)
        group.start_soon(run_data)
    raise_ranked(failures)
    check_ended(sent and bool(results), "transfer")
    return results[0]


async def uncancelled(fn: Callable[[], Awaitable[T]]) -> T:
    """Await ``fn()`` in a child task; a cancellation that nobody asked for becomes `RuntimeError`.

    A task group takes whatever cancellation leaves a child for its own and drops it: a client or a
    source that lets one escape (it awaited a task that was cancelled) would pass for success.
    """
    try:
        return await fn()
    except anyio.get_cancelled_exc_class() as error:
        if _is_cancelled():
            raise
        raise RuntimeError(f"{error!r} was raised, although nothing was cancelled") from error


def _is_cancelled() -> bool:
    if anyio.current_effective_deadline() == -math.inf:
        return True
    try:
        task = asyncio.current_task()
    except RuntimeError:  # under trio only scopes cancel
        return True
    return task is not None and task.cancelling() > 0


def check_ended(ended: bool, what: str) -> None:
    """After a task group: its children came to their ends.

    Raises:
        RoundCancelled: One did not: somebody cancelled its task alone (all tasks of the loop, say),
            which the group takes for a cancellation of its own, and drops.
    """
    if not ended:
        raise cancelled_from_outside(what)


def cancelled_from_outside(what: str) -> RoundCancelled:
    """What a task ends with that somebody cancelled, and not through its owner."""
    return RoundCancelled(f"a task of this {what} was cancelled from outside")


def raise_ranked(failures: list[BaseException]) -> None:
    """Raise the root cause among `failures`, if there are any; empties the list.

    An error that is listed in a frame of its own traceback is a cycle, too (see `collapse`).
    """
    if failures:
        try:
            raise rank_errors(failures)
        finally:
            failures.clear()


def rank_errors(errors: Sequence[BaseException]) -> BaseException:
    """The root cause among `errors`, the others attached to it as notes.

    What a peer reported outranks what this side concluded; among equals the first one wins.
    """
    best = min(errors, key=lambda error: (distance_from_cause(error), errors.index(error)))
    for other in errors:
        if other is not best:
            best.add_note(f"also: {type(other).__name__}: {first_line(other)}")
    return best


def distance_from_cause(error: BaseException) -> int:
    """How little it says about why a round failed: of several, the lowest is the one to raise."""
    if not isinstance(error, AiosyncError):
        # An exception of the user's own code (a source, a loader) is the cause by itself.
        return 0 if isinstance(error, Exception) else 1
    if error.code in ("transport_aborted", "peer_lost"):
        # A group that lost a rank knows why the others' connections closed.
        return 1 if "lost_rank" in error.detail else 3
    if error.code == "phase_timeout" and isinstance(error, RemoteError):
        # One that waited for other ranks knows no more of them than who waited beside it.
        return 3 if "replicas" in error.detail else 1
    return 1 if isinstance(error, RemoteError) else 2


def collapse(error: BaseException) -> BaseException:
    """One plain exception out of a (nested) exception group."""
    # No recursive inner function: it would be a cycle that keeps the errors, and what the frames of
    # their tracebacks hold (a group's sockets and threads), until the next garbage collection.
    leaves: list[BaseException] = []
    waiting = [error]
    while waiting:
        current = waiting.pop()
        if isinstance(current, BaseExceptionGroup):
            waiting.extend(reversed(current.exceptions))
        else:
            leaves.append(current)
    return rank_errors(leaves)


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


async def run_to_end(fn: Callable[[], Awaitable[Any]], *, seconds: float) -> bool:
    """Await ``fn()`` for at most `seconds`, whatever kind of cancellation arrives meanwhile.

    Errors of `fn` are logged at DEBUG and dropped: clean-up must not hide the cause.

    Returns:
        Whether `fn` finished without error within the time.
    """
    finished = False

    async def body() -> None:
        nonlocal finished
        # shield: clean-up has to run although the round is being cancelled; bounded by `seconds`.
        with anyio.move_on_after(seconds, shield=True):
            try:
                await fn()
                finished = True
            except Exception:
                logger.debug("clean-up failed", exc_info=True)

    async with anyio.create_task_group() as group:
        group.start_soon(body)
    return finished


async def to_its_end(fn: Callable[[], Awaitable[None]]) -> None:
    """Await ``fn()``, whose steps are bounded by themselves, whatever cancels meanwhile.

    For closing: a scope that was cancelled must not leave an engine half closed. Errors are
    raised; a cancellation is raised once `fn` is through.
    """

    ended = False

    async def body() -> None:
        nonlocal ended
        with anyio.CancelScope(shield=True):  # each step of `fn` has a deadline of its own
            await fn()
        ended = True

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(body)
    except BaseExceptionGroup as error:
        cause = collapse(error)
        raise cause from cause.__cause__  # not from the group it came in
    check_ended(ended, "clean-up")


@final
class Task(Generic[T]):
    """A free task with a bounded, repeatable wait and a result that never logs by accident."""

    __slots__ = ("_task", "name")

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, T],
        name: str,
        after: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._task = asyncio.get_running_loop().create_task(coroutine, name=name)
        _ALIVE.add(self._task)
        self._task.add_done_callback(_ALIVE.discard)
        self._task.add_done_callback(_note_failure)
        if after is not None:
            self._task.add_done_callback(lambda _: after())

    @property
    def done(self) -> bool:
        return self._task.done()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._task.get_loop()

    def result(self) -> T:
        """The outcome of a finished task; re-raises its exception."""
        return self._task.result()

    def cancel(self) -> None:
        """Ask the task to stop; safe to repeat."""
        self._task.cancel()

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until the task has ended; False if it did not within `timeout` seconds.

        Cancelling the waiter leaves the task alone.
        """
        if not self._task.done():
            await asyncio.wait([self._task], timeout=timeout)
        return self._task.done()


_ALIVE: set[asyncio.Task[Any]] = set()
# The loop holds tasks weakly; this is what keeps a supervised one alive until it ends.


def _note_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.debug("task %s ended with %s", task.get_name(), type(error).__name__)


@final
class Supervisor:
    """The one place that creates tasks which outlive the call that started them."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: set[Task[Any]] = set()

    def start(
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        name: str,
        after: Callable[[], None] | None = None,
    ) -> Task[T]:
        """Start a task; `after` runs once it is over, even if it was cancelled unbegun."""
        self._tasks = {task for task in self._tasks if not task.done}
        task = Task(coroutine, name, after)
        self._tasks.add(task)
        return task

    async def aclose(self, *, seconds: float) -> None:
        """Cancel what still runs and wait for it, at most `seconds`.

        A loop that was closed runs nothing of its own any more.
        """
        running = [t for t in self._tasks if not t.done and not t.loop.is_closed()]
        for task in running:
            task.cancel()
        with anyio.move_on_after(seconds):  # for all of them together
            for task in running:
                await task.wait()
        self._tasks.clear()


@final
class Milestone:
    """Something that happens once: ``await it``, ``it.is_set()``, ``await it.wait()``."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._then: list[Callable[[], None]] = []

    def set(self) -> None:
        self._event.set()
        then, self._then = self._then, []
        for fn in then:
            fn()

    def then(self, fn: Callable[[], None]) -> None:
        """Call `fn` when it happens; before it has."""
        self._then.append(fn)

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()

    def __await__(self) -> Any:
        return self._event.wait().__await__()


async def hold_on(fn: Callable[[], Awaitable[None]], *, grace: float) -> None:
    """Await ``fn()``; when cancelled meanwhile, give it `grace` seconds more to end by itself."""
    try:
        await stoppable(fn, patience=grace, grace=grace, what="finish")
    except Stray as error:
        raise cancelled_from_outside("finish") from error


async def quietly(fn: Callable[[T], Awaitable[None]], arg: T) -> None:
    """A heartbeat or a farewell: what it finds out it writes down, its failure is no news."""
    try:
        await fn(arg)
    except Exception:
        logger.debug("%s failed", getattr(fn, "__name__", fn), exc_info=True)
