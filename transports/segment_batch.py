"""Many small pieces of a shared segment in one call, without the GIL for each of them.

A thread that copies such pieces one by one gives the GIL back and takes it again every few
microseconds: beside one that computes it hardly gets on. `preadv(2)` fills all of them out of the
segment's descriptor. Large pieces are faster by `memmove`.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from functools import cache
from typing import TYPE_CHECKING, Any, final

from statemachines.errors import Validation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transports.copy_batches import Batch, Copies
    from transports.segments import Segment

_SMALL = 256 << 10  # bytes of a piece, on average
_MOST = 1024  # pieces in one call, `UIO_MAXIOV`


@cache
def _read() -> Any:
    """The system call; None where there is none."""
    try:
        call = ctypes.CDLL(None, use_errno=True).preadv
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    call.restype = ctypes.c_ssize_t
    return call


def segment_batch(batch: Batch, segment: Segment) -> Copies:
    """Copies out of a segment: the batch itself, unless they are small and side by side there."""
    sources, sizes = batch.sources, batch.sizes
    is_small = len(sizes) > 1 and batch.nbytes < _SMALL * len(sizes)
    ends = [source + size for source, size in zip(sources, sizes, strict=True)]
    if not is_small or ends[:-1] != sources[1:] or _read() is None:
        return batch
    return _SegmentBatch(batch, segment)


@final
class _SegmentBatch:
    def __init__(self, batch: Batch, segment: Segment) -> None:
        self._batch, self._segment = batch, segment
        self._into = array("Q", bytes(16 * len(batch.sizes)))
        self._into[::2], self._into[1::2] = array("Q", batch.targets), array("Q", batch.sizes)
        self.nbytes = batch.nbytes

    def move(self) -> None:
        """Make the copies.

        Raises:
            Validation: The segment was closed, or the memory on one side is not there any more.
        """
        at = self._batch.sources[0] - self._segment.address_range[0]
        into, count, done = self._into.buffer_info()[0], len(self._batch.sizes), 0
        for first in range(0, count, _MOST):
            part = min(_MOST, count - first)
            moved = _read()(self._segment.fileno(), into + 16 * first, part, at + done)
            if moved < 0:
                why = os.strerror(ctypes.get_errno())
                raise Validation(f"copying out of segment {self._segment.key}: {why}")
            done += moved
        if done != self.nbytes:
            text = f"{done} of {self.nbytes} bytes could be copied out of"
            raise Validation(f"{text} segment {self._segment.key}")

    def move_each(self) -> Iterator[tuple[int, int, int]]:
        """Make them one by one; yields each (to, from, how much)."""
        return self._batch.move_each()
