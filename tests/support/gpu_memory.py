"""How much memory of the GPU is free, as its driver says: of all processes together.

Only the driver sees what a mapping or a dead process keeps, and it does not say whose it is. So
what others take for a moment is waited out, and what they give back is no leak of ours; only one
that takes memory and keeps it makes these tests fail.
"""

from __future__ import annotations

import asyncio
import gc
import time

import torch

MIB = 1 << 20
_APART_S = 0.05
_QUIET_S = 3.0


def _free() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


async def free_memory() -> int:
    """Bytes, once two looks find the same, or after some seconds."""
    deadline = time.monotonic() + _QUIET_S
    found = _free()
    while True:
        await asyncio.sleep(_APART_S)
        last, found = found, _free()
        if found == last or time.monotonic() >= deadline:
            return found


async def assert_as_free(before: int, *, slack: int, seconds: float = 10.0) -> None:
    """No less than before is free now, or soon."""
    deadline = time.monotonic() + seconds
    while (found := await free_memory()) < before - slack:
        lost = (before - found) // MIB
        assert time.monotonic() < deadline, f"{lost} MiB of the GPU's memory were not given back"
