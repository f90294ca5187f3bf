"""What a receiver of device memory queues on its device: copies, and digests of what they wrote."""

from __future__ import annotations

from array import array
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

import torch

from statemachines.errors import Validation
from transports.address_copy import AddressCopy
from transports.cuda import WorkQueue, mark_current, poll
from transports.errors import DigestMismatch, PhaseTimeout
from transports.pointer_digest import PointerDigest
from transports.sender_digests import first_word
from transports.stream import Pieces, known_of, meanwhile_of, targets_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from transports.cuda import Mark
    from transports.device_layout import DeviceLayout
    from transports.device_memory import DeviceMemory
    from transports.planning import Plan
    from transports.stream import Progress
    from transports.waker import Waker

# A launch takes some 0.1 ms of the host. The first batch is small, so that the device soon has
# work, and so are the last ones: what was looked at last is copied last.
_LEAST_NBYTES = 1 << 30
_MOST_NBYTES = 4 << 30
_AHEAD = 3  # batches that are queued before the first of them is waited for
_DRAIN_S = 5.0


@final
class _Batch:
    """Some tensors that are copied together.

    Its tables are made when it is due, on a queue of their own: the device copies others meanwhile.
    """

    def __init__(self, indices: Sequence[int], sizes: Sequence[int]) -> None:
        self.indices, self.nbytes = indices, sum(sizes)
        self.digest: PointerDigest | None = None
        self._sizes = sizes
        self._copy: AddressCopy | None = None

    def made_ready(self, memory: DeviceMemory, beside: WorkQueue, *, verifies: bool) -> AddressCopy:
        """The copy; and `digest`, where it is wanted."""
        if self._copy is None:
            with beside.active():
                if verifies:
                    self.digest = PointerDigest(
                        self._sizes, memory.device, bytes_at=memory.bytes_at
                    )
                self._copy = AddressCopy(self._sizes, memory.device)
        return self._copy


@final
class DeviceCopier:
    """Keeps the tables of one layout between rounds.

    Args:
        memory: The device that copies; destinations are on it.
        small: Bytes of a batch, where destinations are made for it.
    """

    def __init__(
        self, memory: DeviceMemory, waker: Waker, progress: Progress, *, small: int
    ) -> None:
        self._memory = memory
        self._waker = waker
        self._progress = progress
        self._small = small
        self._queue: WorkQueue | None = None
        self._beside: WorkQueue | None = None
        self._batches: tuple[DeviceLayout, bool, bool, list[_Batch]] | None = None
        self._right: dict[int, list[int]] = {}  # addresses of destinations that were looked at
        self._pieces = Pieces()

    def active(self) -> AbstractContextManager[Any]:
        """What is queued in the block comes after what the thread's stream has."""
        if self._queue is None:
            self._queue = WorkQueue(self._memory.device)
        self._queue.wait(mark_current(self._memory.device))
        return self._queue.active()

    def clear(self) -> None:
        """Forget the layout."""
        self._batches, self._right = None, {}

    def _batches_of(self, layout: DeviceLayout, *, takes_all: bool, verifies: bool) -> list[_Batch]:
        known = self._batches
        if known is not None and known[0] is layout and known[1:3] == (takes_all, verifies):
            return known[3]
        self.clear()
        limits = (_LEAST_NBYTES, _MOST_NBYTES) if takes_all else (self._small,)
        sizes = layout.plan.sizes
        made = [
            _Batch(indices, [sizes[index] for index in indices])
            for indices in layout.batches(*limits)
        ]
        self._batches = (layout, takes_all, verifies, made)
        return made

    def take_resident(
        self,
        layout: DeviceLayout,
        addresses: Sequence[int],
        destination: Callable[[int], torch.Tensor],
        landed: Callable[[Sequence[int]], None],
        *,
        verifies: bool,
        await_ready: Callable[[int], None],
    ) -> bytes:
        """Queue copies a batch at a time; the values of what arrived, where they are wanted.

        Args:
            await_ready: Waits until that many tensors of the plan may be read.
        """
        takes_all = bool(getattr(destination, "takes_all", False))
        meanwhile = meanwhile_of(destination)
        batches = self._batches_of(layout, takes_all=takes_all, verifies=verifies)
        under_way: deque[tuple[_Batch, Mark, Sequence[torch.Tensor]]] = deque()
        values: list[torch.Tensor] = []
        device = self._memory.device
        if self._beside is None:
            self._beside = WorkQueue(device)

        def settle(may_stay: int) -> None:
            while len(under_way) > may_stay:
                batch, mark, _ = under_way.popleft()
                poll(mark, self._waker.check)
                self._progress.step(batch.nbytes)
                landed(batch.indices)

        try:
            for number, batch in enumerate(batches):
                self._waker.check()
                targets = targets_of(destination, batch.indices)
                to = known_of(destination, batch.indices)
                if to is None:
                    to = list(map(torch.Tensor.data_ptr, targets))
                if not takes_all or self._right.get(number) != to:
                    self._check(layout.plan, batch.indices, targets)
                self._right[number] = to  # the same objects again compare at once
                copy = batch.made_ready(self._memory, self._beside, verifies=verifies)
                meanwhile(batch.indices[-1] + 1)
                await_ready(batch.indices[-1] + 1)
                copy(to, self._those(addresses, batch.indices))
                if batch.digest is not None:
                    values.append(batch.digest.values(to))
                under_way.append((batch, mark_current(device), targets))
                # Memory that is there anyway costs nothing: the device has all of its work at once.
                settle(len(batches) if takes_all else _AHEAD)
            meanwhile(None)
            settle(0)
        except BaseException:
            # Nothing may be written any more when this returns.
            with suppress(RuntimeError, PhaseTimeout):
                poll(mark_current(device), lambda: None, limit=_DRAIN_S)
            raise
        return b"".join(array("q", part.tolist()).tobytes() for part in values)

    def _those(self, addresses: Sequence[int], indices: Sequence[int]) -> list[int]:
        if isinstance(indices, range):
            return self._pieces.of(addresses, indices)
        return [addresses[index] for index in indices]

    def _check(self, plan: Plan, indices: Sequence[int], targets: Sequence[torch.Tensor]) -> None:
        device = self._memory.device
        sizes = [plan.sizes[index] for index in indices]
        if (
            [target.nbytes for target in targets] == sizes
            and all(map(torch.Tensor.is_contiguous, targets))
            and {target.device for target in targets} <= {device}
        ):
            return
        for index, target, size in zip(indices, targets, sizes, strict=True):
            if target.nbytes != size or not target.is_contiguous() or target.device != device:
                raise Validation(
                    f"the destination of tensor {index} has {target.nbytes} bytes on "
                    f"{target.device} (contiguous: {target.is_contiguous()}), the plan {size} for "
                    f"{device}",
                    tensor=str(index),
                )

    def take_chunk(
        self,
        layout: DeviceLayout,
        at: int,
        base: int,
        destination: Callable[[int], torch.Tensor],
        *,
        sent: int | None,
    ) -> bytes:
        """Copy a chunk out of the buffers, where it begins at `base`; its values, if verified.

        Args:
            sent: Stands for the values that it was sent with; None: nothing is verified.
        """
        memory, chunk, verifies = self._memory, layout.ring.chunks[at], sent is not None
        indices = [layout.streamed[piece.tensor] for piece in chunk.pieces]
        targets = [destination(index) for index in indices]
        self._check(layout.plan, indices, targets)
        sizes = [piece.nbytes for piece in chunk.pieces]
        to = [t.data_ptr() + p.start for t, p in zip(targets, chunk.pieces, strict=True)]
        AddressCopy(sizes, memory.device)(to, [base + piece.offset for piece in chunk.pieces])
        raw = b""
        if verifies:
            found = PointerDigest(sizes, memory.device, bytes_at=memory.bytes_at).values(to)
            raw = array("q", found.tolist()).tobytes()
        self._drain()
        self._progress.step(sum(sizes))
        if verifies and first_word(raw) != sent:
            raise DigestMismatch(
                f"tensors {indices[0]} to {indices[-1]} arrived with digest {first_word(raw)}, "
                f"they were sent with {sent}",
                tensor=str(indices[0]),
            )
        return raw

    def _drain(self) -> None:
        mark = mark_current(self._memory.device)
        try:
            poll(mark, self._waker.check)
        except BaseException:
            with suppress(RuntimeError, PhaseTimeout):
                poll(mark, lambda: None, limit=_DRAIN_S)
            raise
