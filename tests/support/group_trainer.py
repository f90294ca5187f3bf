"""A trainer of a collective group as a process: holds a round until it is killed."""

from __future__ import annotations

import asyncio
import sys

import models
from paced import Hold, Paced

import aiosync


async def main(url: str, backend: str = "gloo", device: str = "cpu") -> None:
    hold = Hold(3)
    source = Paced(models.make("small", 7, device), hold)
    size = "buffer_size_bytes" if backend == "gloo" else "packed_buffer_size_bytes"
    options = {"backend": backend, size: 4096, "lease_s": 20.0}
    async with aiosync.connect(source, workers=[url], **options) as sync:
        sync.begin_update(version=1)
        while not hold.reached.is_set():
            await asyncio.sleep(0.005)
        sys.stdout.write("holding\n")
        sys.stdout.flush()
        await asyncio.sleep(60)


asyncio.run(main(*sys.argv[1:]))
