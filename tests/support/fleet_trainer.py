"""A fleet's trainer as a process: begins a round, holds it in the middle, and goes on by itself."""

from __future__ import annotations

import asyncio
import sys

import models
from paced import Hold, Paced

import aiosync


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def main(policy: str, urls: list[str]) -> None:
    hold = Hold(3)
    engine = aiosync.IPCTrainerWeightTransferEngine(
        client=aiosync.FleetClient(urls, policy=policy),
        source=Paced(models.make("small", 7), hold),
        packed=True,
        packed_buffer_size_bytes=4096,
        lease_s=2.0,
    )
    async with engine:
        await engine.initialize()
        update = engine.begin_update(version=1)
        while not hold.reached.is_set():
            await asyncio.sleep(0.005)
        say("holding")
        await asyncio.sleep(0.3)
        hold.released.set()
        try:
            say((await update).outcome)
            await engine.send_weights(version=2)
        except aiosync.AiosyncError as error:
            say(type(error).__name__)
        try:
            await engine.send_weights(version=3)
        except aiosync.AiosyncError as error:
            say(type(error).__name__)


asyncio.run(main(sys.argv[1], sys.argv[2:]))
