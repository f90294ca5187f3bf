"""Opening and freeing a worker's channel: what happens between rounds."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, final

import anyio

from aiosync.channel_turn import ChannelTurn
from aiosync.config import WeightTransferInitRequest
from aiosync.defaults import DEFAULTS
from aiosync.errors import Busy, PhaseTimeout
from aiosync.overrides import bare_of
from aiosync.staging import place_of
from aiosync.version import label_of
from aiosync.watchable import BUSY
from statemachines.tables import State, Trigger

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiosync.messages import RoundHeader
    from aiosync.worker_cycle import WorkerCycle

logger = logging.getLogger(__name__)


@final
class Channel:
    """The channel of one worker engine."""

    def __init__(self, cycle: WorkerCycle) -> None:
        self.cycle = cycle
        self.turn = ChannelTurn()

    async def init(
        self, bare: Callable[..., Any], init_info: Any, *, header: RoundHeader | None = None
    ) -> None:
        cycle, engine = self.cycle, self.cycle.engine
        if isinstance(init_info, WeightTransferInitRequest):
            init_info = init_info.init_info
        caller = None if header is None else header.owner
        mine = self.turn.give_up(caller)  # the news that it was given up may have got lost
        await self.turn.settled(DEFAULTS.connect_s if mine else 2 * DEFAULTS.cleanup_s)
        if self.turn.what or engine.state in BUSY:
            owner = cycle.ownership.owner or "a client without a name"
            what = self.turn.what or f"a round of {owner}"
            raise Busy(
                f"{what} is under way (state {engine.state.value})",
                replica=engine.name,
                phase="init",
                detail={
                    **engine.standing(),
                    "owner": cycle.ownership.owner,
                    "since": cycle.ownership.since,
                },
            )
        if cycle.is_ended():
            raise engine.wrong_order("init")
        info, place = engine.parse_init_info(init_info), place_of(engine, header)
        if engine.lacks_model and engine.draft_model is None:  # it may still be given one
            logger.warning("%s has no model yet: it was made without model=", engine.name)
        with self.turn.taken("an init", caller):
            await engine.machine.pass_gates(Trigger.INITIALIZE)
            await self._back_to_idle()
            engine.staging = place
            await self._open_channel(bare, info)
            if cycle.is_ended():  # meanwhile
                await self.dispose()
                engine.close_lane()
                raise engine.wrong_order("init")
            cycle.ownership.take(caller)
            engine.machine.fire(Trigger.INITIALIZE, version=label_of(engine.version))
            engine.channel_opened()

    async def shutdown(
        self, bare: Callable[..., Any], *, header: RoundHeader | None = None
    ) -> None:
        cycle, engine = self.cycle, self.cycle.engine
        if header is not None:
            cycle.ownership.check(header, "shutdown")
        if self.turn.what or engine.state in BUSY:
            raise Busy(
                f"{self.turn.what or 'a round'} is under way; abort it first",
                replica=engine.name,
                phase="shutdown",
                detail=engine.standing(),
            )
        if engine.state not in (State.INITIALIZED, State.FAILED):
            return
        with self.turn.taken("a shutdown"):
            await self._limited(bare, seconds=DEFAULTS.finish_s, phase="shutdown")
            if engine.state is State.INITIALIZED:
                engine.machine.fire(Trigger.RELEASE)
            elif engine.state is State.FAILED:
                engine.machine.fire(Trigger.RESET)

    async def _limited(
        self, bare: Callable[..., Any], *args: Any, seconds: float, phase: str
    ) -> None:
        """A step outside of rounds: one that blocks for good must not keep the next owner out."""
        with anyio.move_on_after(seconds) as limit:
            await self.cycle.step(bare, *args)
        if limit.cancelled_caught:
            raise PhaseTimeout(f"{phase} took longer than {seconds:g} s", phase=phase)

    async def _open_channel(self, bare: Callable[..., Any], info: Any) -> None:
        engine = self.cycle.engine
        try:
            await self._limited(bare, info, seconds=DEFAULTS.admit_s, phase="init")
        except BaseException as error:
            if engine.state is State.IDLE:
                engine.machine.fire(Trigger.FAIL, phase="init", error=error, weights=engine.weights)
            raise

    async def _back_to_idle(self) -> None:
        engine = self.cycle.engine
        state, machine = engine.state, engine.machine
        if state is not State.IDLE:
            await self.dispose()
            machine.fire(Trigger.RELEASE if state is State.INITIALIZED else Trigger.RESET)

    async def dispose(self) -> None:
        engine = self.cycle.engine
        try:
            await self.cycle.step(functools.partial(bare_of(type(engine), "shutdown"), engine))
        except Exception:
            # A channel that cannot be closed must not keep the next owner out.
            logger.warning("%s: shutdown of the old channel failed", engine.name, exc_info=True)
