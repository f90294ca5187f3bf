"""Rank 0's half of a stream over a collective group; see `gloo_stream`."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, final

import torch

from statemachines.errors import AiosyncError, Validation
from transports.gloo_half import AHEAD, Half
from transports.packing import bytes_of, settled
from transports.plain_memory import addresses_of
from transports.stream import columns_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transports.planning import Plan
    from transports.sections import Frames, Section
    from transports.stream import Columns, StreamSummary


@final
class GlooSender(Half):
    """The trainer's half; see `transports.stream.Sender`.

    Args:
        group: Joined, rank 0.
        digest: How what arrives is verified (`transports.digest`); None only counts.
    """

    takes_parameters = True

    _plan: Plan
    _word: bytes
    _at = 0  # the section that is being filled
    _next = 0  # the tensor that is due
    _values: list[int]
    _under_way: deque[tuple[Any, int, int]]  # pending, section of a frame or -1, bytes

    def open(self, plan: Plan, readers: int, *, round: int, stall: float) -> None:
        """See `transports.stream.Sender.open`.

        Raises:
            Validation: The group has another number of readers, or one means to take something
                else; named.
        """
        group = self._group
        if readers != group.size - 1:
            raise Validation(f"{readers} readers in a group of {group.size}", phase="open")
        self._word = self._begin(plan, round, stall)
        self._plan, self._at, self._next = plan, 0, 0
        self._values, self._under_way = [], deque()
        self.progress.step(0)
        try:
            for rank, word in enumerate(self._gather("ready"), 1):
                if word != self._word:
                    raise Validation(
                        f"{group.names[rank]} expects another round, plan or digest",
                        replica=group.names[rank],
                        rank=rank,
                    )
        except AiosyncError as error:
            raise self._located(error, "open") from error.__cause__
        self.progress.step(0)

    def write(self, batch: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See `transports.stream.Sender.write`."""
        frames, columns, done = self._plan_frames, columns_of(batch), 0
        try:
            while done < len(batch):
                self._check(columns.indices[done], columns.tensors[done])
                section = frames.sections[self._at]
                count = self._packed_ahead(section, len(batch) - done)
                if count:
                    self._pack(frames, section, columns.part(done, done + count))
                else:
                    self._send_direct(section, columns.indices[done], columns.tensors[done])
                done += count or 1
                self._next += count or 1
                if self._next == section.end:
                    self._send_frame(frames, section)
            self._settle(lambda frame: frame >= 0)
        except AiosyncError as error:
            raise self._located(error, "write") from error.__cause__

    def finish(self) -> StreamSummary:
        """See `transports.stream.Sender.finish`."""
        _ = self._plan_frames
        if self._next < len(self._plan.sizes):
            name = f"tensor {self._next}"
            raise Validation(f"{name} was not written", tensor=name, phase="finish")
        try:
            self._settle(lambda _: False)
            self._gather("done")
        except AiosyncError as error:
            raise self._located(error, "finish") from error.__cause__
        self.progress.step(0)
        return self._summary(self._plan)

    def _gather(self, what: str) -> list[bytes]:
        ranks = range(1, self._group.size)
        return self._group.gather(f"{what}-{self._round}", ranks=ranks, timeout=self._stall)

    def _check(self, index: int, tensor: torch.Tensor) -> None:
        name, plan = f"tensor {index}", self._plan
        if index != self._next or index >= len(plan.sizes):
            due = "nothing" if self._next >= len(plan.sizes) else f"tensor {self._next}"
            raise Validation(f"{name} was written, {due} is next", tensor=name)
        if tensor.nbytes != plan.sizes[index]:
            message = f"{name} has {tensor.nbytes} bytes, planned were {plan.sizes[index]}"
            raise Validation(message, tensor=name)

    def _packed_ahead(self, section: Section, limit: int) -> int:
        """How many tensors from the one that is due on are packed, at most `limit`."""
        if self._next == section.first:
            self._cursor = 0
            self._plan_frames.blank(self._at)
        packed, first, count = section.packed, self._next, 0
        limit = min(limit, len(packed) - self._cursor)
        while count < limit and packed[self._cursor + count].tensor == first + count:
            count += 1
        return count

    def _pack(self, frames: Frames, section: Section, batch: Columns) -> None:
        indices, tensors, known = batch
        parts = section.packed[self._cursor : self._cursor + len(tensors)]
        self._cursor += len(tensors)
        nbytes = [p.nbytes for p in parts]
        in_order = list(indices) == [p.tensor for p in parts]
        sources = addresses_of(tensors, nbytes, known) if in_order else None
        start, digest = frames.address(self._at), self._frame_digest
        if sources is not None:
            targets = [start + p.start for p in parts]
            ready = self._batches_from(self._at, indices[0])(targets, sources, nbytes)
            for made in ready:
                for address, _, size in made.move_each():
                    digest.reach(start, address + size)
            return
        for place, index, tensor in zip(parts, indices, tensors, strict=True):
            self._check(index, tensor)
            self._next += 1
            if place.nbytes:
                with torch.no_grad():
                    frames.view(self._at, place, tensor).copy_(tensor)
        self._next -= len(tensors)

    def _send_direct(self, section: Section, index: int, tensor: torch.Tensor) -> None:
        data = bytes_of(settled(tensor).cpu())
        for part in section.direct:
            if part.tensor != index:
                continue
            raw = data[part.start : part.start + part.nbytes]
            self._post(raw, -1, part.nbytes)
            if self._kind is not None:  # while the bytes are on their way
                self._values.append(self._hash(raw))
            while len(self._under_way) >= AHEAD:
                self._settle_one()

    def _send_frame(self, frames: Frames, section: Section) -> None:
        index = self._at
        self._at += 1
        values, self._values = self._values, []
        if not frames.frame(index).numel():
            self._settle(lambda _: False)  # so that the next frame finds its buffer free
            return
        if self._kind is not None:
            if section.packed_nbytes:
                values.append(self._frame_digest.end(frames.address(index), section.packed_nbytes))
            frames.write_digests(index, values)
            self._digests.extend(values)
        self._post(frames.frame(index), index, sum(part.nbytes for part in section.packed))
        # The frame after the next one lies where this one does.
        self._settle(lambda frame: frame == index)

    def _post(self, raw: torch.Tensor, frame: int, nbytes: int) -> None:
        pending = self._group.broadcast(raw, timeout=self._stall)
        self._under_way.append((pending, frame, nbytes))

    def _settle(self, may_stay: Callable[[int], bool]) -> None:
        while self._under_way and not all(may_stay(frame) for _, frame, _ in self._under_way):
            self._settle_one()

    def _settle_one(self) -> None:
        pending, _, nbytes = self._under_way[0]
        self._wait(pending)
        self._under_way.popleft()
        self.progress.step(nbytes)

    _cursor = 0
