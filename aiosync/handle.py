"""The handle of a round that runs in the background."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Self, final

import anyio
import msgspec

from aiosync.errors import RoundCancelled
from statemachines.tables import State

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Generator

    from aiosync.concurrency import Milestone, Supervisor, Task
    from aiosync.report import Report
    from aiosync.round import Round
    from aiosync.version import Version

logger = logging.getLogger(__name__)
_POLL_S = 0.05


class RoundProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A moment of a round.

    Attributes:
        phase: wait (for its turn), admit, start, update, prepare or finish.
        nbytes: Payload bytes taken from the source so far.
        total_bytes: Payload bytes of the whole round; 0 until the plan is made.
        state: State of the trainer engine.
    """

    phase: str
    nbytes: int
    total_bytes: int
    state: str


@final
class Fate:
    """A failed round that nobody awaited is logged, whether its end or the handle's came first."""

    __slots__ = ("_round", "awaited", "dropped")

    def __init__(self, round: Round) -> None:
        self._round = round
        self.awaited = self.dropped = False

    def over(self) -> None:
        if self.dropped:
            self.settle()

    def settle(self) -> None:
        report = self._round.report
        if not self.awaited and report is not None and report.outcome != "committed":
            self.awaited = True  # once
            logger.error("a round failed and nobody awaited it: %s", report)


@final
class WeightUpdate:
    """A round under way: ``await update`` for its report.

    Awaiting is shielded: several tasks may await, and cancelling or timing out one of them does
    not end the round; `cancel` does, and whoever awaits then gets `RoundCancelled`. As ``async
    with engine.begin_update(...) as update:`` leaving the block cancels an unfinished round.
    """

    def __init__(self, round: Round, task: Task[Report], fate: Fate) -> None:
        self._round = round
        self._task = task
        self._fate = fate

    @property
    def version(self) -> Version:
        """What the round carries; without a label of its own settled when its turn comes."""
        return self._round.version

    @property
    def number(self) -> int:
        """Number of the round; 0 until it has started."""
        return self._round.number

    @property
    def released(self) -> Milestone:
        """``await update.released``: the source's tensors may change again."""
        return self._round.released

    @property
    def done(self) -> bool:
        return self._task.done

    @property
    def report(self) -> Report | None:
        """The round's report once it is over, failed or not."""
        return self._round.report

    @property
    def progress(self) -> RoundProgress:
        """Where the round is now."""
        plan = self._round.plan
        return RoundProgress(
            phase=self._round.phase,
            nbytes=self._round.nbytes,
            total_bytes=plan.total_bytes if plan is not None else 0,
            state=State(self._round.engine.machine.state).value,
        )

    def cancel(self) -> None:
        """End the round; it is over once ``await update`` raises. Idempotent."""
        self._round.cancel()

    async def wait(self) -> Report:
        """Wait for the end of the round.

        Raises:
            RoundCancelled: `cancel` was called, or the event loop shut the round down.
            AiosyncError: The round failed; or the source's own exception.
        """
        self._fate.awaited = True
        await self._task.wait()
        try:
            return self._task.result()
        except asyncio.CancelledError:
            raise RoundCancelled(
                "the round's task was cancelled", round=self.number or None
            ) from None

    def __await__(self) -> Generator[Any, None, Report]:
        return self.wait().__await__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if not self.done:
            self._fate.awaited = True
            self.cancel()
            await self._task.wait()

    async def __aiter__(self) -> AsyncIterator[RoundProgress]:
        """Yield the progress whenever it changed, until the round is over.

        Leaving the loop cancels nothing.
        """
        last: RoundProgress | None = None
        while True:
            over = self.done
            now = self.progress
            if now != last:
                last = now
                yield now
            if over:
                return
            with anyio.move_on_after(_POLL_S):
                await self._task.wait()

    def __del__(self) -> None:
        self._fate.dropped = True
        self._fate.settle()

    def __repr__(self) -> str:
        phase = self.report.outcome if self.report is not None else self._round.phase
        return f"<WeightUpdate round={self.number} version={self.version.label} {phase}>"


def in_background(
    round: Round,
    running: Coroutine[Any, Any, Report],
    supervisor: Supervisor,
    *,
    name: str,
    over: Callable[[Round], None],
) -> WeightUpdate:
    """Start `running` and return the round's handle; `over` is called at its end, come what may."""
    fate = Fate(round)

    def after() -> None:
        over(round)
        fate.over()

    return WeightUpdate(round, supervisor.start(running, name=name, after=after), fate)
