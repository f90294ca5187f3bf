"""Anonymous shared memory.

A `Segment` has a descriptor and no name: it travels to other processes by descriptor passing and
is gone with the last process that maps it, whatever killed them. Its memory is reserved when it
is made, because running out later is a bus error and not an exception.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

import torch

from statemachines.errors import Validation
from transports.errors import OutOfSharedMemory

try:
    import fcntl
except ImportError:  # no POSIX: nothing here works, but the package still imports
    fcntl = None  # type: ignore[assignment]  # checked where it is used

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ALIGNMENT = 64
_LARGEST = 2**48
_RESERVE_STEP = 256 << 20


def available_memory() -> int | None:
    """Bytes this process could still take: the machine's, or its control group's if less."""
    free: list[int] = []
    for line in _lines("/proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            free.append(int(value.split()[0]) * 1024)
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        stat_lines = (line.split() for line in _lines("/sys/fs/cgroup/memory.stat"))
        cache = sum(int(value) for name, value in stat_lines if name == "inactive_file")
        free.append(int(limit[0]) - int(used[0]) + cache)
    return max(0, min(free)) if free else None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


@final
class Segment:
    """One mapped piece of shared memory.

    Attributes:
        key: Names the segment between processes that hold it; says nothing to others.
        nbytes: Its size.
    """

    def __init__(self, fd: int, nbytes: int, key: str) -> None:
        """Use `create` or `attach`; takes over `fd` once it returns."""
        # Unlike the mmap module, torch keeps no second descriptor open for the mapping, and
        # unmaps with the last tensor that looks into it.
        storage = torch.UntypedStorage.from_file(f"/dev/fd/{fd}", True, nbytes)
        assert isinstance(storage, torch.UntypedStorage)
        self._tensor: torch.Tensor | None = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._address = self._tensor.data_ptr()
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._fd = fd
        self.nbytes = nbytes
        self.key = key

    @classmethod
    def create(cls, nbytes: int, *, check: Callable[[], None] = lambda: None) -> Self:
        """Reserve `nbytes` bytes of zeros.

        Args:
            nbytes: The size.
            check: Called now and then, because much memory takes seconds; may raise.

        Raises:
            OutOfSharedMemory: There is not that much; nothing is left behind.
            Validation: Not a positive size.
        """
        if type(nbytes) is not int or not 0 < nbytes <= _LARGEST:
            raise Validation(f"segment size must be an int in 1..2**48, not {nbytes!r}")
        free = available_memory()
        if free is not None and nbytes > free:
            raise _out_of_memory(nbytes, free)
        fd = _anonymous_file()
        try:
            os.ftruncate(fd, nbytes)
            for start in range(0, nbytes, _RESERVE_STEP):
                os.posix_fallocate(fd, start, min(_RESERVE_STEP, nbytes - start))
                check()
            _seal(fd)
            return cls(fd, nbytes, secrets.token_hex(8))
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise _out_of_memory(nbytes, free) from error
            raise
        except RuntimeError as error:  # torch's word for a failed mapping
            os.close(fd)
            raise _out_of_memory(nbytes, free) from error
        except BaseException:  # the descriptor is ours until the segment has it
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, *, nbytes: int | None = None, key: str = "") -> Self:
        """Map a segment that another process made; owns (and on errors closes) `fd`.

        Args:
            fd: As received from the peer.
            nbytes: The size the peer named; the real one is what counts, and is compared.
            key: The peer's name for it.

        Raises:
            Validation: Not a file of that size, or a memfd that could still shrink under us.
        """
        try:
            return cls(fd, _checked_size(fd, nbytes), key)
        except RuntimeError as error:
            os.close(fd)
            raise Validation(f"segment cannot be mapped: {error}") from error
        except BaseException:  # owned from the call on
            os.close(fd)
            raise

    def __repr__(self) -> str:
        return f"<Segment {self.key} {self.nbytes} bytes {'closed' if self._fd < 0 else 'open'}>"

    def fileno(self) -> int:
        """The descriptor, for passing it on; -1 once closed."""
        return self._fd

    @property
    def tensor(self) -> torch.Tensor:
        """All bytes, as a 1-d uint8 tensor."""
        if self._tensor is None:
            raise Validation(f"segment {self.key} is closed")
        return self._tensor

    def private(self) -> torch.Tensor:
        """All bytes once more; what is written here is seen here only.

        Bytes that were not written here are what the segment holds, also later on.

        Raises:
            Validation: It is closed.
        """
        if self._fd < 0:
            raise Validation(f"segment {self.key} is closed")
        storage = torch.UntypedStorage.from_file(f"/dev/fd/{self._fd}", False, self.nbytes)
        assert isinstance(storage, torch.UntypedStorage)
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def check(self, offset: int, nbytes: int) -> None:
        """Refuse bytes that are not all in here, as `view` does, but make no view.

        Raises:
            Validation: Outside of the segment.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise Validation(
                f"bytes {offset}..{offset + nbytes} lie outside of a segment of {self.nbytes}"
            )

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """`nbytes` bytes from `offset`.

        Raises:
            Validation: Outside of the segment, or it is closed.
        """
        self.check(offset, nbytes)
        return self.tensor.narrow(0, offset, nbytes)

    def typed(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A contiguous tensor that lies at `offset`.

        Raises:
            Validation: Outside of the segment, or `offset` is no multiple of the item size.
        """
        count = math.prod(shape)
        base = self._typed.get(dtype)
        if base is None:
            whole = self.nbytes // dtype.itemsize * dtype.itemsize
            base = self._typed[dtype] = self.tensor.narrow(0, 0, whole).view(dtype)
        if offset < 0 or offset % dtype.itemsize or offset + count * dtype.itemsize > self.nbytes:
            raise Validation(f"no {dtype} {tuple(shape)} fits at byte {offset} of {self!r}")
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        return base.as_strided(shape, strides[::-1], offset // dtype.itemsize)

    @property
    def address_range(self) -> tuple[int, int]:
        """First address and the one past the last, in this process."""
        return self._address, self._address + self.nbytes

    def locate(self, tensor: torch.Tensor) -> int | None:
        """Offset of a contiguous CPU tensor that lies in here whole; else None."""
        if self._tensor is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        offset = tensor.data_ptr() - self._address
        return offset if offset >= 0 and 0 < tensor.nbytes <= self.nbytes - offset else None

    def statistics(self) -> dict[str, Any]:
        """Size, descriptor, whether it is open."""
        return {"key": self.key, "nbytes": self.nbytes, "fd": self._fd, "open": self._fd >= 0}

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last tensor that looks into it."""
        fd, self._fd = self._fd, -1
        self._tensor = None
        self._typed.clear()
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # Segments are handed to storages, senders and readers alike; the last one closes.
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def _out_of_memory(need: int, free: int | None) -> OutOfSharedMemory:
    known = "unknown" if free is None else f"{free}"
    return OutOfSharedMemory(
        f"{need} bytes of shared memory needed, {known} free",
        next_step="use smaller or fewer buffers, or free memory",
        detail={"need": need, "free": free},
    )


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("aiosync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    directory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # in memory
    fd, path = tempfile.mkstemp(prefix="aiosync-", dir=directory)
    Path(path).unlink()
    return fd


def _seal(fd: int) -> None:
    if hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS"):
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def _is_memfd(fd: int) -> bool:
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink()).startswith("/memfd:")
    except OSError:
        return False  # no procfs, so no Linux


def _checked_size(fd: int, announced: int | None) -> int:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise Validation("the descriptor is no shared memory")
    if announced is not None and status.st_size != announced:
        raise Validation(f"segment of {status.st_size} bytes was announced as {announced}")
    if not 0 < status.st_size <= _LARGEST:
        raise Validation(f"segment of {status.st_size} bytes")
    # Plain files of a peer without memfd_create cannot be sealed and are taken as they are.
    if _is_memfd(fd) and not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise Validation("segment is not sealed against shrinking")
    return status.st_size
