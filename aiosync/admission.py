"""Which round a trainer engine may run now: one at a time, under one loop, in one process.

Rounds that may wait stand in a queue, in the order of the calls that began them. A round that is
over hands the slot to the next one itself, so nobody slips in between.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from aiosync.errors import Busy, WrongLoop, WrongProcess
from aiosync.round import Round
from aiosync.round_options import NEXT, RoundSettings
from aiosync.ticket_desk import check_version
from aiosync.version import Version, next_version
from aiosync.watchable import BUSY
from statemachines.tables import State, Trigger

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from aiosync.source_side import SourceSide
    from aiosync.trainer import TrainerWeightTransferEngine
    from aiosync.weight_targets import Target


@final
class Admission:
    """The slot for the one round an engine may have, and who waits for it."""

    def __init__(self, engine: TrainerWeightTransferEngine[Any]) -> None:
        self.current: Round | None = None
        self._queue: list[Round] = []
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
        self._check_open()
        if self.current is not None:
            raise Busy(
                self.current.describe(),
                phase="admit",
                next_step="await it, or pass on_busy='wait' or 'supersede'",
            )

    def _check_open(self) -> None:
        self.check_process()
        self.reap()
        if self._engine.state is State.CLOSED:
            error = self._engine.wrong_order("start")
            error.next_step = "this engine is closed (its block was left): connect again"
            raise error
        if self.leaving is not None:
            text = f"{self.leaving} of this engine is under way"
            raise Busy(text, phase="admit", detail=self._engine.standing())
        self._check_loop()

    def _check_loop(self) -> None:
        if self._loop is not None and self._loop is not _running_loop():
            raise WrongLoop(f"{self._engine.name} is in a round under another event loop")

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
        self._queue.clear()
        self._engine.is_opening = False
        if self._engine.state in BUSY:
            error = "its event loop was closed during the round"
            self._engine.machine.fire(Trigger.FAIL, error=error)

    def end(self) -> list[Round]:
        """Let nothing begin from here on; the rounds that are still to be ended.

        Raises:
            WrongLoop: They run under another event loop, which alone can end them.
        """
        self.reap()
        self._check_loop()
        self.leaving = "the end"
        return self._ahead()

    def check_process(self) -> None:
        if os.getpid() != self._engine.pid:
            raise WrongProcess(
                f"{self._engine.name} belongs to process {self._engine.pid};"
                " make a new engine in this one"
            )

    def settings(self, what: str, version: Any, options: Mapping[str, Any]) -> RoundSettings:
        """What `what` was called with; see `RoundSettings.of`.

        With other trainer ranks a call that is wrong on this one begins a round all the same: they
        wait for this rank at the first meeting, and are told there.

        Raises:
            TypeError, Validation: This rank is alone, and the call is wrong.
        """
        try:
            return RoundSettings.of(what, version, options)
        except Exception as error:  # noqa: BLE001  raised again where nobody has to be told
            return self.refused(error, options)

    def refused(self, error: Exception, options: Mapping[str, Any]) -> RoundSettings:
        """Settings of a call that is wrong on this rank, whose round tells the other ranks so.

        Raises:
            The error: This rank is alone.
        """
        if self._engine.ranks.size == 1:
            raise error
        return RoundSettings.refused(error, options)

    def make(self, settings: RoundSettings, source_side: SourceSide | None = None) -> Round:
        """The round, which has no turn yet; its version is the one it would have now.

        Args:
            source_side: Where the tensors come from; None: from what the settings say.

        Raises:
            WrongLoop: No event loop runs here.
            Validation: The settings' source is none, or there is no such version; with other
                trainer ranks as in `settings`.
        """
        _running_loop()
        engine = self._engine
        try:
            side = source_side or engine.source_side.of(settings)
            version = self._resolve(settings)
        except Exception as error:  # noqa: BLE001  as in `settings`
            options = {"budget": settings.budget, "on_busy": settings.on_busy}
            settings, side = self.refused(error, options), engine.source_side
            version = self._resolve(settings)
        return Round(engine, version, settings, source_side=side)

    def join(self, round: Round) -> None:
        """Give `round` the slot, or a place in the queue if it may wait for its turn.

        Raises:
            Busy, WrongLoop, WrongProcess, InvalidTransition: As `check`.
        """
        on_busy = round.settings.on_busy
        if on_busy == "raise":
            self.check()
        else:
            self._check_open()
        self._loop = _running_loop()
        if on_busy == "supersede":
            for other in self._ahead():
                if not other.is_same(round):  # a call repeated with its ticket waits for itself
                    other.cancel()
        if self.current is None:
            self._admit(round)
        else:
            round.phase = "wait"
            self._queue.append(round)

    def make_inner(self, settings: RoundSettings) -> Round:
        """A round inside the one that has the slot, of which it takes the ticket."""
        outer = self.current
        if outer is not None:
            settings = settings.inside(outer.settings)
        round = self.make(settings)
        round.outer = outer
        self._loop = _running_loop()
        self._admit(round)
        return round

    def free(self, round: Round) -> bool:
        """The round is over: its slot goes to the next one; False if it had none (any more)."""
        round.released.set()
        round.over.set()
        if round in self._queue:
            self._queue.remove(round)
        if self.current is not round:
            return False
        self.current = None
        if round.outer is not None and not round.outer.over.is_set():
            self.current = round.outer
        elif self._queue:
            self._admit(self._queue.pop(0))
        else:
            self._loop = None
        return True

    def _admit(self, round: Round) -> None:
        self.current = round
        round.turn.set()

    def _ahead(self) -> list[Round]:
        return ([] if self.current is None else [self.current]) + self._queue

    def resolve(self, round: Round) -> None:
        """Settle the version at the round's turn: by now the last one is known."""
        round.version = self._resolve(round.settings)

    def next_after(self, version: Any, target: Target, *others: Version | None) -> Version:
        """The version of `target` meant by `version`, after all that were sent, and `others`."""
        if isinstance(version, Version):
            return version
        engine = self._engine
        known = [engine.held(target), *(link.held(target) for link in engine.links), *others]
        mine = [v for v in known if v is not None and v.lineage == engine.lineage]
        current = max(mine, key=lambda v: v.order, default=None)
        if version is NEXT:
            version = 1 if current is None else current.order + 1
        return next_version(current, version, lineage=engine.lineage)

    def _resolve(self, settings: RoundSettings) -> Version:
        if settings.ticket is not None:
            return check_version(settings.version, settings.ticket)
        return self.next_after(settings.version, settings.target)


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongLoop(
            "a round needs a running event loop, and there is none here",
            phase="admit",
            next_step="call this inside a coroutine, or use aiosync.blocking",
        ) from None
