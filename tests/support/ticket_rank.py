"""A trainer as a process: connects to URLs, reads a ticket from stdin, carries it out."""

from __future__ import annotations

import asyncio
import sys

import models
from paced import Hold, Paced

import aiosync


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def main(hold_at: str, *urls: str) -> None:
    hold = Hold(int(hold_at))
    source = Paced(models.make("small", 7), hold)
    loop = asyncio.get_running_loop()
    async with aiosync.connect(source, workers=list(urls), packed_buffer_size_bytes=4096) as sync:
        say("connected")
        word = await loop.run_in_executor(None, sys.stdin.readline)
        update = sync.begin_update(ticket=word.strip())
        if hold.at >= 0:
            while not hold.reached.is_set():
                await asyncio.sleep(0.005)
            say("holding")
        try:
            say((await update).outcome)
        except aiosync.AiosyncError as error:
            say(type(error).__name__)
        hold.released.set()


asyncio.run(main(*sys.argv[1:]))
