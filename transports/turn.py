"""One blocking call at a time, and what other threads may do to it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from statemachines.errors import AiosyncError, InvalidTransition
from transports.errors import PeerLost, PhaseTimeout, TransportAborted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transports.waker import Waker


@final
class Turn:
    """Guards an object whose calls block on a lane while a loop may abort, close or release it.

    A call that does not come back in time is left behind on its thread, and its object is closed
    from another one: then closing has to wait for the call, not the caller for closing.
    """

    def __init__(self, waker: Waker) -> None:
        self._waker = waker
        self._lock = threading.Lock()
        self._running = False
        self._afterwards: list[Callable[[], None]] = []

    @contextmanager
    def call(
        self, phase: str, round: int, *, failed: Callable[[BaseException, bool], None]
    ) -> Iterator[None]:
        """A blocking call; raises what it raises, or `TransportAborted` if it was told to stop.

        Args:
            phase, round: Put into errors that lack them.
            failed: Called with the error, and whether it comes of an abort, before it is raised.
        """
        self._begin()
        try:
            yield
        except BaseException as error:  # told to `failed` and re-raised
            aborted = self._waker.woken
            failed(error, aborted)
            if aborted:
                self._waker.reset()  # delivered; the next round is not meant
                if isinstance(error, (PeerLost, PhaseTimeout)):
                    raise TransportAborted("told to stop", phase=phase, round=round) from error
            if isinstance(error, AiosyncError):
                error.locate(phase=phase, round=round)
            raise
        finally:
            self._end()

    def now_or_afterwards(self, action: Callable[[], None], interrupt: Callable[[], None]) -> None:
        """Run `action`, or, if a call is running, `interrupt` it and let it run `action` last."""
        with self._lock:
            if self._running:
                self._afterwards.append(action)
                interrupt()
                return
            self._running = True
        try:
            action()
        finally:
            self._end()

    def _begin(self) -> None:
        with self._lock:
            if self._running:
                raise InvalidTransition("another call of this stream is still running")
            self._running = True

    def _end(self) -> None:
        with self._lock:
            actions, self._afterwards = self._afterwards, []
            if not actions:
                self._running = False
                return
        try:
            for action in actions:
                action()
        finally:
            self._end()
