"""How a round's tensors travel through device memory: read in place, or through buffers.

Both sides make the same layout from the plan and from which tensors stay where they are. Those are
chunk 0. The others are cut anew into chunks of their own that take turns in the buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from transports.planning import ALIGNED, plan_chunks
from transports.stream import run_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from transports.planning import Plan

SLOT_ALIGN = 512


@final
class DeviceLayout:
    """The layout of one plan.

    Attributes:
        resident: Tensors that are read in place, and those without bytes.
        streamed: The others; `ring` speaks of positions in this list.
        ring: Their chunks.
        slot_nbytes: Of a buffer that holds each of the chunks.
    """

    def __init__(self, plan: Plan, resident: Iterable[int]) -> None:
        in_place = set(resident)
        sizes = plan.sizes
        self.plan = plan
        self.resident = [i for i, size in enumerate(sizes) if not size or i in in_place]
        self.streamed = [i for i, size in enumerate(sizes) if size and i not in in_place]
        self.ring = plan_chunks(
            [sizes[i] for i in self.streamed],
            [1] * len(self.streamed),
            limit=plan.limit,
            rule=ALIGNED,
        )
        largest = max((chunk.nbytes for chunk in self.ring.chunks), default=0)
        self.slot_nbytes = -(-largest // SLOT_ALIGN) * SLOT_ALIGN

    @property
    def chunks(self) -> int:
        """Chunk 0 and those of the ring."""
        return 1 + len(self.ring.chunks)

    def batches(self, least: int, most: int = 0) -> Iterator[Sequence[int]]:
        """The resident tensors in runs of about `least` bytes.

        Args:
            most: Where it is more, each run has twice as many as the one before, up to so many, but
                not more than half of what is left: the first ones and the last ones are small.
        """
        sizes = self.plan.sizes
        left = sum(map(sizes.__getitem__, self.resident))
        run: list[int] = []
        total, limit = 0, least
        for index in self.resident:
            run.append(index)
            total += sizes[index]
            if total >= limit:
                yield run_of(run) or run
                left -= total
                limit = max(min(2 * limit, left // 2, most), least)
                run, total = [], 0
        if run:
            yield run_of(run) or run
