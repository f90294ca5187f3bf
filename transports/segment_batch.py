"""Many small pieces of a shared segment in one call, without the GIL for each of them.

A thread that copies such pieces one by one gives the GIL back and takes it again every few
microseconds: beside one that computes it hardly gets on. `preadv(2)` fills all of them out of the
segment's descriptor. Large pieces are faster by `memmove`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, final

from statemachines.errors import Validation
from transports.plain_memory import chars_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transports.copy_batches import Batch, Copies
    from transports.segments import Segment

_SMALL = 256 << 10  # bytes of a piece, on average
_MOST = 1024  # pieces in one call, `UIO_MAXIOV`


def segment_batch(batch: Batch, segment: Segment) -> Copies:
    """Copies out of a segment: the batch itself, unless they are small and side by side there."""
    sources, sizes = batch.sources, batch.sizes
    is_small = len(sizes) > 1 and batch.nbytes < _SMALL * len(sizes)
    ends = [source + size for source, size in zip(sources, sizes, strict=True)]
    if not is_small or ends[:-1] != sources[1:] or not hasattr(os, "preadv"):
        return batch
    return _SegmentBatch(batch, segment)


@final
class _SegmentBatch:
    def __init__(self, batch: Batch, segment: Segment) -> None:
        self._batch, self._segment = batch, segment
        self._into = list(map(chars_at, batch.targets, batch.sizes))
        self.nbytes = batch.nbytes

    def move(self) -> None:
        """Make the copies.

        Raises:
            Validation: The segment was closed, or the memory on one side is not there any more.
        """
        at, done = self._batch.sources[0] - self._segment.address_range[0], 0
        try:
            for first in range(0, len(self._into), _MOST):
                part = self._into[first : first + _MOST]
                done += os.preadv(self._segment.fileno(), part, at + done)
        except OSError as error:
            text = f"copying out of segment {self._segment.key}: {error.strerror}"
            raise Validation(text) from error
        if done != self.nbytes:
            text = f"{done} of {self.nbytes} bytes could be copied out of"
            raise Validation(f"{text} segment {self._segment.key}")

    def move_each(self) -> Iterator[tuple[int, int, int]]:
        """Make them one by one; yields each (to, from, how much)."""
        return self._batch.move_each()
