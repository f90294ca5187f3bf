"""Whole rounds over gloo, beside raw broadcasts of the same bytes in pieces of 64 MiB."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import layouts
from benchmarks.broadcast import Group, free_port
from benchmarks.measure import alternate, median, payload, record, spread
from benchmarks.processes import peer
from benchmarks.setting import setting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.measure import Options
    from benchmarks.processes import Peer

_GB = 1e9


@dataclass(frozen=True)
class _Variant:
    name: str
    layout: str
    target: float
    verify: str = "counts"


VARIANTS = (
    _Variant("in place, counts", "dense", 0.85),
    _Variant("in place, counts", "many", 0.60),
    _Variant("in place, digest", "dense", 0.85, verify="digest"),
    _Variant("in place, digest", "many", 0.60, verify="digest"),
)


async def run(options: Options) -> AsyncIterator[dict[str, Any]]:
    async with peer() as other:
        for variant in VARIANTS:
            yield await _measure(other, variant, options)


async def _measure(other: Peer, variant: _Variant, options: Options) -> dict[str, Any]:
    tensors = layouts.count(variant.layout, options.nbytes)
    async with setting(
        other,
        variant.layout,
        options.nbytes,
        tensors,
        sink="in_place",
        verify=variant.verify,
        backend="gloo",
    ) as pair:
        port = free_port()
        joining = asyncio.create_task(other.do("join", port=port))
        group = await asyncio.to_thread(Group, port, 0)
        await joining
        phases: list[dict[str, float]] = []

        async def ours() -> float:
            seconds, report = await pair.round()
            phases.append(report.seconds)
            return pair.nbytes / seconds / _GB

        async def raw() -> float:
            taking = asyncio.create_task(other.do("take"))
            seconds = await asyncio.to_thread(group.move, pair.flat)
            await taking
            return pair.nbytes / seconds / _GB

        await raw()
        pairs = await alternate(ours, raw, options.repeat)
        updates = [pair.nbytes / phase["update"] / _GB for phase in phases]
        return record(
            "gloo",
            pairs,
            variant=variant.name,
            payload=payload(pair.nbytes, tensors),
            unit="GB/s",
            target=f"ratio >= {variant.target:g}",
            nbytes=pair.nbytes,
            tensors=tensors,
            ours_update=median(updates),
            ours_update_spread=spread(updates),
            seconds={name: median([phase[name] for phase in phases]) for name in phases[0]},
            extra_memory_bytes=pair.extra_nbytes,
        )
