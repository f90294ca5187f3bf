"""A trainer of several ranks in this process, over a fleet of workers."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import models
import torch
from fleets import BUDGET, fleet

import aiosync
from aiosync.gathering import _Guest, _Host
from aiosync.ranks import TrainerRanks
from transports.star_door import StarHub
from transports.waker import Waker

ENGINES = {
    "ipc": aiosync.IPCTrainerWeightTransferEngine,
    "gloo": aiosync.GlooTrainerWeightTransferEngine,
}


async def tables(size):
    """The ranks of a trainer, all in this process."""
    hub = StarHub("127.0.0.1")
    seats = [_Host(hub, size)]
    seats += [_Guest(hub.address, hub.token, rank, size) for rank in range(1, size)]
    limit = time.monotonic() + 20

    def sit(seat):
        return TrainerRanks(seat.sit_down(waker=Waker(), deadline=limit), seat)

    return await asyncio.gather(*(asyncio.to_thread(sit, seat) for seat in seats))


@asynccontextmanager
async def ranks_over(members, *, backend="ipc", size=2, **options):
    """A fleet, and a trainer of `size` ranks of which the first sends."""
    async with fleet(members, backend=backend, init=False, **options) as it:
        engines = [it.trainer]
        for rank in range(1, size):
            other = ENGINES[backend](
                client=None, source=models.make("small", 1), is_sender=False, rank=rank
            )
            engines.append(await it._stack.enter_async_context(other))
        for engine, table in zip(engines, await tables(size), strict=True):
            engine.ranks = table
        await asyncio.gather(*(engine.initialize() for engine in engines))

        async def send(**given):
            it.change()
            for engine in engines[1:]:
                with torch.no_grad():
                    for parameter in engine.source.module.parameters():
                        parameter.add_(1)
            calls = [engine.send_weights(budget=BUDGET, **given) for engine in engines]
            return await asyncio.gather(*calls, return_exceptions=True)

        it.send = send
        yield it, engines
