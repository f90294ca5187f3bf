"""Rank 0's half of a stream over an NCCL group; see `nccl_half`."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from statemachines.errors import AiosyncError, Validation
from transports.cuda import REACHED, mark_current
from transports.nccl_half import AHEAD, NBYTES, Half, nccl_knows
from transports.packing import bytes_of, settled
from transports.stream import columns_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transports.cuda import Mark
    from transports.planning import Plan
    from transports.ring import Ring
    from transports.stream import Columns, StreamSummary


@final
class NcclSender(Half):
    """The trainer's half; see `transports.stream.Sender` and `Holding`.

    `finish` returns when all bytes have left. That they arrived is the workers' own word: NCCL
    completes a send to a dead peer as well.
    """

    _plan: Plan
    _kept: dict[int, list[Sequence[torch.Tensor]]]  # what a chunk is still read from
    _at = 0  # the chunk that is being filled
    _next = 0  # the tensor that is due
    _training: Mark = REACHED
    _stays = False
    _holds = False
    _held: tuple[torch.Tensor, Mark] | None = None  # the first chunk, and when it is packed
    takes_parameters = True
    reads_when_written = True

    def abort(self) -> None:
        """End the group: whatever is running raises `TransportAborted`; from any thread.

        Returns at once. A kernel that still reads sends to nobody.
        """
        self._group.close()

    def order_after(self, mark: Mark) -> None:
        """The next round reads no tensor before `mark`: the training step that wrote them."""
        self._training = mark

    def lean_on(self, *, stays: bool) -> None:
        """Whether the next round's tensors keep their memory and values until it is over."""
        self._stays = stays

    def open(self, plan: Plan, readers: int, *, round: int, stall: float) -> None:
        """See `transports.stream.Sender.open`; readers that are late are waited for by NCCL."""
        group = self._group
        if readers != group.size - 1:
            raise Validation(f"{readers} readers in a group of {group.size}", phase="open")
        self._begin(plan, round, stall)
        self._plan, self._at, self._next = plan, 0, 0
        self._holds, self._held = False, None
        wire, side = self._queues
        for queue in (wire, side):
            queue.wait(self._training)
        self._training = REACHED
        self._kept = {}
        self.progress.step(0)

    def hold(self) -> None:
        """See `transports.stream.Holding.hold`."""
        self._holds = True

    def go(self) -> None:
        """See `transports.stream.Holding.go`."""
        held, self._holds, self._held = self._held, False, None
        if held is not None:
            try:
                self._launch(0, *held)
            except AiosyncError as error:
                raise self._locate(error, "write") from error.__cause__

    def write(self, batch: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See `transports.stream.Sender.write`.

        Tensors that stay as they are until `finish` (see `order_after`) are not waited for.
        """
        ring = self._opened
        if not batch:
            return
        try:
            columns = self._due(batch)
            here = mark_current(self._device)
            for queue in self._queues:
                queue.wait(here)  # what the source has queued to make these tensors
            may_stay, at = AHEAD, 0
            while at < len(batch):
                block = ring.blocks[self._at]
                count = block.end - self._next
                tensors, addresses = self._taken(columns.part(at, at + count))
                at += count
                if block.place < 0:
                    self._send_alone(tensors[0])
                    may_stay = 0
                else:
                    self._pack(ring, tensors, addresses)
            if not self._stays:
                self._settle(may_stay)
                self._poll(self._queues[1].record())
        except AiosyncError as error:
            raise self._locate(error, "write") from error.__cause__

    def finish(self) -> StreamSummary:
        """See `transports.stream.Sender.finish`."""
        _ = self._opened
        if self._next < len(self._plan.sizes):
            name = self._tensors[self._next].name
            raise Validation(f"{name} was not written", tensor=name, phase="finish")
        try:
            self._settle(0)
            if self._digests is not None:
                wire, side = self._queues
                wire.wait(side.record())
                self._broadcast(self._digests.values.view(torch.uint8))
                self._poll(wire.record())
        except AiosyncError as error:
            raise self._locate(error, "finish") from error.__cause__
        self._kept = {}
        self.progress.step(0)
        return self._summary(self._plan)

    def _due(self, batch: Sequence[tuple[int, torch.Tensor]]) -> Columns:
        """A batch, which is what is due."""
        first, count, columns = self._next, len(self._plan.sizes), columns_of(batch)
        if not columns.are_from(first) or first + len(batch) > count:
            due = "nothing" if first >= count else f"tensor {first}"
            raise Validation(f"tensor {columns.indices[0]} was written, {due} is next")
        return columns

    def _taken(self, columns: Columns) -> tuple[Sequence[torch.Tensor], list[int] | None]:
        """The tensors of a chunk, or a part of it, and their addresses, if known."""
        _, tensors, addresses = columns
        first, end, sizes = self._next, self._next + len(tensors), self._plan.sizes
        if addresses is not None and list(map(torch.Tensor.data_ptr, tensors)) != addresses:
            addresses = None  # one was moved since it was looked at
        if addresses is None and tuple(map(NBYTES, tensors)) != sizes[first:end]:
            at = next(i for i, t in enumerate(tensors) if t.nbytes != sizes[first + i])
            name = self._tensors[first + at].name
            text = f"{name} has {tensors[at].nbytes} bytes, planned were {sizes[first + at]}"
            raise Validation(text, tensor=name)
        return tensors, addresses

    def _pack(
        self, ring: Ring, tensors: Sequence[torch.Tensor], addresses: list[int] | None
    ) -> None:
        _, side = self._queues
        block = ring.blocks[self._at]
        if self._next == block.first and block.after in self._marks:
            side.wait(self._marks[block.after])
        if addresses is None and not all(map(torch.Tensor.is_contiguous, tensors)):
            tensors = list(map(settled, tensors))
        with side.active():
            ring.pack(self._at, self._next, tensors, addresses)
        self._kept.setdefault(self._at, []).append(tensors)
        self._next += len(tensors)
        if self._next < block.end:
            return
        raw = ring.raw(self._at)
        self._send(raw, side.record())
        self._note(raw)

    def _send_alone(self, tensor: torch.Tensor) -> None:
        """A tensor that is a chunk: no copy, where it is on the device."""
        _, side = self._queues
        tensor, there = tensor.detach(), REACHED
        if tensor.device != self._device:
            with side.active():
                tensor = tensor.to(self._device)
            there = side.record()
        tensor = settled(tensor)
        self._kept[self._at] = [[tensor]]
        self._next += 1
        is_typed = self._plan.rule == "each" and nccl_knows(tensor.dtype)
        self._send(tensor.view(-1) if is_typed else bytes_of(tensor), there)
        self._note(bytes_of(tensor))

    def _send(self, data: torch.Tensor, there: Mark) -> None:
        index, self._at = self._at, self._at + 1
        if self._holds:
            self._held = data, there
        else:
            self._launch(index, data, there)

    def _launch(self, index: int, data: torch.Tensor, there: Mark) -> None:
        wire, _ = self._queues
        wire.wait(there)
        self._broadcast(data)
        self._marks[index] = wire.record()
        self._under_way.append(index)
        self._settle(AHEAD)

    def _note(self, raw: torch.Tensor) -> None:
        if self._digests is not None:
            with self._queues[1].active():
                self._digests.update(raw)

    def _settle(self, may_stay: int) -> None:
        while len(self._under_way) > may_stay:
            index = self._under_way.popleft()
            self._poll(self._marks[index])
            if self._digests is None or not self._stays:
                self._kept.pop(index, None)
            self.progress.step(self._plan.chunks[index].nbytes)
