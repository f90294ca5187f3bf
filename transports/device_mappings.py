"""What a receiver of device memory has mapped: each of the trainer's allocations once.

Mappings outlive rounds, and would outlive the trainer: its memory is only free when they are
closed, so a `Watch` closes them when its process ends.
"""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING, final

from statemachines.errors import Validation
from transports import device_messages as wire
from transports.shm_messages import Handles

if TYPE_CHECKING:
    from collections.abc import Callable

    from transports.device_memory import DeviceMemory
    from transports.planning import Plan


@final
class _Mapping:
    """One allocation, which is opened when it is needed: that takes a tenth of a millisecond.

    Attributes:
        address: Here; 0 until it is opened.
        is_own: Of this very process: there is nothing to open or to close.
    """

    __slots__ = ("address", "info", "is_own", "nbytes")

    def __init__(self, info: wire.AllocationInfo, *, is_own: bool) -> None:
        self.info, self.is_own, self.nbytes = info, is_own, info.nbytes
        self.address = info.address if is_own else 0

    def open(self, memory: DeviceMemory) -> int:
        """Its address; maps it the first time."""
        if self.address:
            return self.address
        address = memory.open(self.info.handle, self.info.uuid)
        try:
            held = memory.allocation(address).nbytes
            if held < self.nbytes:
                raise Validation(
                    f"allocation {self.info.number} has {held} bytes, not {self.nbytes} as "
                    "announced"
                )
        except BaseException:
            memory.close(address)
            raise
        self.address = address
        return address

    def close(self, memory: DeviceMemory) -> None:
        if self.address and not self.is_own:
            memory.close(self.address)


@final
class DeviceMappings:
    """The table of one receiver; believes nothing that the sender says about places and sizes.

    Attributes:
        table: Its name; empty: there is none.
        addresses: Here, of every tensor of the plan that was reached; -1 for those that come
            through buffers.
        resident: Tensors that are read in place.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self.table = ""
        self.addresses: list[int] = []
        self.resident: list[int] = []
        self._memory = memory
        self._plan = ""
        self._mappings: dict[int, _Mapping] = {}
        self._ring = 0
        self._wheres: list[_Mapping | None] = []
        self._offsets: list[int] = []
        self._reached = 0

    @property
    def known(self) -> int:
        """The highest number among the allocations that were sent."""
        return max(self._mappings, default=0)

    def take(
        self,
        welcome: wire.DeviceWelcome,
        plan: Plan,
        next_message: Callable[[], wire.ToReader],
        *,
        is_own: bool,
    ) -> None:
        """Have the table that a welcome announces.

        Raises:
            Validation: What follows is not what was announced, or impossible.
        """
        if welcome.places is None:
            if welcome.table != self.table or self._plan != plan.digest or not self.table:
                raise Validation(f"the trainer's table is {welcome.table!r}, not ours")
            return
        self.table, self.addresses, self.resident = "", [], []
        self._map(welcome.allocations, next_message, is_own=is_own)
        if welcome.ring and welcome.ring not in self._mappings:
            raise Validation(f"allocation {welcome.ring} with the buffers was not sent")
        self._ring = welcome.ring
        self._place(welcome.places, plan, next_message)
        self.table, self._plan = welcome.table, plan.digest

    def _map(self, count: int, next_message: Callable[[], wire.ToReader], *, is_own: bool) -> None:
        kept: set[int] = set()
        while len(kept) < count:
            message = next_message()
            if not isinstance(message, wire.Allocations) or not (message.kept or message.new):
                raise Validation(f"expected allocations, got {type(message).__name__}")
            for number in message.kept:
                if number not in self._mappings or number in kept:
                    raise Validation(f"allocation {number} was not sent")
                kept.add(number)
            for info in message.new:
                if info.number in kept or info.number in self._mappings:
                    raise Validation(f"allocation {info.number} is named twice")
                self._mappings[info.number] = _Mapping(self._checked(info), is_own=is_own)
                kept.add(info.number)
        if len(kept) > count:
            raise Validation(f"{len(kept)} allocations came, {count} were announced")
        for number in self._mappings.keys() - kept:
            self._close(number)

    def _checked(self, info: wire.AllocationInfo) -> wire.AllocationInfo:
        memory = self._memory
        if info.uuid not in memory.visible:
            raise Validation(
                f"the trainer offers memory of GPU {info.uuid or '(none)'}; this worker is on "
                f"{memory.uuid} and sees {', '.join(memory.visible) or 'no GPU'}",
                detail={"offered": info.uuid, "wanted": list(memory.visible)},
                next_step="let worker and trainer see the same GPU (CUDA_VISIBLE_DEVICES)",
            )
        if not info.nbytes:
            raise Validation(f"allocation {info.number} is said to have no bytes")
        return info

    def _place(self, count: int, plan: Plan, next_message: Callable[[], wire.ToReader]) -> None:
        wheres: list[_Mapping | None] = [None] * len(plan.sizes)
        offsets = [0] * len(plan.sizes)
        came = 0
        while came < count:
            message = next_message()
            if not isinstance(message, Handles) or not message.handles:
                raise Validation(f"expected handles, got {type(message).__name__}")
            for index, number, offset in message.handles:
                mapping = self._mappings.get(number)
                if index >= len(plan.sizes) or mapping is None or wheres[index] is not None:
                    raise Validation(
                        f"handle of tensor {index} in allocation {number} is impossible"
                    )
                if offset + plan.sizes[index] > mapping.nbytes:
                    raise Validation(
                        f"tensor {index} is said to lie at byte {offset} of an allocation of "
                        f"{mapping.nbytes} bytes",
                        tensor=str(index),
                    )
                wheres[index], offsets[index] = mapping, offset
            came += len(message.handles)
        if came > count:
            raise Validation(f"{came} handles came, {count} were announced")
        self.addresses = [-1] * len(plan.sizes)
        self.resident = [index for index, where in enumerate(wheres) if where is not None]
        self._wheres, self._offsets, self._reached = wheres, offsets, 0

    def reach(self, count: int) -> None:
        """Map what the first `count` tensors of the plan need; then `addresses` has them.

        The device copies those before them meanwhile.

        Raises:
            Validation: An allocation is smaller than announced.
        """
        while self._reached < count:
            where = self._wheres[self._reached]
            if where is not None:
                address = where.open(self._memory) + self._offsets[self._reached]
                self.addresses[self._reached] = address
            self._reached += 1

    def in_ring(self, offset: int, nbytes: int) -> int:
        """Where a chunk lies in the buffers, here.

        Raises:
            Validation: Outside of them.
        """
        ring = self._mappings.get(self._ring)
        if ring is None or offset + nbytes > ring.nbytes:
            raise Validation(f"a chunk of {nbytes} bytes is said to be at byte {offset} of buffers")
        return ring.open(self._memory) + offset

    def count(self) -> int:
        """Mapped allocations."""
        return sum(mapping.address != 0 for mapping in self._mappings.values())

    def clear(self) -> None:
        """Unmap everything."""
        self.table, self._plan = "", ""
        self.addresses, self.resident = [], []
        self._wheres, self._offsets = [], []
        for number in list(self._mappings):
            self._close(number)

    def _close(self, number: int) -> None:
        self._mappings.pop(number).close(self._memory)


@final
class Watch:
    """Calls `ended` when a process ends, on a thread of its own; `close` ends the watch."""

    def __init__(self, pid: int, ended: Callable[[], None]) -> None:
        self.pid = pid
        self._ended = ended
        self._pidfd = os.pidfd_open(pid)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_over = False
        self._thread = threading.Thread(  # noqa: TID251 - sleeps until there is something to tell
            target=self._run, name="trainer-watch", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        poller = select.poll()
        for fd in (self._pidfd, self._stop):
            poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll()}
        try:
            if self._stop not in ready:
                self._ended()
        finally:
            with self._lock:  # nobody writes to a number that is given out again
                self._is_over = True
                os.close(self._pidfd)
                os.close(self._stop)

    def close(self) -> None:
        """The process is of no interest any more; from any thread, more than once."""
        with self._lock:
            if not self._is_over:
                os.eventfd_write(self._stop, 1)
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)
