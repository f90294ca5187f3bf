"""Copies between tensors and the chunks of a plan, many tensors in one call.

Python touches each piece of a plan once a round and makes no view for it after the first round:
typed views of shared memory are kept while the plan and the places of its chunks stay the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from statemachines.errors import Validation
from transports.piece_digest import NO_BYTES, PieceDigest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transports.piece_digest import Hashable
    from transports.planning import Piece, Plan
    from transports.segments import Segment
    from transports.stream import Progress
    from transports.waker import Waker

# Between groups abort is looked at. A group that is hashed has to be in the core's cache still.
_GROUP_NBYTES = 8 << 20
_HASHED_GROUP_NBYTES = 1 << 20
_GROUP_LENGTH = 512


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
        self.raw: Hashable | None = None
        self.dtype: torch.dtype | None = None
        self.shape: torch.Size | None = None

    def settle(self, segment: Segment | None, base: int) -> None:
        """Forget the views of an earlier place of the chunk."""
        if not self.resident:
            self.home = None if segment is None else (segment, base + self.offset)
            self.view = self.raw = self.dtype = self.shape = None

    def note(self, tensor: torch.Tensor) -> None:
        """Remember what a tensor that readers find in place looks like: it needs no view here."""
        self.dtype, self.shape = tensor.dtype, tensor.shape

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

    def shared_bytes(self, digest: PieceDigest) -> Hashable:
        """Its bytes in shared memory, as `digest` takes them; kept."""
        if self.raw is None:
            if self.nbytes == 0:
                return digest.kept(NO_BYTES)
            if self.home is None:
                raise Validation(f"tensor {self.tensor} has no place in shared memory")
            self.raw = digest.kept(self.home[0].view(self.home[1], self.nbytes))
        return self.raw


@final
class Run:
    """A chunk of whole tensors, all known from the last round: lists instead of a loop.

    Attributes:
        views: Of shared memory, for copies; none where readers find all of it in place and this
            is the side that does not copy.
        addresses: Where resident tensors lie in this process; empty for copied ones.
    """

    __slots__ = ("addresses", "average", "dtypes", "indices", "nbytes", "shapes", "views")

    def __init__(self, pieces: list[PieceViews]) -> None:
        homes = [piece.home for piece in pieces if piece.resident and piece.home is not None]
        self.addresses = [segment.address_range[0] + offset for segment, offset in homes]
        self.indices = [piece.tensor for piece in pieces]
        self.views = [piece.view for piece in pieces if piece.view is not None]
        self.dtypes = [piece.dtype for piece in pieces]
        self.shapes = [piece.shape for piece in pieces]
        self.nbytes = [piece.nbytes for piece in pieces]
        self.average = max(1, sum(self.nbytes) // len(pieces))

    def fits(self, at: int, tensors: list[torch.Tensor]) -> bool:
        """Whether the views from `at` on are those of these tensors."""
        end = at + len(tensors)
        return [t.dtype for t in tensors] == self.dtypes[at:end] and (
            [t.shape for t in tensors] == self.shapes[at:end]
        )


@final
class ChunkViews:
    """A chunk of a plan.

    Attributes:
        pieces: In plan order.
        complete: Tensors whose last byte is in this chunk.
        copied: Some of its bytes travel through a buffer.
        segment, base: Where those are; None and 0 until `settle`.
        run: The quick way, once `learn` has found that there is one.
    """

    __slots__ = ("base", "complete", "copied", "index", "nbytes", "pieces", "run", "segment")

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
        self.run: Run | None = None

    def settle(self, segment: Segment | None, base: int) -> None:
        """Place the chunk; views are kept if it was there before."""
        if self.segment is not segment or self.base != base or segment is None:
            self.segment, self.base, self.run = segment, base, None
            for piece in self.pieces:
                piece.settle(segment, base)

    def learn(self) -> None:
        """Remember what the pieces looked like this time."""
        pieces = self.pieces
        copied = all(p.whole and p.view is not None and not p.resident for p in pieces)
        in_place = all(p.whole and p.nbytes and p.dtype and p.resident for p in pieces)
        self.run = Run(pieces) if pieces and (copied or in_place) else None


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
        digest: Of the current chunk; None where digests are off.
    """

    def __init__(self, waker: Waker, progress: Progress, *, digest: str | None) -> None:
        self._waker = waker
        self._progress = progress
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._raws: list[Hashable] = []
        self._nbytes = 0
        self._group_nbytes = _GROUP_NBYTES if digest is None else _HASHED_GROUP_NBYTES
        self.copied = 0
        self.digest = None if digest is None else PieceDigest(digest)

    def add(self, target: torch.Tensor, source: torch.Tensor, nbytes: int) -> None:
        """Copy `source` into `target`: same dtype and shape, any strides."""
        self._targets.append(target)
        self._sources.append(source)
        self._nbytes += nbytes
        if self._nbytes >= self._group_nbytes or len(self._targets) >= _GROUP_LENGTH:
            self.flush()

    def add_bytes(self, raw: Hashable) -> None:
        """Hash these bytes, once what is added next has been copied too."""
        self._raws.append(raw)

    def add_run(
        self,
        run: Run,
        at: int,
        targets: list[torch.Tensor],
        sources: list[torch.Tensor],
        raws: Sequence[Hashable],
    ) -> None:
        """Copy, and hash, many at once: pieces `at` and following of a run."""
        self.flush()
        # As many at once as make up about a group.
        step = max(1, min(_GROUP_LENGTH, self._group_nbytes // run.average))
        for start in range(0, len(targets), step):
            end = start + step
            self._targets, self._sources = targets[start:end], sources[start:end]
            self._nbytes = sum(run.nbytes[at + start : at + start + len(self._targets)])
            self._raws.extend(raws[start:end])
            self.flush()

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
        if self.digest is not None:
            for raw in self._raws:
                self.digest.update(raw)
        self._raws = []
        self._progress.step(self._nbytes)
        self.copied += self._nbytes
        self._nbytes = 0

    def end_chunk(self) -> int | None:
        """Finish the chunk; its digest, where digests are on."""
        self.flush()
        return None if self.digest is None else self.digest.end()
