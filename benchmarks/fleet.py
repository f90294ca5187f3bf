"""Rounds with one tiny tensor over 1 to 64 members, beside the bare HTTP requests they make.

What is left of a round is its control plane. Raw makes the requests of a round once for each
member, all members at once and each one's in order, to one server that does nothing. All workers
live in one other process, so that two cores do for 64 of them: the figures are of CPU time that
trainer and workers spend together, not of machines that answer in parallel.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import aiosync
from benchmarks import layouts, wire
from benchmarks.control import requests_of_a_round
from benchmarks.measure import alternate, median, medians, payload, record
from benchmarks.processes import peer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.measure import Options
    from benchmarks.processes import Peer

_NBYTES = 64
_COUNTS = (1, 4, 16, 64)


async def run(options: Options) -> AsyncIterator[dict[str, Any]]:
    async with peer() as other:
        requests = await requests_of_a_round(other)
        for count in _COUNTS:
            yield await _measure(other, requests, count, options)


async def _measure(
    other: Peer, requests: list[wire.Request], count: int, options: Options
) -> dict[str, Any]:
    urls = (await other.do("open_many", nbytes=_NBYTES, count=count))["urls"]
    bare = (await other.do("bare", tcp=False))["url"]
    _, model = layouts.build("one", _NBYTES, 1, trains=True)
    phases: list[dict[str, float]] = []
    async with aiosync.connect(model, workers=urls) as sync:

        async def ours() -> float:
            began = time.perf_counter()
            report = await sync.send_weights()
            took = time.perf_counter() - began
            phases.append(report.seconds)
            return took * 1e3

        async def one() -> None:
            async with wire.session(bare, keep_alive=False) as client:
                await wire.make(client, bare, requests)

        async def raw() -> float:
            began = time.perf_counter()
            await asyncio.gather(*[one() for _ in range(count)])
            return (time.perf_counter() - began) * 1e3

        await ours(), await raw()
        phases.clear()
        pairs = await alternate(ours, raw, options.repeat)
    await other.do("close")
    return record(
        "fleet",
        pairs,
        variant=f"{count} members",
        payload=payload(_NBYTES, 1),
        unit="ms",
        target="ratio <= 3",
        members=count,
        ours_per_member=median(pairs.ours) / count,
        raw_per_member=median(pairs.raw) / count,
        requests_per_member=len(requests),
        seconds=medians(phases),
    )
