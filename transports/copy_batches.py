"""Copies between addresses, with neighbours together, and made ready once for many rounds.

Tens of thousands of copies are lists that one call runs through: a step of Python for each of them
would take as long as moving its bytes. Nothing here looks at what an address belongs to: callers
check sizes, and hold the tensors while their addresses are in use.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BLOCK_NBYTES = 512 << 10
"""Copied at once: source and target fit into a core's own cache, for what reads them next."""
_BATCH_NBYTES = 4 << 20


class Copies(Protocol):
    """Some that are made together: a `Batch`, or one whose sources are another process's."""

    @property
    def nbytes(self) -> int: ...

    def move(self) -> None:
        """Make them all."""

    def move_each(self) -> Iterator[tuple[int, int, int]]:
        """Make them one by one; yields each (to, from, how much)."""


class Batch(NamedTuple):
    """Copies of some megabytes together, as lists side by side; none is larger than a block."""

    targets: list[int]
    sources: list[int]
    sizes: list[int]
    nbytes: int

    def move(self) -> None:
        """Make the copies, without the GIL in each."""
        deque(map(ctypes.memmove, self.targets, self.sources, self.sizes), maxlen=0)

    def move_each(self) -> Iterator[tuple[int, int, int]]:
        """Make them one by one; yields each (to, from, how much)."""
        copy = ctypes.memmove
        for target, source, size in zip(self.targets, self.sources, self.sizes, strict=True):
            copy(target, source, size)
            yield target, source, size


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
    """`batches_of`, which has next to nothing to do for the lists of the last call.

    Args:
        ready: What is made of each batch once; None: it is as it is.
    """

    __slots__ = ("_key", "_made", "_ready")

    def __init__(self, ready: Callable[[Batch], Copies] | None = None) -> None:
        self._key: tuple[Sequence[int], Sequence[int], Sequence[int]] | None = None
        self._made: Sequence[Copies] = []
        self._ready = ready

    def __call__(
        self, targets: Sequence[int], sources: Sequence[int], nbytes: Sequence[int]
    ) -> Sequence[Copies]:
        """See `batches_of`; the lists are kept, and must not be changed afterwards."""
        key = (targets, sources, nbytes)
        if self._key != key:
            made = batches_of(*key)
            self._made = made if self._ready is None else list(map(self._ready, made))
            self._key = key
        return self._made
