"""Seconds where a `Budget` is meant."""

from __future__ import annotations

from torch import nn

import aiosync


async def mistake(url: str) -> None:
    async with aiosync.connect(nn.Linear(4, 2), workers=[url]) as sync:
        await sync.send_weights(budget=30)  # mypy: arg-type  pyright: reportArgumentType
