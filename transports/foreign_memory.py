"""Bytes of another process of this host, copied out of it without a buffer in between.

Linux's `process_vm_readv(2)`, by which MPI libraries move large messages on one node ("cross-memory
attach"). The kernel lets a process do that to those that it might trace: of the same user, unless
the machine's policy (Yama, seccomp), a namespace or the other side's own wish (`PR_SET_DUMPABLE`)
forbids it. `readable` finds out; an address that is gone by then is an error, never a crash.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from functools import cache
from typing import TYPE_CHECKING, Any, final

import torch

from statemachines.errors import Validation
from transports.copy_batches import BLOCK_NBYTES
from transports.errors import PeerLost

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transports.copy_batches import Batch

_MOST = 1024  # pieces in one call, `UIO_MAXIOV`
_MOST_NBYTES = 1 << 30  # in one call, which moves no more than 2 GiB
HIGHEST = 2**63 - 1
"""No address of a process is beyond that."""


@cache
def _read() -> Any:
    """The system call, which runs without the GIL; None where there is none."""
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    call.argtypes = (ctypes.c_int, pointer, count, pointer, count, count)
    call.restype = ctypes.c_ssize_t
    return call


def readable(pid: int | None, address: int, content: bytes) -> bool:
    """Whether this process may read that one's memory, in which `content` is at `address`.

    Args:
        pid: As this process's namespace knows it; None: it does not.
        address: There.
        content: Told apart by it from a process that merely has the number.
    """
    if _read() is None or pid is None or not 0 < address <= HIGHEST - len(content):
        return False
    found = bytearray(len(content))
    place = (ctypes.c_char * len(found)).from_buffer(found)
    try:
        ForeignMemory(pid, "probe").copy(ctypes.addressof(place), address, len(found))
    except (PeerLost, Validation):
        return False
    return bytes(found) == content


@final
class ForeignMemory:
    """The memory of the process `pid`; `peer` names it in errors."""

    address_range = (0, HIGHEST)

    def __init__(self, pid: int, peer: str) -> None:
        self.pid = pid
        self._peer = peer

    def check(self, address: int, nbytes: int) -> None:
        """Refuse what can be no address; whether it is one is found out by reading.

        Raises:
            Validation: It is not.
        """
        _check_range(address, nbytes)

    def locate(self, tensor: torch.Tensor) -> int | None:
        """None: what is here is not there."""
        return None

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy to an address here from one there.

        Raises:
            PeerLost: There is no such process any more.
            Validation: It has no such memory any more, or may not be read any more.
        """
        for start in range(0, nbytes, _MOST_NBYTES):
            size = min(_MOST_NBYTES, nbytes - start)
            self.read(array("Q", (target + start, size)), array("Q", (source + start, size)), size)

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """A copy of the bytes there, as a 1-d uint8 tensor.

        Raises:
            PeerLost: See `copy`.
            Validation: See `copy`.
        """
        found = torch.empty(nbytes, dtype=torch.uint8)
        self.copy(found.data_ptr(), address, nbytes)
        return found

    def read(self, targets: array[int], sources: array[int], nbytes: int) -> None:
        """Copy pieces, 1 GiB at most in all; each is an address and a size, side by side.

        Raises:
            PeerLost: See `copy`.
            Validation: See `copy`.
        """
        call, count = _read(), len(targets) // 2
        into, out_of = targets.buffer_info()[0], sources.buffer_info()[0]
        done = 0
        for first in range(0, count, _MOST):
            part, at = min(_MOST, count - first), 16 * first
            moved = call(self.pid, into + at, part, out_of + at, part, 0)
            if moved < 0:
                raise self._failed(ctypes.get_errno())
            done += moved
        if done != nbytes:  # it ends early where the next piece cannot be read
            raise self._failed(errno.EFAULT)

    def _failed(self, code: int) -> Exception:
        if code == errno.ESRCH:
            return PeerLost(f"{self._peer} is gone: no process {self.pid}", replica=self._peer)
        if code == errno.EFAULT:
            text = f"memory of {self._peer} that was to be copied is not there any more"
        else:
            text = f"the memory of {self._peer} cannot be read: {os.strerror(code)}"
        return Validation(text, replica=self._peer, phase="update")


@final
class ForeignBatch:
    """A `Batch` whose sources are addresses of another process; made ready for the system call."""

    def __init__(self, batch: Batch, memory: ForeignMemory) -> None:
        self._memory, self._batch = memory, batch
        self._into = _pairs(batch.targets, batch.sizes)
        self._out_of = _pairs(batch.sources, batch.sizes)
        self.nbytes = batch.nbytes

    def move(self) -> None:
        """Make the copies; raises what `ForeignMemory.copy` raises."""
        self._memory.read(self._into, self._out_of, self.nbytes)

    def move_each(self) -> Iterator[tuple[int, int, int]]:
        """Make them some at a time; yields each (to, from, how much), while it is in the cache."""
        targets, sources, sizes, _ = self._batch
        first = total = 0
        for end, size in enumerate(sizes, 1):
            total += size
            if total < BLOCK_NBYTES and end < len(sizes):
                continue
            part = slice(2 * first, 2 * end)
            self._memory.read(self._into[part], self._out_of[part], total)
            yield from zip(targets[first:end], sources[first:end], sizes[first:end], strict=True)
            first, total = end, 0


def _check_range(address: int, nbytes: int) -> None:
    if not 0 <= address <= HIGHEST - nbytes:
        raise Validation(f"{nbytes} bytes at {address} are in no process's memory")


def _pairs(addresses: list[int], sizes: list[int]) -> array[int]:
    pairs = array("Q", bytes(16 * len(sizes)))
    pairs[::2], pairs[1::2] = array("Q", addresses), array("Q", sizes)
    return pairs


@final
class OwnMemory:
    """This process's memory, as others read it: a home of tensors that has all addresses."""

    address_range = (0, HIGHEST)

    def __init__(self, mark: bytes) -> None:
        self._mark = ctypes.create_string_buffer(mark, len(mark))

    def check(self, address: int, nbytes: int) -> None:
        """See `ForeignMemory.check`."""
        _check_range(address, nbytes)

    @property
    def mark(self) -> int:
        """Where the bytes lie by which `readable` knows this process."""
        return ctypes.addressof(self._mark)

    @staticmethod
    def lends(addresses: Sequence[int]) -> bool:
        """Whether a byte at each of them can be read as others would; at 0 there is none.

        No others read memory that a driver maps, say, although this process does.
        """
        there = [address for address in addresses if address]
        found, ones = bytearray(len(there) + 1), [1] * len(there)
        start = ctypes.addressof((ctypes.c_char * len(found)).from_buffer(found))
        into = _pairs(list(range(start, start + len(there))), ones)
        if _read() is None:
            return False
        try:
            ForeignMemory(os.getpid(), "probe").read(into, _pairs(there, ones), len(there))
        except (PeerLost, Validation):
            return False
        return True

    @staticmethod
    def locate(tensor: torch.Tensor) -> int | None:
        """Its address; None where its bytes are no plain memory."""
        is_plain = tensor.is_cpu and tensor.is_contiguous()
        is_plain = is_plain and not tensor.is_neg() and not tensor.is_conj()
        return tensor.data_ptr() if is_plain else None
