"""Puts one round's tensors into the chunks of its plan, and announces them."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from statemachines.errors import Validation
from transports import shm_messages as wire
from transports.piece_digest import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from transports.chunk_copy import ChunkViews, CopyQueue, PieceViews, Run
    from transports.piece_digest import Hashable
    from transports.sender_memory import SenderMemory
    from transports.shm_readers import Readers


@final
class ChunkWriter:
    """One round's way through its plan.

    Attributes:
        chunk: How many chunks are complete.
        digests: Theirs, where digests are on.
        in_place: Bytes that readers found where they live.
        copied: Bytes that went through buffers.
    """

    def __init__(
        self, memory: SenderMemory, readers: Readers, queue: CopyQueue, sizes: tuple[int, ...]
    ) -> None:
        self._memory = memory
        self._readers = readers
        self._queue = queue
        self._sizes = sizes
        self._piece = 0
        self._split: torch.Tensor | None = None
        self.chunk = 0
        self.digests: list[int] = []
        self.in_place = 0

    @property
    def copied(self) -> int:
        return self._queue.copied

    def missing(self) -> int | None:
        """The first tensor that has not been written; None when all are."""
        if self.chunk == len(self._memory.chunks):
            return None
        return self._memory.chunks[self.chunk].pieces[self._piece].tensor

    def write(self, batch: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copy everything out of the batch; waits for the readers where they are behind."""
        done = 0
        while done < len(batch):
            done = self._fill(batch, done)
        self._queue.flush()
        self._readers.keep_alive()

    def _fill(self, batch: Sequence[tuple[int, torch.Tensor]], done: int) -> int:
        """Put into the current chunk what belongs there; returns how far the batch is done."""
        if self.chunk == len(self._memory.chunks):
            raise Validation(f"tensor {batch[done][0]} comes after the plan's last")
        chunk = self._memory.chunks[self.chunk]
        pieces, at, queue = chunk.pieces, self._piece, self._queue
        if at == 0 and chunk.copied and self._memory.buffers is not None:
            self._readers.wait_acked(self.chunk - self._memory.buffers + 1)
        if chunk.run is not None:
            count = self._fill_run(chunk, chunk.run, batch[done : done + len(pieces) - at])
            at += count
            done += count
        while done < len(batch) and at < len(pieces):
            index, tensor = batch[done]
            piece = pieces[at]
            if piece.tensor != index or tensor.nbytes != self._sizes[index]:
                raise _unplanned(piece, index, tensor)
            if queue.digest is not None:
                queue.add_bytes(piece.shared_bytes(queue.digest))
            if piece.resident:
                self._check_resident(piece, tensor)
            elif piece.whole and piece.nbytes:
                queue.add(piece.view_like(tensor), tensor, piece.nbytes)
            elif piece.nbytes:
                queue.add(piece.view_like(tensor), self._part(piece, tensor), piece.nbytes)
            at += 1
            done += piece.final
        self._piece = at
        if at == len(pieces):
            if chunk.run is None:
                chunk.learn()
            self._end_chunk(chunk)
        return done

    def _fill_run(
        self, chunk: ChunkViews, run: Run, part: Sequence[tuple[int, torch.Tensor]]
    ) -> int:
        """The same for a chunk that looks as it did in the last round; returns how many went."""
        at, queue = self._piece, self._queue
        tensors = [tensor for _, tensor in part]
        end = at + len(tensors)
        if [index for index, _ in part] != run.indices[at:end] or not run.fits(at, tensors):
            chunk.run = None
            return 0
        if run.addresses and not _are_at(tensors, run.addresses[at:end]):
            chunk.run = None  # the closer look says which one was moved
            return 0
        raws: list[Hashable] = []
        if queue.digest is not None:
            raws = [piece.shared_bytes(queue.digest) for piece in chunk.pieces[at:end]]
        if not run.addresses:
            queue.add_run(run, at, run.views[at:end], tensors, raws)
            return len(tensors)
        for raw in raws:
            queue.add_bytes(raw)
        self.in_place += sum(run.nbytes[at:end])
        return len(tensors)

    def _part(self, piece: PieceViews, tensor: torch.Tensor) -> torch.Tensor:
        # A tensor that is split over chunks and is not contiguous is made so once, not per piece.
        if self._split is None or piece.start == 0:
            self._split = bytes_of(tensor.resolve_conj().resolve_neg().contiguous())
        part = self._split.narrow(0, piece.start, piece.nbytes)
        if piece.final:
            self._split = None
        return part

    def _check_resident(self, piece: PieceViews, tensor: torch.Tensor) -> None:
        segment, offset = self._memory.resident[piece.tensor]
        if segment.locate(tensor) != offset and tensor.nbytes:
            raise Validation(
                f"tensor {piece.tensor} is not where the readers look for it: it was moved or "
                "replaced since set_resident",
                tensor=str(piece.tensor),
            )
        self.in_place += piece.nbytes
        piece.note(tensor)

    def _end_chunk(self, chunk: ChunkViews) -> None:
        value = self._queue.end_chunk()
        if value is not None:
            self.digests.append(value)
        where = 0 if chunk.copied else -1  # our own segment comes first
        self._readers.announce(
            wire.Ready(chunk=chunk.index, segment=where, offset=chunk.base, digest=value)
        )
        self.chunk += 1
        self._piece = 0


def _are_at(tensors: list[torch.Tensor], addresses: list[int]) -> bool:
    """Whether contiguous CPU tensors lie at these addresses; their sizes are known to fit."""
    return [t.data_ptr() for t in tensors] == addresses and all(
        t.is_cpu and t.is_contiguous() for t in tensors
    )


def _unplanned(piece: PieceViews, index: int, tensor: torch.Tensor) -> Validation:
    if piece.tensor != index:
        text = f"tensor {index} was written where the plan has {piece.tensor}"
    else:
        text = f"tensor {index} has {tensor.nbytes} bytes, not as many as planned"
    return Validation(text, tensor=str(index))
