"""What a sender of device memory computes of what it sends: values of tensors and of chunks."""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING, NamedTuple, final

from transports.cuda import WorkQueue
from transports.pointer_digest import PointerDigest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from transports.cuda import Mark
    from transports.device_layout import DeviceLayout
    from transports.device_memory import DeviceMemory
    from transports.planning import Piece


class _Begun(NamedTuple):
    """Values that a queue computes."""

    values: torch.Tensor
    mark: Mark
    queue: WorkQueue

    def read(self, wait: Callable[[Mark], None]) -> list[int]:
        wait(self.mark)
        with self.queue.active():  # on another stream it would wait for that one's work
            return self.values.tolist()


@final
class SenderDigests:
    """Keeps the tables of one layout between rounds; each device digests what lies on it."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._queues: dict[torch.device, WorkQueue] = {}
        self._by_device: dict[torch.device, tuple[list[int], PointerDigest]] = {}
        self._under_way: list[tuple[list[int], _Begun]] = []

    def prepare(self, layout: DeviceLayout, tensors: Sequence[torch.Tensor | None]) -> None:
        """Have the tables for what is read in place."""
        self.clear()
        by_device: dict[torch.device, list[int]] = {}
        for index in layout.resident:
            tensor = tensors[index] if tensors and layout.plan.sizes[index] else None
            device = self._memory.device if tensor is None else tensor.device
            by_device.setdefault(device, []).append(index)
        for device, indices in by_device.items():
            sizes = [layout.plan.sizes[index] for index in indices]
            self._by_device[device] = (indices, self._table(sizes, device))

    def clear(self) -> None:
        """Forget the layout."""
        self._by_device, self._under_way = {}, []

    def begin_resident(self, addresses: list[int]) -> None:
        """Have the devices compute the values of what is read in place."""
        self._under_way = []
        for device, (indices, table) in self._by_device.items():
            all_ = len(indices) == len(addresses)
            those = addresses if all_ else [addresses[index] for index in indices]
            self._under_way.append((indices, self._begin(table, those, device)))

    def of_resident(self, layout: DeviceLayout, wait: Callable[[Mark], None]) -> bytes:
        """What `begin_resident` began, 8 bytes each, in the layout's order."""
        under_way, self._under_way = self._under_way, []
        values: dict[int, int] = {}
        for indices, begun in under_way:
            found = begun.read(wait)
            if len(indices) == len(layout.resident):
                return array("q", found).tobytes()
            values.update(zip(indices, found, strict=True))
        return array("q", map(values.__getitem__, layout.resident)).tobytes()

    def of_pieces(self, pieces: Sequence[Piece], start: int, wait: Callable[[Mark], None]) -> bytes:
        """Of the pieces of a chunk that begins at address `start`."""
        device = self._memory.device
        table = self._table([piece.nbytes for piece in pieces], device)
        begun = self._begin(table, [start + piece.offset for piece in pieces], device)
        return array("q", begun.read(wait)).tobytes()

    def _table(self, sizes: Sequence[int], device: torch.device) -> PointerDigest:
        return PointerDigest(sizes, device, bytes_at=self._memory.bytes_at)

    def _begin(self, table: PointerDigest, addresses: list[int], device: torch.device) -> _Begun:
        queue = self._queues.get(device)
        if queue is None:
            queue = self._queues[device] = WorkQueue(device)
        with queue.active():
            return _Begun(table.values(addresses), queue.record(), queue)


def first_word(raw: bytes) -> int:
    """What stands for all values of a chunk in its announcement."""
    return int.from_bytes(hashlib.sha256(raw).digest()[:8], "little")
