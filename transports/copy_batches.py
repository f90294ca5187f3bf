"""Copies between addresses, with neighbours together, and made ready once for many rounds.

Tens of thousands of copies are lists that one call runs through: a step of Python for each of them
would take as long as moving its bytes. Nothing here looks at what an address belongs to: callers
check sizes, and hold the tensors while their addresses are in use.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

BLOCK_NBYTES = 512 << 10
"""Copied at once: source and target fit into a core's own cache, for what reads them next."""
_BATCH_NBYTES = 4 << 20


class Batch(NamedTuple):
    """Copies of some megabytes together, as lists side by side; none is larger than a block."""

    targets: list[int]
    sources: list[int]
    sizes: list[int]
    nbytes: int


def spans(
    targets: Sequence[int], sources: Sequence[int], nbytes: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """These copies (to, from, how much), with neighbours on both sides made one."""
    target = source = length = 0
    for to, out_of, size in zip(targets, sources, nbytes, strict=True):
        if to == target + length and out_of == source + length:
            length += size
        elif size:
            if length:
                yield target, source, length
            target, source, length = to, out_of, size
    if length:
        yield target, source, length


def batches_of(
    targets: Sequence[int], sources: Sequence[int], nbytes: Sequence[int]
) -> list[Batch]:
    """All of these copies, in order."""
    found: list[Batch] = []
    to: list[int] = []
    out_of: list[int] = []
    sizes: list[int] = []
    total = 0
    for target, source, length in spans(targets, sources, nbytes):
        for start in range(0, length, BLOCK_NBYTES):
            size = min(BLOCK_NBYTES, length - start)
            to.append(target + start)
            out_of.append(source + start)
            sizes.append(size)
            total += size
            if total >= _BATCH_NBYTES:
                found.append(Batch(to, out_of, sizes, total))
                to, out_of, sizes, total = [], [], [], 0
    if total:
        found.append(Batch(to, out_of, sizes, total))
    return found


@final
class SameBatches:
    """`batches_of`, which has next to nothing to do for the lists of the last call."""

    __slots__ = ("_key", "_made")

    def __init__(self) -> None:
        self._key: tuple[Sequence[int], Sequence[int], Sequence[int]] | None = None
        self._made: list[Batch] = []

    def __call__(
        self, targets: Sequence[int], sources: Sequence[int], nbytes: Sequence[int]
    ) -> list[Batch]:
        """See `batches_of`; the lists are kept, and must not be changed afterwards."""
        key = (targets, sources, nbytes)
        if self._key != key:
            self._made, self._key = batches_of(*key), key
        return self._made


def move(batch: Batch) -> None:
    """Make the copies of a batch, without the GIL in each."""
    deque(map(ctypes.memmove, batch.targets, batch.sources, batch.sizes), maxlen=0)


def moved_blocks(batches: Iterable[Batch]) -> Iterator[tuple[int, int, int]]:
    """Make these copies one by one; yields each (to, from, how much)."""
    copy = ctypes.memmove
    for targets, sources, sizes, _ in batches:
        for target, source, size in zip(targets, sources, sizes, strict=True):
            copy(target, source, size)
            yield target, source, size
