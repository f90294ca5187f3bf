"""Whether a fleet's members are alive: probes once a second, judged by more than one sign.

A connection that ended says little: a proxy may have dropped it, and a dead process's socket may be
held open by a child of its. So death is what a new connection says: refused where the server
listened, or no answer to three probes in a row. When this process itself was held up, unanswered
probes count for nothing.
"""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Any, final

import anyio

from aiosync.concurrency import Supervisor, first_line
from aiosync.defaults import DEFAULTS
from aiosync.errors import (
    AiosyncError,
    Busy,
    PeerLost,
    PhaseTimeout,
    ProtocolMismatch,
    Unauthorized,
)
from aiosync.member_table import MemberState, MemberTrigger
from aiosync.mixture import follow
from statemachines.tables import Weights

if TYPE_CHECKING:
    from aiosync.concurrency import Task
    from aiosync.member import MemberStanding
    from aiosync.messages import PeerState
    from aiosync.roster import Roster

NOBODY_LISTENS = "nothing listens there: still loading, or a wrong URL"
_GONE = (errno.ECONNREFUSED, errno.ENOENT)
_TICK_S = 0.1
_HOPELESS = (Unauthorized, ProtocolMismatch)


def is_refused(error: BaseException | None) -> bool:
    """Whether nothing listens any more where the connection was to go."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _GONE:
            return True
        error = error.__cause__ or error.__context__
    return False


@final
class Health:
    """The probes of one fleet; a supervised task while the fleet is entered."""

    def __init__(self, fleet: Roster) -> None:
        self._fleet = fleet
        self._supervisor = Supervisor()
        self._task: Task[None] | None = None

    async def start(self) -> None:
        if self._task is not None and not self._task.done:
            raise Busy("this fleet is entered already")
        self._task = self._supervisor.start(self._beat(), name="fleet-health")

    async def stop(self) -> None:
        self._task = None
        await self._supervisor.aclose(seconds=DEFAULTS.cleanup_s)

    async def _beat(self) -> None:
        while True:
            began = time.monotonic()
            await self.probe_all()
            due = began + DEFAULTS.beat_s
            await anyio.sleep(max(due - time.monotonic(), _TICK_S))

    async def probe_all(self, names: list[str] | None = None) -> None:
        """Probe the members (of these names) at once, and judge each by its answers."""
        standings = list(self._fleet.standings.values())
        async with anyio.create_task_group() as group:
            for standing in standings:
                if names is None or standing.name in names:
                    group.start_soon(self._probe, standing)
        follow(self._fleet)

    async def _probe(self, standing: MemberStanding) -> None:
        began = time.monotonic()
        peers: list[PeerState | None] = []
        try:
            with anyio.move_on_after(DEFAULTS.beat_s) as limit:
                peers = [await ask(client) for client in standing.member.servers]
        except AiosyncError as error:
            self._no_answer(standing, error)
            return
        except Exception as error:  # noqa: BLE001  a client of somebody else's
            self._no_answer(standing, error)
            return
        if not limit.cancelled_caught:
            judge(self._fleet, standing, peers)
        elif time.monotonic() - began < 2 * DEFAULTS.beat_s:  # else this loop itself stood still
            text = f"no answer within {DEFAULTS.beat_s:g} s"
            self._no_answer(standing, PhaseTimeout(text, replica=standing.name))

    def _no_answer(self, standing: MemberStanding, error: Exception) -> None:
        if isinstance(error, _HOPELESS):  # it is alive, and does not want us
            standing.fire(MemberTrigger.MISS, error=_text(error))
            return
        standing.misses += 1
        standing.barred = False  # it is away: when it is back, it may be well
        if is_refused(error) or standing.misses >= DEFAULTS.beats_missed:
            standing.fire(MemberTrigger.LOSE, error=_text(error))

    async def wait_ready(self, seconds: float) -> None:
        """See `FleetClient.wait_ready`."""
        waiting: dict[str, str] = dict.fromkeys(self._fleet.standings, "not asked yet")
        failures: list[Exception] = []

        async def one(standing: MemberStanding) -> None:
            while True:
                try:
                    with anyio.move_on_after(DEFAULTS.beat_s) as limit:
                        peers = [await ask(client) for client in standing.member.servers]
                        judge(self._fleet, standing, peers)
                        del waiting[standing.name]
                        return
                    if limit.cancelled_caught:
                        waiting[standing.name] = "connected, but silent"
                except _HOPELESS as error:
                    error.replica = standing.name
                    failures.append(error)
                    group.cancel_scope.cancel()
                    return
                except (PeerLost, PhaseTimeout) as error:
                    waiting[standing.name] = (
                        NOBODY_LISTENS if is_refused(error) else first_line(error)
                    )
                await anyio.sleep(_TICK_S)

        with anyio.move_on_after(seconds) as limit:
            async with anyio.create_task_group() as group:
                for standing in self._fleet.standings.values():
                    group.start_soon(one, standing)
        if failures:
            raise failures[0]
        follow(self._fleet)
        if limit.cancelled_caught:
            each = "; ".join(f"{name}: {text}" for name, text in waiting.items())
            raise PhaseTimeout(
                f"not ready within {seconds:g} s: {each}",
                replica=next(iter(waiting)) if len(waiting) == 1 else None,
                phase="ready",
            )


async def confirm_lost(fleet: Roster, name: str) -> bool:
    """Probe a member that seems to be lost, as often as it takes to say so."""
    standing = fleet.standings.get(name)
    for _ in range(DEFAULTS.beats_missed):
        await Health(fleet).probe_all([name])
        if standing is None or standing.state is MemberState.LOST or not standing.misses:
            break
    return standing is not None and standing.state is MemberState.LOST


async def ask(client: Any) -> PeerState | None:
    """What a server says of itself; None for one that says nothing, but is alive."""
    if hasattr(client, "capabilities"):
        peer: PeerState | None = (await client.capabilities(refresh=True)).peer
        return peer
    if hasattr(client, "health"):
        await client.health()
    return None


def judge(fleet: Roster, standing: MemberStanding, peers: list[PeerState | None]) -> None:
    """A member has answered: move it to where its answer belongs."""
    restarted = standing.note(peers)
    standing.misses = 0
    standing.barred = standing.barred and not restarted
    if standing.barred:
        return
    whole = all(peer is None or peer.weights == Weights.INTACT for peer in peers)
    holds = standing.version is not None and standing.version == fleet.versions.version
    state = standing.state
    known = holds or None in peers or fleet.follows  # which looks at all of them together
    if fleet.driving:  # its round will say what it holds; only that it is back is news
        holds = False
        if not restarted and state is not MemberState.LOST:
            return
    if holds and whole and state in (MemberState.JOINING, MemberState.LOST):
        standing.fire(MemberTrigger.COMMIT, version=standing.version and standing.version.wire)
    elif restarted or state is MemberState.LOST:
        standing.fire(MemberTrigger.JOIN)
    elif state is MemberState.CURRENT and not (whole and known):
        standing.fire(MemberTrigger.MISS, error="it does not hold the fleet's version whole")


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
