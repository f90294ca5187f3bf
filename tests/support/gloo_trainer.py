"""A gloo trainer as a process: connects, begins a round, and holds it until it is killed."""

from __future__ import annotations

import asyncio
import sys

import models
from paced import Hold, Paced

import aiosync


async def main(url: str) -> None:
    hold = Hold(3)
    source = Paced(models.make("small", 7), hold)
    options = {"backend": "gloo", "buffer_size_bytes": 4096, "lease_s": 20.0}
    async with aiosync.connect(source, workers=[url], **options) as sync:
        sync.begin_update(version=1)
        while not hold.reached.is_set():
            await asyncio.sleep(0.005)
        sys.stdout.write("holding\n")
        sys.stdout.flush()
        await asyncio.sleep(60)


asyncio.run(main(sys.argv[1]))
