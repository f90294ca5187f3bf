"""A trainer as a process: sends once and idles, or holds a round, until it is killed.

Or it sends twice, says what it sent and whether it sees a GPU, and ends.
"""

from __future__ import annotations

import asyncio
import json
import sys

import models
import torch
from paced import Hold, Paced

import aiosync


async def twice(url: str, device: str) -> None:
    model = models.make("odd", 7, device)
    async with aiosync.connect(model, workers=[url], backend="ipc") as sync:
        for version in (1, 2):
            with torch.no_grad():
                model.big.add_(version)
            report = await sync.send_weights(version=version, timeout=20)
            assert report.verified
    facts = {"prints": models.fingerprint(model), "sees_gpu": torch.cuda.is_available()}
    print(json.dumps(facts), flush=True)


async def main(url: str, device: str, what: str) -> None:
    if what == "twice":
        await twice(url, device)
        return
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
