"""What a receiver of device memory has mapped: each of the trainer's allocations once.

Mappings outlive rounds, and would outlive the trainer: its memory is only free when they are
closed, so a `Watch` closes them when its process ends.
"""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING, NamedTuple, final

from statemachines.errors import Validation
from transports import device_messages as wire
from transports.shm_messages import Handles

if TYPE_CHECKING:
    from collections.abc import Callable

    from transports.device_memory import DeviceMemory
    from transports.planning import Plan


class _Mapping(NamedTuple):
    address: int
    nbytes: int
    is_own: bool  # of this very process: there is nothing to unmap


@final
class DeviceMappings:
    """The table of one receiver; believes nothing that the sender says about places and sizes.

    Attributes:
        table: Its name; empty: there is none.
        addresses: Here, of every tensor of the plan; -1 for those that come through buffers.
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

    @property
    def known(self) -> int:
        """The highest number among the mapped allocations."""
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
                self._mappings[info.number] = self._open(info, is_own=is_own)
                kept.add(info.number)
        if len(kept) > count:
            raise Validation(f"{len(kept)} allocations came, {count} were announced")
        for number in self._mappings.keys() - kept:
            self._close(number)

    def _open(self, info: wire.AllocationInfo, *, is_own: bool) -> _Mapping:
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
        if is_own:
            return _Mapping(info.address, info.nbytes, is_own=True)
        address = memory.open(info.handle, info.uuid)
        try:
            held = memory.allocation(address).nbytes
            if held < info.nbytes:
                raise Validation(
                    f"allocation {info.number} has {held} bytes, not {info.nbytes} as announced"
                )
        except BaseException:
            memory.close(address)
            raise
        return _Mapping(address, info.nbytes, is_own=False)

    def _place(self, count: int, plan: Plan, next_message: Callable[[], wire.ToReader]) -> None:
        addresses = [-1] * len(plan.sizes)
        came = 0
        while came < count:
            message = next_message()
            if not isinstance(message, Handles) or not message.handles:
                raise Validation(f"expected handles, got {type(message).__name__}")
            for index, number, offset in message.handles:
                mapping = self._mappings.get(number)
                if index >= len(addresses) or mapping is None or addresses[index] >= 0:
                    raise Validation(
                        f"handle of tensor {index} in allocation {number} is impossible"
                    )
                if offset + plan.sizes[index] > mapping.nbytes:
                    raise Validation(
                        f"tensor {index} is said to lie at byte {offset} of an allocation of "
                        f"{mapping.nbytes} bytes",
                        tensor=str(index),
                    )
                addresses[index] = mapping.address + offset
            came += len(message.handles)
        if came > count:
            raise Validation(f"{came} handles came, {count} were announced")
        self.addresses = addresses
        self.resident = [index for index, address in enumerate(addresses) if address >= 0]

    def in_ring(self, offset: int, nbytes: int) -> int:
        """Where a chunk lies in the buffers, here.

        Raises:
            Validation: Outside of them.
        """
        ring = self._mappings.get(self._ring)
        if ring is None or offset + nbytes > ring.nbytes:
            raise Validation(f"a chunk of {nbytes} bytes is said to be at byte {offset} of buffers")
        return ring.address + offset

    def count(self) -> int:
        """Mapped allocations."""
        return len(self._mappings)

    def clear(self) -> None:
        """Unmap everything."""
        self.table, self._plan = "", ""
        self.addresses, self.resident = [], []
        for number in list(self._mappings):
            self._close(number)

    def _close(self, number: int) -> None:
        mapping = self._mappings.pop(number)
        if not mapping.is_own:
            self._memory.close(mapping.address)


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
