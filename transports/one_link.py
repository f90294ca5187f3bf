"""What the receivers that hold one connection to their sender have in common: how a round ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statemachines.errors import AiosyncError
from transports import shm_messages as wire
from transports.turn import Turn
from transports.waker import Waker

if TYPE_CHECKING:
    from transports.links import Link


class OneLink:
    """A round's connection, and what other threads may do to the call that uses it.

    A subclass says in `_dispose` what it frees beside the connection.
    """

    def __init__(self) -> None:
        self._waker = Waker()
        self._turn = Turn(self._waker)
        self._link: Link | None = None

    def _failed(self, error: BaseException, aborted: bool) -> None:
        if self._link is not None and not aborted:
            try:
                self._link.post(wire.failed(error))
            except AiosyncError:
                pass  # the link is broken, and that is the news itself
        self._end_round()

    def _end_round(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def abort(self) -> None:
        """See `transports.stream.Receiver.abort`.

        Holds until `receive` has raised, or until `close`: also for a call that is only about to
        begin.
        """
        self._waker.wake()
        link = self._link
        if link is not None:
            link.shutdown()

    def close(self) -> None:
        """Drop the round's connection and a pending `abort`; the next `receive` works.

        From any thread; a call that is still running is aborted, and closes when it ends.
        """
        self._turn.now_or_afterwards(self._drop, self.abort)

    def _drop(self) -> None:
        self._end_round()
        self._waker.reset()

    def release(self) -> None:
        """End for good: no mapping, no descriptors.

        From any thread; a call that is still running is aborted, and releases when it ends.
        """
        self._turn.now_or_afterwards(self._dispose, self.abort)

    def _dispose(self) -> None:
        self._end_round()
        self._waker.close()
