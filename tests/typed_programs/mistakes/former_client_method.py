"""A method of an earlier API on the client."""

from __future__ import annotations

import aiosync


async def mistake(url: str) -> None:
    client = aiosync.HTTPVLLMWeightSyncClient(url)
    client.init_weight_update_group()  # mypy: attr-defined  pyright: reportAttributeAccessIssue
