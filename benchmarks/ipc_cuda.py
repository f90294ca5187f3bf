"""Whole rounds over CUDA IPC, beside copies of the same tensors within one process.

Raw is `torch._foreach_copy_` of all tensors, from the call until the device is done; `raw_flat` the
same bytes in one piece. Ours is everything from `send_weights` to its return: all control calls,
both processes' looks at their models, and the copy. Where there are two GPUs, the worker is on the
second one, and raw is the flat copy to there: torch copies tensors from GPU to GPU one by one.
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
    alternate,
    median,
    medians,
    payload,
    percentile,
    record,
    spread,
)
from benchmarks.processes import peer
from transports.cuda import cuda_device, mark_current, poll
from transports.lane import Lane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from torch import nn

    from benchmarks.measure import Options
    from benchmarks.processes import Peer

_FLAT_NBYTES = 8 << 30  # with two models and their staging memory more would not fit
_LAG_ROUNDS = 60  # one of 20 ms has four wake-ups


@dataclass(frozen=True)
class _Variant:
    name: str
    payload: str
    target: str
    sink: str = "in_place"
    verify: str = "counts"
    repeat: int | None = None


VARIANTS = (
    _Variant("in place, counts", "dense", "ratio >= 0.95"),
    _Variant("in place, counts", "moe", "ratio >= 0.95"),
    _Variant("in place, digest", "dense", "none", verify="digest"),
    _Variant("staged, digest", "dense", "ratio >= 0.35", sink="staged", verify="digest"),
    _Variant("staged, digest", "moe", "ratio >= 0.35", sink="staged", verify="digest"),
)


async def run(options: Options) -> AsyncIterator[dict[str, Any]]:
    if not torch.cuda.is_available():
        print("ipc_cuda: skipped, there is no CUDA device", file=sys.stderr)
        return
    torch.cuda.set_device(cuda_device())
    async with peer("benchmarks.peers.gpu") as other, Lane("raw") as lane:
        for variant in VARIANTS:
            yield await _measure(other, lane, variant, options)


class Raw:
    """Copies within this process."""

    def __init__(self, model: nn.Module, lane: Lane) -> None:
        self._lane = lane
        self._from = [parameter.detach() for parameter in model.parameters()]
        self._device = self._from[0].device
        self._target = torch.device("cuda", 1 % torch.cuda.device_count())
        self.crosses = self._target != self._device
        self.nbytes = sum(tensor.nbytes for tensor in self._from)
        self.flat_nbytes = min(self.nbytes, _FLAT_NBYTES)
        if self.crosses:
            self.flatten()
        else:
            self._to = [torch.empty_like(tensor) for tensor in self._from]

    def flatten(self) -> None:
        """From here on it is one copy in one piece."""
        self._from, self._to = [], []
        torch.cuda.empty_cache()
        self._flat = torch.zeros(self.flat_nbytes, dtype=torch.uint8, device=self._device)
        self._other = torch.empty(self.flat_nbytes, dtype=torch.uint8, device=self._target)

    def drop(self) -> None:
        """Give all memory back."""
        self._flat = self._other = torch.empty(0)

    async def batched(self) -> float:
        """Seconds of one batched copy; to another GPU, of as many bytes in one piece."""
        if self.crosses:
            return await self.flat() * self.nbytes / self.flat_nbytes
        return await self._timed(lambda: torch._foreach_copy_(self._to, self._from))

    async def flat(self) -> float:
        """Seconds of one copy in one piece."""
        return await self._timed(lambda: self._other.copy_(self._flat))

    async def polled(self) -> float:
        """The flat copy, with a thread that asks instead of blocking."""
        return await self._timed(lambda: self._other.copy_(self._flat), polls=True)

    async def _timed(self, copy: Callable[[], object], *, polls: bool = False) -> float:
        def act() -> float:
            torch.cuda.synchronize(self._device)
            began = time.perf_counter()
            copy()
            if polls:
                poll(mark_current(self._device), lambda: None)
            else:
                torch.cuda.synchronize(self._device)
            return time.perf_counter() - began

        return await self._lane.run(act)


async def _measure(other: Peer, lane: Lane, variant: _Variant, options: Options) -> dict[str, Any]:
    device = cuda_device()
    model = gpu_models.build(variant.payload, device, trains=True)
    nbytes, tensors = gpu_models.nbytes(model), len(list(model.parameters()))
    opened = await other.do(
        "open",
        payload=variant.payload,
        sink=variant.sink,
        verify=variant.verify,
        backend="ipc",
    )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    rounds: list[float] = []
    phases: list[dict[str, float]] = []
    lags: list[float] = []
    floor: list[float] = []
    async with aiosync.connect(model, workers=[opened["url"]], backend="ipc") as sync:
        first = time.perf_counter()
        report = await sync.send_weights()
        first = time.perf_counter() - first
        first_phases = report.seconds
        extra = {
            "trainer": torch.cuda.max_memory_allocated() - held,
            "worker": (await other.do("peak"))["extra"],
        }
        if (await other.do("checksum"))["sum"] != await asyncio.to_thread(
            gpu_models.checksum, model
        ):
            raise RuntimeError("the worker has other bits than the trainer")
        raw = Raw(model, lane)

        async def ours() -> float:
            began = time.perf_counter()
            report = await sync.send_weights()
            rounds.append(time.perf_counter() - began)
            phases.append(report.seconds)
            return nbytes / rounds[-1] / GB

        async def beside() -> float:
            return nbytes / await raw.batched() / GB

        for _ in range(2):
            await ours(), await beside()
        rounds.clear()
        phases.clear()
        pairs = await alternate(ours, beside, variant.repeat or max(options.repeat, 9))
        for _ in range(_LAG_ROUNDS):
            await lag_of(sync.send_weights(), lags)
            await lag_of(raw.batched(), floor)
        if not raw.crosses:
            raw.flatten()
        await raw.flat()
        flats = [raw.flat_nbytes / await raw.flat() / GB for _ in range(5)]
        blocked = [await raw.flat() for _ in range(5)]
        polled = [await raw.polled() for _ in range(5)]
    raw.drop()
    del model
    await other.do("close")
    torch.cuda.empty_cache()
    later = median(rounds)
    return record(
        "ipc_cuda",
        pairs,
        variant=variant.name,
        payload=f"{variant.payload}: {payload(nbytes, tensors)}",
        unit="GB/s",
        target=variant.target,
        raw_is="one copy to the other GPU"
        if raw.crosses
        else "torch._foreach_copy_ in one process",
        nbytes=nbytes,
        tensors=tensors,
        round_ms=later * 1e3,
        round_ms_spread=[value * 1e3 for value in spread(rounds)],
        raw_flat=median(flats),
        ratio_flat=round(median(pairs.ours) / median(flats), 3),
        first_round_s=round(first, 4),
        first_over_later=round(first / later, 2),
        first_seconds=first_phases,
        seconds=medians(phases),
        wait_synchronize_ms=median([value * 1e3 for value in blocked]),
        wait_poll_ms=median([value * 1e3 for value in polled]),
        lag_p99_ms=round(percentile(lags, 0.99), 3),
        lag_floor_p99_ms=round(percentile(floor, 0.99), 3),
        lag_max_ms=round(max(lags), 3),
        extra_memory_bytes=extra,
        devices=torch.cuda.device_count(),
    )
