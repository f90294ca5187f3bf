"""One lane at a time, that outlives a call which is stuck for good."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from transports.lane import LaneFactory, LaneLike


@final
class LaneSlot:
    """Makes its lane when it is first asked for, and a new one once that is poisoned."""

    __slots__ = ("_lane", "_make", "_name")

    def __init__(self, name: str, make: LaneFactory) -> None:
        self._name = name
        self._make = make
        self._lane: LaneLike | None = None

    @property
    def lane(self) -> LaneLike:
        """The lane, a working one."""
        if self.poisoned:
            self.close()
        if self._lane is None:
            self._lane = self._make(self._name)
        return self._lane

    @property
    def poisoned(self) -> bool:
        """Whether a call on the lane is stuck for good; false where there is none."""
        return self._lane is not None and self._lane.poisoned

    def close(self) -> None:
        """Let the thread end after its last call; asking for the lane again makes a new one."""
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.close()
