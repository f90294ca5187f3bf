"""A trainer and a fleet of workers in one process, over shared memory, with scripted faults."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import models
import torch

import aiosync
from aiosync import Budget
from aiosync.testing import DirectClient

BUDGET = Budget(total=20.0, stall=5.0, cleanup=1.0)


class Fleet:
    """Workers ``w0`` ... by name, the fleet, and a trainer engine over it."""

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {}
        self.copies: dict[str, Any] = {}
        self.model = models.make("small", 1)
        self.calls: list[tuple[str, str]] = []
        self.faults: dict[tuple[str, str], Callable[[], Any]] = {}
        self.after: dict[tuple[str, str], Callable[[], Any]] = {}
        self.client: Any = None
        self.trainer: Any = None
        self._stack = AsyncExitStack()
        self.backend = "ipc"
        self.sink: Any = "staged"
        self.served: Callable[[Fleet, str], Any] | None = None
        """Makes the client of a worker, instead of a `DirectClient`."""

    async def worker(self, name: str) -> Any:
        """A worker of this name; a second one of the same name is the first one, restarted."""
        copy = models.make("small", 2 + len(self.workers))
        config = aiosync.WeightTransferConfig(self.backend, sink=self.sink)
        engine = aiosync.WeightTransferEngineFactory.create_engine(
            config, None, torch.device("cpu"), copy, name=name
        )
        await self._stack.enter_async_context(engine)
        self.workers[name], self.copies[name] = engine, copy
        return self.client_of(name) if self.served is None else await self.served(self, name)

    def client_of(self, name: str) -> DirectClient:
        async def before(method: str) -> None:
            self.calls.append((name, method))
            fault = self.faults.get((name, method))
            if fault is not None:
                await fault()

        async def after(method: str) -> None:
            fault = self.after.get((name, method))
            if fault is not None:
                await fault()

        return DirectClient(self.workers[name], name=name, before=before, after=after)

    def restart(self, name: str, engine: Any) -> None:
        """Let another engine answer under this name."""
        self.workers[name] = engine
        for client in self.client.roster.standings[name].member.servers:
            client.engine = engine

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1)

    def holders(self) -> set[str]:
        """Names of the workers that hold the trainer's present weights, whole."""
        now = models.fingerprint(self.model)
        return {n for n, copy in self.copies.items() if models.fingerprint(copy) == now}

    async def send(self, **options: Any) -> Any:
        self.change()
        return await self.trainer.send_weights(budget=BUDGET, **options)

    def outcomes(self) -> dict[str, str]:
        return {m.name: m.outcome for m in self.trainer.last_report.members}

    def states(self) -> dict[str, str]:
        return {name: state.value for name, state in self.client.states.items()}

    def routable(self) -> set[str]:
        return {member.name for member in self.client.routable()}


@asynccontextmanager
async def fleet(
    count: int,
    *,
    backend: str = "ipc",
    init: bool = True,
    sink: Any = "staged",
    served: Callable[[Fleet, str], Any] | None = None,
    **options: Any,
):
    """`options` are the fleet client's."""
    it = Fleet()
    it.backend, it.sink, it.served = backend, sink, served
    async with it._stack:
        members = [
            aiosync.Member(name, await it.worker(name)) for name in (f"w{n}" for n in range(count))
        ]
        it.client = aiosync.FleetClient(members, **options)
        info = {"packed": True, "packed_buffer_size_bytes": 4096} if backend == "ipc" else {}
        cls = {
            "ipc": aiosync.IPCTrainerWeightTransferEngine,
            "gloo": aiosync.GlooTrainerWeightTransferEngine,
        }[backend]
        it.trainer = cls(client=it.client, source=it.model, **info)
        await it._stack.enter_async_context(it.trainer)
        if init:
            await it.trainer.initialize()
        yield it
