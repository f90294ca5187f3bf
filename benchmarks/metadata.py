"""What 37,000 parameters cost before the first byte moves, and on the wire afterwards.

Ours is connecting and the first round, less what the data phase of a steady round takes: the
fourth one, as the second and third still learn that the models stay where they are. Every
measurement has a fresh trainer and a fresh worker. Raw is one bare request with the same lists,
encoded here and parsed there.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

import aiosync
from benchmarks import layouts, wire
from benchmarks.measure import alternate, median, payload, record, spread
from benchmarks.processes import peer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from torch import nn

    from benchmarks.measure import Options
    from benchmarks.processes import Peer

_LAYOUT = "metadata"
_EACH = 64
_LATER = 3  # rounds after the first one; the last of them is steady


async def run(options: Options) -> AsyncIterator[dict[str, Any]]:
    async with peer() as other:
        yield await _measure(other, options)


async def _measure(other: Peer, options: Options) -> dict[str, Any]:
    tensors = layouts.count(_LAYOUT, options.nbytes)
    bare = (await other.do("bare", tcp=False))["url"]
    flat, model = layouts.build(_LAYOUT, _EACH * tensors, tensors, trains=True)
    phases: list[dict[str, float]] = []
    whole: list[float] = []
    later: list[list[float]] = [[] for _ in range(_LATER)]
    moving: list[float] = []

    async def ours() -> float:
        url = await _worker(other, tensors)
        began = time.perf_counter()
        async with aiosync.connect(model, workers=[url]) as sync:
            connected = time.perf_counter()
            report = await sync.send_weights()
            first = time.perf_counter()
            phases.append({"connect": connected - began, **report.seconds})
            whole.append(first - began)
            for times in later:
                again = time.perf_counter()
                report = await sync.send_weights()
                times.append(time.perf_counter() - again)
            moving.append(report.seconds["update"])
        return whole[-1] - moving[-1]

    async def raw() -> float:
        began = time.perf_counter()
        await _announce(model, bare)
        return time.perf_counter() - began

    await raw()
    pairs = await alternate(ours, raw, options.repeat)
    sent, received = await _later_bytes(other, model, tensors)
    return record(
        "metadata",
        pairs,
        variant="first handshake",
        payload=payload(len(flat), tensors),
        unit="s",
        target="ours < 1 s; later rounds < 10000 control bytes",
        whole_first_s=median(whole),
        whole_first_spread=spread(whole),
        seconds={name: median([phase[name] for phase in phases]) for name in phases[0]},
        steady_update_s=median(moving),
        later_rounds_s=[median(times) for times in later],
        later_rounds_spread=[spread(times) for times in later],
        later_control_bytes=sent + received,
        later_control_bytes_each_way=[sent, received],
    )


async def _worker(other: Peer, tensors: int) -> str:
    answer = await other.do(
        "open",
        layout=_LAYOUT,
        nbytes=_EACH * tensors,
        tensors=tensors,
        sink="staged",
        verify="digest",
        tcp=False,
    )
    return str(answer["url"])


async def _announce(model: nn.Module, url: str) -> None:
    def encode() -> bytes:
        tensors = list(model.named_parameters())
        lists = {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(tensor.dtype) for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
        }
        return msgspec.json.encode(lists)

    body = await asyncio.to_thread(encode)
    async with wire.session(url, keep_alive=False) as client:
        await wire.make(client, url, [wire.Request("POST", "/update_weights", body, 2)])


async def _later_bytes(other: Peer, model: nn.Module, tensors: int) -> tuple[int, int]:
    """Control bytes of the second round, to the worker and back, headers included."""
    async with (
        wire.relay(await _worker(other, tensors)) as seen,
        aiosync.connect(model, workers=[seen.url]) as sync,
    ):
        await sync.send_weights()
        seen.connections.clear()
        await sync.send_weights()
        return seen.nbytes()
