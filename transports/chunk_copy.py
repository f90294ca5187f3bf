"""The chunks of a plan in shared memory, and copies into and out of them.

A chunk is lists side by side, made once and kept while the plan and the places of its chunks stay
the same: with tens of thousands of tensors an object for each would cost more than its bytes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeAlias, final

import torch

from transports.copy_batches import SameBatches
from transports.copy_team import copy_together
from transports.foreign_memory import ForeignBatch, ForeignMemory, OwnMemory
from transports.piece_digest import PieceDigest
from transports.plain_memory import bytes_at
from transports.segment_batch import segment_batch
from transports.segments import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transports.copy_batches import Batch, Copies
    from transports.planning import Chunk, Plan
    from transports.stream import Progress
    from transports.waker import Waker

Process: TypeAlias = "OwnMemory | ForeignMemory"
Home: TypeAlias = "Segment | Process"
_CHECK_NBYTES = 8 << 20  # abort is looked at that often


@final
class PlacedChunk:
    """A chunk of a plan; all lists have an entry for each piece, in plan order.

    Attributes:
        tensors: Which tensor the piece belongs to.
        wholes: Bytes of that tensor.
        nbytes: Bytes of the piece.
        first_start: Where in its tensor the first piece begins; all others are the beginning.
        last_ends: Whether the last piece ends its tensor; all others do.
        resident: Which pieces are where their tensor lives for good; None for none at all.
        memory: Of the trainer's process, where they are in that; all of them, or none.
        complete: Tensors whose last byte is in this chunk.
        copied: Some of its bytes travel through a buffer.
        addresses: Where the pieces are in this process; after `settle`.
        base: Of the chunk in its segment.
    """

    __slots__ = (
        "_batches", "_homes", "_offsets", "_segment", "addresses", "base", "complete", "copied",
        "first_start", "index", "last_ends", "memory", "nbytes", "resident", "room", "tensors",
        "wholes",
    )  # fmt: skip

    def __init__(
        self, chunk: Chunk, sizes: Sequence[int], resident: Mapping[int, tuple[Home, int]]
    ) -> None:
        self.index, self.room, pieces = chunk
        self.tensors = [piece.tensor for piece in pieces]
        self.nbytes = [piece.nbytes for piece in pieces]
        self.wholes = [sizes[tensor] for tensor in self.tensors]
        self.first_start = pieces[0].start
        last = pieces[-1]
        self.last_ends = last.start + last.nbytes == self.wholes[-1]
        self.complete = self.tensors if self.last_ends else self.tensors[:-1]
        self._offsets = [piece.offset for piece in pieces]
        self._homes = [resident.get(t) for t in self.tensors] if resident else []
        self.resident: list[bool] | None = None
        self.memory = _memory_of(self._homes)
        if self.memory is not None and None in self._homes:
            self._homes, self.memory = [], None  # the whole chunk goes through a buffer
        if any(self._homes):
            self.resident = [home is not None for home in self._homes]
        there = self.resident or [False] * len(pieces)
        self.copied = any(n and not here for n, here in zip(self.nbytes, there, strict=True))
        self._segment: Segment | None = None
        self.base = 0
        self.addresses: list[int] = []
        self._batches: dict[int, SameBatches] = {}
        self.settle(None, 0)

    def settle(self, segment: Segment | None, base: int) -> None:
        """Say where the chunk is; without a segment only what is resident has an address."""
        if self.addresses and segment is self._segment and base == self.base:
            return
        self._segment, self.base = segment, base
        start = 0 if segment is None else segment.address_range[0] + base
        self.addresses = [start + offset for offset in self._offsets]
        for at, home in enumerate(self._homes):
            if home is not None:
                self.addresses[at] = home[0].address_range[0] + home[1] + self.start(at)

    def start(self, at: int) -> int:
        """Where in its tensor piece `at` begins."""
        return 0 if at else self.first_start

    def ends(self, at: int) -> bool:
        """Whether piece `at` ends its tensor."""
        return self.last_ends or at < len(self.tensors) - 1

    def batches(self, at: int) -> SameBatches:
        """What made the copies from piece `at` on ready, in the last round."""
        found = self._batches.get(at)
        if found is None:
            ready = None if self.copied else _ready_for(self._homes)
            found = self._batches[at] = SameBatches(ready)
        return found

    def view_like(self, at: int, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of piece `at`: as `tensor` is typed, where they are all of it.

        A copy of them where they are another process's.
        """
        read = self.memory.bytes_at if isinstance(self.memory, ForeignMemory) else bytes_at
        raw = read(self.addresses[at], self.nbytes[at])
        whole = self.nbytes[at] == self.wholes[at]
        return raw.view(tensor.dtype).view(tensor.shape) if whole else raw


def place_chunks(plan: Plan, resident: Mapping[int, tuple[Home, int]]) -> list[PlacedChunk]:
    """All chunks of a plan, without places yet."""
    return [PlacedChunk(chunk, plan.sizes, resident) for chunk in plan.chunks]


def _ready_for(homes: Sequence[tuple[Home, int] | None]) -> Callable[[Batch], Copies] | None:
    """What is made of batches that read from these homes of a chunk's pieces."""
    those = {id(home[0]): home[0] for home in homes if home is not None}
    home = those.popitem()[1] if len(those) == 1 else None
    if isinstance(home, ForeignMemory):
        return partial(ForeignBatch, memory=home)
    return partial(segment_batch, segment=home) if isinstance(home, Segment) else None


def _memory_of(homes: Sequence[tuple[Home, int] | None]) -> Process | None:
    for home in homes:
        if home is not None and isinstance(home[0], OwnMemory | ForeignMemory):
            return home[0]
    return None


@final
class CopyQueue:
    """Runs the copies of a chunk, and hashes what they wrote while it is warm.

    Attributes:
        copied: Bytes copied so far.
        digest: Of the current chunk; None where digests are off.
    """

    def __init__(self, waker: Waker, progress: Progress, *, digest: str | None) -> None:
        self._waker = waker
        self._progress = progress
        self._noted = 0
        self.copied = 0
        self.digest = None if digest is None else PieceDigest(digest)

    def move(
        self, batches: Sequence[Copies], targets: Sequence[int], nbytes: Sequence[int]
    ) -> None:
        """Make copies that are ready, and hash what they wrote; the callers hold what lies there.

        Args:
            batches: The copies.
            targets, nbytes: All that they write, in order.

        Raises:
            TransportAborted: The waker was woken.
        """
        digest = self.digest
        if digest is None or digest.by_piece:
            for batch in batches:
                batch.move()
                self._count(batch.nbytes)
            self.hash(targets, nbytes)
        else:
            for batch in batches:
                for address, _, size in batch.move_each():
                    digest.update_at(address, size)
                    self._count(size)

    def move_together(
        self, batches: Sequence[Copies], *, beside: Callable[[], None] = lambda: None
    ) -> None:
        """`move` with the help of other cores, which the other side does not need meanwhile.

        Args:
            batches: The copies.
            beside: What else is to be done; others copy meanwhile.

        Raises:
            TransportAborted: The waker was woken.
        """
        copy_together(batches, note=self._count, beside=beside)

    def _count(self, nbytes: int) -> None:
        self.copied += nbytes
        if self.copied - self._noted >= _CHECK_NBYTES:
            self.note()

    def copy(self, target: torch.Tensor, source: torch.Tensor, address: int) -> None:
        """Copy one tensor of any strides; what was written lies at `address`."""
        with torch.no_grad():
            target.copy_(source)
        self.copied += target.nbytes
        if self.digest is not None:
            self.digest.update_at(address, target.nbytes)
        self.note()

    def hash(self, addresses: Sequence[int], nbytes: Sequence[int]) -> None:
        """Hash what is there already."""
        if self.digest is None:
            return
        for address, size in zip(addresses, nbytes, strict=True):
            self.digest.update_at(address, size)
        self.note()

    def leave(self, addresses: Sequence[int], nbytes: Sequence[int]) -> None:
        """Hash what others will find where it is; it counts as sent."""
        self.hash(addresses, nbytes)
        self._progress.step(sum(nbytes))

    def note(self) -> None:
        """Tell how far it is.

        Raises:
            TransportAborted: The waker was woken.
        """
        self._waker.check()
        self._progress.step(self.copied - self._noted)
        self._noted = self.copied

    def end_chunk(self) -> int | None:
        """Finish the chunk; its digest, where digests are on."""
        self.note()
        return None if self.digest is None else self.digest.end()
