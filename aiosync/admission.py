"""Which round a trainer engine may run now: one at a time, under one loop, in one process."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, final

import anyio
import msgspec

from aiosync.defaults import DEFAULTS
from aiosync.errors import Busy, Validation, WrongLoop, WrongProcess
from aiosync.round import Round
from aiosync.version import Version, next_version
from aiosync.watchable import BUSY
from statemachines.tables import State, Trigger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiosync.budget import Budget
    from aiosync.source_side import SourceSide
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
        self.leaving: str | None = None
        """What frees the channel right now: no round may begin beside it."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def check(self) -> None:
        """Raise unless a round could begin right now.

        Raises:
            WrongProcess: The engine came here through fork.
            WrongLoop: A round is under way under another event loop.
            Busy: A round is under way.
            InvalidTransition: The engine is closed.
        """
        self.check_process()
        self.reap()
        if self._engine.state is State.CLOSED:
            raise self._engine.wrong_order("start")
        if self.leaving is not None:
            text = f"{self.leaving} of this engine is under way"
            raise Busy(text, phase="admit", detail=self._engine.standing())
        if self.current is not None:
            self._check_loop()
            raise Busy(
                f"round {self.current.number} (version {self.current.version.label}) is under way"
                f" in phase {self.current.phase}",
                phase="admit",
                next_step="await it, or pass on_busy='wait' or 'supersede' to send_weights",
            )

    def check_free(self) -> None:
        """Raise what `check` raises, and `Busy` while an ``initialize`` is under way."""
        self.check()
        if self._engine.is_opening:
            raise Busy("an initialize is under way", detail=self._engine.standing())

    @contextmanager
    def closed_for(self, what: str) -> Iterator[None]:
        """Let no round begin while the block runs."""
        before, self.leaving = self.leaving, what
        try:
            yield
        finally:
            if self.leaving == what:  # `aclose` may have come meanwhile
                self.leaving = before

    def reap(self) -> None:
        """Forget a round whose event loop was closed under it: nobody can end it any more."""
        if self.current is None or self._loop is None or not self._loop.is_closed():
            return
        self.current = self._loop = None
        self._engine.is_opening = False
        if self._engine.state in BUSY:
            error = "its event loop was closed during the round"
            self._engine.machine.fire(Trigger.FAIL, error=error)

    def end(self) -> Round | None:
        """Let nothing begin from here on; the round that is still to be ended."""
        self.reap()
        self.leaving = "the end"
        return self.current

    def check_process(self) -> None:
        if os.getpid() != self._engine.pid:
            raise WrongProcess(
                f"{self._engine.name} belongs to process {self._engine.pid};"
                " make a new engine in this one"
            )

    async def wait_turn(self, on_busy: str, budget: Budget) -> Budget:
        """Apply ``on_busy`` until the slot is free, or raise `Busy`.

        Returns:
            `budget`, with the time that was waited taken off its total.
        """
        if on_busy not in ("raise", "wait", "supersede"):
            raise Validation(f"on_busy must be raise, wait or supersede, not {on_busy!r}")
        self.reap()
        began = time.monotonic()
        total = DEFAULTS.total_s if budget.total is None else budget.total
        with anyio.move_on_after(total):
            while on_busy != "raise" and self.current is not None:
                self._check_loop()
                if on_busy == "supersede":
                    self.current.cancel()
                await self.current.over.wait()
        self.check()
        if budget.total is None:
            return budget
        left = max(total - (time.monotonic() - began), 0.001)
        return msgspec.structs.replace(budget, total=left)

    def take(
        self,
        version: Any,
        budget: Budget,
        *,
        rollback: bool,
        source_side: SourceSide | None = None,
    ) -> Round:
        """Make the round and occupy the slot. Call `check` before, with no await in between.

        Args:
            source_side: Where the tensors come from, if not from the engine's own source.

        Raises:
            WrongLoop: No event loop runs here.
        """
        self._loop = _running_loop()
        target = self._resolve(version)
        self.current = Round(
            self._engine, target, budget, rollback=rollback, source_side=source_side
        )
        return self.current

    def free(self, round: Round) -> bool:
        """The round is over: give its slot back; False if it was somebody else's by now."""
        round.released.set()
        round.over.set()
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


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongLoop(
            "a round needs a running event loop, and there is none here",
            phase="admit",
            next_step="call this inside a coroutine, or use aiosync.blocking",
        ) from None
