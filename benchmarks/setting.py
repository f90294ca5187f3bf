"""A trainer here, a worker in the other process, connected and warmed up."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import aiosync
from benchmarks import layouts, memory
from benchmarks.ring import Ring, checksum

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import torch

    from benchmarks.processes import Peer


@final
@dataclass
class Setting:
    """What is measured on.

    Attributes:
        sync: The connected trainer engine.
        flat: All bytes of its model.
        extra_nbytes: Most memory that both processes took in the first round, beyond what they
            had before they were connected.
    """

    peer: Peer
    sync: Any
    flat: torch.Tensor
    extra_nbytes: int
    shared_at: str | None
    ring: Ring | None = None

    @property
    def nbytes(self) -> int:
        return len(self.flat)

    async def round(self) -> tuple[float, Any]:
        """Seconds of one whole round, and its report."""
        began = time.perf_counter()
        report = await self.sync.send_weights()
        return time.perf_counter() - began, report

    async def two_copies(self) -> float:
        """Seconds of the same bytes through a raw ring: one copy in here, one out there."""
        if self.ring is None:
            self.ring = Ring.create()
        reading = asyncio.create_task(self.peer.do("pull", ring=self.ring.where))
        seconds = await asyncio.to_thread(self.ring.push, self.flat)
        await reading
        return seconds

    async def one_copy(self, piece: int | None = None) -> float:
        """Seconds of a raw copy, whole or in pieces, by the worker from the trainer's memory."""
        answer = await self.peer.do("copy", source=self.shared_at, piece=piece or self.nbytes)
        return float(answer["seconds"])


@asynccontextmanager
async def setting(
    peer: Peer,
    layout: str,
    nbytes: int,
    tensors: int,
    *,
    sink: str = "staged",
    verify: str = "digest",
    share: bool = False,
    direct: bool = True,
    tcp: bool = False,
    backend: str = "ipc",
) -> AsyncIterator[Setting]:
    """Connect, make one round, and check that every byte arrived."""
    answer = await peer.do(
        "open",
        layout=layout,
        nbytes=nbytes,
        tensors=tensors,
        sink=sink,
        verify=verify,
        tcp=tcp,
        backend=backend,
    )
    flat, model = layouts.build(layout, nbytes, tensors, trains=True)
    storage = aiosync.share_tensors(model) if share else None
    if storage is not None:
        flat = storage.segment.tensor[: len(flat)]
    # The reader first: pages it maps between the two looks would else count twice.
    pids = (peer.pid, os.getpid())
    before = memory.resident(pids)
    more: dict[str, Any] = {} if storage is None else {"shared": (storage,)}
    if not direct:
        more["direct"] = False
    try:
        async with aiosync.connect(model, workers=[answer["url"]], **more) as sync:
            async with memory.watched(pids) as peak:
                await sync.send_weights()
            arrived = (await peer.do("checksum"))["crc"]
            if arrived != await asyncio.to_thread(checksum, flat):
                raise RuntimeError("the worker has other bytes than the trainer")
            where = (
                None if storage is None else f"/proc/{os.getpid()}/fd/{storage.segment.fileno()}"
            )
            yield Setting(peer, sync, flat, peak.nbytes - before, where)
    finally:
        await peer.do("close")
