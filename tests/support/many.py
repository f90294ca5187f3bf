"""A fleet of replica processes behind clients that tests can hook into."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import models
import torch
from paced import Paced
from processes import Replica, replica

import aiosync
from aiosync import Budget

BUDGET = Budget(total=30.0, stall=10.0, cleanup=1.0)


class Hooked(aiosync.HTTPVLLMWeightSyncClient):  # type: ignore[misc]
    """Awaits ``before(method)`` ahead of every call."""

    before: Callable[[str], Any] | None = None

    async def _do(self, route: str, *args: Any, **options: Any) -> Any:
        if self.before is not None:
            await self.before(route)
        return await super()._do(route, *args, **options)


class Many:
    """Replicas ``w0`` ... by name, their clients, and a trainer engine over all of them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.replicas: dict[str, Replica] = {}
        self.clients: dict[str, Hooked] = {}
        self.model = models.make(kind, 1)
        self.source = Paced(self.model)
        self.fleet: Any = None
        self.trainer: Any = None
        self._stack = AsyncExitStack()

    async def start(self, name: str, path: str | None = None) -> aiosync.Member:
        options = {} if path is None else {"path": path}
        seed = 2 + len(self.replicas)
        it = replica(kind=self.kind, seed=seed, name=name, **options)
        self.replicas[name] = await self._stack.enter_async_context(it)
        self.clients[name] = Hooked(self.replicas[name].url)
        return aiosync.Member(name, self.clients[name])

    async def send(self, **options: Any) -> Any:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1)
        return await self.trainer.send_weights(budget=BUDGET, **options)

    async def holders(self, *names: str) -> set[str]:
        """Of these replicas, those that serve the trainer's present weights."""
        now = models.fingerprint(self.model)
        facts = await asyncio.gather(*[self.replicas[name].facts() for name in names])
        return {n for n, f in zip(names, facts, strict=True) if f["prints"] == now}

    def routable(self) -> set[str]:
        return {member.name for member in self.fleet.routable()}

    def states(self) -> dict[str, str]:
        return {name: state.value for name, state in self.fleet.states.items()}

    async def until(self, name: str, *states: str, seconds: float = 20.0) -> None:
        async with asyncio.timeout(seconds):
            while self.states()[name] not in states:
                await asyncio.sleep(0.02)

    def at(self, name: str, route: str, act: Callable[[], Any]) -> None:
        """Once, before that call to this member."""

        async def before(called: str) -> None:
            if called == route:
                self.clients[name].before = None
                result = act()
                if result is not None:
                    await result

        self.clients[name].before = before

    def stop(self, name: str) -> None:
        self.replicas[name].signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self.replicas[name].signal(signal.SIGCONT)

    async def kill(self, name: str) -> None:
        await self.replicas[name].kill()


@asynccontextmanager
async def many(
    count: int, *, kind: str = "small", buffer: int = 4096, initialized: bool = True, **options: Any
):
    """`options` are the fleet client's."""
    it = Many(kind)
    async with it._stack:
        names = [f"w{number}" for number in range(count)]
        members = await asyncio.gather(*[it.start(name) for name in names])
        it.fleet = aiosync.FleetClient(members, **options)
        it.trainer = aiosync.IPCTrainerWeightTransferEngine(
            client=it.fleet, source=it.source, packed=True, packed_buffer_size_bytes=buffer
        )
        await it._stack.enter_async_context(it.trainer)
        if initialized:
            await it.trainer.initialize()
        yield it
