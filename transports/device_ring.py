"""The buffers of a sender of device memory: one allocation, kept between rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from transports.device_exports import DeviceExports
    from transports.device_memory import DeviceMemory


@final
class SenderRing:
    """Exported for as long as it is there.

    Attributes:
        address: Its first byte; 0: there are no buffers.
    """

    def __init__(self, memory: DeviceMemory, exports: DeviceExports) -> None:
        self.address = self.nbytes = 0
        self._memory = memory
        self._exports = exports

    def reserve(self, nbytes: int) -> None:
        """Have at least as much, or nothing where nothing is needed.

        Raises:
            OutOfSharedMemory: There is no room.
        """
        if nbytes <= self.nbytes and bool(nbytes) == bool(self.nbytes):
            return
        if self.address:
            self._exports.set_ring(0)
            self.give()
        if nbytes:
            self.address = self._memory.take(nbytes)
            self.nbytes = nbytes
            self._exports.set_ring(self.address)

    def give(self) -> None:
        """Give the memory back."""
        address, self.address, self.nbytes = self.address, 0, 0
        if address:
            self._memory.give(address)
