"""Whole rounds over NCCL, beside raw broadcasts of the same bytes between the same processes.

Raw is `ncclBroadcast` in pieces of 1 GiB from one buffer into another, over a group of its own;
nothing is packed or loaded. Both sides' update phase is compared with it: from the first control
call of the phase to the worker's answer that every tensor is in its place.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import aiosync
from benchmarks import gpu_models
from benchmarks.loop_lag import lag_of
from benchmarks.measure import (
    GB,
    Pairs,
    alternate,
    median,
    medians,
    payload,
    percentile,
    record,
    spread,
)
from benchmarks.processes import peer
from transports.cuda import WorkQueue, cuda_device, poll
from transports.lane import Lane
from transports.nccl_group import NcclGroup, new_unique_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.measure import Options
    from benchmarks.processes import Peer

PIECE = 1 << 30
_LIMIT_S = 60.0


@dataclass(frozen=True)
class _Variant:
    name: str
    payload: str
    target: str
    sink: str = "in_place"
    verify: str = "counts"
    repeat: int | None = None
    graded: bool = True


VARIANTS = (
    _Variant("in place, counts", "dense", "ratio >= 0.98"),
    _Variant("in place, counts", "moe", "ratio >= 0.98"),
    _Variant("in place, counts, vLLM's chunks", "dense", "none", repeat=3, graded=False),
    _Variant("in place, counts, vLLM's chunks", "moe", "none", repeat=3, graded=False),
    _Variant("in place, digest", "dense", "none", verify="digest", repeat=3),
    _Variant("staged, digest", "moe", "none", sink="staged", verify="digest", repeat=3),
)


async def run(options: Options) -> AsyncIterator[dict[str, Any]]:
    if not torch.cuda.is_available():
        print("nccl: skipped, there is no CUDA device", file=sys.stderr)
        return
    torch.cuda.set_device(cuda_device())
    async with peer("benchmarks.peers.gpu") as other, Lane("raw") as lane:
        raw = await Raw.joined(other, lane)
        for variant in VARIANTS:
            yield await _measure(other, raw, variant, options)
        await raw.close()


class Raw:
    """This side of the raw group."""

    def __init__(self, other: Peer, lane: Lane, group: NcclGroup) -> None:
        self._other, self._lane, self._group = other, lane, group
        self._queue = WorkQueue(group.device, urgent=True)
        self._buffer = torch.zeros(PIECE, dtype=torch.uint8, device=group.device)

    @classmethod
    async def joined(cls, other: Peer, lane: Lane) -> Raw:
        unique_id = new_unique_id()
        group = NcclGroup(0, 2, device=cuda_device())
        joining = asyncio.create_task(other.do("join", unique_id=unique_id.hex()))
        await lane.run(lambda: group.join(unique_id, timeout=_LIMIT_S))
        await joining
        torch.cuda.synchronize()
        return cls(other, lane, group)

    async def seconds(self, nbytes: int, *, synchronizes: bool = False) -> float:
        """Of one broadcast of everything, from a worker that waits to the last byte."""
        await self._other.do("receive", nbytes=nbytes)
        began = time.perf_counter()
        await self._lane.run(self._send, nbytes, synchronizes)
        seconds = time.perf_counter() - began
        await self._other.do("received")
        return seconds

    def _send(self, nbytes: int, synchronizes: bool) -> None:
        broadcast_all(self._group, self._buffer, nbytes, self._queue, synchronizes=synchronizes)

    async def close(self) -> None:
        await self._other.do("leave")
        await self._lane.run(self._group.abort)


def broadcast_all(
    group: NcclGroup,
    buffer: torch.Tensor,
    nbytes: int,
    queue: WorkQueue,
    *,
    synchronizes: bool = False,
) -> None:
    """One side of a raw broadcast, piece by piece from or into the same buffer."""
    left = nbytes
    while left > 0:
        group.broadcast(buffer[: min(left, PIECE)], queue, timeout=_LIMIT_S)
        left -= PIECE
    if synchronizes:
        queue.stream.synchronize()
    else:
        poll(queue.record(), group.check, limit=_LIMIT_S)


async def _measure(other: Peer, raw: Raw, variant: _Variant, options: Options) -> dict[str, Any]:
    device = cuda_device()
    model = gpu_models.build(variant.payload, device, trains=True)
    nbytes, tensors = gpu_models.nbytes(model), len(list(model.parameters()))
    opened = await other.do(
        "open", payload=variant.payload, sink=variant.sink, verify=variant.verify
    )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    rounds: list[float] = []
    phases: list[dict[str, float]] = []
    lags: list[float] = []
    floor: list[float] = []
    async with aiosync.connect(
        model, workers=[opened["url"]], backend="nccl", graded=variant.graded
    ) as sync:
        first = time.perf_counter()
        await sync.send_weights()
        first = time.perf_counter() - first
        extra = torch.cuda.max_memory_allocated() - held
        peak = await other.do("peak")
        if (await other.do("checksum"))["sum"] != await asyncio.to_thread(
            gpu_models.checksum, model
        ):
            raise RuntimeError("the worker has other bits than the trainer")

        async def ours() -> float:
            began = time.perf_counter()
            report = await sync.send_weights()
            rounds.append(time.perf_counter() - began)
            phases.append(report.seconds)
            return nbytes / report.seconds["update"] / GB

        async def beside() -> float:
            return nbytes / await raw.seconds(nbytes) / GB

        await ours(), await beside()
        rounds.clear()
        phases.clear()
        pairs = await alternate(ours, beside, variant.repeat or options.repeat)
        whole = [nbytes / seconds / GB for seconds in rounds]
        blocked = [nbytes / await raw.seconds(nbytes, synchronizes=True) / GB for _ in range(3)]
        for _ in range(3):
            await lag_of(sync.send_weights(), lags)
            await lag_of(raw.seconds(nbytes), floor)
    await other.do("close")
    return record(
        "nccl",
        pairs,
        variant=variant.name,
        payload=f"{variant.payload}: {payload(nbytes, tensors)}",
        unit="GB/s",
        target=variant.target,
        raw_is="ncclBroadcast in pieces of 1 GiB",
        nbytes=nbytes,
        tensors=tensors,
        ours_round=median(whole),
        ours_round_spread=spread(whole),
        ratio_round=median(Pairs(whole, pairs.raw).ratios()),
        raw_synchronize=median(blocked),
        first_round_s=round(first, 3),
        seconds=medians(phases),
        lag_p99_ms=round(percentile(lags, 0.99), 3),
        lag_floor_p99_ms=round(percentile(floor, 0.99), 3),
        extra_memory_bytes={"trainer": extra, "worker": peak["extra"]},
        devices=torch.cuda.device_count(),
    )
