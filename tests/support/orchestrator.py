"""An orchestrator as a process: looks at a gateway's first offer, accepts it, or asks."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from aiosync import GatewayClient


def say(what: object) -> None:
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


async def main(url: str, task: str) -> None:
    async with GatewayClient(url) as client:
        if task == "ask":
            say(await client.rounds())
            return
        offers = client.offers()
        offer = await anext(offers)
        if task == "accept":
            await offer.accept()
        say(offer.record)
        await asyncio.sleep(60)


asyncio.run(main(*sys.argv[1:]))
