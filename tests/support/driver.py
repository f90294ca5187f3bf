"""An orchestrator as a process: ``driver.py SECONDS URL...`` announces a round and says its ticket.

Reads nothing, follows the round, and says how it ended.
"""

from __future__ import annotations

import asyncio
import sys

import aiosync


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def main(seconds: str, *urls: str) -> None:
    fleet = aiosync.FleetClient([aiosync.Member(f"m{n}", url) for n, url in enumerate(urls)])
    try:
        async with fleet.round(version=1, timeout=float(seconds)) as rnd:
            say(rnd.ticket.encode())
            report = await rnd.wait()
        say(report.outcome)
    except aiosync.AiosyncError as error:
        say(type(error).__name__)


asyncio.run(main(*sys.argv[1:]))
