"""What those that serve several readers in a round have in common: how a round ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transports.listener import Listener
from transports.turn import Turn
from transports.waker import Waker

if TYPE_CHECKING:
    from transports.shm_readers import Readers


class ManyLinks:
    """A listener, a round's readers, and what other threads may do to the call that serves them.

    A subclass says in `_end_round` and `_dispose` what it frees beside the connections.

    Args:
        address: Of the listener; None: a new one.
    """

    def __init__(self, address: str | None = None) -> None:
        self._waker = Waker()
        self._turn = Turn(self._waker)
        self._readers: Readers | None = None
        self._listener = Listener(address)

    def _failed(self, error: BaseException, aborted: bool) -> None:
        # Half a round is of no use to anybody: readers are told, and connections dropped.
        if self._readers is not None and not aborted:
            self._readers.fail(error)
        self._end_round()

    def _end_round(self) -> None:
        readers, self._readers = self._readers, None
        if readers is not None:
            readers.close()

    def abort(self) -> None:
        """See `transports.stream.Sender.abort`.

        Holds until the round's blocking call has raised, or until `close`: also for a call that
        is only about to begin.
        """
        self._interrupt()

    def _interrupt(self) -> None:
        self._waker.wake()
        readers = self._readers
        if readers is not None:
            readers.shutdown()

    def close(self) -> None:
        """Drop this round's connections and a pending `abort`; the next round works.

        From any thread; a call that is still running is aborted, and closes when it ends.
        """
        self._turn.now_or_afterwards(self._drop, self._interrupt)

    def _drop(self) -> None:
        self._end_round()
        self._waker.reset()

    def release(self) -> None:
        """End for good: no address, no memory, no descriptors.

        From any thread; a call that is still running is aborted, and releases when it ends.
        """
        self._turn.now_or_afterwards(self._dispose, self._interrupt)

    def _dispose(self) -> None:
        self._end_round()
        self._listener.close()
        self._waker.close()
