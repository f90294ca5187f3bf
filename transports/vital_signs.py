"""Which ranks still wait, when nothing moves: the one that gives no sign is the one at fault.

In a tree of broadcasts a stopped rank holds up healthy ones, which then look stuck as well. So a
rank that waits counts up in the store, now and then, and rank 0 reads along while it waits itself.
Nothing of this happens while bytes move.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from transports.rendezvous import Meeting

_STAGE = "alive"
_RESTS = b"rests"
_FRESH = 0.6  # seconds; a waiting rank gives several signs in it
_PAUSE = 0.1  # seconds between two looks


@final
class VitalSigns:
    """One rank's part."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._count = 0
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._looked = 0.0

    def give(self, *, rests: bool = False) -> None:
        """Leave a sign; one that `rests` is not expected to leave another one."""
        if self._meeting.rank:
            self._count += 1
            try:
                self._meeting.put(_STAGE, _RESTS if rests else b"%d" % self._count)
            except RuntimeError:
                pass  # the store is gone, which the wait itself notices

    def give_or_look(self) -> None:
        """To be called again and again by a rank that waits; returns at once."""
        self.give()
        if self._meeting.rank:
            return
        try:
            self._look()
        except RuntimeError:
            pass  # as in `give`

    def look_now_and_then(self) -> None:
        """As `give_or_look`, for a loop that turns faster than that is needed."""
        now = time.monotonic()
        if now - self._looked >= _PAUSE:
            self._looked = now
            self.give_or_look()

    def silent(self, seconds: float) -> list[int]:
        """At rank 0, after waiting for `seconds`: who gave no sign, the longest silent first.

        A machine under load delays the signs of healthy ranks as well, so the limit grows with the
        wait; a rank that rests owes none.
        """
        now = time.monotonic()
        self.give_or_look()
        ages = {
            rank: now - at
            for rank in range(1, self._meeting.size)
            for sign, at in [self._seen.get(rank, (b"", 0.0))]
            if sign != _RESTS
        }
        limit = max(_FRESH, seconds / 2)
        return sorted((rank for rank, age in ages.items() if age > limit), key=lambda r: -ages[r])

    def _look(self) -> None:
        for rank in range(1, self._meeting.size):
            sign = self._meeting.peek(_STAGE, rank)
            if sign is not None and self._seen.get(rank, (b"",))[0] != sign:
                self._seen[rank] = (sign, time.monotonic())
