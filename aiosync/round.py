"""One round on the trainer: admit, start, transfer, prepare, finish, report.

The path of a round is `Round.run`. Everything up to `_start` moves nothing and leaves the engine's
state alone when it fails. From `_start` on, leaving by any exception, cancellation included, goes
through `aiosync.giving_up`: the data plane has been aborted by then, the members are told, and the
engine flips to ``initialized`` (all members confirmed that their weights are intact and the channel
can carry another round) or to ``failed``. Sending finish is the point of no return.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import anyio

from aiosync.commit import commit
from aiosync.concurrency import Milestone, collapse, run_legs
from aiosync.defaults import DEFAULTS
from aiosync.errors import Fenced, InvalidTransition, PhaseTimeout, RoundCancelled
from aiosync.giving_up import abort_members, give_up
from aiosync.liveness import send_heartbeats, watch_stall
from aiosync.members import MemberLink, fan_out, opened
from aiosync.messages import PROTOCOL, RoundHeader
from aiosync.reporting import make_report
from statemachines.tables import Trigger, Weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiosync.budget import Budget
    from aiosync.feed import SourceFeed
    from aiosync.report import Report
    from aiosync.trainer import TrainerWeightTransferEngine
    from aiosync.version import Version
    from transports.planning import Plan
    from transports.stream import StreamSummary


@final
class Round:
    """One weight update from admission to report. Made by the engine, run once."""

    def __init__(
        self,
        engine: TrainerWeightTransferEngine[Any],
        version: Version,
        budget: Budget,
        *,
        rollback: bool,
    ) -> None:
        self.engine = engine
        self.version = version
        self.budget = budget
        self.rollback = rollback
        self.number = 0
        self.phase = "admit"
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []
        self.recovered = False
        self.released = Milestone()
        self.over = Milestone()
        self.report: Report | None = None
        self.feed: SourceFeed | None = None
        self.plan: Plan | None = None
        self.summary: StreamSummary | None = None
        self.links: list[MemberLink] = engine.links
        self.sent_finish = False
        self._scope = anyio.CancelScope()
        self._deadline = math.inf

    def cancel(self) -> None:
        """End the round from outside its task; it then raises `RoundCancelled`."""
        self._scope.cancel()

    # -- the path of a round ---------------------------------------------------------------------

    async def run(self) -> Report:
        """Carry the round out.

        Raises:
            One plain exception with the report attached (``error.report``), or the cancellation.
        """
        began = time.monotonic()
        total = self.budget.total if self.budget.total is not None else DEFAULTS.total_s
        self._deadline = began + total
        try:
            async with opened(self.links):
                await self._guarded(total)
        except BaseException as error:
            self.report = make_report(self, error, took=time.monotonic() - began)
            raise
        else:
            self.report = make_report(self, None, took=time.monotonic() - began)
            return self.report
        finally:
            self.released.set()
            self.over.set()

    async def _guarded(self, total: float) -> None:
        try:
            with self._scope, anyio.move_on_after(total) as scope:
                await self._phases()
            if self._scope.cancelled_caught:
                raise RoundCancelled("the round was cancelled", phase=self.phase, round=self.number)
            if scope.cancelled_caught:
                raise PhaseTimeout(
                    f"the round took longer than its {total:g} s",
                    phase=self.phase,
                    round=self.number,
                )
        except BaseException as error:
            cause = collapse(error)
            await give_up(self, cause)
            if cause is error:
                raise
            raise cause from None

    async def _phases(self) -> None:
        engine = self.engine
        with self._timed("admit", self.budget.admit or DEFAULTS.admit_s):
            await engine.ensure_initialized(self)
            await self._validate()
            await engine.machine.pass_gates(Trigger.START, version=self.label)
        if not engine.is_sender:
            if self.feed is not None:
                await engine.source_side.drain(self.feed, grace=self.budget.cleanup / 2)
            return
        engine.next_round(self)
        engine.machine.fire(Trigger.START, round=self.number, version=self.label)
        with self._timed("start", self.budget.admit or DEFAULTS.admit_s):
            await self._start()
        with self._timed("update", None):
            await self._transfer()
        engine.machine.fire(Trigger.FINALIZE, **self.facts())
        with self._timed("prepare", self.budget.finish or DEFAULTS.finish_s):
            await self._prepare()
        with self._timed("finish", self.budget.finish or DEFAULTS.finish_s):
            await self._finish()
        engine.committed(self)
        engine.machine.fire(Trigger.COMPLETE, weights=Weights.INTACT, **self.facts())

    async def _validate(self) -> None:
        engine, grace = self.engine, self.budget.cleanup / 2
        self.feed = await engine.source_side.open_feed(grace=grace)
        self.plan = await engine.source_side.open_plan(self.feed, engine.make_plan, grace=grace)

    def validated(self) -> tuple[SourceFeed, Plan]:
        """Feed and plan; there from the first flip on."""
        assert self.feed is not None  # `_validate` came first
        assert self.plan is not None
        return self.feed, self.plan

    async def _start(self) -> None:
        try:
            await self._all("start_weight_update")
        except (InvalidTransition, Fenced) as error:
            if self.recovered or not self.engine.recovers or not await self._peer_restarted():
                raise
            # Noticed before a byte moved: initialise again, once, within the same budget.
            self.notes.append(f"initialised again, a worker had restarted: {error.message}")
            self.recovered = True
            await abort_members(self, error)  # those whose start went through
            await self.engine.rejoin()
            await self._all("start_weight_update")

    async def _peer_restarted(self) -> bool:
        able = [link for link in self.links if link.speaks_ours]
        await fan_out(able, MemberLink.probe, phase="start", linger=self.budget.cleanup)
        return any(link.restarted for link in able)

    async def _transfer(self) -> None:
        payload = self.engine.update_payload(self)

        async def control() -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(send_heartbeats, self)
                group.start_soon(watch_stall, self)
                await self._all("update_weights", payload)
                group.cancel_scope.cancel()

        async def data() -> None:
            self.summary = await self.engine.transmit(self)

        await run_legs(control, data, linger=self.budget.cleanup / 4)
        self.released.set()
        self.engine.machine.fire(Trigger.UPDATE, **self.facts())

    async def _prepare(self) -> None:
        ready = [link for link in self.links if link.supports("prepare")]
        await self._all("prepare_weight_update", links=ready)

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
        return {"round": self.number, "version": self.label, "nbytes": self.engine.sent_bytes()}

    def header(self, link: MemberLink) -> RoundHeader | None:
        """The ``aiosync`` object of every call of this round to `link`."""
        if not link.speaks_ours:
            return None
        return RoundHeader(
            protocol=PROTOCOL,
            owner=self.engine.owner,
            epoch=link.epoch,
            round=self.number,
            lease_s=self.engine.lease_s,
            deadline_s=max(self._deadline - time.monotonic(), 0.001),
            version=self.version,
            base_version=link.version,
            # A member that holds this very version already (an earlier round that ended mixed)
            # takes it again; any other repeat is the caller's explicit choice.
            rollback=self.rollback or link.version == self.version,
            digest=self.plan.digest if self.plan is not None else None,
        )

    async def _all(self, method: str, *args: Any, links: list[MemberLink] | None = None) -> None:
        await fan_out(
            self.links if links is None else links,
            lambda link: link.call(method, *args, header=self.header(link)),
            phase=_PHASE_OF[method],
            linger=self.budget.cleanup / 4,
        )

    @contextmanager
    def _timed(self, phase: str, limit: float | None) -> Iterator[None]:
        self.phase = phase
        began = time.monotonic()
        try:
            with anyio.move_on_after(math.inf if limit is None else limit) as scope:
                yield
            if scope.cancelled_caught:
                raise PhaseTimeout(
                    f"{phase} took longer than its {limit:g} s", phase=phase, round=self.number
                )
        finally:
            self.seconds[phase] = time.monotonic() - began


_PHASE_OF = {
    "start_weight_update": "start",
    "update_weights": "update",
    "prepare_weight_update": "prepare",
}
