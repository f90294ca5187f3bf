"""One round on the trainer: admit, start, transfer, prepare, finish, report.

The path of a round is `Round.run`. Everything up to `_start` moves nothing and leaves the engine's
state alone when it fails. From `_start` on, leaving by any exception, cancellation included, goes
through `_give_up`: the data plane has been aborted by then, the members are told, and the engine
flips to ``initialized`` (all members confirmed that their weights are intact and the channel can
carry another round) or to ``failed``. Sending finish is the point of no return.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import anyio

from aiosync.concurrency import collapse, first_line, run_legs, run_to_end
from aiosync.defaults import DEFAULTS
from aiosync.errors import (
    AiosyncError,
    Fenced,
    InvalidTransition,
    OutcomeUnknown,
    PeerLost,
    PhaseTimeout,
    ProtocolMismatch,
    RoundCancelled,
)
from aiosync.members import MemberLink, fan_out, opened
from aiosync.messages import PROTOCOL, RoundHeader
from aiosync.report import MemberOutcome, Report
from aiosync.watchable import BUSY
from statemachines.tables import State, Trigger, Weights

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from transports.planning import Plan

    from aiosync.budget import Budget
    from aiosync.feed import SourceFeed
    from aiosync.trainer import TrainerWeightTransferEngine
    from aiosync.version import Version
    from transports.stream import StreamSummary


@final
class Milestone:
    """Something that happens once: ``await it``, ``it.is_set()``, ``await it.wait()``."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()

    def __await__(self) -> Any:
        return self._event.wait().__await__()


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
        self._sent_finish = False
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
            self._reported(error, time.monotonic() - began)
            raise
        else:
            return self._reported(None, time.monotonic() - began)
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
            await self._give_up(cause)
            if cause is error:
                raise
            raise cause from None

    async def _phases(self) -> None:
        engine = self.engine
        with self._timed("admit", self.budget.admit or DEFAULTS.admit_s):
            await engine.ensure_initialized(self)
            await self._validate()
            await engine.machine.pass_gates(Trigger.START, version=self._label)
        if not engine.is_sender:
            if self.feed is not None:
                await engine.drain_source(self.feed, grace=self.budget.cleanup / 2)
            return
        engine.next_round(self)
        engine.machine.fire(Trigger.START, round=self.number, version=self._label)
        with self._timed("start", self.budget.admit or DEFAULTS.admit_s):
            await self._start()
        with self._timed("update", None):
            await self._transfer()
        engine.machine.fire(Trigger.FINALIZE, **self._facts())
        with self._timed("prepare", self.budget.finish or DEFAULTS.finish_s):
            await self._prepare()
        with self._timed("finish", self.budget.finish or DEFAULTS.finish_s):
            await self._finish()
        engine.committed(self)
        engine.machine.fire(Trigger.COMPLETE, weights=Weights.INTACT, **self._facts())

    async def _validate(self) -> None:
        self.feed = await self.engine.open_feed(self)
        self.plan = await self.engine.open_plan(self.feed)

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
            await self._abort_members(error)  # those whose start went through
            await self.engine.rejoin()
            await self._all("start_weight_update")

    async def _peer_restarted(self) -> bool:
        able = [link for link in self.links if link.speaks_ours]
        await fan_out(able, MemberLink.probe, phase="start", linger=self.budget.cleanup)
        return any(link.restarted for link in able)

    async def _transfer(self) -> None:
        payload = self.engine.update_payload(self)
        began = time.monotonic()
        for link in self.links:
            link.progress_at = began

        async def control() -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(self._heartbeats)
                group.start_soon(self._watch_stall, began)
                await self._all("update_weights", payload)
                group.cancel_scope.cancel()

        async def data() -> None:
            self.summary = await self.engine.transmit(self)

        await run_legs(control, data, linger=self.budget.cleanup / 4)
        self.released.set()
        self.engine.machine.fire(Trigger.UPDATE, **self._facts())

    async def _prepare(self) -> None:
        ready = [link for link in self.links if link.supports("prepare")]
        await self._all("prepare_weight_update", links=ready)

    async def _finish(self) -> None:
        await self.engine.machine.pass_gates(
            Trigger.COMPLETE, round=self.number, version=self._label
        )
        self._sent_finish = True
        failures: list[BaseException] = []

        async def one(link: MemberLink) -> None:
            try:
                await link.call("finish_weight_update", self._label, header=self.header(link))
            except (PeerLost, PhaseTimeout, ProtocolMismatch) as error:
                if not await self._committed_after_all(link):
                    link.outcome = "unknown" if link.outcome != "refused" else "failed"
                    raise OutcomeUnknown(
                        f"finish was sent but not answered: {error.message}",
                        replica=link.name,
                        phase="finish",
                        weights="unknown",
                    ) from error
            link.outcome = "committed"

        async def owner() -> None:
            try:
                await fan_out(self.links, one, phase="finish", linger=self.budget.cleanup)
            except Exception as error:  # noqa: BLE001  handed over to the waiting half
                failures.append(error)

        await hold_on(owner, grace=self.budget.cleanup)
        if failures:
            raise failures[0]

    async def _committed_after_all(self, link: MemberLink) -> bool:
        """Finish got no answer; ask instead of sending it again."""
        if not link.supports("status"):
            return False
        deadline = time.monotonic() + self.budget.cleanup
        while time.monotonic() < deadline:
            try:
                await link.call("weight_update_status", header=self.header(link))
            except AiosyncError:
                await anyio.sleep(0.05)
                continue
            peer = link.peer
            settled = peer is not None and peer.state not in BUSY
            if settled and peer is not None:
                link.outcome = "refused"
                return bool(peer.version == self.version)
            await anyio.sleep(0.05)
        return False

    # -- giving up -------------------------------------------------------------------------------

    async def _give_up(self, cause: BaseException) -> None:
        """Tell the members, then flip. The data plane has been aborted by its lane already."""
        engine = self.engine
        if engine.machine.state not in BUSY:
            return
        try:
            if not self._sent_finish:
                await run_to_end(
                    lambda: self._abort_members(cause), seconds=self.budget.cleanup / 2
                )
        finally:
            self._flip_down(cause)

    async def _abort_members(self, cause: BaseException) -> None:
        reason = f"{type(cause).__name__}: {first_line(cause)}"[:500]
        able = [link for link in self.links if link.supports("abort")]
        for link in able:
            link.outcome = "unconfirmed"

        async def one(link: MemberLink) -> None:
            before = (link.phase, link.error)
            await link.call("abort_weight_update", reason, header=self.header(link))
            link.phase, link.error = before
            peer = link.peer
            if peer is not None and peer.state not in BUSY:
                link.outcome = "aborted"

        async with anyio.create_task_group() as group:
            for link in able:
                group.start_soon(_quietly, one, link)

    def _flip_down(self, cause: BaseException) -> None:
        engine = self.engine
        if self._sent_finish and all(link.outcome == "committed" for link in self.links):
            # Cancelled, or out of time, while the last answer was on its way: it is committed.
            engine.committed(self)
            engine.machine.fire(Trigger.COMPLETE, weights=Weights.INTACT, **self._facts())
            return
        confirmed = all(
            link.outcome == "aborted"
            and link.peer is not None
            and link.peer.weights == Weights.INTACT
            and link.peer.state == State.INITIALIZED
            for link in self.links
        )
        reusable = engine.reusable_after_abort and engine.channel_healthy()
        usable = confirmed and reusable and not self._sent_finish
        self._unify_outcomes()
        engine.machine.fire(
            Trigger.ABORT if usable else Trigger.FAIL,
            phase=self.phase,
            error=cause,
            weights=self._weights(),
            **self._facts(),
        )

    def _unify_outcomes(self) -> None:
        for link in self.links:
            if link.outcome == "committed":
                continue
            unsure = (
                self._sent_finish
                and link.outcome in ("unknown", "failed")
                and (link.known_error is None or isinstance(link.known_error, OutcomeUnknown))
            )
            link.outcome = "unknown" if unsure else "failed"

    def _weights(self) -> Weights:
        states = {link.peer.weights if link.peer else Weights.UNKNOWN for link in self.links}
        for worst in (Weights.UNKNOWN, Weights.TORN):
            if worst in states:
                return worst
        return Weights.INTACT

    # -- liveness --------------------------------------------------------------------------------

    async def _heartbeats(self) -> None:
        """Keep the members' leases alive and learn of progress made behind an open call."""
        able = [link for link in self.links if link.supports("status")]
        pause = min(self.engine.lease_s, self.budget.stall) / 3

        async def beat(link: MemberLink) -> None:
            with anyio.move_on_after(pause):
                await link.call("weight_update_status", header=self.header(link))

        while able:
            await anyio.sleep(pause)
            async with anyio.create_task_group() as group:
                for link in able:
                    group.start_soon(_quietly, beat, link)

    async def _watch_stall(self, began: float) -> None:
        stall = self.budget.stall
        tick = min(stall / 10, 1.0)
        while True:
            await anyio.sleep(tick)
            latest = max(began, self.engine.progress_at(), *(x.progress_at for x in self.links))
            # The data plane times a silent peer itself and names it; this is for all the rest.
            if time.monotonic() - latest > stall + 2 * tick:
                waiting = [link.name for link in self.links if link.error is None]
                raise PhaseTimeout(
                    f"no progress for {stall:g} s; waiting for {', '.join(waiting)}",
                    replica=waiting[0] if len(waiting) == 1 else None,
                    phase="update",
                    round=self.number,
                )

    # -- small parts -----------------------------------------------------------------------------

    @property
    def _label(self) -> str:
        return str(self.version.label)

    def _facts(self) -> dict[str, Any]:
        return {"round": self.number, "version": self._label, "nbytes": self.engine.sent_bytes()}

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

    def _reported(self, error: BaseException | None, took: float) -> Report:
        cause = None if error is None else collapse(error)
        outcome = "committed"
        if cause is not None:
            outcomes = {link.outcome for link in self.links}
            unsure = outcomes & {"unknown", "committed"}
            outcome = "unknown" if unsure and self._sent_finish else "failed"
            if outcomes == {"committed"}:
                outcome = "committed"
        report = self.report = Report(
            outcome=outcome,
            version=self.version,
            round=self.number,
            backend=self.engine.backend_name,
            nbytes=self.engine.sent_bytes(),
            seconds={**self.seconds, "total": took},
            members=tuple(_member_outcome(link, cause) for link in self.links),
            digest=self.summary.digest if self.summary is not None else None,
            verified=self.summary is not None and self.summary.digest is not None,
            left_out=tuple(getattr(self.engine.source, "left_out", ())),
            notes=tuple(self.notes),
            recovered=self.recovered,
        )
        if isinstance(cause, AiosyncError):
            cause.locate(report=report, round=self.number or None, phase=self.phase)
            cause.locate(weights=self._weights().value if self.engine.is_sender else None)
        elif cause is not None:
            with _tolerant():
                cause.report = report  # type: ignore[attr-defined]
        return report


def _member_outcome(link: MemberLink, cause: BaseException | None) -> MemberOutcome:
    outcome = link.outcome if cause is not None else "committed"
    if outcome not in ("committed", "unknown"):
        outcome = "failed"
    weights = link.peer.weights if link.peer is not None else Weights.UNKNOWN
    return MemberOutcome(
        name=link.name,
        outcome=outcome,
        weights=str(weights),
        phase=link.phase,
        error=link.error,
        seconds=link.seconds,
    )


_PHASE_OF = {
    "start_weight_update": "start",
    "update_weights": "update",
    "prepare_weight_update": "prepare",
}


@contextmanager
def _tolerant() -> Iterator[None]:
    """Some exceptions (those with slots) take no attribute; the report is then not attached."""
    try:
        yield
    except AttributeError:
        return


async def _quietly(fn: Callable[[MemberLink], Awaitable[None]], link: MemberLink) -> None:
    """A heartbeat or a farewell: what it finds out is in the link, its failure is no news."""
    try:
        await fn(link)
    except Exception:  # noqa: BLE001  the call that matters reports for itself
        return


async def hold_on(fn: Callable[[], Awaitable[None]], *, grace: float) -> None:
    """Await ``fn()``; when cancelled meanwhile, give it `grace` seconds more to end by itself."""
    done = anyio.Event()
    scope = anyio.CancelScope(shield=True)  # the owner outlives a cancellation, by `grace`

    async def owner() -> None:
        try:
            with scope:
                await fn()
        finally:
            done.set()

    async def waiter() -> None:
        try:
            await done.wait()
        except BaseException:
            with anyio.move_on_after(grace, shield=True):  # bounded by `grace`
                await done.wait()
            scope.cancel()
            raise

    async with anyio.create_task_group() as group:
        group.start_soon(owner)
        group.start_soon(waiter)
