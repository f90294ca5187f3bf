"""A replica of several rank processes, and what a test may do to one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import models
import sliced
import torch
from processes import Replica, replica

import aiosync
from aiosync import Budget, HTTPVLLMWeightSyncClient, WorkerGroup

BUDGET = Budget(total=20.0, stall=10.0, finish=10.0, cleanup=2.0)
# Of rounds in which a cause that is known on the other side has the time to get here.
LONG = Budget(total=40.0, stall=20.0, finish=20.0, cleanup=8.0)
BEAT = 0.2
MISSES = 8  # one that ended is noticed at once, and a busy one is no stopped one
PHASES = {
    "start": "start_weight_update",
    "update": "update_weights",
    "prepare": "prepare_weight_update",
    "finish": "finish_weight_update",
}


class Tripwire:
    """A rank's client; does something to the rank's process before or after one of its calls."""

    def __init__(self, url: str) -> None:
        self._client = HTTPVLLMWeightSyncClient(url)
        self.before: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def __aenter__(self) -> Any:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.__aexit__(*exc)

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        action = self.before.pop(method, None)
        if action is not None:
            await action()
        return await getattr(self._client, method)(*args, **options)

    async def init_weight_transfer_engine(self, info, **options):
        return await self._call("init_weight_transfer_engine", info, **options)

    async def start_weight_update(self, **options):
        return await self._call("start_weight_update", **options)

    async def update_weights(self, info, **options):
        return await self._call("update_weights", info, **options)

    async def prepare_weight_update(self, **options):
        return await self._call("prepare_weight_update", **options)

    async def finish_weight_update(self, label=None, **options):
        return await self._call("finish_weight_update", label, **options)


@dataclass
class Parallel:
    """A served group over rank processes, and what the trainer holds."""

    url: str
    group: WorkerGroup
    clients: list[Tripwire]
    ranks: list[Replica]
    model: torch.nn.Module
    options: list[dict[str, Any]]
    """Of each rank's process."""

    def set(self, seed: int) -> None:
        self.model.load_state_dict(sliced.full(seed).state_dict())

    @asynccontextmanager
    async def replaced(self, rank: int) -> AsyncIterator[Replica]:
        """A new process takes the place of a rank that ended."""
        own = {"seed": 5, **self.options[rank]}
        async with replica(**own) as self.ranks[rank]:
            yield self.ranks[rank]

    async def until_found(self, rank: int, *, restarted: bool = False) -> None:
        """Wait until the group has heard of a rank that was lost."""
        known = self.group.ranks[rank]
        while known.lost is not None or (restarted and not known.link.restarted):
            await asyncio.sleep(0.05)

    async def assert_mended(self, sync: Any, seed: int, version: int, budget: Budget) -> None:
        """The next round reaches every rank, and is whole."""
        self.set(seed)
        await sync.send_weights(version=version, budget=budget)
        await self.assert_ranks_hold(seed, version)
        assert self.group.peer_state().weights == "intact"

    async def assert_ranks_hold(self, seed: int, version: int, *, only=None) -> None:
        """Asked of every rank's own process, not of the group."""
        for index, rank in enumerate(self.ranks):
            if only is not None and index not in only:
                continue
            facts = await rank.facts()
            expected = sliced.Slice(index, len(self.ranks), seed)
            assert facts["prints"] == models.fingerprint(expected)
            assert (facts["version"], facts["weights"]) == (version, "intact")

    def assert_not_ready(self, *weights: str) -> None:
        peer = self.group.peer_state()
        assert peer.weights in weights
        assert peer.version is None


@asynccontextmanager
async def parallel(
    size: int = 2, *, rank: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Parallel]:
    """Ranks of a tensor-parallel model, and a server in front of them.

    Args:
        size: How many.
        rank: Further options of the rank processes (`replica.py`).
        options: Of the group.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="ranks-")))
        own, ranks = [], []
        for index in range(size):
            kind = {"kind": f"slice-{index}-{size}", "path": folder / str(index)}
            own.append({**kind, **(rank or {})})
            ranks.append(await stack.enter_async_context(replica(**{"seed": index, **own[index]})))
        clients = [Tripwire(rank.url) for rank in ranks]
        options = {"heartbeat_s": BEAT, "misses": MISSES, **options}
        group = WorkerGroup(clients, name="tp", **options)
        await stack.enter_async_context(group)
        server = await stack.enter_async_context(aiosync.serve(group))
        yield Parallel(server.url, group, clients, ranks, sliced.full(7), own)


def unhurried(size: int = 2, **options: Any) -> AbstractAsyncContextManager[Parallel]:
    """`parallel`: a process that ends is noticed at once; one that is slow is not given up."""
    return parallel(size, **{"heartbeat_s": 0.2, "misses": 50, **options})
