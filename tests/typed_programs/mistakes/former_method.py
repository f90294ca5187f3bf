"""A method of an earlier API on the engine."""

from __future__ import annotations

from torch import nn

import aiosync


async def mistake(url: str) -> None:
    model = nn.Linear(4, 2)
    async with aiosync.connect(model, workers=[url]) as sync:
        sync.trainer_send_weights(  # mypy: attr-defined  pyright: reportAttributeAccessIssue
            model.named_parameters()
        )
