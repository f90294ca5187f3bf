"""Rounds that somebody else than their trainer drives, as a worker keeps track of them.

The driver announces a ticket; the trainer's calls carry its id. The trainer moves the bytes, the
driver decides: a round that has arrived and been verified waits for the driver's word before it is
swapped in, and the driver can end it at any time before. A ticket that was cancelled, or is not
known here (this worker was restarted since), is refused: nothing moves under it any more.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, final

import anyio
import msgspec

from aiosync.concurrency import first_line
from aiosync.defaults import DEFAULTS
from aiosync.errors import PhaseTimeout, Refused, RoundCancelled, Validation

# At run time: msgspec resolves the annotations of a Struct when it is first decoded.
from aiosync.messages import Count, Name

if TYPE_CHECKING:
    from aiosync.messages import RoundHeader
    from aiosync.ticket import RoundTicket

OPEN: Final = "open"
RUNNING: Final = "running"
RECEIVED: Final = "received"
COMMITTED: Final = "committed"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
OVER: Final = (COMMITTED, FAILED, CANCELLED)
_KEPT: Final = 64


class TicketState(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a ticket at one worker.

    Attributes:
        phase: ``open`` (announced), ``running``, ``received`` (verified, waits for the driver),
            ``committed``, ``failed`` or ``cancelled``.
        error: Why it failed or was cancelled.
    """

    id: Name
    round: Count = 0
    phase: str = OPEN
    error: str | None = None


@final
class _Driven:
    __slots__ = ("allowed", "cancelled", "changed", "deadline", "state")

    def __init__(self, ticket: RoundTicket) -> None:
        self.state = TicketState(id=ticket.id, round=ticket.round)
        self.deadline = time.monotonic() + ticket.seconds_left
        self.allowed = anyio.Event()
        self.cancelled = False
        self.changed = anyio.Event()

    def move(self, phase: str, error: str | None = None) -> None:
        if self.state.phase not in OVER:
            self.state = msgspec.structs.replace(self.state, phase=phase, error=error)
            self.changed.set()
            self.changed = anyio.Event()


@final
class DrivenRounds:
    """The tickets that were announced to one worker; it remembers the last 64."""

    def __init__(self) -> None:
        self._known: dict[str, _Driven] = {}
        self._running: _Driven | None = None

    # -- the driver's side -----------------------------------------------------------------------

    def announce(self, ticket: RoundTicket) -> TicketState:
        """Expect the ticket's round; may be repeated.

        Raises:
            Validation: It names no driver.
            PhaseTimeout: It has expired.
        """
        if ticket.driver is None:
            raise Validation("the ticket names no driver", detail={"path": "$.ticket.driver"})
        if ticket.seconds_left <= 0:
            raise PhaseTimeout(f"the ticket expired {-ticket.seconds_left:.1f} s ago")
        driven = self._known.setdefault(ticket.id, _Driven(ticket))
        while len(self._known) > _KEPT:
            old = next(key for key, each in self._known.items() if each is not self._running)
            del self._known[old]
        return driven.state

    def allow(self, id: str) -> TicketState:
        """The driver's word: swap it in. May be repeated.

        Raises:
            Refused: It is over without having been committed, or has not been verified yet.
        """
        driven = self._find(id)
        state = driven.state
        if state.phase not in (RECEIVED, COMMITTED):
            raise Refused(
                f"ticket {id} is {state.phase}: {state.error or 'there is nothing to commit'}",
                phase="finish",
                detail={"ticket": id, "is": state.phase},
            )
        driven.allowed.set()
        return driven.state

    def cancel(self, id: str, reason: str) -> RoundCancelled | None:
        """No round may begin under the ticket any more; the error for the one that runs.

        One that is not known here is refused anyway.
        """
        driven = self._known.get(id)
        if driven is None or driven.state.phase in OVER:
            return None
        text = f"cancelled by its driver{': ' + reason if reason else ''}"
        if driven is self._running:
            if driven.allowed.is_set():
                return None  # the commit has the driver's word already
            driven.cancelled = True
            return RoundCancelled(text, round=driven.state.round)
        driven.move(CANCELLED, text)
        return None

    async def state_of(self, id: str, *, beside: str | None, seconds: float) -> TicketState:
        """The ticket's state: once its phase is another than `beside`, or `seconds` have passed."""
        driven = self._find(id)
        with anyio.move_on_after(seconds):
            while driven.state.phase == beside:
                await driven.changed.wait()
        return driven.state

    # -- the round's side ------------------------------------------------------------------------

    def check(self, header: RoundHeader | None) -> None:
        """Refuse a start under a ticket that is not, or no longer, expected here.

        Raises:
            Refused: Says what became of the ticket.
        """
        if header is None or header.ticket is None:
            return
        driven = self._known.get(header.ticket)
        why = "it was not announced here (this worker may have been restarted since)"
        if driven is not None:
            why = f"it is {driven.state.phase}: {driven.state.error or 'its round was carried out'}"
            if driven.state.phase not in OVER and driven.deadline <= time.monotonic():
                why = "it has expired"
            elif driven.state.phase not in OVER and driven.state.round == header.round:
                return
        raise Refused(
            f"ticket {header.ticket}: {why}",
            phase="start",
            next_step="ask the driver for a new ticket",
            detail={"ticket": header.ticket},
        )

    def began(self, header: RoundHeader | None) -> None:
        """The round of `header` is open."""
        self._running = None
        if header is not None and header.ticket is not None:
            self._running = self._known[header.ticket]
            self._running.move(RUNNING)

    @property
    def decides(self) -> bool:
        """Whether the open round has a driver."""
        return self._running is not None

    async def permission(self) -> bool:
        """Wait for the driver's word; at once, and False, where the round has no driver.

        Raises:
            PhaseTimeout: It did not come in time.
        """
        driven = self._running
        if driven is None:
            return False
        driven.move(RECEIVED)
        limit = min(DEFAULTS.decide_s, max(driven.deadline - time.monotonic(), 0.0))
        with anyio.move_on_after(limit):
            await driven.allowed.wait()
        if not driven.allowed.is_set():
            raise PhaseTimeout(
                f"the driver said nothing for {limit:.1f} s; the round is given up", phase="finish"
            )
        return True

    def ended(self, error: BaseException | None) -> None:
        """The open round is over."""
        driven, self._running = self._running, None
        if driven is None:
            return
        if error is None:
            driven.move(COMMITTED)
        else:
            text = f"{type(error).__name__}: {first_line(error)}"
            driven.move(CANCELLED if driven.cancelled else FAILED, text)

    def _find(self, id: str) -> _Driven:
        driven = self._known.get(id)
        if driven is None:
            raise Validation(f"no ticket {id!r:.80} was announced here", detail={"path": "$.id"})
        return driven
