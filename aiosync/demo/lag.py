"""How late the event loop wakes up, with the library at work and without it."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, final

import torch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from transports.lane import Lane

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


async def measure_floor(tensors: Sequence[torch.Tensor], lane: Lane, seconds: float) -> list[float]:
    """Samples while a thread copies the tensors with torch alone."""
    spare = [torch.empty_like(tensor) for tensor in tensors]
    clock = asyncio.get_running_loop().time
    async with LagSampler().running() as sampler:
        end = clock() + seconds
        while clock() < end:
            await lane.run(_copy, tensors, spare)
            await asyncio.sleep(_INTERVAL_S)
    return sampler.samples


@torch.no_grad()
def _copy(tensors: Sequence[torch.Tensor], spare: Sequence[torch.Tensor]) -> None:
    for tensor, copy in zip(tensors, spare, strict=True):
        copy.copy_(tensor)
