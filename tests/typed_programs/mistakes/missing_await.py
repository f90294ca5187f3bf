"""A round that nobody awaits."""

from __future__ import annotations

from torch import nn

import aiosync


async def mistake(url: str) -> None:
    async with aiosync.connect(nn.Linear(4, 2), workers=[url]) as sync:
        sync.send_weights(version=1)  # mypy: unused-coroutine  pyright: reportUnusedCoroutine
