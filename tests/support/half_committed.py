"""A driver as a process that is killed between two members' commits.

``half_committed.py trainer|driver|gateway[=RECORD] URL...``: brings version 1 to all, then lets
``m0`` commit version 2, and kills itself (SIGKILL) before anybody else is told to.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import models
import torch

import aiosync

LINEAGE = "run"
_COMMITS = ("finish_weight_update", "round_ticket/commit")


class Dying(aiosync.HTTPVLLMWeightSyncClient):  # type: ignore[misc]
    """Once `Dying.armed`, the second member that is to commit finds its driver dead."""

    armed = False
    committed = asyncio.Event()

    def __init__(self, name: str, url: str) -> None:
        super().__init__(url)
        self.member = name

    async def _do(self, route: str, *args: Any, **options: Any) -> Any:
        if not (self.armed and route in _COMMITS):
            return await super()._do(route, *args, **options)
        if self.member != "m0":
            await self.committed.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        reply = await super()._do(route, *args, **options)
        self.committed.set()
        return reply


MODEL = models.make("small", 7)


def connected(workers: list[Any]) -> Any:
    return aiosync.connect(MODEL, workers=workers, lineage=LINEAGE, lease_s=1.0)


def arm() -> None:
    with torch.no_grad():
        for parameter in MODEL.parameters():
            parameter.add_(1)
    Dying.armed = True


async def trainer(fleet: aiosync.FleetClient) -> None:
    async with connected(list(fleet.members)) as sync:
        await sync.send_weights(version=1)
        arm()
        await sync.send_weights(version=2, pause=aiosync.Pause(scope="round"))


async def driver(fleet: aiosync.FleetClient) -> None:
    async with connected(sys.argv[2:]) as sync:
        await sync.send_weights(version=1)
        arm()
        async with fleet.round(version=2, lineage=LINEAGE, timeout=3) as rnd:
            await sync.send_weights(ticket=rnd.ticket)


async def gateway(fleet: aiosync.FleetClient, record: str | None = None) -> None:
    async def accept() -> None:
        async for offer in gate.offers():
            await offer.accept()

    async with aiosync.FleetGateway(fleet, record=record) as gate, aiosync.serve(gate) as server:
        deciding = asyncio.create_task(accept())
        async with connected([server.url]) as sync:
            await sync.send_weights(version=1)
            arm()
            await sync.send_weights(version=2)
        deciding.cancel()


async def main(who: str, *urls: str) -> None:
    members = [aiosync.Member(f"m{n}", Dying(f"m{n}", url)) for n, url in enumerate(urls)]
    drive = {"trainer": trainer, "driver": driver, "gateway": gateway}
    kind, _, record = who.partition("=")
    await drive[kind](aiosync.FleetClient(members), *filter(None, [record]))
    sys.stdout.write("alive\n")


asyncio.run(main(*sys.argv[1:]))
