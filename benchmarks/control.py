"""A round with one tiny tensor, beside the bare HTTP requests that it makes.

Raw sends requests of the same number, kind and size with the same HTTP library to a server that
does nothing: each over a connection of its own. `raw_by_round` makes them
as a round does, over one connection for all of its requests, and `raw_keep_alive` over one
connection for all rounds.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import aiosync
from benchmarks import layouts, wire
from benchmarks.measure import alternate, median, medians, payload, record, spread
from benchmarks.processes import peer
from benchmarks.setting import setting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.measure import Options
    from benchmarks.processes import Peer

_NBYTES = 64
_BATCH = 10  # rounds per measurement: one alone is shorter than a hiccup of the machine


async def run(options: Options) -> AsyncIterator[dict[str, Any]]:
    async with peer() as other:
        requests = await requests_of_a_round(other)
        for tcp in (False, True):
            yield await _measure(other, requests, options, tcp=tcp)


async def requests_of_a_round(other: Peer) -> list[wire.Request]:
    """What a round sends, once everything is known to both sides."""
    answer = await other.do(
        "open", layout="one", nbytes=_NBYTES, tensors=1, sink="staged", verify="digest", tcp=False
    )
    _, model = layouts.build("one", _NBYTES, 1, trains=True)
    async with (
        wire.relay(answer["url"]) as seen,
        aiosync.connect(model, workers=[seen.url]) as sync,
    ):
        await sync.send_weights()
        seen.connections.clear()
        await sync.send_weights()
        return seen.requests()


async def _measure(
    other: Peer, requests: list[wire.Request], options: Options, *, tcp: bool
) -> dict[str, Any]:
    bare = (await other.do("bare", tcp=tcp))["url"]
    kept: list[float] = []
    by_round: list[float] = []
    async with (
        setting(other, "one", _NBYTES, 1, tcp=tcp) as pair,
        wire.session(bare, keep_alive=True) as lasting,
    ):

        async def ours() -> float:
            return sum([(await pair.round())[0] for _ in range(_BATCH)]) / _BATCH * 1e3

        async def raw() -> float:
            began = time.perf_counter()
            for _ in range(_BATCH):
                async with wire.session(bare, keep_alive=False) as client:
                    await wire.make(client, bare, requests)
            single = time.perf_counter()
            for _ in range(_BATCH):
                async with wire.session(bare, keep_alive=True) as client:
                    await wire.make(client, bare, requests)
            rounds = time.perf_counter()
            for _ in range(_BATCH):
                await wire.make(lasting, bare, requests)
            kept.append((time.perf_counter() - rounds) / _BATCH * 1e3)
            by_round.append((rounds - single) / _BATCH * 1e3)
            return (single - began) / _BATCH * 1e3

        await ours(), await raw()
        kept.clear()
        by_round.clear()
        pairs = await alternate(ours, raw, options.repeat)
        phases = [(await pair.round())[1].seconds for _ in range(options.repeat)]
    return record(
        "control",
        pairs,
        variant="TCP" if tcp else "Unix socket",
        payload=payload(_NBYTES, 1),
        unit="ms",
        target="ratio <= 3",
        requests=[f"{request.method} {request.target}" for request in requests],
        raw_by_round=median(by_round),
        raw_by_round_spread=spread(by_round),
        ratio_by_round=median([ours / raw for ours, raw in zip(pairs.ours, by_round, strict=True)]),
        raw_keep_alive=median(kept),
        raw_keep_alive_spread=spread(kept),
        seconds=medians(phases),
    )
