"""Coroutines that others wrote (clients, sources, steps), awaited so that they cannot keep a round.

Each runs in a task of its own. A cancellation is passed on once, as asyncio does it; one that does
not end then, since it swallows the cancellation, is left behind after a while, and said so in the
log. What it does to its own task (cancel it, too) reaches nobody else.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")
logger = logging.getLogger(__name__)
_LEFT: set[asyncio.Task[Any]] = set()
# The loop holds tasks weakly, and a task that is destroyed before its end complains.


class Stray(RuntimeError):
    """A cancellation that nobody asked for."""


async def stoppable(
    fn: Callable[[], Awaitable[T]], *, grace: float, what: str, patience: float = 0.0
) -> T:
    """Await ``fn()``; when cancelled, cancel it `patience` seconds later, unless it has ended.

    Whoever cancels the caller meanwhile, once more or in another way, changes nothing about that.

    Args:
        grace: Seconds that it then gets to end.
        what: Its name in the log and in errors.

    Raises:
        Stray: It was cancelled, although nobody asked for that: it is no success, and a
            task group would take the cancellation for its own and drop it.
    """

    stopped: list[BaseException] = []

    async def body() -> T:
        try:
            return await fn()
        except (SystemExit, KeyboardInterrupt) as error:
            stopped.append(error)  # out of a task it would stop the event loop
            raise asyncio.CancelledError from error

    task = asyncio.get_running_loop().create_task(body(), name=what)
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


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.debug("%s ended with %r", task.get_name(), task.exception())
