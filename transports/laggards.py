"""Readers that hold all others up: told apart from readers that merely come last.

A reader's lag is the time in which it was behind while enough others had nothing left to do. On a
busy machine all readers come last now and then, and their lags grow alike; a slow one's grows
alone. So lags are compared with that of the reader whose place is just good enough, and judged by
the time that the round would have taken without the waiting.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, TypeVar, final

from transports.errors import PhaseTimeout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transports.stream import Roll


class _Reader(Protocol):
    name: str
    lag: float


R = TypeVar("R", bound=_Reader)


@final
class Laggards:
    """The lags of one round's readers."""

    tick = 0.1  # seconds between two looks

    def __init__(self, roll: Roll) -> None:
        self._roll = roll
        self._began = self._met_at = time.monotonic()
        self._held = 0.0

    @property
    def allowance(self) -> float:
        """Seconds that a reader may lag by now."""
        own = time.monotonic() - self._began - self._held
        return max(self._roll.floor, self._roll.patience * own)

    def note_missing(self, present: Sequence[str]) -> None:
        """While readers are still coming: those that are late after enough are there are out."""
        now = time.monotonic()
        if len(present) < self._roll.pace():
            self._met_at = now
        elif now - self._met_at > self.allowance:
            for name in self._roll.missing(present):
                text = f"{name} did not connect while {len(present)} others waited"
                self._roll.lose(name, PhaseTimeout(text, replica=name))

    def judge(
        self, behind: Sequence[R], readers: Sequence[R], seconds: float
    ) -> list[tuple[R, PhaseTimeout]]:
        """Add `seconds` of waiting to the lag of those `behind`; returns those struck for it."""
        pace = self._roll.pace()
        if sum(reader not in behind for reader in readers) < pace:
            return []
        self._held += seconds
        for reader in behind:
            reader.lag += seconds
        fair = sorted(reader.lag for reader in readers)[pace - 1] if pace else 0.0
        found = []
        for reader in [r for r in behind if r in readers and r.lag - fair > self.allowance]:
            text = f"{reader.name} kept the others waiting for {reader.lag:.1f} s"
            error = PhaseTimeout(text, replica=reader.name)
            if self._roll.lose(reader.name, error):
                found.append((reader, error))
        return found
