"""Work that was accepted and is done later: a bounded queue and its one consumer.

The owner's task group executes `Deferred.run`; any task may `put` and `drain`. Whether an item is
accepted is decided in one place without an await (`_accept`), so the counts are right whatever is
cancelled. Tasks that wait for room stand in line: items are processed in the order of the puts.

The first error ends it: what is queued is dropped, and every put and drain, waiting or later,
raises that same exception.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar, final

import anyio
import anyio.lowlevel
import msgspec

from statemachines.errors import InvalidTransition, Validation
from transports.errors import TransportAborted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")


class DeferredStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the queue was made.

    Attributes:
        accepted: Items that `put` took.
        done: Items that were processed without an error.
        dropped: Accepted items that will not be processed, because an earlier one failed.
        queued: Items that wait for the consumer now; never more than the depth.
        waiting: Tasks that wait in `put` now.
    """

    accepted: int
    done: int
    dropped: int
    queued: int
    waiting: int
    closed: bool
    failed: bool


@final
class Deferred(Generic[T]):
    """A bounded queue whose items are processed one after another, in order.

    Args:
        process: Awaited with each item, in the task that executes `run`.
        depth: Items that may be queued beside the one in process; at least 1.
    """

    __slots__ = (
        "_accepted", "_closed", "_depth", "_done", "_dropped", "_error", "_is_running", "_items",
        "_line", "_moved", "_process", "_work",
    )  # fmt: skip

    def __init__(self, process: Callable[[T], Awaitable[object]], *, depth: int) -> None:
        if type(depth) is not int or depth < 1:
            raise Validation(f"depth must be an int of at least 1, not {depth!r}")
        self._process = process
        self._depth = depth
        self._items: deque[T] = deque()
        self._line: deque[_Waiting[T]] = deque()
        self._accepted = self._done = self._dropped = 0
        self._closed = False
        self._is_running = False
        self._error: BaseException | None = None
        self._work = anyio.Event()  # set for the consumer: an item, or the end
        self._moved = anyio.Event()  # set for drains: an item is done, or none will be

    async def put(self, item: T) -> None:
        """Hand in an item; waits while the queue is full.

        A put that is cancelled while it waits is withdrawn, unless it got its place in the same
        moment: then the item is accepted, counted and will be processed.

        Raises:
            InvalidTransition: The queue is closed, or was closed before there was room.
            TransportAborted: The consumer was cancelled.
            Exception: Whatever `process` raised first.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        self._check()
        self._check_open()
        if len(self._items) < self._depth:  # nobody waits while there is room
            self._accept(item)
            return
        waiting = _Waiting(item)
        self._line.append(waiting)
        try:
            await waiting.called.wait()
        except BaseException:  # cancelled
            if not waiting.accepted and waiting in self._line:
                self._line.remove(waiting)
            raise
        if not waiting.accepted:
            self._check()
            self._check_open()

    async def drain(self) -> None:
        """Wait until everything that was accepted before this call has been processed.

        Raises:
            TransportAborted: The consumer was cancelled.
            Exception: Whatever `process` raised first, on every call.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        target = self._accepted
        self._check()
        while self._done < target:
            await self._moved.wait()
            self._check()

    def close(self) -> None:
        """Accept no further items; `run` returns once the queue is empty. Idempotent.

        Tasks that wait for room raise `InvalidTransition`: their items were not accepted.
        """
        self._closed = True
        self._dismiss_line()
        self._work.set()

    async def run(self) -> None:
        """Process items until the queue is closed and empty. To be executed once.

        Raises:
            InvalidTransition: It has been executed before.
            Exception: Whatever `process` raises; the queue has failed then.
        """
        if self._is_running:
            raise InvalidTransition("a deferred queue has one consumer, once")
        self._is_running = True
        try:
            while await self._has_work():
                await self._process_next()
        except BaseException as exc:  # re-raised; a cancellation ends the queue, too
            self._fail(exc)
            raise

    async def _process_next(self) -> None:
        item = self._items.popleft()
        if self._line:
            first = self._line.popleft()
            first.accepted = True
            self._accept(first.item)
            first.called.set()
        await self._process(item)
        self._done += 1
        self._notify_drains()

    def statistics(self) -> DeferredStatistics:
        return DeferredStatistics(
            accepted=self._accepted,
            done=self._done,
            dropped=self._dropped,
            queued=len(self._items),
            waiting=len(self._line),
            closed=self._closed,
            failed=self._error is not None,
        )

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "closed" if self._closed else "open"
        return f"<Deferred {state} accepted={self._accepted} done={self._done}>"

    async def _has_work(self) -> bool:
        while not self._items:
            if self._closed:
                return False
            self._work = anyio.Event()
            await self._work.wait()
        return True

    def _accept(self, item: T) -> None:
        self._items.append(item)
        self._accepted += 1
        self._work.set()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _check_open(self) -> None:
        if self._closed:
            detail = {"state": "closed", "allowed": []}
            raise InvalidTransition("the deferred queue is closed", detail=detail)

    def _fail(self, exc: BaseException) -> None:
        # A cancellation is its own task's; others are told that nobody consumes any more.
        is_error = isinstance(exc, Exception)
        self._error = exc if is_error else TransportAborted("the consumer was cancelled")
        self._dropped = self._accepted - self._done - is_error
        self._items.clear()
        self._dismiss_line()
        self._notify_drains()

    def _dismiss_line(self) -> None:
        while self._line:
            self._line.popleft().called.set()

    def _notify_drains(self) -> None:
        self._moved.set()
        self._moved = anyio.Event()


@final
class _Waiting(Generic[T]):
    """A put that stands in line."""

    __slots__ = ("accepted", "called", "item")

    def __init__(self, item: T) -> None:
        self.item = item
        self.accepted = False
        self.called = anyio.Event()
