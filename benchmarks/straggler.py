"""A fleet's round with one member that stands still, beside the same round without it.

Eight workers in processes of their own, five of which must commit. The trainer takes seconds to
gather its weights, as one that gathers shards does; a member that is stopped, or runs a twentieth
of the time, may cost the others its share of patience (`FleetClient(patience=)`) and no more.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import aiosync
from benchmarks import layouts
from benchmarks.measure import alternate, medians, payload, record
from benchmarks.processes import peer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from typing import TypeAlias

    import torch
    from torch import nn

    from benchmarks.measure import Options

    _Side: TypeAlias = Callable[[], Awaitable[float]]
    _Hindered: TypeAlias = Callable[[int], AbstractAsyncContextManager[None]]

_TENSORS = 32
_NBYTES = 32 << 20
_GATHER_S = 6.0
_RUN_S, _STAND_S = 0.01, 0.19


class _Gathering(aiosync.ModuleSource):
    """A model whose tensors take their time."""

    def __init__(self, module: nn.Module, pause: float) -> None:
        super().__init__(module)
        self._pause = pause

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in cast("Iterator[tuple[str, torch.Tensor]]", super().iter_full()):
            time.sleep(self._pause)
            yield pair


async def run(options: Options) -> AsyncIterator[dict[str, Any]]:
    share = min(1.0, options.nbytes / layouts.FULL_NBYTES)  # less of everything for a quick look
    nbytes = max(1 << 20, int(_NBYTES * share))
    members, quorum = (8, 5) if share > 0.1 else (3, 2)
    async with AsyncExitStack() as stack:
        peers = await asyncio.gather(*[stack.enter_async_context(peer()) for _ in range(members)])
        opened = [
            await each.do(
                "open",
                layout="dense",
                nbytes=nbytes,
                tensors=_TENSORS,
                sink="staged",
                verify="digest",
                tcp=False,
            )
            for each in peers
        ]
        _, model = layouts.build("dense", nbytes, _TENSORS, trains=True)
        source = _Gathering(model, _GATHER_S * share / _TENSORS)
        fleet = aiosync.FleetClient(
            [aiosync.Member(f"m{n}", each["url"]) for n, each in enumerate(opened)],
            policy=f"quorum({quorum})",
        )
        info = aiosync.IPCTrainerInitInfo(rank=0, packed=True)
        sync = await aiosync.WeightTransferTrainerFactory.trainer_init(
            init_info=info, client=fleet, source=source
        )
        async with sync, fleet:
            for variant, hindered in (("stopped", _stopped), ("at 5 % of a core", _crawling)):
                phases: list[dict[str, float]] = []
                behind: list[int] = []
                left = _sides(sync, fleet, members, phases, behind)

                async def ours(hindered: _Hindered = hindered, left: _Side = left) -> float:
                    async with hindered(peers[-1].pid):
                        took = await left()
                    await fleet.wait_ready(30)
                    return took

                await left()
                phases.clear()
                behind.clear()
                pairs = await alternate(ours, left, options.repeat)
                yield record(
                    "straggler",
                    pairs,
                    variant=f"one of {members} {variant}",
                    payload=payload(nbytes, _TENSORS),
                    unit="s",
                    target="ratio <= 1.3",
                    left_behind=sum(behind),
                    seconds=medians(phases),
                )
        for each in peers:
            await each.do("close")


def _sides(
    sync: aiosync.TrainerWeightTransferEngine[Any],
    fleet: aiosync.FleetClient,
    members: int,
    phases: list[dict[str, float]],
    behind: list[int],
) -> _Side:
    async def one() -> float:
        began = time.perf_counter()
        report = await sync.send_weights()
        took = time.perf_counter() - began
        phases.append(report.seconds)
        behind.append(members - len(fleet.routable()))
        return took

    return one


@asynccontextmanager
async def _stopped(pid: int) -> AsyncIterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def _crawling(pid: int) -> AsyncIterator[None]:
    async def crawl() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(_STAND_S)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(_RUN_S)

    crawling = asyncio.create_task(crawl())
    try:
        yield
    finally:
        crawling.cancel()
        await asyncio.wait([crawling])
        os.kill(pid, signal.SIGCONT)
