"""One round on the trainer: admit, start, transfer, prepare, finish, report.

The path of a round is `Round.run`. Everything up to `_carry_out` moves nothing and leaves the
engine's state alone when it fails. From there on, leaving by any exception, cancellation included,
goes through `aiosync.giving_up`: the data plane has been aborted by then, the members are told, and
the engine flips to ``initialized`` (all members confirmed that their weights are intact and the
channel can carry another round) or to ``failed``. Sending finish is the point of no return.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, final

import anyio
from msgspec import UNSET

from aiosync import together
from aiosync.attendance import Attendance
from aiosync.commit import commit
from aiosync.concurrency import Milestone, collapse, run_legs
from aiosync.defaults import DEFAULTS
from aiosync.errors import PhaseTimeout, RoundCancelled, Validation
from aiosync.giving_up import give_up
from aiosync.liveness import kept_alive, watched
from aiosync.member_checks import check_options, opening_call
from aiosync.members import opened, unanswered
from aiosync.messages import PROTOCOL, RoundHeader
from aiosync.metadata import first_few
from aiosync.opening import start
from aiosync.repeating import reliably
from aiosync.reporting import make_report
from aiosync.roll_call import assemble, convene
from aiosync.round_holds import Holds
from aiosync.settling import at_most_twice, driving, may_look_late
from aiosync.weight_targets import MODEL
from statemachines.tables import Trigger, Weights

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from aiosync.feed import SourceFeed
    from aiosync.members import MemberLink
    from aiosync.report import Report
    from aiosync.round_options import RoundSettings
    from aiosync.source_side import SourceSide
    from aiosync.streaming import OutStream
    from aiosync.trainer import TrainerWeightTransferEngine
    from aiosync.version import Version
    from transports.planning import Plan
    from transports.stream import StreamSummary


_SHORT = ("pause", "start", "prepare", "finish")  # an update's silence has other causes


@final
class Round:
    """One weight update from admission to report. Made by the engine, run once."""

    def __init__(
        self,
        engine: TrainerWeightTransferEngine[Any],
        version: Version,
        settings: RoundSettings,
        *,
        source_side: SourceSide,
    ) -> None:
        self.engine = engine
        self.source_side = source_side
        self.version = version
        self.settings = settings
        self.budget = settings.budget
        self.target = settings.target
        self.holds = Holds(self)
        self.number, self.phase = 0, "admit"
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []
        self.recovered = self.has_moved = self.looks_late = False
        self.starts_with_update = False
        """Whether the members' update says that it also starts the round."""
        self.turn = Milestone()
        """The engine's slot is this round's."""
        self.released = Milestone()
        self.over = Milestone()
        self.outer: Round | None = None
        """The round of an override that calls the base's `send_weights`."""
        self.report: Report | None = None
        self.feed: SourceFeed | None = None
        self.plan: Plan | None = None
        self.summary: StreamSummary | None = None
        self.ahead: OutStream | None = None  # begun beside the start
        self.attendance = Attendance([])
        """Who takes part: the engine's members from this round's turn on."""
        self.sent_finish = self._is_sending = False
        self.agreed: Report | None = None
        """A report that stands for this round: rank 0's, or that of an inner or repeated one."""
        self._waiting, self._scope, self.limit = (anyio.CancelScope() for _ in range(3))
        self._began = time.monotonic()

    @property
    def links(self) -> list[MemberLink]:
        """The servers that this round began with."""
        return self.attendance.links

    @property
    def present(self) -> list[MemberLink]:
        """Those that have not dropped out."""
        return self.attendance.present

    @property
    def nbytes(self) -> int:
        """Payload bytes taken from the source so far."""
        return self.engine.sent_bytes() if self._is_sending else 0

    @property
    def elapsed(self) -> float:
        """Seconds since the round began."""
        return time.monotonic() - self._began

    def cancel(self) -> None:
        """End the round from outside its task; it then raises `RoundCancelled`."""
        self._waiting.cancel()
        self._scope.cancel()

    def describe(self) -> str:
        """Number, version and phase, for the error of another round."""
        which = f"round {self.number}" if self.number else "a round that has no number yet"
        return f"{which} (version {self.version.label}) is under way in phase {self.phase}"

    def is_same(self, other: Round) -> bool:
        """Whether both were given the same ticket."""
        mine, its = self.settings.ticket, other.settings.ticket
        return mine is not None and its is not None and mine.id == its.id

    # -- the path of a round ---------------------------------------------------------------------

    async def run(self, body: Callable[[], Awaitable[None]] | None = None) -> Report:
        """Carry the round out.

        Args:
            body: What an engine that overrides `send_weights` does instead of the phases here.

        Raises:
            One plain exception with the report attached (``error.report``), or the cancellation.
        """
        try:
            await self._take_turn()
            recorded = self.engine.tickets.recorded(self.settings.ticket)
            if recorded is not None and self.engine.ranks.size == 1:
                self.report = recorded
                return recorded
            self._began = time.monotonic()
            self.engine.ranks.begin(self.settings.deadline)
            for link in self.links:
                link.forget_round()
            async with opened(self.links, seconds=min(self.seconds_left, DEFAULTS.connect_s)):
                with driving(self):
                    await at_most_twice(self, lambda: self._guarded(body or self._phases))
        except BaseException as error:
            self.report = make_report(self, error, took=self.elapsed)
            raise
        else:
            self.report = self.agreed or make_report(self, None, took=self.elapsed)
            return self.report
        finally:
            if self.turn.is_set():
                await self.source_side.retire(seconds=self.budget.cleanup / 2)
            self.released.set()
            self.over.set()

    @property
    def seconds_left(self) -> float:
        """Seconds until the round's deadline, never quite zero."""
        return max(self.settings.deadline - time.monotonic(), 0.001)

    async def _take_turn(self) -> None:
        """Wait while other rounds have the slot; nothing of this one has begun."""
        if not self.turn.is_set():
            try:
                with self._within(self._waiting):
                    await self.turn.wait()
            finally:
                self.seconds["wait"] = self.elapsed
        self.phase = "admit"
        convene(self)
        self.engine.admission.resolve(self)

    @contextmanager
    def _within(self, scope: anyio.CancelScope) -> Iterator[None]:
        """Until `cancel` or the deadline, each of which becomes an error of its own."""
        with scope, anyio.move_on_after(self.seconds_left) as limit:
            yield
        if scope.cancelled_caught:
            raise RoundCancelled("the round was cancelled", phase=self.phase, round=self.number)
        if limit.cancelled_caught:
            ahead = self.engine.admission.current if self.phase == "wait" else None
            raise self._late(
                "the round",
                self.settings.total,
                f", waiting for its turn: {ahead.describe()}" if ahead else "",
            )

    async def _guarded(self, body: Callable[[], Awaitable[None]]) -> None:
        try:
            with self._within(self._scope):
                await body()
        except BaseException as error:
            cause = self.engine.explained(collapse(error))
            await give_up(self, cause)
            if cause is error:
                raise
            raise cause from cause.__cause__  # not from the group it came in

    async def _phases(self) -> None:
        engine = self.engine
        if not engine.is_sender and engine.ranks.size == 1:
            raise Validation(
                f"rank {engine.rank} sends nothing, and there is no other trainer rank that could:"
                " pass group=, or initialise torch.distributed first",
                rank=engine.rank,
                phase="admit",
            )
        with self._timed("admit", self.budget.admit or DEFAULTS.admit_s):
            await assemble(self)
            engine.tickets.check(self.settings)
            check_options(self)
            self.attendance.check()
            await self._validate()
            engine.tickets.check_plan(self)
            if await engine.machine.pass_gates(Trigger.START, version=self.label):
                self.source_side.look_again()
            await together.agree(self)
            if self.agreed is None:
                engine.tickets.check_unused(self.settings.ticket)
        if self.agreed is not None:
            # The ticket's round was committed before: answered from the record.
            if engine.tickets.recorded(self.settings.ticket) is None:
                engine.committed(self)  # this rank had left before it could learn that
            return
        engine.next_round(self)
        engine.machine.fire(Trigger.START, round=self.number, version=self.label)
        if engine.is_sender:
            await kept_alive(self, lambda: self.attendance.hold(self._carry_out))
        else:
            with self._timed("update", None):
                await together.take_part(self)
        await together.conclude(self)
        engine.committed(self)
        engine.machine.fire(Trigger.COMPLETE, weights=Weights.INTACT, **self.facts())

    async def _carry_out(self) -> None:
        await self._hold("round")
        with self._timed("start", self.budget.admit or DEFAULTS.admit_s):
            await start(self)
        self.holds.start_clocks()
        with self._timed("update", None):
            await self._transfer()
        self.engine.machine.fire(Trigger.FINALIZE, **self.facts())
        with self._timed("prepare", self.budget.finish or DEFAULTS.finish_s):
            await self._prepare()
        await self._hold("swap")
        with self._timed("finish", self.budget.finish or DEFAULTS.finish_s):
            await self._finish()
        await self.holds.lift_all(seconds=self.budget.cleanup)

    async def _validate(self) -> None:
        side, grace = self.source_side, self.budget.cleanup / 2
        self.looks_late = may_look_late(self)
        self.feed = await side.open_feed(grace=grace, late=self.looks_late)
        self.plan = await side.open_plan(self.feed, self.engine.make_plan, grace=grace)

    def validated(self) -> tuple[SourceFeed, Plan]:
        """Feed and plan; there from the first flip on."""
        assert self.feed is not None  # `_validate` came first
        assert self.plan is not None
        return self.feed, self.plan

    @property
    def source_grace(self) -> float:
        """What an aborted call on the source lane gets: with peers, one layer group's gather."""
        alone = self.engine.ranks.size == 1
        return self.budget.cleanup / 2 if alone else self.budget.stall

    # -- with the workers ------------------------------------------------------------------------

    async def _transfer(self) -> None:
        payload = self.engine.update_payload(self)

        async def control() -> None:
            if payload is None:
                return  # the data leg makes these calls as it goes
            update = partial(self.call, "update", "update_weights", payload)
            await together.heard(self, lambda: watched(self, update))

        async def data() -> None:
            self._is_sending = True
            self.summary = await self.engine.transmit(self)

        await run_legs(control, data, linger=self.budget.cleanup / 4)
        self.released.set()
        self.engine.machine.fire(Trigger.UPDATE, **self.facts())

    async def _prepare(self) -> None:
        ready = [
            link
            for link in self.links
            if link.supports("prepare") and not link.has_verified(self.number)
        ]
        if ready:
            await self.call("prepare", "prepare_weight_update", links=ready)

    async def _finish(self) -> None:
        await self.engine.machine.pass_gates(
            Trigger.COMPLETE, round=self.number, version=self.label
        )
        self.sent_finish = True
        await commit(self)

    # -- small parts -----------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The version as vLLM's wire carries it."""
        return str(self.version.label)

    def facts(self) -> dict[str, Any]:
        """What every flip of this round says about it."""
        return {"round": self.number, "version": self.label, "nbytes": self.nbytes}

    def header(self, link: MemberLink, *, starts: bool = False) -> RoundHeader | None:
        """The ``aiosync`` object of every call of this round to `link`.

        Args:
            starts: The call also starts the round.
        """
        if not link.speaks_ours:
            return None
        return RoundHeader(
            protocol=PROTOCOL,
            owner=self.engine.owner,
            epoch=link.epoch,
            round=self.number,
            lease_s=self.engine.lease_s,
            deadline_s=self.seconds_left,
            version=self.version,
            target=None if self.target == MODEL else self.target,
            # A member that holds this very version although it was never committed by all (an
            # earlier round ended mixed) takes it again; any other repeat needs the caller's word.
            rollback=self.settings.rollback
            or (
                link.held(self.target) == self.version
                and self.engine.cycle.mixed == (self.target, self.version)
            ),
            digest=self.plan.digest if self.plan is not None else None,
            ticket=self.settings.driven,
            starts=starts or UNSET,
        )

    async def _hold(self, scope: str) -> None:
        if self.settings.pause is not None or self.settings.around:
            with self._timed("pause", self.budget.pause or DEFAULTS.pause_s):
                await self.holds.take(scope)

    async def call(
        self, phase: str, method: str | None, *args: Any, links: list[MemberLink] | None = None
    ) -> None:
        """Call `method` of all members; None: the one that starts the round."""
        await self.attendance.call(
            self.links if links is None else links,
            lambda link: reliably(self, link, method or opening_call(self, link), *args),
            phase=phase,
            linger=self.budget.cleanup / 4,
            direct=True,
        )

    @contextmanager
    def _timed(self, phase: str, limit: float | None) -> Iterator[None]:
        self.phase = phase
        began = time.monotonic()
        try:
            with anyio.move_on_after(math.inf if limit is None else limit) as self.limit:
                yield
            if self.limit.cancelled_caught:
                raise self._late(phase, limit or 0)
        finally:
            self.seconds[phase] = time.monotonic() - began

    def _late(self, what: str, seconds: float, why: str = "") -> PhaseTimeout:
        text, late = f"{what} took longer than its {seconds:g} s{why}", []
        if self.phase in _SHORT:
            late = unanswered(self.links, self.phase)
        if late:
            text += f": no answer from {first_few(late)}"
        replica = late[0] if late else None
        return PhaseTimeout(text, replica=replica, phase=self.phase, round=self.number)
