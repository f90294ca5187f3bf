"""The blocking front door inside a coroutine."""

from __future__ import annotations

from torch import nn

import aiosync.blocking


async def mistake(url: str) -> None:
    with aiosync.blocking.connect(nn.Linear(4, 2), workers=[url]) as sync:
        await sync.send_weights(version=1)  # mypy: misc  pyright: reportGeneralTypeIssues
