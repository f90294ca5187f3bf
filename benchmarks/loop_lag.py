"""How late the trainer's event loop wakes a 5 ms sleeper while weights move.

Raw is the floor of the same machine in the same run: a thread copies the same bytes through a
plain ring to the other process, and nothing of this package runs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from benchmarks import layouts
from benchmarks.measure import Pairs, alternate, median, payload, percentile, record, spread
from benchmarks.processes import peer
from benchmarks.setting import setting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from benchmarks.measure import Options
    from benchmarks.processes import Peer

_SLEEP_S = 0.005
_P = 0.99


async def run(options: Options) -> AsyncIterator[dict[str, Any]]:
    async with peer() as other:
        for layout in ("dense", "many"):
            yield await _measure(other, layout, options)


async def _measure(other: Peer, layout: str, options: Options) -> dict[str, Any]:
    mine: list[float] = []
    floor: list[float] = []
    tensors = layouts.count(layout, options.nbytes)
    async with setting(other, layout, options.nbytes, tensors) as pair:

        async def ours() -> float:
            return await lag_of(pair.round(), mine)

        async def raw() -> float:
            return await lag_of(pair.two_copies(), floor)

        await pair.two_copies()  # the first one pays for pages
        turns = await alternate(ours, raw, options.repeat)
        nbytes = pair.nbytes
    # Of all wake-ups together: a single round has too few for a 99th percentile.
    pooled = Pairs([percentile(mine, _P)], [percentile(floor, _P)])
    return record(
        "loop_lag",
        pooled,
        variant="staged, digest",
        payload=payload(nbytes, tensors),
        unit="ms (p99)",
        target="ours <= raw + 2 ms",
    ) | {
        "repeat": options.repeat,
        "ours_spread": spread(turns.ours),
        "raw_spread": spread(turns.raw),
        "ratio_spread": spread(turns.ratios()),
        "excess_ms": round(pooled.ours[0] - pooled.raw[0], 3),
        "ours_p50": median(mine),
        "raw_p50": median(floor),
        "ours_max": median([max(mine)]),
        "raw_max": median([max(floor)]),
        "wake_ups": [len(mine), len(floor)],
    }


async def lag_of(work: Awaitable[object], lags: list[float]) -> float:
    """Milliseconds that the sleeper was late while `work` ran; their 99th percentile."""
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(work)
    found: list[float] = []
    while not found or not running.done():
        began = loop.time()
        await asyncio.sleep(_SLEEP_S)
        found.append((loop.time() - began - _SLEEP_S) * 1e3)
    await running
    lags += found
    return percentile(found, _P)
