"""The digest ``wsum64`` of thousands of pieces of memory in one launch, over a table of addresses.

`transports.digest` defines the value. One warp takes a row of 4 KiB, so the weights of its columns
stay in registers; rows add up modulo 2**64 in any order. Where the kernel cannot be had, torch
computes each piece's value by itself.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any, final

import torch

from transports.device_digest import DeviceDigests
from transports.digest import WSUM64_CHAIN, wsum64_weights
from transports.pointer_copy import AddressColumn, tiles_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

_TILE = 512 << 10  # bytes that one block of threads looks at: many rows for one look at weights
_THREADS = 256
_GROUP_NBYTES = 8 << 20
_SOURCE = """
extern "C" __global__ void wsum_tiles(
    const long long* at, const long long* sizes, const int* which, const int* firsts,
    const unsigned long long* rows, const unsigned long long* columns,
    const unsigned long long* powers, unsigned long long* values)
{
    typedef unsigned long long u64;
    const int piece = which[blockIdx.x];
    const long long size = sizes[piece];
    const long long start = (long long)((int)blockIdx.x - firsts[piece]) * TILE;
    const long long end = size - start > TILE ? start + TILE : size;
    const unsigned char* base = (const unsigned char*)at[piece];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const long long groups = (size + GROUP - 1) / GROUP;
    u64 weights[16];
    for (int k = 0; k < 8; ++k) {
        weights[2 * k] = columns[64 * k + 2 * lane];
        weights[2 * k + 1] = columns[64 * k + 2 * lane + 1];
    }
    u64 total = 0;
    for (long long row = start + 4096LL * warp; row < end; row += 4096LL * (THREADS / 32)) {
        const unsigned char* from = base + row;
        const long long left = size - row;
        u64 sum = 0;
        if (left >= 4096 && ((u64)from & 15) == 0) {
            const ulonglong2* words = (const ulonglong2*)from;
            #pragma unroll
            for (int k = 0; k < 8; ++k) {
                const ulonglong2 two = words[32 * k + lane];
                sum += two.x * weights[2 * k] + two.y * weights[2 * k + 1];
            }
        } else {
            for (int k = 0; k < 16; ++k) {
                const long long first = 512LL * (k >> 1) + 16 * lane + 8 * (k & 1);
                u64 word = 0;
                for (int b = 0; b < 8; ++b)
                    if (first + b < left) word |= (u64)from[first + b] << (8 * b);
                sum += word * weights[k];
            }
        }
        for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        sum ^= sum >> 29;
        const long long index = row >> 12, group = index >> 11;
        total += sum * rows[index & 2047] * powers[groups - 1 - group];
    }
    if (lane == 0) atomicAdd(&values[piece], total * CHAINULL);
}
"""
for _name, _value in (
    ("TILE", _TILE),
    ("THREADS", _THREADS),
    ("GROUP", f"{_GROUP_NBYTES}LL"),
    ("CHAIN", WSUM64_CHAIN),
):
    _SOURCE = _SOURCE.replace(_name, str(_value))


@cache
def pointer_digests(device: torch.device) -> bool:
    """Whether the kernel works on `device`; compiles it, once a process."""
    if device.type != "cuda":
        return False
    try:
        data = torch.arange(70_001, device=device).view(torch.uint8)[:-3]
        known = DeviceDigests(1, device)
        known.update(data)
        made = PointerDigest([data.numel()], device, has_kernel=True)
        return made.values([data.data_ptr()]).tolist() == known.values.tolist()
    except Exception:  # a private interface of torch, and a compiler that may not be there
        logger.info("no kernel for digests; torch computes them instead", exc_info=True)
        return False


@cache
def _kernel(device: torch.device) -> Any:
    make: Any = torch.cuda._compile_kernel  # noqa: SLF001 - public in later releases
    with torch.cuda.device(device):
        return make(_SOURCE, "wsum_tiles")


@final
class PointerDigest:
    """Values of pieces of these sizes, again and again, perhaps at other addresses.

    Args:
        nbytes: Of each piece; may be 0.
        bytes_at: Memory at an address as a tensor, for where there is no kernel.
    """

    def __init__(
        self,
        nbytes: Sequence[int],
        device: torch.device,
        *,
        bytes_at: Callable[[int, int], torch.Tensor] | None = None,
        has_kernel: bool | None = None,
    ) -> None:
        self._device = device
        self._nbytes = list(nbytes)
        self._bytes_at = bytes_at
        self._has_kernel = pointer_digests(device) if has_kernel is None else has_kernel
        self._column = AddressColumn(device)
        if self._has_kernel:
            self._make_tables()

    def _make_tables(self) -> None:
        which, firsts = tiles_of(self._nbytes, _TILE)
        most = max((-(-size // _GROUP_NBYTES) for size in self._nbytes), default=0)
        powers = [1]
        for _ in range(most):
            powers.append(powers[-1] * WSUM64_CHAIN % 2**64)
        device = self._device
        self._tiles = len(which)
        self._sizes = torch.tensor(self._nbytes, dtype=torch.int64, device=device)
        self._which, self._firsts = which.to(device), firsts.to(device)
        self._powers = torch.tensor([_signed(p) for p in powers], dtype=torch.int64, device=device)

    def values(self, addresses: list[int]) -> torch.Tensor:
        """One int64 for each piece, as its bits; queued on the current stream."""
        if not self._has_kernel:
            return self._by_torch(addresses)
        values = self._sizes.clone()
        if self._tiles:
            weights = wsum64_weights(self._device)
            column = self._column.of(addresses)
            tables = (column, self._sizes, self._which, self._firsts)
            with torch.cuda.device(self._device):  # a launch goes to the thread's own device
                _kernel(self._device)(
                    grid=(self._tiles, 1, 1),
                    block=(_THREADS, 1, 1),
                    args=[*tables, weights.rows, weights.columns, self._powers, values],
                    stream=torch.cuda.current_stream(self._device),
                )
        return values

    def _by_torch(self, addresses: list[int]) -> torch.Tensor:
        assert self._bytes_at is not None, "no kernel, and no way to look at an address"
        found = DeviceDigests(len(self._nbytes), self._device)
        for address, size in zip(addresses, self._nbytes, strict=True):
            data = self._bytes_at(address, size)
            found.update(data.clone() if address % 8 else data)
        return found.values


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
