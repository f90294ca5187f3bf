"""Coroutines that others wrote (clients, sources, steps), awaited so that they cannot keep a round.

Each runs in a task of its own. A cancellation is passed on once, as asyncio does it; one that does
not end then, since it swallows the cancellation, is left behind after a while, and said so in the
log. What it does to its own task (cancel it, too) reaches nobody else. Where it could still touch
what the next round uses, its owner keeps it in mind (`LeftBehind`) and begins none before its end.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import TYPE_CHECKING, Any, TypeVar, final

import anyio

from aiosync.errors import PhaseTimeout, Refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

T = TypeVar("T")
logger = logging.getLogger(__name__)
_LEFT: set[asyncio.Task[Any]] = set()
# The loop holds tasks weakly, and a task that is destroyed before its end complains.


class Stray(RuntimeError):
    """A cancellation that nobody asked for."""


@final
class LeftBehind:
    """What one owner's callers gave up waiting for, as long as it runs."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def add(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def running(self) -> list[asyncio.Task[Any]]:
        """Those that have not ended; a loop that was closed has ended all of its tasks."""
        return [t for t in self._tasks if not t.done() and not t.get_loop().is_closed()]

    def check(self, what: str) -> None:
        """Refuse `what` while something of before could get into it.

        Raises:
            Refused: Names what still runs.
        """
        names = sorted(task.get_name() for task in self.running)
        if names:
            raise Refused(
                f"{what} has to wait: {', '.join(names)} was cancelled and still runs",
                retryable=True,
                next_step="let it end when it is cancelled (no `except BaseException` around an"
                " await); until it has ended nothing begins that it could get into",
            )


async def all_ended(parties: Sequence[LeftBehind], *, seconds: float) -> None:
    """Wait until nothing of `parties` runs, at most `seconds`: it may be about to end."""
    running = [task for party in parties for task in party.running]
    if running:
        await asyncio.wait(running, timeout=seconds)


async def limited(
    fn: Callable[[], Awaitable[T]],
    seconds: float,
    *,
    grace: float,
    what: str,
    phase: str,
    left: LeftBehind,
) -> T:
    """`stoppable` for `seconds`.

    Raises:
        PhaseTimeout: It took longer; says so where it did not even end then.
    """
    with anyio.move_on_after(seconds):
        return await stoppable(fn, grace=grace, what=what, left=left)
    text = f"{what} took longer than {seconds:g} s"
    if left.running:
        text += ", and did not end when it was cancelled: it was left behind"
    raise PhaseTimeout(text, phase=phase)


async def stoppable(
    fn: Callable[[], Awaitable[T]],
    *,
    grace: float,
    what: str,
    patience: float = 0.0,
    left: LeftBehind | None = None,
) -> T:
    """Await ``fn()``; when cancelled, cancel it `patience` seconds later, unless it has ended.

    Whoever cancels the caller meanwhile, once more or in another way, changes nothing about that.

    Args:
        grace: Seconds that it then gets to end.
        what: Its name in the log and in errors.
        left: Told where it did not end then.

    Raises:
        Stray: It was cancelled, although nobody asked for that: it is no success, and a
            task group would take the cancellation for its own and drop it.
    """

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # under trio nothing can be left behind
        return await fn()
    stopped: list[BaseException] = []

    async def body() -> T:
        try:
            return await fn()
        except (SystemExit, KeyboardInterrupt) as error:
            stopped.append(error)  # out of a task it would stop the event loop
            raise asyncio.CancelledError from error

    task = loop.create_task(body(), name=what)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        # A group, because a native cancellation goes straight through a shield.
        async with anyio.create_task_group() as group:
            group.start_soon(_outlast, task, patience, grace)
            raise
    finally:
        if not task.done():
            logger.warning("%s does not end although it was cancelled: left behind", what)
            task.cancel()
            _LEFT.add(task)
            task.add_done_callback(_LEFT.discard)
            if left is not None:
                left.add(task)
        task.add_done_callback(_retrieve)
    try:
        return task.result()
    except asyncio.CancelledError as error:
        if stopped:
            raise stopped.pop() from None
        text = f"{what} raised {error!r}, although nothing was cancelled"
        raise Stray(text) from error
    finally:
        del task  # an error's traceback has this frame in it


async def _outlast(task: asyncio.Task[Any], patience: float, grace: float) -> None:
    if patience:
        with anyio.move_on_after(patience, shield=True):  # bounded, as the next one
            await asyncio.wait([task])
    task.cancel()
    with anyio.move_on_after(grace, shield=True):
        await asyncio.wait([task])


def discard(result: object) -> None:
    """Close a coroutine that nobody has awaited: it would complain of it."""
    if inspect.iscoroutine(result) and inspect.getcoroutinestate(result) == inspect.CORO_CREATED:
        result.close()


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.debug("%s ended with %r", task.get_name(), task.exception())
