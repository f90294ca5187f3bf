"""The life cycle around a worker engine's steps: order, owner, session, commit.

`WorkerCycle` is the only writer of the engine's state. A step reaches it through the wrapper of
`aiosync.overrides`, with the bare method as its first argument.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, final

import anyio

from aiosync.concurrency import Supervisor, run_to_end
from aiosync.defaults import DEFAULTS
from aiosync.driven import DrivenRounds
from aiosync.errors import AiosyncError, Fenced, RoundCancelled, Validation
from aiosync.foreign import LeftBehind, all_ended
from aiosync.lane_calls import LaneCalls
from aiosync.overrides import bare_of, call_instant, call_step, is_instant
from aiosync.ownership import Ownership
from aiosync.session import Session
from aiosync.version import check_label, check_successor, label_of
from aiosync.watchable import BUSY
from aiosync.weight_targets import MODEL, of_header
from aiosync.worker_channel import Channel
from aiosync.worker_commit import Ending
from aiosync.worker_pausing import patience
from statemachines.tables import State, Trigger, Weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiosync.messages import RoundHeader
    from aiosync.sinks import Sink
    from aiosync.version import Version
    from aiosync.weight_targets import Target
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
        self.aim: Target = MODEL
        """What the open round updates."""
        self.calls: LaneCalls | None = None
        """How the round's calls on the lane reach the loop."""
        self.supervisor = Supervisor()
        self._payload: Any = None
        self.channel = Channel(self)
        self.ending = Ending(self)
        self.driven = DrivenRounds()
        self.left = LeftBehind()
        """Async steps that did not end when they were cancelled."""
        self._closing = False
        self._paused_before = (0, 0, 0.0)  # epoch, round, seconds

    # -- the steps -------------------------------------------------------------------------------

    async def init(
        self, bare: Callable[..., Any], init_info: Any, *, header: RoundHeader | None = None
    ) -> None:
        await self.channel.init(bare, init_info, header=header)

    async def shutdown(
        self, bare: Callable[..., Any], *, header: RoundHeader | None = None
    ) -> None:
        await self.channel.shutdown(bare, header=header)

    async def start(
        self,
        bare: Callable[..., Any],
        *,
        header: RoundHeader | None = None,
        aim: Target | None = None,
    ) -> None:
        engine = self.engine
        self.ownership.check(header, "start")
        if await self._joins(bare, header):
            return
        if engine.state is not State.INITIALIZED:
            raise engine.wrong_order("start")
        await self._alone()
        self.driven.check(header)
        if aim is None:
            aim = of_header(None if header is None else header.target)
        target = self._successor(header, aim)
        place = engine.resolve_target(aim)
        await engine.machine.pass_gates(Trigger.START, version=label_of(target))
        self.ownership.check(header, "start")
        if await self._joins(bare, header):
            return  # it came twice, and both were at the gates
        # No await from here to the session: nobody slips in between check, flip and owner.
        if self.channel.turn.what or self.is_ended() or not engine.machine.may(Trigger.START):
            raise engine.wrong_order("start")
        self.driven.check(header)
        number = self._take_aim(aim, place, header)
        try:
            engine.machine.fire(Trigger.START, round=number, version=label_of(target))
        except BaseException:  # it did not begin after all
            self.aim_back()
            raise
        self._paused_before = (self.ownership.epoch, number, engine.generation.seconds_paused)
        self.driven.began(header)
        self.target, self.header = target, header
        self.calls = LaneCalls()
        self.sink = None
        engine.received_digest = None
        session = self.session = Session(
            number=number,
            lease=self._lease(header),
            on_end=self.ending.over,
            progress=engine.progress_at,
            leave=self._leave,
            deferred=engine.new_queue(),
        )
        self.supervisor.start(
            session.run(), name=f"{engine.name}-round-{number}", after=session.ensure_over
        )
        if is_instant(bare):
            await session.do_now(functools.partial(call_instant, engine, bare), key="start")
        else:
            await session.do(functools.partial(self.step, bare), key="start")
        engine.round_began(header)

    async def receive(
        self, bare: Callable[..., Any], update_info: Any, *, header: RoundHeader | None = None
    ) -> None:
        engine = self.engine
        if header is not None and header.starts:
            await self._start_first(header)
        self.ownership.check(header, "update")
        session = self._open_session("update", header)
        if engine.state is not State.UPDATING or session.was_asked("prepare", "finish"):
            # Jobs run in order: it would run behind the commit, outside of the round.
            raise engine.wrong_order("update")
        info = engine.parse_update_info(update_info)
        engine.check_model()
        key = None
        if engine.one_update:
            key = "update"
            if session.was_asked(key):
                if info != self._payload:
                    raise engine.wrong_order("a second update in one round")
                await session.do(functools.partial(self.step, bare, info), key=key)
                return  # the same call again: it has the outcome of the first
            self._payload = info
        engine.machine.fire(Trigger.UPDATE, round=session.number, nbytes=engine.received_bytes())
        receive = functools.partial(self._receive, bare, info, patience(info, header))
        await session.do(receive, key=key)

    async def prepare(self, *, header: RoundHeader | None = None) -> None:
        self.ownership.check(header, "prepare")
        session = self._open_session("prepare", header)
        if self.ending.is_prepared:
            await session.do_now(self.ending.finalize, key="prepare")
        else:
            await session.do(self.ending.prepare, key="prepare")

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
            self.target = self._successor(
                header, self.aim
            )  # a rank of a group may learn it only now
        label: Any = weight_version  # a caller by hand may pass an int
        if label is not None and type(label) is not str:
            raise Validation(f"weight_version must be a str or None, not {label!r}", phase="finish")
        if label is not None:
            check_label(label)
        session = self._open_session("finish", header)
        self.ending.note_limit(header)
        commit = functools.partial(self.ending.commit, bare, session, weight_version)
        if self.ending.is_instant(bare):
            now = functools.partial(self.ending.commit_now, commit)
            await session.do_now(now, key="finish", later=commit)
        else:
            await session.do(commit, key="finish")
        await session.wait_over()

    async def abort(self, reason: str, *, header: RoundHeader | None = None) -> None:
        turn = self.channel.turn
        if header is not None and turn.give_up(header.owner):
            await turn.settled(DEFAULTS.cleanup_s)
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

    async def cancel_driven(self, id: str, reason: str) -> None:
        """The driver ends the ticket's round; one past its point of no return is left to finish."""
        error = self.driven.cancel(id, reason)
        if error is not None and self.session is not None:
            self.session.cancel(error)
            with anyio.move_on_after(DEFAULTS.cleanup_s):
                await self.session.wait_over()

    async def close(self) -> None:
        """An open round fails first (a commit under way is finished), then the channel goes."""
        engine, session = self.engine, self.session
        self._closing = True  # an init that is under way frees what it opened
        if session is not None:
            session.cancel(RoundCancelled("the worker engine was closed", round=session.number))
            await run_to_end(session.wait_over, seconds=DEFAULTS.finish_s)
        await self.supervisor.aclose(seconds=DEFAULTS.cleanup_s)
        await run_to_end(self.channel.dispose, seconds=DEFAULTS.cleanup_s)
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

    @property
    def starts_quickly(self) -> bool:
        """Whether a start waits for nobody's code.

        Then the trainer may send it together with the update, whose time is limited otherwise.
        """
        engine = self.engine
        bare = bare_of(type(engine), "start_weight_update")
        is_gated = engine.machine.is_gated(Trigger.START)
        return is_instant(bare) and engine.updates_plainly and not is_gated

    @property
    def paused_before(self) -> float | None:
        """How long generation had stood still when the last round began, in seconds."""
        epoch, number, seconds = self._paused_before
        is_last = (epoch, number) == (self.ownership.epoch, self.ownership.last_round)
        return seconds if is_last else None

    # -- inside ----------------------------------------------------------------------------------

    async def _joins(self, bare: Callable[..., Any], header: RoundHeader | None) -> bool:
        """Whether it is the same start again; then it has had the outcome of the first."""
        session = self.session
        if session is None or header is None or header.round != session.number:
            return False
        await session.do(functools.partial(self.step, bare), key="start")
        return True

    async def _start_first(self, header: RoundHeader) -> None:
        """The start that comes with an update; what it raises says that it was the start."""
        engine = self.engine
        try:
            await engine.start_weight_update(header=header)
        except AiosyncError as error:
            raise error.locate(phase="start")  # noqa: B904  the same error, now with its place
        except Exception as error:
            logger.exception("%s: a step that starts a round failed", engine.name)
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise AiosyncError(text, phase="start") from error

    def is_ended(self) -> bool:
        return self._closing or self.engine.state is State.CLOSED

    async def step(self, bare: Callable[..., Any], *args: Any) -> Any:
        engine = self.engine
        return await call_step(
            engine,
            bare,
            *args,
            lane=lambda: engine.lane,
            abort=self._abort_step,
            grace=DEFAULTS.cleanup_s / 2,
            left=self.left,
        )

    async def _alone(self) -> None:
        """Nothing of an earlier round runs any more that could get into this one's memory.

        Raises:
            Refused: Names what does.
        """
        sinks = self.engine.known_sinks()
        parties = [self.left, self.engine.generation.cache.left, *(sink.left for sink in sinks)]
        await all_ended(parties, seconds=DEFAULTS.cleanup_s)
        for party in parties:
            party.check("start")
        for sink in sinks:
            if sink.is_open:  # it was opened once more by a step whose round was over
                sink.abort()

    async def _receive(self, bare: Callable[..., Any], info: Any, limit: float) -> None:
        engine = self.engine
        if engine.writes_early:
            await engine.pausing.hold_for_round(self.ownership.last_round, limit)
        if not engine.uses_sink:
            # The engine writes into the model by itself; until it finishes nobody can tell.
            engine.weights = Weights.UNKNOWN
        await self.step(bare, info)

    def _take_aim(self, aim: Target, place: tuple[Any, Any], header: RoundHeader | None) -> int:
        """Point the engine at the round's target and open the round; its number."""
        if aim == MODEL:
            return self.ownership.begin(header)
        try:
            self.engine.set_weight_update_target(*place)
            number = self.ownership.begin(header)
        except BaseException:  # the round does not begin: nothing may stay pointed elsewhere
            self.engine.reset_weight_update_target()
            raise
        self.aim = aim
        return number

    def aim_back(self) -> None:
        """The round is over, however: the engine points at its own model again."""
        aim, self.aim = self.aim, MODEL
        if aim == MODEL:
            return
        try:
            self.engine.reset_weight_update_target()
        except Exception:
            # An override that raises must not keep the round from ending.
            logger.exception("%s: resetting the target failed", self.engine.name)

    def _abort_step(self) -> None:
        self.engine.abort_receive()
        if self.sink is not None:
            self.sink.interrupt()

    async def _leave(self, error: BaseException) -> None:
        """The round failed: what others must hear before the weights can be judged."""
        if self.session is not None:  # else it is committed
            leaving = functools.partial(self.engine.leave_round, error)
            await run_to_end(leaving, seconds=DEFAULTS.cleanup_s)

    def _successor(self, header: RoundHeader | None, aim: Target) -> Version | None:
        if header is None or header.version is None:
            return None
        check_successor(self.engine.version_of(aim), header.version, rollback=header.rollback)
        return header.version

    def _lease(self, header: RoundHeader | None) -> float:
        own: float | None = getattr(self.engine.config, "lease_s", None)
        if own is not None:
            return own
        if header is None:
            return DEFAULTS.legacy_lease_s
        return header.lease_s or DEFAULTS.lease_s

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
