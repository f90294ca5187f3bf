"""A function of an earlier API on the package."""

from __future__ import annotations

import aiosync


async def mistake(url: str) -> None:
    send = aiosync.trainer_send_weights  # mypy: attr-defined  pyright: reportAttributeAccessIssue
    await send([], {"url": url})
