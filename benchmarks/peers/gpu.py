"""The other process on a GPU: a worker engine behind its server, and the far end of raw broadcasts.

Commands as in `benchmarks.peers.worker`.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import torch

import aiosync
from benchmarks import gpu_models
from benchmarks.nccl import PIECE, broadcast_all
from benchmarks.peers.worker import obey
from transports.cuda import WorkQueue
from transports.lane import Lane
from transports.nccl_group import NcclGroup

if TYPE_CHECKING:
    from torch import nn

_LIMIT_S = 60.0


class Peer:
    """What this process holds between commands."""

    def __init__(self) -> None:
        count = torch.cuda.device_count()
        self.device = torch.device("cuda", 1 % count)
        torch.cuda.set_device(self.device)
        self._worker = AsyncExitStack()
        self._lane = Lane("raw")
        self._model: nn.Module | None = None
        self._group: NcclGroup | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._held = 0

    async def open(
        self, *, payload: str, sink: str, verify: str, backend: str = "nccl"
    ) -> dict[str, Any]:
        """A fresh model, a worker engine for it, and its server."""
        await self.close()
        self._model = gpu_models.build(payload, self.device, trains=False)
        config = aiosync.WeightTransferConfig(backend, sink=sink, verify=verify)
        engine = aiosync.WeightTransferEngineFactory.create_engine(
            config, None, self.device, self._model, name="worker"
        )
        await self._worker.enter_async_context(engine)
        server = await self._worker.enter_async_context(aiosync.serve(engine))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._held = torch.cuda.memory_allocated()
        return {"url": server.url}

    async def close(self) -> dict[str, Any]:
        await self._worker.aclose()
        self._worker = AsyncExitStack()
        self._model = None
        torch.cuda.empty_cache()
        return {}

    async def checksum(self) -> dict[str, Any]:
        assert self._model is not None, "no worker is open"
        return {"sum": await asyncio.to_thread(gpu_models.checksum, self._model)}

    async def peak(self) -> dict[str, Any]:
        """Most device memory that was taken beyond what there was before the first round."""
        return {"extra": torch.cuda.max_memory_allocated() - self._held}

    async def join(self, *, unique_id: str) -> dict[str, Any]:
        group = self._group = NcclGroup(1, 2, device=self.device)
        await self._lane.run(lambda: group.join(bytes.fromhex(unique_id), timeout=_LIMIT_S))
        self._queue = WorkQueue(self.device, urgent=True)
        self._buffer = torch.zeros(PIECE, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize()
        return {}

    async def receive(self, *, nbytes: int) -> dict[str, Any]:
        """Begin to take part in raw broadcasts."""
        group = self._group
        assert group is not None, "not joined"
        work = self._lane.run(lambda: broadcast_all(group, self._buffer, nbytes, self._queue))
        self._receiving = asyncio.create_task(work)
        await asyncio.sleep(0.01)  # until it waits on the device
        return {}

    async def received(self) -> dict[str, Any]:
        assert self._receiving is not None, "nothing is received"
        await self._receiving
        return {}

    async def leave(self) -> dict[str, Any]:
        if self._group is not None:
            await self._lane.run(self._group.abort)
            self._group = None
        return {}

    async def end(self) -> None:
        await self.close()
        await self.leave()
        self._lane.close()


if __name__ == "__main__":
    asyncio.run(obey(Peer))
