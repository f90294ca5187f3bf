"""A commit policy that is a number."""

from __future__ import annotations

import aiosync


async def mistake(url: str) -> None:
    aiosync.FleetClient([url], policy=2)  # mypy: arg-type  pyright: reportArgumentType
