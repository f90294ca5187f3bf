"""A worker's half of a stream over an NCCL group; see `nccl_half`."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from statemachines.errors import AiosyncError, Validation
from transports.cuda import mark_current
from transports.errors import DigestMismatch
from transports.nccl_half import AHEAD, NBYTES, Half, nccl_knows
from transports.packing import bytes_of
from transports.stream import known_of, meanwhile_of, targets_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transports.nccl_group import NcclGroup
    from transports.planning import Plan
    from transports.ring import Ring
    from transports.stream import StreamSummary

_LONGER = 1.25


@final
class NcclReceiver(Half):
    """The worker's half; see `transports.stream.Receiver`.

    Bytes are verified, where they are, when all have arrived: tensors have landed before.

    Args:
        early: `prefetch` is called before the sender may send: let it take a first chunk that is a
            single tensor, too, at the price of one copy.
    """

    asks_late = True

    _posted = 0  # chunks whose broadcast is queued

    def __init__(
        self,
        group: NcclGroup,
        *,
        digest: str | None = None,
        ring_nbytes: int = 1 << 29,
        early: bool = False,
    ) -> None:
        super().__init__(group, digest=digest, ring_nbytes=ring_nbytes)
        self._takes_early = early

    def abort(self) -> None:
        """End the group: whatever is running raises `TransportAborted`; from any thread.

        Returns when no kernel writes any more: the caller judges what was written.
        """
        self._group.abort()

    def prefetch(self, plan: Plan, *, round: int, stall: float, posts: bool = True) -> None:
        """Begin to take what fits into the ring, before anybody knows where it goes.

        For a round that is announced as the last one was: `receive` goes on from there.

        Args:
            posts: False: do only what keeps the device free; a further call does the rest.
        """
        if not self._goes_on(plan, round):
            self._open(plan, round, stall)
        try:
            if posts:
                self._post_ahead(self._opened, 0)
        except AiosyncError as error:
            self.close()
            raise self._locate(error, "receive") from error.__cause__

    def receive(
        self,
        plan: Plan,
        destination: Callable[[int], torch.Tensor],
        landed: Callable[[Sequence[int]], None],
        *,
        round: int,
        stall: float,
    ) -> StreamSummary:
        """See `transports.stream.Receiver.receive`; `landed` gets a chunk at a time."""
        if self._goes_on(plan, round):
            self._stall = stall * _LONGER
        else:
            self._open(plan, round, stall)
        here = mark_current(self._device)
        for queue in self._queues:
            queue.wait(here)  # the sink may have made its memory since
        try:
            with self._queues[1].active():  # what a sink queues is in order with the copies
                self._take(plan, destination, landed)
            self._verify()
        except BaseException as error:
            self.close()
            if isinstance(error, AiosyncError):
                raise self._locate(error, "receive") from error.__cause__
            raise
        return self._summary(plan)

    def _goes_on(self, plan: Plan, round: int) -> bool:
        # Chunks and their places are the same for all tensors that are cut alike.
        is_open = self._is_open and self._round == round
        return is_open and self._opened.plan.digest == plan.digest

    def _open(self, plan: Plan, round: int, stall: float) -> None:
        # The trainer's limit comes first: it knows which of several ranks gives no sign.
        self._begin(plan, round, stall * _LONGER)
        self._posted = 0
        here = mark_current(self._device)
        for queue in self._queues:
            queue.wait(here)  # the ring's memory is new, or was used there
        self.progress.step(0)

    def _take(
        self,
        plan: Plan,
        destination: Callable[[int], torch.Tensor],
        landed: Callable[[Sequence[int]], None],
    ) -> None:
        ring = self._opened
        meanwhile = meanwhile_of(destination)

        def settle(may_stay: int) -> None:
            while len(self._under_way) > may_stay:
                index = self._under_way.popleft()
                self._poll(self._marks[index])
                block = ring.blocks[index]
                self.progress.step(block.nbytes)
                landed(range(block.first, block.end))

        for index, block in enumerate(ring.blocks):
            if block.place < 0:
                self._take_alone(plan, index, destination(block.first))
            else:
                if self._posted <= index:
                    self._post(ring)
                indices = range(block.first, block.end)
                targets = targets_of(destination, indices)  # a sink may hand out many at once
                self._load(ring, index, targets, known_of(destination, indices))
                self._post_ahead(ring, index + 1)
            self._under_way.append(index)
            meanwhile(block.end)
            settle(AHEAD)
        meanwhile(None)
        settle(0)

    def _post_ahead(self, ring: Ring, loaded: int) -> None:
        """Queue the broadcasts behind the first `loaded` chunks whose places are free in time.

        The sender must not wait until somebody knows where a chunk goes.
        """
        for block in ring.blocks[self._posted : loaded + AHEAD]:
            if block.place < 0 or block.after >= loaded:
                break
            self._post(ring)

    def _post(self, ring: Ring) -> None:
        """Queue the broadcast of the next chunk that has a place in the ring."""
        wire, _ = self._queues
        block = ring.blocks[self._posted]
        if block.after in self._marks:
            wire.wait(self._marks[block.after])
        self._broadcast(ring.raw(self._posted))
        self._marks[self._posted] = wire.record()  # until it is loaded
        self._posted += 1

    def _load(
        self,
        ring: Ring,
        index: int,
        targets: Sequence[torch.Tensor],
        addresses: list[int] | None,
    ) -> None:
        """Queue the copies out of the ring; on the current stream, which is the copies' own."""
        _, side = self._queues
        block = ring.blocks[index]
        side.wait(self._marks[index])
        sizes = ring.plan.sizes[block.first : block.end]
        if addresses is None and tuple(map(NBYTES, targets)) != sizes:
            at = next(i for i, target in enumerate(targets) if target.nbytes != sizes[i])
            raise self._misfit(block.first + at, targets[at].nbytes, sizes[at])
        ring.unpack(index, targets, addresses)
        if self._digests is not None:
            self._digests.update(ring.raw(index))
        self._marks[index] = side.record()

    def _take_alone(self, plan: Plan, index: int, target: torch.Tensor) -> None:
        """A tensor that is a chunk goes straight into its own memory."""
        wire, side = self._queues
        if target.nbytes != plan.chunks[index].nbytes:
            raise self._misfit(
                plan.chunks[index].pieces[0].tensor, target.nbytes, plan.chunks[index].nbytes
            )
        if target.device != self._device:
            name = self._tensors[plan.chunks[index].pieces[0].tensor].name
            text = f"{name}: NCCL receives into memory of {self._device}, not of {target.device}"
            raise Validation(text, tensor=name)
        wire.wait(side.record())  # the sink may have made the memory there
        is_typed = plan.rule == "each" and nccl_knows(target.dtype)
        self._broadcast(target.view(-1) if is_typed else bytes_of(target))
        self._posted = index + 1
        side.wait(wire.record())
        if self._digests is not None:
            self._digests.update(bytes_of(target))
        self._marks[index] = side.record()

    def _verify(self) -> None:
        if self._digests is None:
            return
        wire, side = self._queues
        with side.active():
            theirs = torch.empty_like(self._digests.values)
        wire.wait(side.record())
        self._broadcast(theirs.view(torch.uint8))
        self._poll(wire.record())
        with side.active():
            sent = [value % 2**64 for value in theirs.tolist()]
            found = self._digests.read()
        if sent == found:
            return
        at = next(i for i, pair in enumerate(zip(sent, found, strict=True)) if pair[0] != pair[1])
        block = self._opened.blocks[at]
        first, last = self._tensors[block.first].name, self._tensors[block.end - 1].name
        raise DigestMismatch(
            f"{first} to {last} arrived with digest {found[at]}, they were sent with {sent[at]}",
            tensor=first,
            detail={"sent": sent[at], "found": found[at], "tensor": block.first},
        )

    def _misfit(self, index: int, found: int, planned: int) -> Validation:
        name = self._tensors[index].name
        return Validation(f"{name}: {planned} bytes into {found}", tensor=name)
