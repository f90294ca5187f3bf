"""What a round holds of its members while it lasts: paused generation, and the caller's contexts.

A hold belongs to the round: whatever ends it, each member is resumed (a call that may be repeated)
unless its weights are not one whole version. A worker of ours judges that by itself; for any other
the trainer knows only whether a payload was on its way. What could not be lifted is in the report;
on workers of ours it ends with the trainer's lease.
"""

from __future__ import annotations

import logging
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, final

import anyio
import msgspec

from aiosync.concurrency import first_line
from aiosync.defaults import DEFAULTS
from aiosync.errors import (
    PeerLost,
    PhaseTimeout,
    ProtocolMismatch,
    Refused,
    RemoteError,
    Torn,
)
from aiosync.fleet import Member
from aiosync.repeating import reliably

if TYPE_CHECKING:
    from aiosync.members import MemberLink
    from aiosync.messages import RoundHeader
    from aiosync.pause import Pause
    from aiosync.round import Round

logger = logging.getLogger(__name__)


@final
class _Held:
    """What the round holds of one member."""

    def __init__(self, *, paused: bool) -> None:
        self.paused = paused
        self.since: float | None = None
        """When its pause was answered."""
        self.contexts = AsyncExitStack()


@final
class Holds:
    """The pauses and contexts of one round, by member."""

    def __init__(self, round: Round) -> None:
        self._round = round
        self._held: dict[MemberLink, _Held] = {}
        self._clocks: dict[MemberLink, tuple[str, float]] = {}
        self._measured: dict[MemberLink, float] = {}
        self.left_paused: dict[str, str] = {}
        """By member, why its generation was not seen going on again."""

    @property
    def pause(self) -> Pause | None:
        return self._round.settings.pause

    def check(self) -> None:
        """Refuse members that cannot be paused; before anything moves.

        Raises:
            Refused: Names the first of them.
        """
        pause = self.pause
        if pause is None:
            return
        unable = [link.name for link in self._round.links if not _can_pause(link)]
        if unable and not pause.optional:
            raise Refused(
                f"{', '.join(unable)} cannot be paused: no pause and resume calls",
                replica=unable[0],
                phase="admit",
                next_step="Pause(optional=True) sends to them without a pause",
            )
        self._round.notes.extend(f"{name} was not paused: it cannot be" for name in unable)

    async def take(self, scope: str) -> None:
        """Pause the members whose pause begins here, then enter their contexts.

        Raises:
            PhaseTimeout: Requests were still running. What was held so far is lifted when the
                round is given up.
        """
        round = self._round
        links = [link for link in round.present if self._begins(link) == scope]
        if not links or (self.pause is None and not round.settings.around):
            return
        linger = round.budget.cleanup / 4
        await round.attendance.call(links, self._take, phase="pause", linger=linger)
        round.source_side.look_again()  # requests ended meanwhile, and others' code ran

    def start_clocks(self) -> None:
        """The members have answered `start`: what they measure from here on is the round's.

        One that starts with the update has not: its last answer is of before the round, and where
        its clock stood then is in the next one (`seconds`).
        """
        for link in [] if self._round.starts_with_update else self._round.present:
            self._read_clock(link)

    async def lift_all(self, *, seconds: float) -> None:
        """The round is over for all members, within `seconds` for the resumes.

        The caller's contexts get what a pause gets to begin.
        """
        if not self._held:
            return
        limit = self._round.budget.pause or DEFAULTS.pause_s

        async def one(link: MemberLink) -> None:
            with anyio.move_on_after(limit):
                await self._leave(link)
            with anyio.move_on_after(seconds):
                await self.lift(link)

        async with anyio.create_task_group() as group:
            for link in list(self._held):
                group.start_soon(one, link)

    async def lift(self, link: MemberLink) -> None:
        """The round is over for this member; idempotent, tried until it is cancelled."""
        await self._leave(link)
        held = self._held.pop(link, None)
        if held is None or not held.paused:
            return
        if not link.speaks_ours and not _is_whole(link):
            self.left_paused[link.name] = "stays paused: its weights are unknown"
            return
        self.left_paused[link.name] = "did not confirm that its generation goes on"
        try:
            await self._resume(link)
        except Torn as error:
            self.left_paused[link.name] = f"stays paused: {first_line(error)}"
        except Exception as error:  # noqa: BLE001  the round's own outcome must not be lost
            self.left_paused[link.name] += f": {first_line(error)}"
        else:
            del self.left_paused[link.name]
            if held.since is not None:
                self._measured[link] = time.monotonic() - held.since

    def seconds(self, link: MemberLink) -> float:
        """How long generation of this member stood still, as it measured itself if it can."""
        clock, peer = self._clocks.get(link), link.peer
        if self._round.starts_with_update and peer is not None:
            before = peer.detail.get("paused_before")
            if peer.detail.get("round") != self._round.number or before is None:
                return 0.0  # it has not begun there
            clock = peer.incarnation, float(before)
        if clock is None or peer is None or peer.incarnation != clock[0]:
            return self._measured.get(link, 0.0)
        return max(_seconds_paused(link) - clock[1], 0.0)

    # -- inside ----------------------------------------------------------------------------------

    def _begins(self, link: MemberLink) -> str:
        """Where this member's pause begins: one that writes as it receives is paused before."""
        if self.pause is None or self.pause.scope == "round" or not link.supports("prepare"):
            return "round"
        return "round" if _writes_early(link) else "swap"

    async def _take(self, link: MemberLink) -> None:
        round, pause = self._round, self.pause
        held = _Held(paused=pause is not None and _can_pause(link))
        if pause is not None and held.paused:
            if link.supports("status"):  # where its clock stands before
                await reliably(round, link, "weight_update_status")
            self._read_clock(link)
            self._held[link] = held  # from here on it may be paused
            try:
                await reliably(
                    round,
                    link,
                    "pause",
                    pause.mode,
                    header=self._pause_header(link, pause),
                    clear_cache=pause.clear_cache,
                )
            except ProtocolMismatch as error:
                if not pause.optional or link.speaks_ours:
                    raise
                held.paused = False
                round.notes.append(f"{link.name} was not paused: {error.message}")
            held.since = time.monotonic()
        self._held[link] = held
        for enter in round.settings.around:
            await held.contexts.enter_async_context(enter(Member(link.name, link.client)))

    def _pause_header(self, link: MemberLink, pause: Pause) -> RoundHeader | None:
        header, budget = self._round.header(link), self._round.budget
        if header is None:
            return None
        limit = budget.pause or DEFAULTS.pause_s
        # A little less than the phase has, so that the member itself says what kept it.
        drain = limit - min(limit / 10, budget.cleanup)
        if pause.drain_timeout is not None:
            drain = min(drain, pause.drain_timeout)
        return msgspec.structs.replace(header, deadline_s=min(drain, self._round.seconds_left))

    async def _leave(self, link: MemberLink) -> None:
        held = self._held.get(link)
        if held is None:
            return
        contexts, held.contexts = held.contexts, AsyncExitStack()
        try:
            await contexts.aclose()
        except Exception as error:  # generation goes on all the same: the weights are judged alone
            logger.warning("%s: leaving a context failed", link.name, exc_info=True)
            self._round.notes.append(f"{link.name}: leaving a context failed: {first_line(error)}")

    async def _resume(self, link: MemberLink) -> None:
        """Repeated until it is answered: a resume that came twice has lifted one hold."""
        pause = self._round.budget.cleanup / 20
        while True:
            with anyio.move_on_after(self._round.budget.cleanup / 2):
                try:
                    await link.call("resume", header=self._round.header(link))
                    return
                except (PeerLost, PhaseTimeout) as error:
                    if isinstance(error, RemoteError):
                        raise
            await anyio.sleep(pause)

    def _read_clock(self, link: MemberLink) -> None:
        peer = link.peer
        if peer is not None and self._clocks.get(link, ("",))[0] != peer.incarnation:
            self._clocks[link] = (peer.incarnation, _seconds_paused(link))


def _can_pause(link: MemberLink) -> bool:
    if link.speaks_ours:
        return link.supports("pause")
    return all(callable(getattr(link.client, name, None)) for name in ("pause", "resume"))


def _writes_early(link: MemberLink) -> bool:
    return link.peer is None or bool(link.peer.detail.get("writes_early", True))


def _is_whole(link: MemberLink) -> bool:
    """Whether a member that cannot be asked holds one version: untouched, or it has committed."""
    return link.outcome == "committed" or link.untouched


def _seconds_paused(link: MemberLink) -> float:
    value: Any = None if link.peer is None else link.peer.detail.get("seconds_paused")
    return float(value) if isinstance(value, int | float) else 0.0
