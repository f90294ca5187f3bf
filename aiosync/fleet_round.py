"""Rounds that the fleet's own process drives: it hands out a ticket, the trainer carries it out.

The driver never touches the bytes and needs no connection to the trainer. It announces the ticket
to every member; the members refuse what was not announced to them, hold what they have verified
until the driver says commit, and end the round when the driver cancels it. So whatever becomes of
the driver reaches every trainer rank through the members that it talks to.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Self, final

import anyio

from aiosync.budget import check_seconds
from aiosync.concurrency import Supervisor, collapse, first_line, run_to_end
from aiosync.defaults import DEFAULTS
from aiosync.driven_members import DrivenMembers
from aiosync.driven_settling import settle
from aiosync.errors import AiosyncError, RoundCancelled, Validation
from aiosync.members import MemberLink, fan_out, links_of, opened
from aiosync.messages import PROTOCOL, RoundHeader
from aiosync.mixture import of_links
from aiosync.rendezvous import owner_name
from aiosync.report import Report
from aiosync.round_options import NEXT
from aiosync.ticket import RoundTicket, ticket_of
from aiosync.version import Version, next_version

if TYPE_CHECKING:
    from types import TracebackType

    from aiosync.fleet import FleetClient
    from aiosync.round_options import Next

_PAUSES: Final = (None, "keep", "wait", "abort")
_DRIVEN: Final = "driven by its orchestrator; the trainer's report has bytes and digests"


@final
class FleetRound:
    """One round that this process drives, used as ``async with``; `FleetClient.round` makes one.

    Made directly, it takes a list: one round over several fleets, with one pass over the source of
    a trainer that is connected to the members of all. Nobody commits before every fleet has as
    many members ready as its policy asks for.

    While the block runs, the round is followed in the background: once enough members have
    received and verified it, they are paused (if asked), told to commit, and resumed. Leaving the
    block waits for the outcome; leaving it by an exception or a cancellation cancels the round.

    Attributes:
        ticket: For ``send_weights(ticket=...)`` on every trainer rank; `RoundTicket.encode` makes
            it one word. There from the beginning of the block.
        report: What became of the round; None until it is over.
    """

    def __init__(
        self,
        fleets: FleetClient | Sequence[FleetClient],
        *,
        version: int | str | Version | Next = NEXT,
        timeout: float | None = None,
        pause: str | None = None,
        lineage: str | None = None,
        opaque: str = "",
    ) -> None:
        if pause not in _PAUSES:
            raise Validation(f"pause must be one of keep, wait, abort or None, not {pause!r}")
        self._asked = version
        self._seconds = DEFAULTS.total_s if timeout is None else check_seconds(timeout, "timeout")
        self._pause = pause
        self._lineage = lineage
        self._opaque = opaque
        self._owner = owner_name()
        found = list(fleets) if isinstance(fleets, Sequence) else [fleets]
        self._rosters = [fleet.roster for fleet in found]
        groups = [(links_of(fleet), fleet.policy.needed) for fleet in found]
        self._members = DrivenMembers(groups)
        self._links = self._members.links
        names = [link.name for link in self._links]
        if not names or len(set(names)) < len(names):
            raise Validation(f"a round needs members of unique names, not {', '.join(names)}")
        self._opened = opened(self._links)
        self._tasks = Supervisor()
        self._spent: dict[str, float] = {}
        self._notes: list[str] = []
        self._began = time.monotonic()
        self._stop = anyio.CancelScope()
        self._over = anyio.Event()
        self._error: BaseException | None = None
        self._ticket: RoundTicket | None = None
        self.report: Report | None = None

    @property
    def ticket(self) -> RoundTicket:
        if self._ticket is None:
            raise Validation("enter the round first: async with fleet.round(...) as rnd")
        return self._ticket

    def __repr__(self) -> str:
        what = "not begun" if self._ticket is None else f"round {self._ticket.round}"
        return f"<FleetRound {what} {self._members.phases}>"

    # -- the block -------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._began = time.monotonic()
        for roster in self._rosters:
            roster.begins()  # meanwhile members may be newer than the fleet
        try:
            for roster in self._rosters:
                await roster.give_way()
            await self._announce()
        except BaseException:
            for roster in self._rosters:
                roster.ended()
            raise
        return self

    async def _announce(self) -> None:
        await self._opened.__aenter__()
        try:
            await fan_out(self._links, MemberLink.probe, phase="admit", linger=DEFAULTS.cleanup_s)
            self._members.check()
            self._notes = list(filter(None, [of_links(self._links)]))
            self._ticket = self._made()
            await self._members.announce(self._ticket)
        except BaseException:
            await self._members.end("the round could not be announced")
            await self._close()
            raise
        self._tasks.start(self._drive(), name=f"fleet-round-{self._ticket.round}")

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                await self.cancel(f"{type(error).__name__}: {first_line(error)}")
                return
            try:
                await self._over.wait()
            except BaseException:
                await self.cancel("its task was cancelled")
                raise
        finally:
            await self._close()
        if self._error is not None:
            raise self._error

    async def cancel(self, reason: str = "") -> None:
        """End the round on every member; a commit that has begun is finished. Idempotent."""
        if self._over.is_set():
            return
        if self._error is None:
            text = f"cancelled by its driver{': ' + reason if reason else ''}"
            self._error = RoundCancelled(text, phase="update")
        self._stop.cancel()
        # The drive ends the round on the members, and then it is over.
        await run_to_end(self._over.wait, seconds=DEFAULTS.finish_s)

    async def wait(self) -> Report:
        """Wait for the outcome inside the block; cancelling the wait cancels nothing.

        Raises:
            What ended the round, with its ``report``.
        """
        await self._over.wait()
        if self._error is not None:
            raise self._error
        assert self.report is not None  # set before `_over`
        return self.report

    # -- the ticket ------------------------------------------------------------------------------

    def _made(self) -> RoundTicket:
        held = [link.version for link in self._links if link.version is not None]
        newest = max(held, key=lambda version: version.order, default=None)
        version = self._asked
        if not isinstance(version, Version):
            lineage = self._lineage or (newest.lineage if newest else secrets.token_hex(8))
            mine = [each for each in held if each.lineage == lineage]
            current = max(mine, key=lambda each: each.order, default=None)
            if version is NEXT:
                version = 1 if current is None else current.order + 1
            version = next_version(current, version, lineage=lineage)
        # By the clock: later than what any trainer or any earlier driver has numbered.
        last = [link.peer.detail.get("round", 0) for link in self._links if link.peer is not None]
        made = RoundTicket(
            id=secrets.token_hex(16),
            round=max(int(time.time()), *(number + 1 for number in last)),
            version=version,
            issued_at=time.time(),
            seconds=self._seconds,
            driver=self._owner,
            opaque=self._opaque,
        )
        return ticket_of(made)  # what a caller gave is checked here

    # -- driving ---------------------------------------------------------------------------------

    async def _drive(self) -> None:
        members = self._members
        cause: BaseException | None = None
        try:
            with self._stop, anyio.move_on_after(self._seconds) as limit:
                await members.follow()
                self._spent["receive"] = time.monotonic() - self._began
                header = RoundHeader(protocol=PROTOCOL, owner=self._owner, lease_s=DEFAULTS.lease_s)
                await members.commit(self._pause, header)
                self._spent["commit"] = self.elapsed - self._spent["receive"]
            if limit.cancelled_caught:
                cause = members.late(self._seconds)
            if self._stop.cancelled_caught:
                cause = self._error
        except Exception as error:  # noqa: BLE001  becomes the round's error
            cause = collapse(error)
        except BaseException:
            self._finish(RoundCancelled("the driver's event loop ended", phase="update"))
            raise
        if cause is not None:
            await members.end(first_line(cause))
        await members.look()
        self._finish(cause)

    def _finish(self, cause: BaseException | None) -> None:
        members = self._members
        for roster in self._rosters:
            settle(roster, members, self.ticket)
            roster.ended()
        self._spent["total"] = self.elapsed
        self.report = Report(
            outcome="committed" if cause is None else members.outcome,
            version=self.ticket.version,
            round=self.ticket.round,
            backend=self._backend(),
            seconds=dict(self._spent),
            pause_seconds=members.pause_seconds,
            members=members.outcomes(self._spent["total"]),
            notes=[_DRIVEN, *self._notes],
        )
        if isinstance(cause, AiosyncError):
            cause.locate(report=self.report, round=self.ticket.round)
        self._error = cause
        self._over.set()

    @property
    def elapsed(self) -> float:
        """Seconds since the block began."""
        return time.monotonic() - self._began

    def _backend(self) -> str:
        peer = self._links[0].peer
        return str(peer.detail.get("backend") or "") if peer is not None else ""

    async def _close(self) -> None:
        await self._tasks.aclose(seconds=DEFAULTS.cleanup_s)
        await self._opened.__aexit__(None, None, None)
