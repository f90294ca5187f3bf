"""The life cycle around a worker engine's steps: order, owner, session, commit.

`WorkerCycle` is the only writer of the engine's state. A step reaches it through the wrapper of
`aiosync.overrides`, with the bare method as its first argument.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, final

import anyio

from aiosync.channel_turn import ChannelTurn
from aiosync.concurrency import Supervisor, run_to_end
from aiosync.config import WeightTransferInitRequest
from aiosync.defaults import DEFAULTS
from aiosync.errors import Busy, Coverage, Fenced, PhaseTimeout, RoundCancelled, Validation
from aiosync.lane_calls import LaneCalls
from aiosync.overrides import bare_of, call_step
from aiosync.ownership import Ownership
from aiosync.session import Session, stopped
from aiosync.version import check_label, check_successor, label_of, next_version, renamed
from aiosync.watchable import BUSY
from statemachines.tables import State, Trigger, Weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiosync.messages import RoundHeader
    from aiosync.sinks import Sink
    from aiosync.version import Version
    from aiosync.worker import WeightTransferEngine

logger = logging.getLogger(__name__)


@final
class WorkerCycle:
    """State of one worker engine between and during rounds."""

    def __init__(self, engine: WeightTransferEngine[Any, Any]) -> None:
        self.engine = engine
        self.ownership = Ownership()
        self.session: Session | None = None
        self.sink: Sink | None = None
        """The sink of the open round, once its first payload was opened."""
        self.header: RoundHeader | None = None
        """The header that opened the round."""
        self.target: Version | None = None
        """The version that the round's commit makes visible."""
        self.calls: LaneCalls | None = None
        """How the round's calls on the lane reach the loop."""
        self._supervisor = Supervisor()
        self._turn = ChannelTurn()
        self._closing = False

    # -- the steps -------------------------------------------------------------------------------

    async def init(
        self, bare: Callable[..., Any], init_info: Any, *, header: RoundHeader | None = None
    ) -> None:
        engine = self.engine
        if isinstance(init_info, WeightTransferInitRequest):
            init_info = init_info.init_info
        caller = None if header is None else header.owner
        mine = self._turn.give_up(caller)  # the news that it was given up may have got lost
        await self._turn.settled(DEFAULTS.connect_s if mine else 2 * DEFAULTS.cleanup_s)
        if self._turn.what or engine.state in BUSY:
            what = (
                self._turn.what or f"a round of {self.ownership.owner or 'a client without a name'}"
            )
            raise Busy(
                f"{what} is under way (state {engine.state.value})",
                replica=engine.name,
                phase="init",
                detail=engine.standing()
                | {"owner": self.ownership.owner, "since": self.ownership.since},
            )
        if self._is_ended():
            raise engine.wrong_order("init")
        info = engine.parse_init_info(init_info)
        with self._turn.taken("an init", caller):
            await engine.machine.pass_gates(Trigger.INITIALIZE)
            await self._back_to_idle()
            await self._open_channel(bare, info)
            if self._is_ended():  # meanwhile
                await self._dispose()
                engine.close_lane()
                raise engine.wrong_order("init")
            self.ownership.take(caller)
            engine.machine.fire(Trigger.INITIALIZE, version=label_of(engine.version))

    async def start(self, bare: Callable[..., Any], *, header: RoundHeader | None = None) -> None:
        engine = self.engine
        self.ownership.check(header, "start")
        session = self.session
        if session is not None and header is not None and header.round == session.number:
            await session.do(functools.partial(self._step, bare), key="start")
            return  # the same call again: the round is open
        if engine.state is not State.INITIALIZED:
            raise engine.wrong_order("start")
        target = self._successor(header)
        await engine.machine.pass_gates(Trigger.START, version=label_of(target))
        # No await from here to the session: nobody slips in between check, flip and owner.
        if self._turn.what or self._is_ended() or not engine.machine.may(Trigger.START):
            raise engine.wrong_order("start")
        self.ownership.check(header, "start")
        number = self.ownership.begin(header)
        engine.machine.fire(Trigger.START, round=number, version=label_of(target))
        self.target, self.header = target, header
        self.calls = LaneCalls()
        self.sink = None
        session = self.session = Session(
            number=number,
            lease=self._lease(header),
            on_end=self._over,
            progress=engine.progress_at,
            leave=self._leave,
            deferred=engine.new_queue(),
        )
        self._supervisor.start(
            session.run(), name=f"{engine.name}-round-{number}", after=session.ensure_over
        )
        await session.do(functools.partial(self._step, bare), key="start")

    async def receive(
        self, bare: Callable[..., Any], update_info: Any, *, header: RoundHeader | None = None
    ) -> None:
        engine = self.engine
        self.ownership.check(header, "update")
        session = self._open_session("update", header)
        if engine.state is not State.UPDATING or session.was_asked("prepare", "finish"):
            # Jobs run in order: it would run behind the commit, outside of the round.
            raise engine.wrong_order("update")
        info = engine.parse_update_info(update_info)
        engine.machine.fire(Trigger.UPDATE, round=session.number, nbytes=engine.received_bytes())
        if not engine.uses_sink:
            # The engine writes into the model by itself; until it finishes nobody can tell.
            engine.weights = Weights.UNKNOWN
        await session.do(functools.partial(self._step, bare, info))

    async def prepare(self, *, header: RoundHeader | None = None) -> None:
        self.ownership.check(header, "prepare")
        await self._open_session("prepare", header).do(self._prepare, key="prepare")

    async def finish(
        self,
        bare: Callable[..., Any],
        weight_version: str | None = None,
        *,
        header: RoundHeader | None = None,
    ) -> None:
        self.ownership.check(header, "finish")
        if self.session is None and self.ownership.is_settled(header):
            if self.ownership.outcome is not None:
                raise self.ownership.outcome
            return  # the same call again: the round was committed
        if header is not None and self.target is None:
            self.target = self._successor(header)  # a rank of a group may learn it only now
        label: Any = weight_version  # a caller by hand may pass an int
        if label is not None and type(label) is not str:
            raise Validation(f"weight_version must be a str or None, not {label!r}", phase="finish")
        if label is not None:
            check_label(label)
        session = self._open_session("finish", header)
        commit = functools.partial(self._commit, bare, session, weight_version)
        await session.do(commit, key="finish")
        await session.wait_over()

    async def abort(self, reason: str, *, header: RoundHeader | None = None) -> None:
        if header is not None and self._turn.give_up(header.owner):
            await self._turn.settled(DEFAULTS.cleanup_s)
            return
        self.ownership.check(header, "abort")
        session, text = self.session, f"aborted by the trainer{': ' + reason if reason else ''}"
        if session is None and header is not None:
            self.ownership.pass_over(header, RoundCancelled(text, round=header.round))
        if session is None or (header is not None and header.round != session.number):
            return
        session.cancel(RoundCancelled(text, round=session.number))
        with anyio.move_on_after(DEFAULTS.finish_s):
            await session.wait_over()

    async def shutdown(
        self, bare: Callable[..., Any], *, header: RoundHeader | None = None
    ) -> None:
        engine = self.engine
        if header is not None:
            self.ownership.check(header, "shutdown")
        if self._turn.what or engine.state in BUSY:
            raise Busy(
                f"{self._turn.what or 'a round'} is under way; abort it first",
                replica=engine.name,
                phase="shutdown",
                detail=engine.standing(),
            )
        if engine.state not in (State.INITIALIZED, State.FAILED):
            return
        with self._turn.taken("a shutdown"):
            await self._limited(bare, seconds=DEFAULTS.finish_s, phase="shutdown")
            if engine.state is State.INITIALIZED:
                engine.machine.fire(Trigger.RELEASE)
            elif engine.state is State.FAILED:
                engine.machine.fire(Trigger.RESET)

    async def close(self) -> None:
        """An open round fails first (a commit under way is finished), then the channel goes."""
        engine, session = self.engine, self.session
        self._closing = True  # an init that is under way frees what it opened
        if session is not None:
            session.cancel(RoundCancelled("the worker engine was closed", round=session.number))
            await run_to_end(session.wait_over, seconds=DEFAULTS.finish_s)
        await self._supervisor.aclose(seconds=DEFAULTS.cleanup_s)
        await run_to_end(self._dispose, seconds=DEFAULTS.cleanup_s)
        if engine.state in BUSY:
            engine.machine.fire(Trigger.FAIL, error="closed", weights=engine.weights)
        if engine.machine.may(Trigger.CLOSE):
            engine.machine.fire(Trigger.CLOSE)

    def touch(self, header: RoundHeader | None) -> None:
        """Renew the lease of the open round if `header` is its owner's."""
        session = self.session
        if session is not None and header is not None and header.round == session.number:
            self.ownership.check(header, "status")
            session.touch()

    # -- inside ----------------------------------------------------------------------------------

    def _is_ended(self) -> bool:
        return self._closing or self.engine.state is State.CLOSED

    async def _step(self, bare: Callable[..., Any], *args: Any) -> Any:
        engine = self.engine
        return await call_step(
            engine,
            bare,
            *args,
            lane=lambda: engine.lane,
            abort=self._abort_step,
            grace=DEFAULTS.cleanup_s / 2,
        )

    async def _limited(
        self, bare: Callable[..., Any], *args: Any, seconds: float, phase: str
    ) -> None:
        """A step outside of rounds: one that blocks for good must not keep the next owner out."""
        with anyio.move_on_after(seconds) as limit:
            await self._step(bare, *args)
        if limit.cancelled_caught:
            raise PhaseTimeout(f"{phase} took longer than {seconds:g} s", phase=phase)

    def _abort_step(self) -> None:
        self.engine.abort_receive()
        if self.sink is not None:
            self.sink.interrupt()

    async def _leave(self, error: BaseException) -> None:
        """The round failed: what others must hear before the weights can be judged."""
        if self.session is not None:  # else it is committed
            leaving = functools.partial(self.engine.leave_round, error)
            await run_to_end(leaving, seconds=DEFAULTS.cleanup_s)

    async def _open_channel(self, bare: Callable[..., Any], info: Any) -> None:
        engine = self.engine
        try:
            await self._limited(bare, info, seconds=DEFAULTS.admit_s, phase="init")
        except BaseException as error:
            if engine.state is State.IDLE:
                engine.machine.fire(Trigger.FAIL, phase="init", error=error, weights=engine.weights)
            raise

    async def _back_to_idle(self) -> None:
        state, machine = self.engine.state, self.engine.machine
        if state is not State.IDLE:
            await self._dispose()
            machine.fire(Trigger.RELEASE if state is State.INITIALIZED else Trigger.RESET)

    async def _dispose(self) -> None:
        engine = self.engine
        try:
            await self._step(functools.partial(bare_of(type(engine), "shutdown"), engine))
        except Exception:
            # A channel that cannot be closed must not keep the next owner out.
            logger.warning("%s: shutdown of the old channel failed", engine.name, exc_info=True)

    def _successor(self, header: RoundHeader | None) -> Version | None:
        if header is None or header.version is None:
            return None
        check_successor(self.engine.version, header.version, rollback=header.rollback)
        return header.version

    def _lease(self, header: RoundHeader | None) -> float:
        own: float | None = getattr(self.engine.config, "lease_s", None)
        if own is not None:
            return own
        if header is None:
            return DEFAULTS.legacy_lease_s
        return header.lease_s or DEFAULTS.lease_s

    async def _prepare(self) -> None:
        engine = self.engine
        if engine.state is State.FINALIZING:
            return
        number = self.ownership.last_round
        engine.machine.fire(Trigger.FINALIZE, round=number, nbytes=engine.received_bytes())
        await engine.drain_pending()
        if engine.uses_sink:
            if self.sink is None:
                raise Coverage("the round announced no tensors", phase="prepare", round=number)
            await engine.lane.run(self.sink.verify)

    async def _commit(
        self, bare: Callable[..., Any], session: Session, weight_version: str | None
    ) -> None:
        engine, version = self.engine, self.target
        if version is None and weight_version is not None:
            lineage = engine.version.lineage if engine.version else engine.incarnation
            version = self.target = next_version(engine.version, weight_version, lineage=lineage)
        elif version is not None and weight_version is not None:
            version = renamed(version, weight_version)
        await self._prepare()
        await engine.machine.pass_gates(
            Trigger.COMPLETE, round=session.number, version=label_of(version)
        )
        await self._step(bare)
        if self.sink is None:
            self._committed(session, version)
            return
        async with engine.generation.swap(timeout=DEFAULTS.pause_s):
            session.holding = True
            self.sink.target = version
            with anyio.move_on_after(DEFAULTS.commit_s) as limit:
                await engine.lane.run(self.sink.commit, grace=DEFAULTS.cleanup_s)
            if limit.cancelled_caught:  # a loader that blocks for good: torn, and the lane is lost
                raise PhaseTimeout(
                    f"the swap took longer than its {DEFAULTS.commit_s:g} s",
                    phase="finish",
                    round=session.number,
                )
            # Inside the swap: the version becomes visible together with the weights.
            self._committed(session, version)

    def _committed(self, session: Session, version: Version | None) -> None:
        engine = self.engine
        engine.weights = Weights.INTACT
        if version is not None:
            engine.version = version
        self.session = None
        self.ownership.settle(None)
        engine.machine.fire(
            Trigger.COMPLETE,
            round=session.number,
            version=label_of(engine.version),
            nbytes=engine.received_bytes(),
            weights=engine.weights,
        )
        session.close()

    def _over(self, error: BaseException | None) -> None:
        """The session's last step: settle the weights and flip, with no await in between."""
        engine, session = self.engine, self.session
        if session is None:
            return  # committed
        self.session = None
        if self.sink is not None:
            self.sink.abort()
            if engine.lane_poisoned:
                # A stuck writer may wake up late: the next round gets other spare memory.
                self.sink.release()
            engine.weights = Weights(self.sink.weights)
        if error is None or not isinstance(error, Exception):
            error = stopped(error, session.number)
        self.ownership.settle(error)
        lane_healthy = not engine.lane_poisoned
        usable = engine.reusable_after_abort and lane_healthy and engine.weights == Weights.INTACT
        engine.machine.fire(
            Trigger.ABORT if usable else Trigger.FAIL,
            round=session.number,
            error=error,
            weights=engine.weights,
            nbytes=engine.received_bytes(),
            version=label_of(engine.version),
        )

    def _open_session(self, what: str, header: RoundHeader | None) -> Session:
        session = self.session
        if session is None or self.engine.state not in BUSY:
            raise self.engine.wrong_order(what)
        if header is not None and header.round != session.number:
            raise Fenced(
                f"{what}: round {header.round} is not the open one, {session.number} is",
                round=header.round,
                phase=what,
                detail={"last_round": session.number},
            )
        return session
