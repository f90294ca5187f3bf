"""What a sender of device memory has exported: each allocation once, for as long as it lives.

A table says where every tensor lies. It has a name, and gets another one when anything in it is
not where it was; readers that know the name are sent nothing. That no address means other memory
than before is known from torch's count of freed allocations; where it moved, or nobody counts, the
driver is asked what each allocation is.
"""

from __future__ import annotations

import secrets
from functools import partial
from operator import attrgetter, is_
from typing import TYPE_CHECKING, NamedTuple, final

import torch

from transports import device_messages as wire
from transports.shm_messages import HANDLES_PER_FRAME, Handles, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transports.device_memory import Allocation, DeviceMemory
    from transports.links import Link
    from transports.planning import Plan
    from transports.shm_messages import Hello

_ABSENT = -1
_DEVICE: Callable[[torch.Tensor], torch.device] = attrgetter("device")
_IS_NONE: Callable[[object], bool] = partial(is_, None)


class _Export(NamedTuple):
    number: int
    allocation: Allocation
    uuid: str
    handle: bytes

    def info(self) -> wire.AllocationInfo:
        return wire.AllocationInfo(
            number=self.number,
            handle=self.handle,
            uuid=self.uuid,
            nbytes=self.allocation.nbytes,
            address=self.allocation.base,
        )


@final
class DeviceExports:
    """The table of one sender.

    Attributes:
        table: Its name.
        places: Tensor, number of its allocation, offset.
        addresses: Of every tensor of the plan; -1 for those that are not read in place.
        has_all: Whether there is an address for each of them.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self.table = ""
        self.places: list[tuple[int, int, int]] = []
        self.addresses: list[int] = []
        self.has_all = False
        self._memory = memory
        self._plan = ""
        self._given: list[int] | None = None
        self._frees: int | None = None
        self._exports: dict[Allocation, _Export] = {}
        self._ring: _Export | None = None
        self._next = 1

    @property
    def ring(self) -> int:
        """Number of the buffers' allocation; 0: there is none."""
        return 0 if self._ring is None else self._ring.number

    @property
    def uuids(self) -> set[str]:
        """Devices that a reader has to open."""
        return {export.uuid for export in self._all()}

    def hidden_from(self, hello: Hello) -> str | None:
        """Why a reader cannot open all of it; None: it can."""
        hidden = sorted(self.uuids - set(hello.visible))
        if not hidden:
            return None
        seen = ", ".join(hello.visible) or "none"
        return (
            f"the tensors are on GPU {', '.join(hidden)}, which reader {hello.reader!r} does "
            f"not see; it is on {hello.device} and sees {seen}"
        )

    def keeps(self, addresses: list[int] | None) -> bool:
        """Whether the table is one of these very addresses, and no memory was freed since."""
        frees = self._memory.frees()
        same = addresses is not None and addresses is self._given and bool(self.table)
        return same and frees is not None and frees == self._frees

    def update(
        self,
        plan: Plan,
        tensors: Sequence[torch.Tensor | None],
        addresses: list[int] | None = None,
    ) -> bool:
        """Look where these tensors are now; whether the table is a new one.

        Args:
            plan: The round's.
            tensors: By index in the plan; None for those that do not stay. All are contiguous.
            addresses: Theirs, where the caller knows them: the same list as last time says that
                none has moved.

        Raises:
            Validation: An allocation cannot be exported; names the setting that allows it.
        """
        frees = self._memory.frees()
        same = addresses is not None and addresses is self._given and plan.digest == self._plan
        found = self.addresses if same else _addresses(tensors, plan, self._memory.device.type)
        self._given = addresses
        if self.table and plan.digest == self._plan and (same or found == self.addresses):
            if frees is not None and frees == self._frees:
                return False
            if self._are_alive():
                self._frees = frees
                return False
        self.table = ""  # until all of the new one is there
        self._make(tensors, found)
        self.addresses, self._plan, self._frees = found, plan.digest, frees
        self.has_all = _ABSENT not in found
        self._rename()
        return True

    def set_ring(self, address: int) -> None:
        """Export the buffers as well; 0: there are none any more."""
        if address:
            allocation = self._memory.allocation(address)
            self._ring = self._export(allocation, self._memory.uuid)
        else:
            self._ring = None
        self._rename()

    def greet(self, link: Link, known_table: str, known_number: int) -> None:
        """Post what a reader lacks of the table."""
        if known_table == self.table:
            return
        exports = self._all()
        kept = [e.number for e in exports if e.number <= known_number]
        new = [e.info() for e in exports if e.number > known_number]
        step = wire.ALLOCATIONS_PER_FRAME
        for start in range(0, len(kept), step):
            link.post(encode(wire.Allocations(kept=tuple(kept[start : start + step]))))
        for start in range(0, len(new), step):
            link.post(encode(wire.Allocations(new=tuple(new[start : start + step]))))
        for start in range(0, len(self.places), HANDLES_PER_FRAME):
            part = tuple(self.places[start : start + HANDLES_PER_FRAME])
            link.post(encode(Handles(handles=part)))

    def count(self) -> int:
        """Allocations of the table."""
        return len(self._all())

    def _all(self) -> list[_Export]:
        ring = [] if self._ring is None else [self._ring]
        return [*self._exports.values(), *ring]

    def _rename(self) -> None:
        self.table = secrets.token_hex(8)

    def _are_alive(self) -> bool:
        memory = self._memory
        return all(memory.allocation(known.base) == known for known in self._exports)

    def _make(self, tensors: Sequence[torch.Tensor | None], addresses: list[int]) -> None:
        memory, found = self._memory, dict[int, _Export]()
        current: _Export | None = None
        # In the order of addresses, so that neighbours cost one question.
        order = sorted((at, i) for i, at in enumerate(addresses) if at != _ABSENT)
        exports: dict[Allocation, _Export] = {}
        for address, index in order:
            if current is None or not _holds(current.allocation, address):
                tensor = tensors[index]
                assert tensor is not None  # it has an address
                allocation = memory.allocation(address)
                known = self._exports.get(allocation)
                uuid = memory.uuid if tensor.device == memory.device else ""
                uuid = uuid or memory.uuid_of(tensor.device)
                current = known or self._export(allocation, uuid)
                exports[allocation] = current
            found[index] = current
        self._exports = exports
        self.places = [
            (index, export.number, addresses[index] - export.allocation.base)
            for index, export in sorted(found.items())
        ]

    def _export(self, allocation: Allocation, uuid: str) -> _Export:
        handle = self._memory.export(allocation.base)
        number, self._next = self._next, self._next + 1
        return _Export(number, allocation, uuid, handle)

    def clear(self) -> None:
        """Forget everything; nothing of it is ours but the buffers."""
        self.table, self._plan = "", ""
        self.places, self.addresses = [], []
        self._exports, self._ring = {}, None


def _holds(allocation: Allocation, address: int) -> bool:
    return allocation.base <= address < allocation.base + allocation.nbytes


def _addresses(tensors: Sequence[torch.Tensor | None], plan: Plan, kind: str) -> list[int]:
    if all(plan.sizes) and not any(map(_IS_NONE, tensors)):  # not `in`: tensors compare
        there: list[torch.Tensor] = tensors  # type: ignore[assignment] # just checked
        if all(device.type == kind for device in set(map(_DEVICE, there))):
            return list(map(torch.Tensor.data_ptr, there))
    return [
        tensor.data_ptr() if tensor is not None and size and tensor.device.type == kind else _ABSENT
        for tensor, size in zip(tensors, plan.sizes, strict=True)
    ]
