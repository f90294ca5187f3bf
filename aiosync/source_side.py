"""The source's side of a trainer engine: its thread, its checked metadata, the plan."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, final

from aiosync import passes
from aiosync.concurrency import run_to_end
from aiosync.errors import Validation
from aiosync.feed import SourceFeed
from aiosync.iterator_source import IteratorSource
from aiosync.lane_slot import LaneSlot
from aiosync.push import PushSource
from aiosync.source_kinds import as_source
from aiosync.sources import ModuleSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiosync.round_options import RoundSettings
    from transports.lane import LaneFactory, LaneLike
    from transports.planning import Plan

_AT_A_GLANCE = 256  # tensors, which takes a fraction of a millisecond
_KEPT = 8  # targets whose own sources are remembered; each may hold a model's memory


@final
class SourceSide:
    """Owns the lane on which a source is read and iterated; it may run collectives there."""

    def __init__(self, source: Any, *, name: str, rank: int, lane_factory: LaneFactory) -> None:
        self.source = source
        self._name = name
        self._rank = rank
        self._lane_slot = LaneSlot(f"{name}-source", lane_factory)
        self._feed: tuple[Any, SourceFeed] | None = None
        self._plan: tuple[SourceFeed, Plan] | None = None
        self._given: dict[str, tuple[Any, SourceSide]] = {}
        self.agreed: SourceFeed | None = None
        """What all trainer ranks were last found to agree on."""

    @property
    def lane(self) -> LaneLike:
        """The source's thread; replaced once a call on it is stuck for good.

        A source made with ``run_in=`` brings its own, shared with the caller's training step.
        """
        own: LaneLike | None = getattr(self.source, "run_in", None)
        return self._lane_slot.lane if own is None else own

    @property
    def healthy(self) -> bool:
        """Whether no blocking call is stuck."""
        own: LaneLike | None = getattr(self.source, "run_in", None)
        return not (self._lane_slot if own is None else own).poisoned

    async def open_feed(self, *, grace: float, late: bool = False) -> SourceFeed:
        """Read the metadata (perhaps a collective) and check it, unless it is the same as before.

        Args:
            late: A module that seems to be as it was is looked at by the pass, see
                `settling.may_look_late`.

        Raises:
            Validation: There is no source, or its metadata cannot be right.
        """
        source = self.source
        if source is None:
            raise Validation(f"{self._name} was made without a source", phase="admit")
        if isinstance(source, IteratorSource):
            source.claim()

        def read() -> tuple[Any, SourceFeed]:
            # A cached metadata list is the same object again: then nothing has to be checked anew.
            known = self._feed
            if isinstance(source, ModuleSource):
                if late and known is not None and source.look_late():
                    return known
                source.notice_changes()
            announced = source.metadata
            if known is not None and announced is known[0] and known[1].announces(announced):
                return known
            return announced, SourceFeed(source, rank=self._rank)

        if not self._is_as_before(late=late):
            self._feed = await self.lane.run(read, grace=grace)
        assert self._feed is not None
        return self._feed[1]

    def _is_as_before(self, *, late: bool) -> bool:
        """Whether a glance on the loop is enough to see that nothing has changed since last time.

        At a module that is small or looked at late, that nobody has to be asked for, and that
        nothing on its lane may be changing now: a lane's turn takes longer than such a glance.
        """
        source, known, lane = self.source, self._feed, self.lane
        if known is None or type(source) is not ModuleSource:
            return False
        if source.session is not None or source.run_in is not None:
            return False
        if lane.poisoned or lane.busy or lane.statistics().waiting:
            return False
        if late and source.look_late():
            return True
        if len(known[0]) > _AT_A_GLANCE or "metadata" not in vars(source):
            return False
        source.notice_changes()
        # Of a module that has changed it keeps none; what it then has to say is found on the lane.
        kept = "metadata" in vars(source) and source.metadata is known[0]
        return kept and known[1].announces(known[0])

    async def open_plan(
        self, feed: SourceFeed, make: Callable[[SourceFeed], Plan], *, grace: float
    ) -> Plan:
        """The plan for `feed`; made again only when the metadata changed."""
        if self._plan is None or self._plan[0] is not feed:
            self._plan = (feed, await self.lane.run(make, feed, grace=grace))
        return self._plan[1]

    def look_again(self) -> None:
        """Others' code ran since `open_feed`, and may have replaced tensors that it found."""
        if isinstance(self.source, ModuleSource):
            self.source.forget_tensors()

    async def retire(self, *, seconds: float) -> None:
        """The round is over: nothing of it is held, an iterator no pass has begun is closed."""
        self.look_again()
        if self._feed is not None:
            self._feed[1].forget()
        if not isinstance(self.source, IteratorSource):
            return
        left = self.source.unclaim()

        async def close() -> None:
            if hasattr(left, "__aiter__"):
                await passes.aclose(left)
            else:
                await self.lane.run(passes.close, left, grace=seconds)

        if left is not None:
            await run_to_end(close, seconds=seconds)

    @cached_property
    def pushed(self) -> SourceSide:
        """The same thread with a source that a caller pushes tensors into."""
        return self._beside(PushSource(self.source))

    @property
    def is_pushed(self) -> bool:
        """Whether what it yields is handed over once, and gone."""
        return isinstance(self.source, PushSource)

    def of(self, settings: RoundSettings) -> SourceSide:
        """The side of a round: this one, or the same thread with the round's own source.

        Raises:
            Validation: ``source=`` is no source.
        """
        given, key = settings.source, settings.target.key
        if given is None or given is self.source:
            return self
        known = self._given.pop(key, None)
        if known is None or known[0] is not given:
            try:
                known = (given, self._beside(as_source(given)))
            except TypeError as error:
                raise Validation(f"source: {error}", phase="admit") from error
        self._given[key] = known
        while len(self._given) > _KEPT:
            del self._given[next(iter(self._given))]
        return known[1]

    def _beside(self, source: Any) -> SourceSide:
        return SourceSide(
            source, name=self._name, rank=self._rank, lane_factory=lambda _: self.lane
        )

    def close(self) -> None:
        """Let the thread end once it is idle."""
        self._given.clear()
        self._lane_slot.lane.close()  # it stays in the slot: nothing runs any more
