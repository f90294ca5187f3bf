"""Copies between tensors and the chunks of a plan, many tensors in one call.

Python touches each piece of a plan once a round and makes no view for it after the first round:
typed views of shared memory are kept while the plan and the places of its chunks stay the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from statemachines.errors import Validation
from transports.digest import ChunkDigest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transports.planning import Piece, Plan
    from transports.segments import Segment
    from transports.stream import Progress
    from transports.waker import Waker

# A group is hashed while it is still in the core's cache, and abort is looked at in between.
_GROUP_NBYTES = 1 << 20
_GROUP_LENGTH = 512
NO_BYTES = torch.empty(0, dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a 1-d uint8 view."""
    return tensor.view(-1).view(torch.uint8) if tensor.nbytes else NO_BYTES


@final
class PieceViews:
    """A piece of a plan and its kept views of shared memory.

    Attributes:
        tensor, start, nbytes: As in `transports.planning.Piece`.
        whole: It is all of its tensor.
        final: Its tensor ends with it.
        home: Segment and offset where its bytes are; None until the chunk has its place.
        resident: They are there for good: the tensor itself lives there.
        view: Typed like the tensor (whole) or plain bytes, for `dtype` and `shape`.
    """

    __slots__ = (
        "dtype",
        "final",
        "home",
        "nbytes",
        "offset",
        "raw",
        "resident",
        "shape",
        "start",
        "tensor",
        "view",
        "whole",
    )

    def __init__(self, piece: Piece, size: int, handle: tuple[Segment, int] | None) -> None:
        self.tensor, self.start, self.offset, self.nbytes = piece
        self.whole = self.nbytes == size
        self.final = self.start + self.nbytes == size
        self.resident = handle is not None
        self.home = None if handle is None else (handle[0], handle[1] + self.start)
        self.view: torch.Tensor | None = None
        self.raw: torch.Tensor | None = None
        self.dtype: torch.dtype | None = None
        self.shape: torch.Size | None = None

    def settle(self, segment: Segment | None, base: int) -> None:
        """Forget the views of an earlier place of the chunk."""
        if not self.resident:
            self.home = None if segment is None else (segment, base + self.offset)
            self.view = self.raw = self.dtype = self.shape = None

    def view_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view that `tensor`'s bytes, or this part of them, are copied with; kept."""
        if self.view is None or self.dtype is not tensor.dtype or self.shape != tensor.shape:
            if self.home is None:
                raise Validation(f"tensor {self.tensor} has no place in shared memory")
            segment, offset = self.home
            if self.whole:
                self.view = segment.typed(offset, tensor.dtype, tensor.shape)
            else:
                self.view = segment.view(offset, self.nbytes)
            self.dtype, self.shape = tensor.dtype, tensor.shape
        return self.view

    def shared_bytes(self) -> torch.Tensor:
        """Its bytes in shared memory; kept."""
        if self.raw is None:
            if self.nbytes == 0:
                return NO_BYTES
            if self.home is None:
                raise Validation(f"tensor {self.tensor} has no place in shared memory")
            self.raw = self.home[0].view(self.home[1], self.nbytes)
        return self.raw


@final
class ChunkViews:
    """A chunk of a plan.

    Attributes:
        pieces: In plan order.
        complete: Tensors whose last byte is in this chunk.
        copied: Some of its bytes travel through a buffer.
        segment, base: Where those are; None and 0 until `settle`.
    """

    __slots__ = ("base", "complete", "copied", "index", "nbytes", "pieces", "segment")

    def __init__(
        self, index: int, nbytes: int, pieces: list[PieceViews], complete: list[int]
    ) -> None:
        self.index = index
        self.nbytes = nbytes
        self.pieces = pieces
        self.complete = complete
        self.copied = any(not piece.resident for piece in pieces if piece.nbytes)
        self.segment: Segment | None = None
        self.base = 0

    def settle(self, segment: Segment | None, base: int) -> None:
        """Place the chunk; views are kept if it was there before."""
        if self.segment is not segment or self.base != base or segment is None:
            self.segment, self.base = segment, base
            for piece in self.pieces:
                piece.settle(segment, base)


def chunk_views(plan: Plan, resident: Mapping[int, tuple[Segment, int]]) -> list[ChunkViews]:
    """All chunks of a plan, without places yet."""
    sizes, chunks = plan.sizes, []
    for chunk in plan.chunks:
        pieces = [PieceViews(p, sizes[p.tensor], resident.get(p.tensor)) for p in chunk.pieces]
        complete = [p.tensor for p in chunk.pieces if p.start + p.nbytes == sizes[p.tensor]]
        chunks.append(ChunkViews(chunk.index, chunk.nbytes, pieces, complete))
    return chunks


@final
class CopyQueue:
    """Collects a chunk's copies and runs them in groups, hashing each group while it is warm.

    Attributes:
        copied: Bytes copied so far.
    """

    def __init__(self, waker: Waker, progress: Progress, *, digest: str | None) -> None:
        self._waker = waker
        self._progress = progress
        self._kind = digest
        self._digest = None if digest is None else ChunkDigest(digest)
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._raws: list[torch.Tensor] = []
        self._nbytes = 0
        self.copied = 0

    def add(self, target: torch.Tensor, source: torch.Tensor, nbytes: int) -> None:
        """Copy `source` into `target`: same dtype and shape, any strides."""
        self._targets.append(target)
        self._sources.append(source)
        self._nbytes += nbytes
        if self._nbytes >= _GROUP_NBYTES or len(self._targets) >= _GROUP_LENGTH:
            self.flush()

    def add_bytes(self, raw: torch.Tensor) -> None:
        """Hash these bytes, once what is added next has been copied too."""
        self._raws.append(raw)

    def flush(self) -> None:
        """Run what has been collected.

        Raises:
            TransportAborted: The waker was woken.
        """
        self._waker.check()
        if self._targets:
            with torch.no_grad():
                torch._foreach_copy_(self._targets, self._sources)
            self._targets, self._sources = [], []
        if self._digest is not None:
            for raw in self._raws:
                self._digest.update(raw)
        self._raws = []
        self._progress.step(self._nbytes)
        self.copied += self._nbytes
        self._nbytes = 0

    def end_chunk(self) -> int | None:
        """Finish the chunk; its digest, where digests are on."""
        self.flush()
        if self._digest is None or self._kind is None:
            return None
        value = self._digest.value()
        self._digest = ChunkDigest(self._kind)
        return value
