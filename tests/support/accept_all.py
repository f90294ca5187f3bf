"""An orchestrator as a process: accepts whatever a gateway is offered."""

from __future__ import annotations

import asyncio
import sys

from aiosync import GatewayClient


async def main(url: str) -> None:
    async with GatewayClient(url) as client:
        async for offer in client.offers():
            await offer.accept()


asyncio.run(main(sys.argv[1]))
