"""Between rounds: members that joined or missed a version are brought to the fleet's version.

Theory of operation. One task, while the fleet is entered, takes the members that are not current
one after the other and has each sent what the others hold, by a round of its own: another engine,
another owner, the same version, the same bytes (the digests are compared before it commits). It
never runs beside a round of the fleet. A round that begins cancels it and waits a moment; the
member then takes part in that round, or, if it has not let go by then, in the one after. The
fleet's engine initialises it anew in either case, since it belonged to somebody else meanwhile.

A member that could not be brought up is not tried again for the same version, unless it has been
away or is another process: it waits for the next round, and its record says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, final

import anyio

from aiosync.concurrency import Supervisor, first_line, uncancelled
from aiosync.defaults import DEFAULTS
from aiosync.member_table import MemberState, MemberTrigger
from statemachines.tables import State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiosync.concurrency import Task
    from aiosync.member import MemberStanding
    from aiosync.messages import PeerState
    from aiosync.metadata import ParamMeta
    from aiosync.roster import Roster
    from aiosync.round import Round
    from aiosync.trainer import TrainerWeightTransferEngine
    from aiosync.version import Version
    from statemachines.events import Transition

_WAITING = (MemberState.JOINING, MemberState.STALE)
WAY_S = DEFAULTS.cleanup_s / 2  # what a round waits for a member to be let go


@final
@dataclass(frozen=True, eq=False)
class Goal:
    """What the fleet has committed last, and how it was sent.

    Attributes:
        digest: Of the bytes; None where only their number was checked.
        wire_digest: Of names, dtypes and shapes, in their order; None where the engine wrote its
            round by itself.
    """

    engine: TrainerWeightTransferEngine[Any]
    version: Version
    digest: str | None
    metadata: Sequence[ParamMeta]
    wire_digest: str | None
    aliases: Mapping[str, str]

    @classmethod
    def of(cls, round: Round) -> Goal:
        """Of a round that counts."""
        feed, summary = round.feed, round.summary
        return cls(
            engine=round.engine,
            version=round.version,
            digest=None if summary is None else summary.digest,
            metadata=() if feed is None else feed.metadata,
            # As the plan left it: it is not for the loop to compute.
            wire_digest=None if feed is None else feed.__dict__.get("wire_digest"),
            aliases={} if feed is None else dict(getattr(feed.source, "aliases", None) or {}),
        )

    @property
    def is_out_of_reach(self) -> bool:
        """Whether the engine is closed, or busy with its channel."""
        engine = self.engine
        leaving = engine.admission.leaving is not None
        return engine.state is State.CLOSED or engine.is_opening or leaving


class Way(Protocol):
    """How a member gets the fleet's version."""

    async def bring(
        self,
        standing: MemberStanding,
        goal: Goal,
        arrived: Callable[[Sequence[PeerState | None]], None],
    ) -> None:
        """Bring the member there; call `arrived` once its servers have said that they hold it.

        Raises:
            Exception: It could not be done: the member is as it was.
        """


@final
@dataclass(eq=False)
class _Attempt:
    standing: MemberStanding
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    over: anyio.Event = field(default_factory=anyio.Event)


@final
class CatchUps:
    """The one task of a fleet that brings members up."""

    def __init__(self, roster: Roster, way: Way) -> None:
        self._roster = roster
        self._way = way
        self._supervisor = Supervisor()
        self._task: Task[None] | None = None
        self._stopping = False
        self._news = anyio.Event()
        self._attempt: _Attempt | None = None
        self._remove: Callable[[], None] | None = None

    async def start(self) -> None:
        self._remove = self._roster.hub.on_transition(self._heard)
        self._stopping = False
        self._task = self._supervisor.start(self._run(), name="fleet-catch-up")

    async def stop(self) -> None:
        """End what is under way: its member is told, within the clean-up second."""
        if self._remove is not None:
            self._remove()
            self._remove = None
        self._stopping = True
        if self._task is not None:
            # By its scope: where a round ends, anyio may lose count of a native cancellation.
            if self._attempt is not None:
                self._attempt.scope.cancel()
            self.kick()
            await self._task.wait(2 * DEFAULTS.cleanup_s)
        await self._supervisor.aclose(seconds=DEFAULTS.cleanup_s)

    @property
    def member(self) -> MemberStanding | None:
        """Who is being brought up right now."""
        return None if self._attempt is None else self._attempt.standing

    def kick(self) -> None:
        """There may be something to do."""
        self._news.set()

    async def give_way(self) -> None:
        """A round begins: end what is under way, and wait for that, but not for long."""
        attempt = self._attempt
        if attempt is not None:
            attempt.scope.cancel()
            with anyio.move_on_after(WAY_S):
                await attempt.over.wait()

    async def run_once(self) -> None:
        """Bring up whoever waits now."""
        while not self._stopping and (found := self._next()) is not None:
            await self._bring_up(*found)

    # -- inside ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._stopping:
            self._news = anyio.Event()
            await self.run_once()
            if self._stopping:
                return
            with anyio.move_on_after(DEFAULTS.beat_s):
                await self._news.wait()

    def _heard(self, transition: Transition) -> None:
        attempt = self._attempt
        gone = transition.dest in (MemberState.LOST, MemberState.LEFT)
        if attempt is not None and gone and transition.engine == attempt.standing.name:
            attempt.scope.cancel()
        self.kick()

    def _next(self) -> tuple[MemberStanding, Goal] | None:
        roster, goal = self._roster, self._roster.goal
        if goal is None or goal.version != roster.versions.version:
            return None
        if roster.driving or goal.is_out_of_reach:
            return None
        for standing in roster.standings.values():
            if standing.state in _WAITING and standing.tried != _try(standing, goal):
                return standing, goal
        return None

    async def _bring_up(self, standing: MemberStanding, goal: Goal) -> None:
        attempt = self._attempt = _Attempt(standing)
        standing.fire(MemberTrigger.CATCH_UP, version=goal.version.wire)
        remove = goal.engine.on_transition(partial(_end_with, attempt, goal.engine.name))
        try:
            with attempt.scope:
                arrived = partial(self._arrived, standing, goal)
                await uncancelled(lambda: self._way.bring(standing, goal, arrived))
                if standing.state not in _WAITING or self._roster.goal is not goal:
                    return
            if not attempt.scope.cancelled_caught:  # it arrived, and something came in between
                standing.tried = _try(standing, goal)
        except Exception as error:  # noqa: BLE001  its own affair: it waits for the next round
            standing.tried = _try(standing, goal)
            text = f"{type(error).__name__}: {first_line(error)}"
            if standing.state in _WAITING:
                standing.fire(MemberTrigger.FALL_BACK, error=text, version=goal.version.wire)
        finally:
            remove()
            self._attempt = None
            attempt.over.set()

    def _arrived(
        self, standing: MemberStanding, goal: Goal, peers: Sequence[PeerState | None]
    ) -> None:
        roster = self._roster
        standing.note(peers)
        mine = roster.standings.get(standing.name) is standing
        if mine and roster.goal is goal and standing.state in _WAITING:
            standing.fire(MemberTrigger.COMMIT, version=goal.version.wire)


def _try(standing: MemberStanding, goal: Goal) -> tuple[Any, ...]:
    """What one attempt is told from the next by."""
    return goal.version, *sorted(standing.incarnations.items())


def _end_with(attempt: _Attempt, engine: str, transition: Transition) -> None:
    if (transition.engine, transition.dest) == (engine, State.CLOSED):
        attempt.scope.cancel()
