"""A bounded stream of transitions with one reader."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Self, TypeAlias, final

import anyio
import anyio.lowlevel

from statemachines.waiting import Wakeup

if TYPE_CHECKING:
    from statemachines.events import Transition
    from statemachines.hub import TransitionHub

# (engine, role): the identity of a machine on a shared hub.
Source: TypeAlias = tuple[str, str]


@final
class Subscription:
    """A bounded stream of transitions that one consumer reads at its own pace.

    Iterate over it (``async for``), or call `receive`. When more than `size` items wait, the
    oldest is dropped: a gap in `seq` shows where, `dropped` how many. Iteration ends by itself,
    after the items that are left, once the hub or the watched machine is closed. A subscription
    nobody holds any more is forgotten; as a context manager it is closed at once.
    """

    __slots__ = ("__weakref__", "_ended", "_hub", "_items", "_size", "_wakeups", "dropped", "only")

    def __init__(self, hub: TransitionHub, size: int, only: Source | None) -> None:
        self._hub = hub
        self._size = size
        self._items: deque[Transition] = deque()
        self._wakeups: set[Wakeup] = set()
        self._ended = False
        self.only = only
        self.dropped = 0

    def __repr__(self) -> str:
        state = "ended" if self._ended else "open"
        return f"<Subscription {state} {len(self._items)}/{self._size} dropped={self.dropped}>"

    def receive_nowait(self) -> Transition:
        """The next transition.

        Raises:
            anyio.WouldBlock: None is waiting.
            anyio.EndOfStream: None is waiting and none will come.
        """
        if self._items:
            return self._items.popleft()
        raise anyio.EndOfStream if self._ended else anyio.WouldBlock

    async def receive(self) -> Transition:
        """Wait for the next transition; a cancelled call loses none.

        Raises:
            anyio.EndOfStream: The stream has ended and everything was read.
        """
        # A consumer that is behind must still let others run, and be cancellable.
        await anyio.lowlevel.checkpoint()
        while True:
            try:
                return self.receive_nowait()
            except anyio.WouldBlock:
                await self._sleep()

    async def _sleep(self) -> None:
        wakeup = Wakeup()
        self._wakeups.add(wakeup)
        try:
            await wakeup.wait()
        finally:
            self._wakeups.discard(wakeup)

    def deliver(self, transition: Transition) -> bool:
        """The hub's side: add an item; returns whether an older one was dropped for it."""
        full = len(self._items) >= self._size
        if full:
            self._items.popleft()
            self.dropped += 1
        self._items.append(transition)
        self._wake()
        return full

    def end(self) -> None:
        """The hub's side: nothing more will come; what waits can still be read."""
        self._ended = True
        self._wake()

    def close(self) -> None:
        """Stop listening and discard what waits. Idempotent."""
        self._hub.forget(self)
        self._items.clear()
        self.end()

    def _wake(self) -> None:
        for wakeup in tuple(self._wakeups):
            wakeup.wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Transition:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
