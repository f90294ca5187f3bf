"""How much memory two processes take together, page by page that is shared counted once."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

_EVERY_S = 0.01


def resident(pids: Sequence[int]) -> int:
    """Bytes of these processes: the sum of their proportional set sizes."""
    return sum(_pss(pid) for pid in pids)


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no Pss")


@final
class Peak:
    """The most that was seen while the block of `watched` ran."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


@asynccontextmanager
async def watched(pids: Sequence[int]) -> AsyncIterator[Peak]:
    """Look again and again; too costly beside anything that is timed."""
    peak, over = Peak(resident(pids)), threading.Event()

    def look() -> None:
        while not over.wait(_EVERY_S):
            peak.nbytes = max(peak.nbytes, resident(pids))
        peak.nbytes = max(peak.nbytes, resident(pids))

    task = asyncio.create_task(asyncio.to_thread(look))
    try:
        yield peak
    finally:
        over.set()
        await task
