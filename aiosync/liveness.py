"""During a round: keep the members' leases alive, and notice when nothing moves any more."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from aiosync.concurrency import (
    cancelled_from_outside,
    collapse,
    quietly,
    raise_ranked,
    run_to_end,
)
from aiosync.defaults import DEFAULTS
from aiosync.errors import PhaseTimeout
from aiosync.fleet_health import Health

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from aiosync.members import MemberLink
    from aiosync.round import Round


async def accompanied(
    fn: Callable[[], Awaitable[None]],
    companion: Callable[[], Coroutine[Any, Any, None]],
    *,
    after: float,
) -> None:
    """Await ``fn()``; ``companion()`` begins `after` seconds later, and what it raises ends both.

    By a timer: most of what is waited for is over by then, and a task that slept until then would
    cost as much as a call to a worker.
    """
    failures: list[BaseException] = []
    joined: list[asyncio.Task[None]] = []
    scope = anyio.CancelScope()
    loop = asyncio.get_running_loop()

    def join() -> None:
        joined.append(loop.create_task(companion()))
        joined[0].add_done_callback(left)

    def left(task: asyncio.Task[None]) -> None:
        # Cancelled alone, by somebody else: nobody would tend the round any more.
        error = cancelled_from_outside("round") if task.cancelled() else task.exception()
        if error is not None and not timer.cancelled():
            failures.append(collapse(error))
            scope.cancel()

    timer = loop.call_later(after, join)
    try:
        with scope:
            await fn()
    except Exception as error:
        if not failures:
            raise
        failures.append(collapse(error))
    finally:
        timer.cancel()  # from here on it is not listened to
        if joined and not joined[0].done():
            joined[0].cancel()
            await run_to_end(partial(asyncio.wait, joined), seconds=DEFAULTS.cleanup_s / 2)
    raise_ranked(failures)


async def kept_alive(round: Round, fn: Callable[[], Awaitable[None]]) -> None:
    """Await ``fn()`` while heartbeats go out: a phase may take longer than a lease."""
    admit = round.budget.admit or DEFAULTS.admit_s
    pause = min(round.engine.lease_s, round.budget.stall, admit) / 3
    beat = partial(send_heartbeats, round, pause)
    fleet = round.engine.fleet
    lost = [] if fleet is None else fleet.lost()
    if fleet is None or not lost:
        await accompanied(fn, beat, after=pause)
        return
    # One that answers again takes part in the next round; looking costs this one nothing.
    look = partial(quietly, Health(fleet).probe_all, lost)
    await accompanied(lambda: accompanied(fn, beat, after=pause), look, after=0)


async def watched(round: Round, fn: Callable[[], Awaitable[None]]) -> None:
    """Await ``fn()`` for as long as something moves; see `watch_stall`."""
    tick = min(round.budget.stall / 10, 1.0)
    await accompanied(fn, partial(watch_stall, round, tick, time.monotonic()), after=tick)


async def send_heartbeats(round: Round, pause: float) -> None:
    """Renew every lease each `pause` seconds, and learn of progress made behind an open call."""
    able = [link for link in round.links if link.supports("status")]

    async def beat(link: MemberLink) -> None:
        with anyio.move_on_after(pause):
            await link.call("weight_update_status", header=round.header(link))

    while able:
        async with anyio.create_task_group() as group:
            for link in able:
                if link.member not in round.attendance.lost:
                    group.start_soon(quietly, beat, link)
        for link in able:
            held = link.peer.detail.get("held") if link.peer is not None else None
            if isinstance(held, dict) and held.get("round") == round.number:
                _held_back(round, link.name)
        await anyio.sleep(pause)


def _held_back(round: Round, name: str) -> None:
    """A gateway waits for a decision: ``start`` has its time from now, within the round's own."""
    if round.phase != "start":
        return
    seconds = round.budget.admit or DEFAULTS.admit_s
    round.limit.deadline = anyio.current_time() + seconds
    note = f"{name} held start until somebody decided"
    if note not in round.notes:
        round.notes.append(note)


def _to_blame(waiting: list[MemberLink], stall: float) -> str | None:
    """The one that is waited for, or the only one of those that answers no heartbeat either."""
    silent = [link for link in waiting if time.monotonic() - link.heard_at > 2 / 3 * stall]
    suspects = silent if len(silent) == 1 and len(waiting) > 1 else waiting
    return suspects[0].name if len(suspects) == 1 else None


async def watch_stall(round: Round, tick: float, began: float) -> None:
    """End the round once neither the data plane nor any member has moved for ``budget.stall``.

    Raises:
        PhaseTimeout: Names the members that have not answered.
    """
    stall = round.budget.stall
    while True:
        members = (link.progress_at for link in round.present)
        latest = max(began, round.engine.progress_at(), *members)
        # The data plane times a silent peer itself and names it; this is for all the rest.
        if time.monotonic() - latest > stall + 2 * tick:
            waiting = [link for link in round.present if link.answered != "update"]
            raise PhaseTimeout(
                f"no progress for {stall:g} s; waiting for "
                f"{', '.join(link.name for link in waiting)}",
                replica=_to_blame(waiting, stall),
                phase="update",
                round=round.number,
            )
        await anyio.sleep(tick)
