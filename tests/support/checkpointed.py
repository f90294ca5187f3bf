"""A training run that checkpoints, and goes on from its checkpoint when started again."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

import models
from paced import Hold, Paced

import aiosync


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--upto", type=int, required=True)
    parser.add_argument("--save", type=int, default=0)
    parser.add_argument("--stop", choices=["after", "inside"])
    options = parser.parse_args()
    step = 0
    if await asyncio.to_thread(options.checkpoint.exists):
        step = json.loads(await asyncio.to_thread(options.checkpoint.read_text))["step"]
    hold = Hold(-1)
    model = models.make("small", os.getpid())  # no two runs compute the same
    source = Paced(model, hold)
    async with aiosync.connect(source, workers=[options.url], lease_s=3.0) as sync:
        while step < options.upto:
            step += 1
            for parameter in model.parameters():
                parameter.data.add_(1)
            await sync.send_weights(version=step)
            if step == options.save:
                text = json.dumps({"step": step})
                await asyncio.to_thread(options.checkpoint.write_text, text)
            say(f"{step} {models.fingerprint(model)['0.weight']}")
        if options.stop == "inside":
            hold.at = 2
            update = sync.begin_update(version=step + 1)
            while not hold.reached.is_set():
                await asyncio.sleep(0.005)
            say("stopped")
            await update
        if options.stop == "after":
            say("stopped")
            await asyncio.sleep(60)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


asyncio.run(main())
