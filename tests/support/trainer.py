"""A trainer as a process: connects, begins a round, and holds or ends it as told."""

from __future__ import annotations

import argparse
import asyncio
import sys

import models
from paced import Hold, Paced

import aiosync


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--hold", type=int, default=-1)
    parser.add_argument("--version", type=int, default=1)
    parser.add_argument("--lease", type=float)
    parser.add_argument("--kind", default="small")
    parser.add_argument("--pause", action="store_true")
    options = parser.parse_args()
    hold = Hold(options.hold)
    source = Paced(models.make(options.kind, 7), hold)
    try:
        async with aiosync.connect(
            source, workers=[options.url], packed_buffer_size_bytes=4096, lease_s=options.lease
        ) as sync:
            say("connected")
            pause = aiosync.Pause() if options.pause else None
            update = sync.begin_update(version=options.version, pause=pause)
            if options.hold >= 0:
                while not hold.reached.is_set():
                    await asyncio.sleep(0.005)
                say("holding")
            report = await update
            say(report.outcome)
    except aiosync.AiosyncError as error:
        say(type(error).__name__)


try:
    asyncio.run(main())
except KeyboardInterrupt:
    say("interrupted")
    sys.exit(130)
