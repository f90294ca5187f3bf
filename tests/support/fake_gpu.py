"""Device memory on the CPU: what the data plane over a GPU's memory does, without the GPU.

Only for a sender and a receiver in one process, which open nothing: they see the same addresses.
"""

from __future__ import annotations

import ctypes

import torch

from transports.device_memory import Allocation
from transports.errors import OutOfSharedMemory


class FakeMemory:
    """Counts what is taken, given, exported and freed."""

    def __init__(self, uuid="gpu-a", visible=("gpu-a",), room=1 << 30):
        self.device = torch.device("cpu")
        self.uuid = uuid
        self.visible = visible
        self.room = room
        self.freed = 0
        self.exported = []
        self.taken = {}
        self._known = {}
        self._next = 1

    def own(self, *tensors):
        """Let these tensors' storages be allocations of the device."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            base, nbytes = storage.data_ptr(), storage.nbytes()
            if (known := self._known.get(base)) is None or known.nbytes != nbytes:
                self._add(base, nbytes)

    def reallocate(self, tensor):
        """The tensor's allocation was freed, and another one begins at the same address."""
        storage = tensor.untyped_storage()
        self.freed += 1
        self._add(storage.data_ptr(), storage.nbytes())

    def _add(self, base, nbytes):
        self._known[base] = Allocation(base, nbytes, self._next)
        self._next += 1

    def uuid_of(self, device):
        return self.uuid

    def allocation(self, address):
        for found in self._known.values():
            if found.base <= address < found.base + found.nbytes:
                return found
        raise AssertionError(f"nothing at {address:#x}")

    def frees(self):
        return self.freed

    def export(self, address):
        self.exported.append(address)
        return address.to_bytes(8, "little").ljust(64, b"\0")

    def open(self, handle, uuid):
        raise AssertionError("one process maps nothing of its own")

    def close(self, address):
        raise AssertionError("one process maps nothing of its own")

    def take(self, nbytes):
        if nbytes > self.room:
            raise OutOfSharedMemory(f"no {nbytes} bytes")
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self._add(memory.data_ptr(), nbytes)
        self.taken[memory.data_ptr()] = memory
        return memory.data_ptr()

    def give(self, address):
        del self.taken[address]
        del self._known[address]

    def bytes_at(self, address, nbytes):
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
