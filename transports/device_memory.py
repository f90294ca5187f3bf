"""Device memory that another process of the same host opens: what is exported, and what is mapped.

CUDA exports whole allocations (64 bytes each), not tensors. `CudaMemory` asks the driver for them;
the rest of the data plane knows addresses only, so that it runs over any memory that keeps this
contract.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import torch

from statemachines.errors import Validation
from transports.errors import OutOfSharedMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

HANDLE_NBYTES = 64
_LAZY_PEER_ACCESS = 1
_BUFFER_ID = 7
_OUT_OF_MEMORY = 2


class Allocation(NamedTuple):
    """What an address lies in; `identity` is another one once that memory was freed."""

    base: int
    nbytes: int
    identity: int


class DeviceMemory(Protocol):
    """One device, as one process sees it. Calls come from any thread, one at a time.

    Attributes:
        device: Where this process's own memory is.
        uuid: The device's name in all processes.
        visible: Devices whose memory this process can open.
    """

    device: torch.device
    uuid: str
    visible: tuple[str, ...]

    def uuid_of(self, device: torch.device) -> str:
        """The name of another device of this process."""

    def allocation(self, address: int) -> Allocation:
        """What `address` lies in."""

    def frees(self) -> int | None:
        """While it stays the same, no allocation was freed; None: nobody counts."""

    def export(self, address: int) -> bytes:
        """A handle of the whole allocation.

        Raises:
            Validation: It cannot be exported.
        """

    def open(self, handle: bytes, uuid: str) -> int:
        """Map another process's allocation; its first address.

        Raises:
            Validation: The driver does not take the handle.
        """

    def close(self, address: int) -> None:
        """Unmap what `open` returned."""

    def take(self, nbytes: int) -> int:
        """An allocation of its own, which can be exported.

        Raises:
            OutOfSharedMemory: There is no room.
        """

    def give(self, address: int) -> None:
        """Free what `take` returned."""

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """A 1-d uint8 tensor over that memory, which keeps nothing alive."""


@final
class CudaMemory:
    """Device memory of one GPU, by the driver's own calls."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.uuid = uuid_of(device)
        self.visible = visible_uuids()

    def uuid_of(self, device: torch.device) -> str:
        return uuid_of(device)

    def allocation(self, address: int) -> Allocation:
        base, nbytes, identity = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
        with _current(self.device):
            _call(
                "cuMemGetAddressRange_v2",
                ctypes.byref(base),
                ctypes.byref(nbytes),
                ctypes.c_uint64(address),
            )
            _call(
                "cuPointerGetAttribute",
                ctypes.byref(identity),
                ctypes.c_int(_BUFFER_ID),
                ctypes.c_uint64(address),
            )
        return Allocation(base.value, nbytes.value, identity.value)

    def frees(self) -> int | None:
        try:
            return sum(_frees(index) for index in range(torch.cuda.device_count()))
        except (RuntimeError, KeyError, AttributeError):
            return None  # another allocator than torch's own

    def export(self, address: int) -> bytes:
        handle = (ctypes.c_char * HANDLE_NBYTES)()
        with _current(self.device):
            try:
                _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
            except DriverError as error:
                raise Validation(
                    f"device memory at {address:#x} cannot be shared with another process: {error}",
                    next_step="memory of expandable segments and of custom pools has no handle: "
                    "start the trainer with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",
                ) from error
        return handle.raw

    def open(self, handle: bytes, uuid: str) -> int:
        address = ctypes.c_uint64()
        with _current(self.device):
            try:
                _call(
                    "cuIpcOpenMemHandle_v2",
                    ctypes.byref(address),
                    _Handle.from_buffer_copy(handle),
                    ctypes.c_uint(_LAZY_PEER_ACCESS),
                )
            except DriverError as error:
                raise Validation(
                    f"memory of GPU {uuid} cannot be mapped on GPU {self.uuid}: {error}"
                ) from error
        return address.value

    def close(self, address: int) -> None:
        with _current(self.device):
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def take(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        with _current(self.device):
            try:
                _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
            except DriverError as error:
                raise OutOfSharedMemory(
                    f"no {nbytes} bytes of device memory for the buffers: {error}"
                ) from error
        return address.value

    def give(self, address: int) -> None:
        with _current(self.device):
            _call("cuMemFree_v2", ctypes.c_uint64(address))

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        made: torch.Tensor = torch.as_tensor(_Array(address, nbytes), device=self.device)
        return made


def uuid_of(device: torch.device) -> str:
    """As vLLM writes it: no prefix."""
    return str(torch.cuda.get_device_properties(device).uuid)


def visible_uuids() -> tuple[str, ...]:
    """Of all devices that this process sees."""
    return tuple(uuid_of(torch.device("cuda", i)) for i in range(torch.cuda.device_count()))


def _frees(index: int) -> int:
    stats: Any = torch.cuda.memory_stats_as_nested_dict(index)
    return int(stats["segment"]["all"]["freed"]) if stats else 0


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_NBYTES),)


class _Array:
    """How other libraries hand memory to torch."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    code = getattr(_driver(), name)(*args)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        said = (text.value or b"unknown error").decode()
        raise DriverError(f"{name}: {said} ({code})")


@cache
def _context(index: int) -> ctypes.c_void_p:
    """The device's primary context, the one torch uses; held for as long as the process lives."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", ctypes.c_uint(0))
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    # A thread that has not launched anything yet has no context.
    _call("cuCtxPushCurrent_v2", _context(device.index or 0))
    try:
        yield
    finally:
        popped = ctypes.c_void_p()
        _call("cuCtxPopCurrent_v2", ctypes.byref(popped))


def copy_async(device: torch.device, to: int, out_of: int, nbytes: int, stream: int) -> None:
    """Queue one copy between addresses of any devices on a ``cudaStream_t``."""
    with _current(device):
        _call(
            "cuMemcpyAsync",
            ctypes.c_uint64(to),
            ctypes.c_uint64(out_of),
            ctypes.c_size_t(nbytes),
            ctypes.c_void_p(stream),
        )
