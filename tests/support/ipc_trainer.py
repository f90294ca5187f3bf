"""A trainer on a GPU as a process: sends once and idles, or holds a round, until it is killed."""

from __future__ import annotations

import asyncio
import sys

import models
from paced import Hold, Paced

import aiosync


async def main(url: str, device: str, what: str) -> None:
    kind = "small" if what == "hold" else "large"
    model = models.make(kind, 7, device)
    hold = Hold(3)
    source = Paced(model, hold) if what == "hold" else model
    async with aiosync.connect(source, workers=[url], lease_s=20.0) as sync:
        if what == "hold":
            sync.begin_update(version=1)
            while not hold.reached.is_set():
                await asyncio.sleep(0.005)
            print("holding", flush=True)
        else:
            await sync.send_weights(version=1)
            print("sent", flush=True)
        await asyncio.sleep(60)


asyncio.run(main(*sys.argv[1:]))
