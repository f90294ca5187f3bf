"""A trainer as a process whose workers copy from its memory; ends as told.

``hold``: all of round 2 is announced, and nothing more happens. ``twice``: two rounds, then what it
sent and how the bytes went.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading

import models
import torch

import aiosync


def say(**facts):
    print(json.dumps(facts), flush=True)


async def main(url: str, what: str) -> None:
    model = models.make("many", 7)
    async with aiosync.connect(model, workers=[url], packed_buffer_size_bytes=4096) as sync:
        await sync.send_weights(version=1)
        held = models.fingerprint(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        if what == "hold":

            def finish():
                say(prints=held)
                threading.Event().wait()

            sync.sender.finish = finish
        await sync.send_weights(version=2)
        say(prints=models.fingerprint(model), statistics=sync.sender.statistics())


asyncio.run(main(*sys.argv[1:]))
