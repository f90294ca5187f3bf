"""Which round a trainer engine may run now: one at a time, under one loop, in one process."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Final, final

from aiosync.errors import Busy, Validation, WrongLoop, WrongProcess
from aiosync.round import Round
from aiosync.version import Version, next_version
from statemachines.tables import State

if TYPE_CHECKING:
    from aiosync.budget import Budget
    from aiosync.trainer import TrainerWeightTransferEngine


@final
class Next:
    """Type of `NEXT`: distinct, so that passing None is a type error."""

    def __repr__(self) -> str:
        return "NEXT"


NEXT: Final = Next()
"""Default of ``version=``: the order after the last one."""


@final
class Admission:
    """The slot for the one round an engine may have."""

    def __init__(self, engine: TrainerWeightTransferEngine[Any]) -> None:
        self.current: Round | None = None
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()

    def check(self) -> None:
        """Raise unless a round could begin right now.

        Raises:
            WrongProcess: The engine came here through fork.
            WrongLoop: A round is under way under another event loop.
            Busy: A round is under way.
            InvalidTransition: The engine is closed.
        """
        self.check_process()
        if self._engine.state is State.CLOSED:
            raise self._engine.wrong_order("start")
        if self.current is not None:
            self._check_loop()
            raise Busy(
                f"round {self.current.number} (version {self.current.version.label}) is under way"
                f" in phase {self.current.phase}",
                phase="admit",
            )

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise WrongProcess(
                f"{self._engine.name} belongs to process {self._pid}; make a new engine in this one"
            )

    async def wait_turn(self, on_busy: str) -> None:
        """Apply ``on_busy`` until the slot is free, or raise `Busy`."""
        if on_busy not in ("raise", "wait", "supersede"):
            raise Validation(f"on_busy must be raise, wait or supersede, not {on_busy!r}")
        while on_busy != "raise" and self.current is not None:
            self._check_loop()
            if on_busy == "supersede":
                self.current.cancel()
            await self.current.over.wait()
        self.check()

    def take(self, version: Any, budget: Budget, *, rollback: bool) -> Round:
        """Make the round and occupy the slot. Call `check` before, with no await in between."""
        self._loop = asyncio.get_running_loop()
        target = self._resolve(version)
        self.current = Round(self._engine, target, budget, rollback=rollback)
        return self.current

    def free(self, round: Round) -> bool:
        """Give the slot back; False if it was somebody else's by now."""
        if self.current is not round:
            return False
        self.current = self._loop = None
        return True

    def _resolve(self, version: Any) -> Version:
        if isinstance(version, Version):
            return version
        engine = self._engine
        known = [engine.version, *(link.version for link in engine.links)]
        mine = [v for v in known if v is not None and v.lineage == engine.lineage]
        current = max(mine, key=lambda v: v.order, default=None)
        if isinstance(version, Next):
            version = 1 if current is None else current.order + 1
        return next_version(current, version, lineage=engine.lineage)

    def _check_loop(self) -> None:
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise WrongLoop(f"{self._engine.name} is in a round under another event loop")
