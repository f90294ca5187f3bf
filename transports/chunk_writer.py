"""Puts one round's tensors into the chunks of its plan, and announces them."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from statemachines.errors import Validation
from transports import shm_messages as wire
from transports.packing import bytes_of, settled
from transports.plain_memory import addresses_of
from transports.stream import Columns, columns_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transports.chunk_copy import CopyQueue, PlacedChunk
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

    def __init__(self, memory: SenderMemory, readers: Readers, queue: CopyQueue) -> None:
        self._memory = memory
        self._readers = readers
        self._queue = queue
        self._piece = 0
        self._split: torch.Tensor | None = None
        self._lent: list[tuple[PlacedChunk, int, Sequence[torch.Tensor]]] = []
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
        return self._memory.chunks[self.chunk].tensors[self._piece]

    def write(self, batch: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copy everything out of the batch; waits for the readers where they are behind."""
        columns, done = columns_of(batch), 0
        while done < len(batch):
            done = self._fill(columns, done)
        self._queue.note()
        self._readers.keep_alive()

    def check_lent(self) -> None:
        """The readers have copied all: what they copied from was there all the time.

        Raises:
            Validation: A tensor was given another storage meanwhile; names the index.
        """
        for chunk, at, tensors in self._lent:
            found = list(map(torch.Tensor.data_ptr, tensors))
            found[0] += chunk.start(at)
            due = chunk.addresses[at : at + len(found)]
            for number, (here, there) in enumerate(zip(found, due, strict=True)):
                if here != there and tensors[number].nbytes:
                    index = chunk.tensors[at + number]
                    raise Validation(
                        f"tensor {index} was moved while the readers copied it", tensor=str(index)
                    )

    def _fill(self, batch: Columns, done: int) -> int:
        """Put into the current chunk what belongs there; returns how far the batch is done."""
        if self.chunk == len(self._memory.chunks):
            raise Validation(f"tensor {batch.indices[done]} comes after the plan's last")
        chunk, at = self._memory.chunks[self.chunk], self._piece
        if at == 0 and chunk.copied and self._memory.buffers is not None:
            self._readers.wait_acked(self.chunk - self._memory.buffers + 1)
        part = batch.part(done, done + len(chunk.tensors) - at)
        end = at + len(part.tensors)
        if list(part.indices) != chunk.tensors[at:end]:
            raise _unplanned(chunk, at, part)
        sources = addresses_of(part.tensors, chunk.wholes[at:end], part.addresses)
        if sources is None or not self._move(chunk, at, end, sources):
            for number, tensor in enumerate(part.tensors, at):
                self._copy(chunk, number, tensor)
        if chunk.memory is not None:
            # An address keeps nothing alive, and the readers are behind.
            self._lent.append((chunk, at, part.tensors))
        self._piece = end
        if end == len(chunk.tensors):
            self._end_chunk(chunk)
        return done + end - at - (not chunk.ends(end - 1))

    def _move(self, chunk: PlacedChunk, at: int, end: int, sources: list[int]) -> bool:
        """All of these pieces at once; False, with nothing done, where one differs."""
        sources[0] += chunk.start(at)
        targets, nbytes = chunk.addresses[at:end], chunk.nbytes[at:end]
        if chunk.resident is None:
            self._queue.move(chunk.batches(at)(targets, sources, nbytes), targets, nbytes)
            return True
        if not all(chunk.resident[at:end]) or sources != targets:
            return False  # some are copied, or the closer look says which one was moved
        self._queue.leave(targets, nbytes)
        self.in_place += sum(nbytes)
        return True

    def _copy(self, chunk: PlacedChunk, at: int, tensor: torch.Tensor) -> None:
        """One piece, of a tensor that may be of any strides, on any device, or resident."""
        if tensor.nbytes != chunk.wholes[at]:
            raise _unplanned(chunk, at, Columns([chunk.tensors[at]], [tensor], None))
        address, nbytes = chunk.addresses[at], chunk.nbytes[at]
        if chunk.resident is not None and chunk.resident[at]:
            self._check_resident(chunk, at, tensor)
            self._queue.leave([address], [nbytes])
        elif not nbytes:
            self._queue.hash([address], [0])
        elif nbytes == chunk.wholes[at]:
            self._queue.copy(chunk.view_like(at, tensor), tensor, address)
        else:
            self._queue.copy(chunk.view_like(at, tensor), self._part(chunk, at, tensor), address)

    def _part(self, chunk: PlacedChunk, at: int, tensor: torch.Tensor) -> torch.Tensor:
        # A tensor that is split over chunks and is not contiguous is made so once, not per piece.
        if self._split is None or chunk.start(at) == 0:
            self._split = bytes_of(settled(tensor))
        part = self._split.narrow(0, chunk.start(at), chunk.nbytes[at])
        if chunk.ends(at):
            self._split = None
        return part

    def _check_resident(self, chunk: PlacedChunk, at: int, tensor: torch.Tensor) -> None:
        index = chunk.tensors[at]
        home, offset = self._memory.resident[index]
        if home.locate(tensor) != offset and tensor.nbytes:
            raise Validation(
                f"tensor {index} is not where the readers look for it: it was moved or replaced "
                "since set_resident",
                tensor=str(index),
            )
        self.in_place += chunk.nbytes[at]

    def _end_chunk(self, chunk: PlacedChunk) -> None:
        value = self._queue.end_chunk()
        if value is not None:
            self.digests.append(value)
        where = 0 if chunk.copied else -1  # our own segment comes first
        self._readers.announce(
            wire.Ready(chunk=chunk.index, segment=where, offset=chunk.base, digest=value)
        )
        self.chunk += 1
        self._piece = 0


def _unplanned(chunk: PlacedChunk, at: int, part: Columns) -> Validation:
    for expected, whole, index, tensor in zip(
        chunk.tensors[at:], chunk.wholes[at:], part.indices, part.tensors, strict=False
    ):
        if expected != index:
            text = f"tensor {index} was written where the plan has {expected}"
            return Validation(text, tensor=str(index))
        if tensor.nbytes != whole:
            break
    text = f"tensor {index} has {tensor.nbytes} bytes, not as many as planned"
    return Validation(text, tensor=str(index))
