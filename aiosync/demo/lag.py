"""How late the event loop wakes up."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

_INTERVAL_S = 0.005


@final
class LagSampler:
    """Sleeps 5 ms again and again while its block runs.

    Attributes:
        samples: By how many seconds each sleep took longer than asked for.
    """

    def __init__(self) -> None:
        self.samples: list[float] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[LagSampler]:
        """Sample for the length of the block."""
        task = asyncio.create_task(self._sample())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _sample(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            await asyncio.sleep(_INTERVAL_S)
            self.samples.append(max(0.0, clock() - began - _INTERVAL_S))


def percentile_ms(samples: Sequence[float], percent: int) -> float:
    """The smallest sample that `percent` of all do not exceed, in milliseconds; 0 without any."""
    if not samples:
        return 0.0
    rank = math.ceil(len(samples) * percent / 100)
    return sorted(samples)[max(0, rank - 1)] * 1000
