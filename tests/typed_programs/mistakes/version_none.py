"""A version that was never set."""

from __future__ import annotations

from torch import nn

import aiosync


async def mistake(url: str) -> None:
    async with aiosync.connect(nn.Linear(4, 2), workers=[url]) as sync:
        await sync.send_weights(version=None)  # mypy: arg-type  pyright: reportArgumentType
