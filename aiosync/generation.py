"""The gate between generation and a swap of the weights.

Requests hold the gate shared, a swap holds it alone. Neither can starve the other: once a swap
waits, new requests queue behind it, and the requests that queued go before the next swap. One
gate belongs to one event loop. All bookkeeping between two awaits is synchronous, so a cancelled
waiter leaves nothing behind.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import TYPE_CHECKING

import anyio

from aiosync.errors import PhaseTimeout, Validation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class GateState(StrEnum):
    """Where the gate is in ``running -> pausing -> paused -> running``."""

    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"


class _Waiter:
    __slots__ = ("admitted", "event")

    def __init__(self) -> None:
        self.admitted = False
        self.event = anyio.Event()

    def admit(self) -> None:
        self.admitted = True
        self.event.set()


class GenerationGate:
    """Lets requests run side by side, or one swap alone.

    Attributes:
        state: `GateState`; paused means that nobody is inside but the swap.
        in_flight: Requests inside.
    """

    __slots__ = ("_idle", "_requests", "_swaps", "_swaps_done", "in_flight", "state")

    def __init__(self) -> None:
        self.state = GateState.RUNNING
        self.in_flight = 0
        self._requests: deque[_Waiter] = deque()
        self._swaps: deque[_Waiter] = deque()
        self._idle: anyio.Event | None = None
        self._swaps_done = 0

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Hold while one generation runs. Waits while a swap waits or runs.

        Not re-entrant: a request that enters again while a swap waits for it would wait for
        itself, until the swap times out.
        """
        if self.state is not GateState.RUNNING:
            await self._queue(self._requests, self._leave)
        else:
            self.in_flight += 1
        try:
            yield
        finally:
            self._leave()

    @asynccontextmanager
    async def swap(self, *, timeout: float = 30.0) -> AsyncIterator[None]:
        """Hold alone: waits for the requests inside, keeps new ones out.

        Args:
            timeout: Seconds until the body runs, waiting for other swaps included. The body
                itself is not limited.

        Raises:
            PhaseTimeout: Requests (or another swap) were still inside; the gate is open again.
        """
        if not timeout >= 0 or math.isinf(timeout):
            raise Validation(f"timeout must be a finite number of seconds, not {timeout!r}")
        with anyio.move_on_after(timeout) as scope:
            if self.state is GateState.RUNNING:
                self.state = GateState.PAUSING
            else:
                await self._queue(self._swaps, self._open)
        if scope.cancelled_caught:
            raise PhaseTimeout(f"another swap is still {self.state}", phase="pause")
        try:
            remaining = scope.deadline - anyio.current_time()
            with anyio.move_on_after(max(remaining, 0)):
                if self.in_flight:
                    self._idle = anyio.Event()
                    await self._idle.wait()
            if self.in_flight:
                raise PhaseTimeout(
                    f"{self.in_flight} requests were still running after {timeout:g} s",
                    phase="pause",
                    detail={"in_flight": self.in_flight},
                )
            self.state = GateState.PAUSED
            yield
            self._swaps_done += 1
        finally:
            self._idle = None
            self._open()

    def statistics(self) -> dict[str, int | str]:
        """Counts as they are now."""
        return {
            "state": self.state.value,
            "in_flight": self.in_flight,
            "requests_waiting": len(self._requests),
            "swaps_waiting": len(self._swaps),
            "swaps_done": self._swaps_done,
        }

    def __repr__(self) -> str:
        waiting = len(self._requests)
        return f"<GenerationGate {self.state} in_flight={self.in_flight} waiting={waiting}>"

    async def _queue(self, queue: deque[_Waiter], hand_back: Callable[[], None]) -> None:
        waiter = _Waiter()
        queue.append(waiter)
        try:
            await waiter.event.wait()
        except BaseException:  # whatever ends the wait: give up the place, or the turn
            if waiter.admitted:
                hand_back()
            else:
                queue.remove(waiter)
            raise

    def _leave(self) -> None:
        self.in_flight -= 1
        if not self.in_flight and self._idle is not None:
            self._idle.set()

    def _open(self) -> None:
        """End a swap: let the waiting requests in, then hand the gate to the next swap."""
        self.state = GateState.RUNNING
        while self._requests:
            self.in_flight += 1  # counted here: the next swap must wait for them
            self._requests.popleft().admit()
        if self._swaps:
            self.state = GateState.PAUSING
            self._swaps.popleft().admit()
