"""How a round ends on a worker: verified and swapped in, or given up."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any, final

import anyio

from aiosync.defaults import DEFAULTS
from aiosync.errors import Coverage, PhaseTimeout
from aiosync.overrides import drive, is_instant
from aiosync.session import stopped
from aiosync.sinks import InPlaceSink
from aiosync.version import label_of, next_version, renamed, weights_id
from aiosync.weight_targets import MODEL
from aiosync.worker_deferring import Defers
from statemachines.tables import State, Trigger, Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from aiosync.messages import RoundHeader
    from aiosync.session import Session
    from aiosync.sinks import Sink
    from aiosync.version import Version
    from aiosync.worker_cycle import WorkerCycle

logger = logging.getLogger(__name__)


@final
class Ending:
    """The end of each round of one worker engine."""

    def __init__(self, cycle: WorkerCycle) -> None:
        self.cycle = cycle
        self.commits = 0
        self.deadline = math.inf
        """Of `time.monotonic`: what the trainer waits for the round's finish."""

    def note_limit(self, header: RoundHeader | None) -> None:
        """Finish has come: how long the trainer waits for it."""
        limit = None if header is None else header.deadline_s
        self.deadline = math.inf if limit is None else time.monotonic() + limit

    @property
    def is_prepared(self) -> bool:
        """Whether nothing is left to `prepare`: what came was verified as it came."""
        session, engine = self.cycle.session, self.cycle.engine
        deferred = session is None or session.deferred is not None
        return not deferred and engine.verified_round == self.cycle.ownership.last_round

    def is_instant(self, bare: Callable[..., Any]) -> bool:
        """Whether `commit` waits for nobody and blocks nowhere."""
        cycle, engine = self.cycle, self.cycle.engine
        sink = cycle.sink
        return (
            self.is_prepared
            and type(engine).drain_pending is Defers.drain_pending
            and is_instant(bare)
            and isinstance(sink, InPlaceSink)
            and sink.commits_at_once
            and self._waits_for_nobody
        )

    @property
    def _waits_for_nobody(self) -> bool:
        cycle, engine = self.cycle, self.cycle.engine
        gate = engine.generation
        asks = engine.machine.is_gated(Trigger.COMPLETE) or cycle.driven.decides
        flushes = cycle.aim == MODEL and gate.cache.flushes
        return gate.swaps_at_once and not asks and not flushes

    def commit_now(self, commit: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """`commit`, in this very step; False where that cannot be after all.

        Others' hooks see the flip that comes first, and may add a gate there.
        """
        self.finalize()
        if not self._waits_for_nobody:
            return False
        drive(commit(), "commit")
        return True

    def finalize(self) -> None:
        """The round's input is complete."""
        engine, number = self.cycle.engine, self.cycle.ownership.last_round
        if engine.state is not State.FINALIZING:
            nbytes = engine.received_bytes()
            engine.machine.fire(Trigger.FINALIZE, round=number, nbytes=nbytes)

    async def prepare(self) -> None:
        cycle, engine = self.cycle, self.cycle.engine
        if engine.state is State.FINALIZING:
            return
        number = cycle.ownership.last_round
        self.finalize()
        await engine.drain_pending()
        if engine.uses_sink:
            if cycle.sink is None:
                raise Coverage("the round announced no tensors", phase="prepare", round=number)
            if engine.verified_round != number:
                await engine.lane.run(cycle.sink.verify)

    async def commit(
        self, bare: Callable[..., Any], session: Session, weight_version: str | None
    ) -> None:
        cycle, engine = self.cycle, self.cycle.engine
        version = self._version(weight_version)
        await self.prepare()
        asked = await engine.machine.pass_gates(
            Trigger.COMPLETE, round=session.number, version=label_of(version)
        )
        waited = await cycle.driven.permission() or asked
        name = self._weights_id(version)
        sink = cycle.sink
        if sink is not None:
            await cycle.step(bare)
            if waited:  # others' code ran since the round was verified
                await engine.lane.run(sink.check_model)
        # Sooner than the trainer stops waiting, so that it hears what the swap waited for.
        patience = min(DEFAULTS.pause_s, max(self.deadline - time.monotonic(), 0))
        async with engine.generation.swap(timeout=patience, phase="finish"):
            if cycle.aim == MODEL:
                # Before the weights are new: a cache that cannot be emptied costs the round only.
                await engine.generation.renew_cache(name)
            if sink is None:
                await cycle.step(bare)
            else:
                session.holding = True
                sink.target = version
                await self._swap(sink)
            # Inside the swap: the version becomes visible together with the weights.
            self._committed(session, version, name)

    async def _swap(self, sink: Sink) -> None:
        if isinstance(sink, InPlaceSink) and sink.commits_at_once:
            sink.commit()
            return
        with anyio.move_on_after(DEFAULTS.commit_s) as limit:
            await self.cycle.engine.lane.run(sink.commit, grace=DEFAULTS.cleanup_s)
        if limit.cancelled_caught:  # a loader that blocks for good: torn, the lane lost
            raise PhaseTimeout(
                f"the swap took longer than its {DEFAULTS.commit_s:g} s",
                phase="finish",
                round=self.cycle.ownership.last_round,
            )

    def over(self, error: BaseException | None) -> None:
        """The session's last step: settle the weights and flip, with no await in between."""
        cycle, engine, session = self.cycle, self.cycle.engine, self.cycle.session
        if session is None:
            return  # committed
        cycle.session = None
        if cycle.sink is not None:
            cycle.sink.abort()
            if engine.lane_poisoned:
                # A stuck writer may wake up late: the next round gets other spare memory.
                cycle.sink.release()
            engine.weights = Weights(cycle.sink.weights)
        held = engine.version_of(cycle.aim)
        cycle.aim_back()
        if error is None or not isinstance(error, Exception):
            error = stopped(error, session.number)
        cycle.ownership.settle(error)
        cycle.driven.ended(error)
        lane_healthy = not engine.lane_poisoned
        usable = engine.reusable_after_abort and lane_healthy and engine.weights == Weights.INTACT
        usable = usable and not cycle.left.running
        engine.machine.fire(
            Trigger.ABORT if usable else Trigger.FAIL,
            round=session.number,
            error=error,
            weights=engine.weights,
            nbytes=engine.received_bytes(),
            version=label_of(held),
        )
        engine.pausing.judge()

    def _version(self, weight_version: str | None) -> Version | None:
        """The version that this commit makes visible."""
        cycle, engine = self.cycle, self.cycle.engine
        version = cycle.target
        if version is None and weight_version is not None:
            current = engine.version_of(cycle.aim)
            lineage = current.lineage if current else engine.incarnation
            version = cycle.target = next_version(current, weight_version, lineage=lineage)
        elif version is not None and weight_version is not None:
            version = renamed(version, weight_version)
        return version

    def _weights_id(self, version: Version | None) -> str:
        engine = self.cycle.engine
        own = f"{engine.incarnation}.{self.commits + 1}"
        if version is None:
            return f"{own}/{engine.received_digest or 'unverified'}"
        # Without a digest two commits of one version may differ: the name must not repeat.
        return weights_id(version, engine.received_digest or f"unverified.{own}")

    def _committed(self, session: Session, version: Version | None, name: str) -> None:
        cycle, engine = self.cycle, self.cycle.engine
        engine.weights = Weights.INTACT
        self.commits += 1
        engine.take_version(cycle.aim, version, name)
        held = engine.version_of(cycle.aim)
        cycle.session = None
        cycle.aim_back()
        cycle.ownership.settle(None)
        cycle.driven.ended(None)
        engine.machine.fire(
            Trigger.COMPLETE,
            round=session.number,
            version=label_of(held),
            nbytes=engine.received_bytes(),
            weights=engine.weights,
        )
        engine.pausing.judge()
        session.close()
