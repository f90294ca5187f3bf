"""Does one thing with a trainer and ends: the process must end, soon and with exit code 0."""

from __future__ import annotations

import asyncio
import sys

import torch
from carried import carried

import aiosync


async def round_(backend: str) -> None:
    """A process may end right after a round."""
    source, model = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    async with carried(source, model, backend) as (sync, _):
        await sync.send_weights(timeout=20)


async def open_engine(backend: str) -> None:
    """Nobody calls `aclose`."""
    context = carried(torch.nn.Linear(3, 2), torch.nn.Linear(3, 2), backend)
    sync, _ = await context.__aenter__()
    await sync.send_weights(timeout=20)
    globals()["kept"] = context, sync


async def waiting(backend: str) -> None:
    """Cancelled while it waits for a worker that never comes."""

    class Never:
        name = "never"

        async def init_weight_transfer_engine(self, *args: object, **options: object) -> None:
            await asyncio.sleep(60)

        capabilities = start_weight_update = init_weight_transfer_engine
        update_weights = finish_weight_update = init_weight_transfer_engine

    cls = aiosync.WeightTransferTrainerFactory.engine_class(backend)
    engine = cls.from_init_info(
        cls.init_info_cls(rank=0), client=Never(), source=torch.nn.Linear(3, 2), hub=None
    )
    task = asyncio.create_task(engine.initialize(timeout=30))
    await asyncio.sleep(0.3)
    task.cancel()
    await asyncio.wait([task])


what, backend = sys.argv[1:]
asyncio.run({"round": round_, "open": open_engine, "waiting": waiting}[what](backend))
