"""The gate's states as data, and what its parties hand around: holds, spans, tags of weights."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, final

import msgspec

from aiosync.version import Version
from statemachines.tables import Rule, Table

if TYPE_CHECKING:
    from collections.abc import Callable


class GateState(StrEnum):
    """Where the gate is in ``running -> pausing -> paused -> running``."""

    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"


class GateTrigger(StrEnum):
    """What moves the gate."""

    PAUSE = "pause"
    DRAINED = "drained"
    RESUME = "resume"


GENERATION = Table(
    name="generation",
    states=tuple(GateState),
    initial=GateState.RUNNING,
    rules=(
        Rule(
            GateTrigger.PAUSE,
            (GateState.RUNNING,),
            GateState.PAUSING,
            "a first party holds generation, or a swap waits",
        ),
        Rule(
            GateTrigger.DRAINED,
            (GateState.PAUSING,),
            GateState.PAUSED,
            "no request computes any more: each has left or is parked",
        ),
        Rule(
            GateTrigger.RESUME,
            (GateState.PAUSING, GateState.PAUSED),
            GateState.RUNNING,
            "the last hold is lifted",
        ),
    ),
)


class PauseMode(StrEnum):
    """What a pause does to the requests inside; vLLM's names.

    ``abort`` ends them with what they have, ``wait`` lets them finish, ``keep`` parks them at
    their next checkpoint and lets them go on afterwards. New requests are refused in the first
    two and queued in the last, unless the pause says otherwise.
    """

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


@final
class Hold:
    """One party's hold on generation (or, without a `mode`, on the admission of new requests).

    Attributes:
        owner: Who holds; another party's resume does not lift it.
        mode: What happens to requests inside; None: they go on, only new ones stay out.
        refuses: Whether new requests are refused, instead of queued.
        reason: Why, where there is more to say than who.
    """

    __slots__ = ("_lift", "clears_cache", "mode", "owner", "reason", "refuses")

    def __init__(
        self,
        owner: str,
        mode: PauseMode | None,
        *,
        refuses: bool,
        reason: str,
        clears_cache: bool | None,
        lift: Callable[[Hold], None],
    ) -> None:
        self.owner = owner
        self.mode = mode
        self.refuses = refuses
        self.reason = reason
        self.clears_cache = clears_cache
        self._lift = lift

    def release(self) -> None:
        """Lift this hold; idempotent. Generation goes on when the last one is lifted."""
        self._lift(self)

    @property
    def text(self) -> str:
        """Why requests are refused or ended."""
        return f"generation is paused ({self})"

    def __str__(self) -> str:
        return f"{self.owner}: {self.reason}" if self.reason else self.owner

    def __repr__(self) -> str:
        return f"<Hold {self} {self.mode or 'admission'}>"


class WeightsTag(msgspec.Struct, frozen=True):
    """Which weights serve: their version, and a name for exactly these bytes."""

    version: Version | None = None
    weights_id: str = "initial"


class Span(msgspec.Struct, frozen=True):
    """Which version produced units ``start`` to ``end`` (exclusive) of a request's output."""

    version: str
    weights_id: str
    start: int
    end: int
