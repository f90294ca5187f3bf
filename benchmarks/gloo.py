"""Whole rounds over gloo, beside raw broadcasts of the same bytes in pieces of 64 MiB."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from benchmarks.broadcast import Group, free_port
from benchmarks.cpu_rounds import Variant, measure, pair_for
from benchmarks.measure import GB
from benchmarks.processes import peer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.measure import Options
    from benchmarks.processes import Peer

VARIANTS = (
    Variant("in place, counts", "dense", 0.85),
    Variant("in place, counts", "many", 0.60),
    Variant("in place, digest", "dense", 0.85, verify="digest"),
    Variant("in place, digest", "many", 0.60, verify="digest"),
)


async def run(options: Options) -> AsyncIterator[dict[str, Any]]:
    async with peer() as other:
        for variant in VARIANTS:
            yield await _measure(other, variant, options)


async def _measure(other: Peer, variant: Variant, options: Options) -> dict[str, Any]:
    async with pair_for(other, variant, options, backend="gloo") as pair:
        port = free_port()
        joining = asyncio.create_task(other.do("join", port=port))
        group = await asyncio.to_thread(Group, port, 0)
        await joining

        async def raw() -> float:
            taking = asyncio.create_task(other.do("take"))
            seconds = await asyncio.to_thread(group.move, pair.flat)
            await taking
            return pair.nbytes / seconds / GB

        await raw()
        return await measure("gloo", pair, variant, raw, options)
