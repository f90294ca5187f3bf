"""Ranks of this process in a served group, and models of one value."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch
from torch import nn

import aiosync
from aiosync import WeightTransferConfig, WorkerGroup
from aiosync.testing import DirectClient


@asynccontextmanager
async def near_group(
    *models: Any, configs: Sequence[WeightTransferConfig], **options: Any
) -> AsyncIterator[tuple[list[Any], WorkerGroup, str]]:
    """Engines over `models`, their group, and its URL.

    Args:
        models: One for each rank.
        configs: One for each rank, or one for all.
        options: Of the group.
    """
    create = aiosync.WeightTransferEngineFactory.create_engine
    async with AsyncExitStack() as stack:
        engines = []
        for number, model in enumerate(models):
            engine = create(configs[number % len(configs)], model=model, name=f"r{number}")
            engines.append(await stack.enter_async_context(engine))
        clients = [DirectClient(engine, name=engine.name) for engine in engines]
        group = WorkerGroup(clients, **{"name": "tp", "heartbeat_s": 5.0, **options})
        await stack.enter_async_context(group)
        server = await stack.enter_async_context(aiosync.serve(group))
        yield engines, group, server.url


def trained(value: float, *, bias: bool = True) -> nn.Module:
    """A model all of whose parameters are `value`."""
    model = nn.Linear(64, 64, bias=bias)
    fill(model, value)
    return model


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def held(model: nn.Module) -> set[float]:
    """All values in it."""
    return {float(v) for p in model.parameters() for v in p.detach().unique()}
