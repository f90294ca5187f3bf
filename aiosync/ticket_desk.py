"""The tickets of one trainer engine: those it issued, and what became of those it carried out."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, Final, final

from aiosync.budget import check_seconds
from aiosync.defaults import DEFAULTS
from aiosync.errors import PhaseTimeout, Validation
from aiosync.round_options import NEXT
from aiosync.ticket import RoundTicket, ticket_of
from statemachines.tables import State

if TYPE_CHECKING:
    from aiosync.report import Report
    from aiosync.round import Round
    from aiosync.round_options import RoundSettings
    from aiosync.trainer import TrainerWeightTransferEngine
    from aiosync.version import Version
    from aiosync.weight_targets import Target

_KEPT: Final = 64  # reports; a repeated call comes soon after the first one
_NEW_ONE: Final = "ask for a new ticket"


@final
class TicketDesk:
    """Issues tickets, refuses those that do not fit, and answers those that are done.

    A ticket is used up once its round has started. Given again after that, it is answered with
    the recorded report if the round was committed, and refused if it was not. One that was
    refused before anything moved may be given again.
    """

    def __init__(self, engine: TrainerWeightTransferEngine[Any]) -> None:
        self._engine = engine
        self._last: RoundTicket | None = None
        self._promised: dict[str, Version] = {}
        self._reports: dict[str, Report] = {}

    def last_version(self, target: Target) -> Version | None:
        """Of the ticket for `target` that was issued last."""
        return self._promised.get(target.key)

    def issue(
        self,
        version: Version,
        *,
        target: Target,
        timeout: float | None,
        plan_digest: str | None,
        opaque: str,
    ) -> RoundTicket:
        """The ticket for the round after all that were numbered or promised so far."""
        engine = self._engine
        current = engine.admission.current
        rounds = engine.rounds + (current is not None and current.number == 0)
        held = engine.state not in (State.IDLE, State.FAILED)
        made = RoundTicket(
            id=secrets.token_hex(16),
            round=max(rounds, 0 if self._last is None else self._last.round) + 1,
            version=version,
            target=target,
            issued_at=time.time(),
            seconds=DEFAULTS.total_s if timeout is None else check_seconds(timeout, "timeout"),
            # A channel that must be opened again will have other epochs.
            epochs={link.name: link.epoch for link in engine.links if held and link.speaks_ours},
            plan_digest=plan_digest,
            opaque=opaque,
        )
        self._last = ticket_of(made)  # what a caller gave is checked here
        self._promised[target.key] = version
        return self._last

    def recorded(self, ticket: RoundTicket | None) -> Report | None:
        """The report of the ticket's round, if it was committed."""
        return None if ticket is None else self._reports.get(ticket.id)

    def record(self, ticket: RoundTicket, report: Report) -> None:
        """The ticket's round is committed."""
        self._reports[ticket.id] = report
        while len(self._reports) > _KEPT:
            del self._reports[next(iter(self._reports))]

    def check(self, settings: RoundSettings) -> None:
        """Refuse what is no call at all, and a ticket that is not for this engine here and now.

        Raises:
            Validation: Names the field of the ticket.
            PhaseTimeout: It has expired.
        """
        if settings.refusal is not None:
            raise settings.refusal
        ticket = settings.ticket
        if ticket is None or self.recorded(ticket) is not None:
            return
        if settings.expired_s is not None:
            raise PhaseTimeout(
                f"the ticket expired {settings.expired_s:.1f} s ago: issued for"
                f" {ticket.seconds:g} s at {ticket.issued_at:.0f} by its issuer's clock,"
                f" it is {time.time():.0f} by this one",
                phase="admit",
                next_step=f"{_NEW_ONE}; if it was fresh, set the clocks",
            )
        self.check_epochs(ticket)

    def check_unused(self, ticket: RoundTicket | None) -> None:
        """Refuse a ticket whose round, or a later one, has started here.

        Raises:
            Validation: Names both numbers.
        """
        rounds = self._engine.rounds
        if ticket is not None and ticket.round <= rounds:
            raise _refusal(
                f"ticket.round is {ticket.round}, which was used already: this engine is at round"
                f" {rounds}"
            )

    def check_epochs(self, ticket: RoundTicket) -> None:
        """Refuse a ticket that was issued while the workers were held otherwise.

        Raises:
            Validation: Names the member and both epochs, or a member that is not there.
        """
        engine = self._engine
        if not engine.is_sender:
            return
        here = {link.name: link.epoch for link in engine.links}
        for name, epoch in ticket.epochs.items():
            if here.get(name) != epoch:
                held = "no such member is here" if name not in here else f"it is {here[name]} now"
                raise _refusal(f"ticket.epochs[{name!r}] is {epoch}; {held}")

    def check_plan(self, this: Round) -> None:
        """Refuse a ticket for other chunks than those of the round's plan, on ranks that send.

        Raises:
            Validation: Names both digests.
        """
        ticket = this.settings.ticket
        if ticket is None or ticket.plan_digest is None or not this.engine.is_sender:
            return
        digest = None if this.plan is None else this.plan.digest
        if digest != ticket.plan_digest:
            raise _refusal(
                f"ticket.plan_digest is {ticket.plan_digest}, this rank's plan has {digest}"
            )


def check_version(asked: Any, ticket: RoundTicket) -> Version:
    """The ticket's version, which a ``version=`` beside it must not contradict.

    Raises:
        Validation: Names both.
    """
    mine = ticket.version
    labelled = type(asked) is type(mine.label) and asked == mine.label
    if asked is not NEXT and asked != mine and not labelled:
        raise _refusal(f"version={asked!r} was given, ticket.version is {mine.label!r}")
    return mine


def _refusal(text: str) -> Validation:
    return Validation(text, phase="admit", next_step=_NEW_ONE)
