"""The members of a driven round, as its driver sees them: announce, follow, commit, or end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, final

import anyio

from aiosync.concurrency import first_line, quietly, run_to_end
from aiosync.defaults import DEFAULTS
from aiosync.driven import CANCELLED, COMMITTED, FAILED, OPEN, OVER, RECEIVED, RUNNING
from aiosync.errors import (
    AiosyncError,
    OutcomeUnknown,
    PeerLost,
    PhaseTimeout,
    ProtocolMismatch,
    RemoteError,
    RoundCancelled,
)
from aiosync.members import fan_out
from aiosync.report import MemberOutcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiosync.driven import TicketState
    from aiosync.members import MemberLink
    from aiosync.messages import RoundHeader
    from aiosync.report import MemberResult
    from aiosync.ticket import RoundTicket

_WAIT_S: Final = 2.0  # one question to a member, which answers once there is news
_UNKNOWN: Final = "unknown"


@final
class DrivenMembers:
    """One round's members, by the server.

    Args:
        fleets: Links to the servers of each fleet, and how many of so many members must commit
            there. Nobody commits before every fleet has enough.

    Attributes:
        links: One to each server, of all fleets.
        phases: What each server said last of the ticket; ``unknown`` where commit was sent and
            its answer never came.
        failures: Why servers are out of the round.
        pause_seconds: How long generation was held for the commit.
    """

    def __init__(self, fleets: Sequence[tuple[list[MemberLink], Callable[[int], int]]]) -> None:
        self.links = [link for links, _ in fleets for link in links]
        self.phases: dict[str, str] = {}
        self.failures: dict[str, BaseException] = {}
        self.pause_seconds = 0.0
        self._id = ""
        self._following = anyio.CancelScope()
        self._fleets = [(links, needed(len(_members(links)))) for links, needed in fleets]

    def check(self) -> None:
        """Refuse members that know nothing of drivers.

        Raises:
            ProtocolMismatch: Names the first one.
        """
        for link in self.links:
            if "tickets" not in link.capabilities.features:
                raise ProtocolMismatch(
                    "the member takes no rounds from a driver: it is no aiosync worker",
                    replica=link.name,
                    phase="admit",
                )

    async def announce(self, ticket: RoundTicket) -> None:
        """Have every member expect the round."""
        self._id = ticket.id

        async def one(link: MemberLink) -> None:
            self.phases[link.name] = OPEN
            await link.client.announce_ticket(ticket)

        await self._each(one, phase="admit")

    # -- following -------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Until every member has verified the round or is out of it; or too few are left.

        Raises:
            The first failure, the others as its notes, if too few members are left.
        """
        with self._following:
            await self._each(self._follow, phase="update")
        if self._enough(self._is_ready):
            return
        cause = next(iter(self.failures.values()))
        for name, other in self.failures.items():
            if other is not cause:
                cause.add_note(f"also: {name}: {first_line(other)}")
        raise cause

    async def _follow(self, link: MemberLink) -> None:
        silent_since: float | None = None
        while self.phases[link.name] not in (RECEIVED, *OVER):
            try:
                state = await link.client.ticket_state(
                    self._id, beside=self.phases[link.name], wait_s=_WAIT_S
                )
            except AiosyncError as error:
                now = time.monotonic()
                silent_since = silent_since or now
                if isinstance(error, RemoteError) or now - silent_since > DEFAULTS.connect_s / 2:
                    self._drop(link, FAILED, error)
                    return
                await anyio.sleep(_WAIT_S / 20)
                continue
            silent_since = None
            self._note(link, state)

    def _note(self, link: MemberLink, state: TicketState) -> None:
        self.phases[link.name] = state.phase
        if state.phase in (FAILED, CANCELLED):
            text = state.error or f"the member's round is {state.phase}"
            error = RoundCancelled.remote(text, replica=link.name, phase="update")
            self._drop(link, state.phase, error)

    def _drop(self, link: MemberLink, phase: str, error: BaseException) -> None:
        """The round goes on without it, if that is enough."""
        self.phases[link.name] = phase
        self.failures.setdefault(link.name, error)
        if not self._enough(lambda other: other.name not in self.failures):
            self._following.cancel()

    # -- committing ------------------------------------------------------------------------------

    async def commit(self, pause: str | None, header: RoundHeader) -> None:
        """Give the word to every member that has the round whole, paused meanwhile if asked.

        Raises:
            OutcomeUnknown: A member's answer never came.
            AiosyncError: Too few members have committed.
        """
        lacking = _members([link for link in self.links if not self._is_ready(link)])
        ready = [link for link in self.links if _member_of(link) not in lacking]
        began = time.monotonic()
        try:
            if pause is not None:
                await self._each(
                    lambda link: link.client.pause(pause, clear_cache=False, header=header),
                    phase="pause",
                    links=ready,
                )
            await self._each(self._allow, phase="finish", links=ready)
        finally:
            if pause is not None:
                await run_to_end(lambda: self._resume(ready, header), seconds=DEFAULTS.finish_s)
                self.pause_seconds = time.monotonic() - began
        if lost := [name for name, phase in self.phases.items() if phase == _UNKNOWN]:
            text = f"commit was sent, its answer never came: {', '.join(lost)}"
            raise OutcomeUnknown(text, replica=lost[0], phase="finish")
        late = [self.failures[link.name] for link in ready if link.name in self.failures]
        if late and not self._enough(lambda link: self.phases[link.name] == COMMITTED):
            raise late[0]

    async def _allow(self, link: MemberLink) -> None:
        """The driver's word; from here on only the member's own answer counts."""
        with anyio.CancelScope(shield=True):  # bounded by the call's own time and the clean-up
            try:
                state = await link.client.commit_ticket(self._id)
            except (PeerLost, PhaseTimeout) as error:
                self.failures[link.name] = error
                self.phases[link.name] = _UNKNOWN
                with anyio.move_on_after(DEFAULTS.cleanup_s):
                    await quietly(self._ask, link)
            except AiosyncError as error:
                self._drop(link, FAILED, error)
            else:
                self._note(link, state)

    async def _ask(self, link: MemberLink) -> None:
        state = await link.client.ticket_state(self._id)
        if state.phase in OVER:
            self._note(link, state)

    async def _resume(self, links: list[MemberLink], header: RoundHeader) -> None:
        """Each goes on as soon as it can: one that is torn stays paused by its own rule."""

        async def one(link: MemberLink) -> None:
            await link.client.resume(header=header)

        async with anyio.create_task_group() as group:
            for link in links:
                group.start_soon(quietly, one, link)

    # -- ending ----------------------------------------------------------------------------------

    async def end(self, reason: str) -> None:
        """Every member gives the round up, and refuses the ticket from now on."""

        async def one(link: MemberLink) -> None:
            await link.client.cancel_ticket(self._id, reason[:500])
            self._note(link, await link.client.ticket_state(self._id))

        async def everyone() -> None:
            async with anyio.create_task_group() as group:
                for link in self.links:
                    if self.phases.get(link.name) not in (None, COMMITTED, _UNKNOWN):
                        group.start_soon(quietly, one, link)

        await run_to_end(everyone, seconds=2 * DEFAULTS.cleanup_s)

    async def look(self) -> None:
        """Ask every member once more what it holds; for the report."""

        silent = {link.name for link in self.links}

        async def one(link: MemberLink) -> None:
            try:
                await link.probe()
            except AiosyncError as error:
                self.failures.setdefault(link.name, error)
            else:
                silent.discard(link.name)

        async def everyone() -> None:
            async with anyio.create_task_group() as group:
                for link in self.links:
                    group.start_soon(quietly, one, link)

        await run_to_end(everyone, seconds=DEFAULTS.cleanup_s)
        for name in silent:
            self.failures.setdefault(name, PeerLost("it does not answer", replica=name))

    # -- what became of them ---------------------------------------------------------------------

    @property
    def outcome(self) -> str:
        """Of a round that ended with an error."""
        return "unknown" if _UNKNOWN in self.phases.values() else "failed"

    def outcomes(self, seconds: float) -> list[MemberOutcome]:
        """By server, for the report."""
        return [self._outcome(link, seconds) for link in self.links]

    def _outcome(self, link: MemberLink, seconds: float) -> MemberOutcome:
        phase, error = self.phases.get(link.name), self.failures.get(link.name)
        outcome: MemberResult = "failed"
        if phase == COMMITTED:
            outcome = "committed"
        elif phase == _UNKNOWN:
            outcome = "unknown"
        sure = outcome != "unknown" and link.peer is not None and not isinstance(error, PeerLost)
        return MemberOutcome(
            name=link.name,
            outcome=outcome,
            weights=link.peer.weights if sure and link.peer is not None else "unknown",
            phase=None if outcome == "committed" else phase,
            error=None if error is None else f"{type(error).__name__}: {first_line(error)}",
            seconds=seconds,
        )

    def late(self, seconds: float) -> PhaseTimeout:
        """The error of a round that took longer than `seconds`."""
        waiting = [name for name, phase in self.phases.items() if phase in (OPEN, RUNNING)]
        none = OPEN in self.phases.values()
        why = f"no trainer has begun it on {', '.join(waiting)}" if none else "it is under way"
        return PhaseTimeout(
            f"the round took longer than its {seconds:g} s; {why}",
            replica=waiting[0] if len(waiting) == 1 else None,
            phase="update",
        )

    # -- inside ----------------------------------------------------------------------------------

    def _is_ready(self, link: MemberLink) -> bool:
        return self.phases[link.name] == RECEIVED

    def _enough(self, holds: Callable[[MemberLink], bool]) -> bool:
        """Whether it holds for all servers of as many members as each fleet needs."""
        for links, least in self._fleets:
            lacking = _members([link for link in links if not holds(link)])
            if len(_members(links) - lacking) < least:
                return False
        return True

    async def _each(
        self,
        call: Callable[[MemberLink], Awaitable[Any]],
        *,
        phase: str,
        links: list[MemberLink] | None = None,
    ) -> None:
        found = self.links if links is None else links
        await fan_out(found, call, phase=phase, linger=DEFAULTS.cleanup_s)


def _members(links: Sequence[MemberLink]) -> set[str]:
    return {_member_of(link) for link in links}


def _member_of(link: MemberLink) -> str:
    """A member may be several servers."""
    return link.member
