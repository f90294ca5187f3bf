"""How a task sleeps until a machine moves."""

from __future__ import annotations

import threading
from typing import final

import anyio

_RECHECK = 1.0


@final
class Wakeup:
    """One sleeping waiter. Made inside async code, since an event belongs to a running loop."""

    __slots__ = ("_event", "_thread")

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._thread = threading.get_ident()

    def wake(self) -> None:
        """End the waiter's sleep; never raises, never blocks."""
        if self._thread != threading.get_ident():
            return  # events are not thread-safe; the waiter looks again by itself
        try:
            self._event.set()
        except RuntimeError:
            pass  # the waiter's loop is gone, and the waiter with it

    async def wait(self) -> None:
        """Sleep until woken, or until it is time to look again."""
        with anyio.move_on_after(_RECHECK):
            await self._event.wait()


class _Watch:
    """One waiter's view: it sees a state that is left again before the waiter runs."""

    __slots__ = ("ended", "reached", "wakeup", "wanted")

    def __init__(self, wanted: tuple[str, ...]) -> None:
        self.wanted = wanted
        self.reached: str | None = None
        self.ended = False
        self.wakeup = Wakeup()

    def notice(self, state: str, *, ended: bool) -> None:
        if self.reached is None and state in self.wanted:
            self.reached = state
        self.ended = ended
        if ended or self.reached is not None:
            self.wakeup.wake()


@final
class Watches:
    """The tasks that wait for one machine."""

    __slots__ = ("_watches",)

    def __init__(self) -> None:
        self._watches: set[_Watch] = set()

    def notice(self, state: str, *, ended: bool) -> None:
        """The machine is in `state` now; `ended` if it will never leave it."""
        for watch in tuple(self._watches):
            watch.notice(state, ended=ended)

    async def wait(self, wanted: tuple[str, ...], timeout: float | None) -> str | None:
        """The first of `wanted` that is reached, or None if the machine ended elsewhere.

        Raises:
            TimeoutError: `timeout` seconds have passed.
        """
        watch = _Watch(wanted)
        self._watches.add(watch)
        try:
            with anyio.move_on_after(timeout):
                while watch.reached is None and not watch.ended:
                    await watch.wakeup.wait()
        finally:
            self._watches.discard(watch)
        if watch.reached is None and not watch.ended:
            raise TimeoutError
        return watch.reached
