"""During a round: keep the members' leases alive, and notice when nothing moves any more."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import anyio

from aiosync.concurrency import check_ended, quietly
from aiosync.defaults import DEFAULTS
from aiosync.errors import PhaseTimeout
from aiosync.fleet_health import Health

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from aiosync.members import MemberLink
    from aiosync.round import Round


async def kept_alive(round: Round, fn: Callable[[], Awaitable[None]]) -> None:
    """Await ``fn()`` while heartbeats go out: a phase may take longer than a lease."""
    await _beside(_tend, round, fn)


async def _tend(round: Round) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(look_for_the_lost, round)
        await send_heartbeats(round)


async def watched(round: Round, fn: Callable[[], Awaitable[None]]) -> None:
    """Await ``fn()`` for as long as something moves; see `watch_stall`."""
    await _beside(watch_stall, round, fn)


async def _beside(
    companion: Callable[[Round], Coroutine[Any, Any, None]],
    round: Round,
    fn: Callable[[], Awaitable[None]],
) -> None:
    ended = False  # a companion whose task is cancelled alone takes ``fn()`` with it, silently
    async with anyio.create_task_group() as group:
        group.start_soon(companion, round)
        await fn()
        ended = True
        group.cancel_scope.cancel()
    check_ended(ended, "round")


async def send_heartbeats(round: Round) -> None:
    """Renew every lease each third of it, and learn of progress made behind an open call."""
    admit = round.budget.admit or DEFAULTS.admit_s
    pause = min(round.engine.lease_s, round.budget.stall, admit) / 3
    able = [link for link in round.links if link.supports("status")]

    async def beat(link: MemberLink) -> None:
        with anyio.move_on_after(pause):
            await link.call("weight_update_status", header=round.header(link))

    while able:
        await anyio.sleep(pause)
        async with anyio.create_task_group() as group:
            for link in able:
                if link.member not in round.attendance.lost:
                    group.start_soon(quietly, beat, link)
        for link in able:
            held = link.peer.detail.get("held") if link.peer is not None else None
            if isinstance(held, dict) and held.get("round") == round.number:
                _held_back(round, link.name, admit)


def _held_back(round: Round, name: str, seconds: float) -> None:
    """A gateway waits for a decision: ``start`` has `seconds` from now, within the round's own."""
    if round.phase != "start":
        return
    round.limit.deadline = anyio.current_time() + seconds
    note = f"{name} held start until somebody decided"
    if note not in round.notes:
        round.notes.append(note)


async def look_for_the_lost(round: Round) -> None:
    """One that answers again takes part in the next round; looking costs this one nothing."""
    fleet = round.engine.fleet
    lost = [] if fleet is None else fleet.lost()
    if fleet is not None and lost:
        await quietly(Health(fleet).probe_all, lost)


async def watch_stall(round: Round) -> None:
    """End the round once neither the data plane nor any member has moved for ``budget.stall``.

    Raises:
        PhaseTimeout: Names the members that have not answered.
    """
    began = time.monotonic()
    stall = round.budget.stall
    tick = min(stall / 10, 1.0)
    while True:
        await anyio.sleep(tick)
        members = (link.progress_at for link in round.present)
        latest = max(began, round.engine.progress_at(), *members)
        # The data plane times a silent peer itself and names it; this is for all the rest.
        if time.monotonic() - latest > stall + 2 * tick:
            waiting = [link.name for link in round.present if link.answered != "update"]
            raise PhaseTimeout(
                f"no progress for {stall:g} s; waiting for {', '.join(waiting)}",
                replica=waiting[0] if len(waiting) == 1 else None,
                phase="update",
                round=round.number,
            )
