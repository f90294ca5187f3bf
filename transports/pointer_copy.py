"""Thousands of copies on a device in one launch: a kernel over a table of addresses.

A batched copy of torch looks at every tensor and starts a kernel for each fifty of them. Here the
host hands over three columns (to, from, how much), which are kept on the device while they are the
same. Bytes move as bytes, whatever they mean. Where the kernel cannot be had (no compiler at run
time, another kind of device), `pointer_copies` says so and torch's copy does it.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any, final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

_TILE = 32 << 10  # bytes that one block of threads copies
_THREADS = 512
_GENTLE = 64  # blocks of threads at once: faster than NVLink, and the memory stays free for others
_SOURCE = """
extern "C" __global__ void copy_tiles(
    const long long* to, const long long* from, const long long* sizes,
    const int* which, const int* firsts, const int tiles)
{
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int tensor = which[tile];
    const long long start = (long long)(tile - firsts[tensor]) * TILE;
    long long n = sizes[tensor] - start;
    if (n > TILE) n = TILE;
    char* d = (char*)to[tensor] + start;
    const char* s = (const char*)from[tensor] + start;
    const unsigned long long both = (unsigned long long)d | (unsigned long long)s;
    long long done = 0;
    if ((both & 15) == 0) {
        const long long count = n >> 4;
        const int4* s4 = (const int4*)s;
        int4* d4 = (int4*)d;
        long long i = threadIdx.x;
        for (; i + 3 * THREADS < count; i += 4 * THREADS) {
            const int4 a = s4[i], b = s4[i + THREADS];
            const int4 c = s4[i + 2 * THREADS], e = s4[i + 3 * THREADS];
            d4[i] = a; d4[i + THREADS] = b; d4[i + 2 * THREADS] = c; d4[i + 3 * THREADS] = e;
        }
        for (; i < count; i += THREADS) d4[i] = s4[i];
        done = count << 4;
    } else if ((both & 3) == 0) {
        const long long count = n >> 2;
        for (long long i = threadIdx.x; i < count; i += THREADS) ((int*)d)[i] = ((const int*)s)[i];
        done = count << 2;
    }
    for (long long i = done + threadIdx.x; i < n; i += THREADS) d[i] = s[i];
  }
}
""".replace("TILE", str(_TILE)).replace("THREADS", str(_THREADS))


@cache
def pointer_copies(device: torch.device) -> bool:
    """Whether `PointerCopy` works on `device`; compiles the kernel, once a process."""
    if device.type != "cuda":
        return False
    try:
        # The tensor first: a thread that has not used the device yet can load no kernel.
        source = torch.arange(24, dtype=torch.uint8, device=device)
        copy = PointerCopy([24], device)
        target = torch.zeros_like(source)
        copy([target.data_ptr()], [source.data_ptr()])
        return bool(torch.equal(source, target))
    except Exception:  # a private interface of torch, and a compiler that may not be there
        logger.info("no kernel for batched copies; torch copies instead", exc_info=True)
        return False


@cache
def _kernel(device: torch.device) -> Any:
    make: Any = torch.cuda._compile_kernel  # noqa: SLF001 - public in later releases
    with torch.cuda.device(device):
        return make(_SOURCE, "copy_tiles")


def tiles_of(nbytes: Sequence[int], tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of memory cut into tiles: of each tile, which piece; of each piece, the first tile.

    Both int32: some ten thousand pieces have a few hundred thousand tiles.
    """
    sizes = torch.tensor(list(nbytes), dtype=torch.int64)
    counts = (sizes + (tile - 1)) // tile
    which = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
    return which, (torch.cumsum(counts, 0) - counts).to(torch.int32)


@final
class AddressColumn:
    """Addresses as a table on the device, which is kept while they are the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: list[int] | None = None
        self._column = torch.empty(0, dtype=torch.int64)

    def of(self, addresses: list[int]) -> torch.Tensor:
        """One int64 for each; the copy to the device is queued on the current stream."""
        if addresses != self._known:
            column = torch.tensor(addresses, dtype=torch.int64)
            self._column = column.to(self._device, non_blocking=True)
        self._known = addresses  # the same objects again compare at once
        return self._column


@final
class PointerCopy:
    """Copies of these sizes, again and again, perhaps between other addresses.

    Args:
        nbytes: Of each copy; none may be 0.
    """

    def __init__(self, nbytes: Sequence[int], device: torch.device) -> None:
        which, firsts = tiles_of(nbytes, _TILE)
        self._device = device
        self._tiles = len(which)
        self._sizes = torch.tensor(list(nbytes), dtype=torch.int64, device=device)
        self._which, self._firsts = which.to(device), firsts.to(device)
        self._to, self._from = AddressColumn(device), AddressColumn(device)

    def __call__(self, to: list[int], out_of: list[int], *, gently: bool = False) -> None:
        """Queue the copies on the current stream; all memory must stay until they are done.

        Args:
            gently: Leave room for what runs beside it, which a copy at full speed would hold up.
        """
        if not self._tiles:
            return
        columns = (self._to.of(to), self._from.of(out_of))
        with torch.cuda.device(self._device):  # a launch goes to the thread's own device
            _kernel(self._device)(
                grid=(min(self._tiles, _GENTLE) if gently else self._tiles, 1, 1),
                block=(_THREADS, 1, 1),
                args=[*columns, self._sizes, self._which, self._firsts, self._tiles],
                stream=torch.cuda.current_stream(self._device),
            )
