"""Whole rounds of one payload between two processes' CPUs, beside something raw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import layouts
from benchmarks.measure import GB, alternate, median, medians, payload, record, spread
from benchmarks.setting import setting

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from benchmarks.measure import Options
    from benchmarks.processes import Peer
    from benchmarks.setting import Setting


@dataclass(frozen=True)
class Variant:
    """One line of output.

    Attributes:
        target: The ratio that is wanted at least; None: it is there to be compared with.
        share: The trainer's tensors are in shared memory.
        direct: Workers may read the trainer's memory.
    """

    name: str
    layout: str
    target: float | None
    sink: str = "in_place"
    verify: str = "counts"
    share: bool = False
    direct: bool = True


def pair_for(
    peer: Peer, variant: Variant, options: Options, *, backend: str
) -> AbstractAsyncContextManager[Setting]:
    """Trainer and worker as `variant` wants them."""
    return setting(
        peer,
        variant.layout,
        options.nbytes,
        layouts.count(variant.layout, options.nbytes),
        sink=variant.sink,
        verify=variant.verify,
        share=variant.share,
        direct=variant.direct,
        backend=backend,
    )


async def measure(
    name: str,
    pair: Setting,
    variant: Variant,
    raw: Callable[[], Awaitable[float]],
    options: Options,
    **more: Any,
) -> dict[str, Any]:
    """The record of a whole round and its update phase, in GB/s, beside what `raw` gives."""
    phases: list[dict[str, float]] = []

    async def ours() -> float:
        seconds, report = await pair.round()
        phases.append(report.seconds)
        return pair.nbytes / seconds / GB

    pairs = await alternate(ours, raw, options.repeat)
    updates = [pair.nbytes / phase["update"] / GB for phase in phases]
    tensors = layouts.count(variant.layout, options.nbytes)
    return record(
        name,
        pairs,
        variant=variant.name,
        payload=payload(pair.nbytes, tensors),
        unit="GB/s",
        target="none" if variant.target is None else f"ratio >= {variant.target:g}",
        nbytes=pair.nbytes,
        tensors=tensors,
        ours_update=median(updates),
        ours_update_spread=spread(updates),
        ratio_update=median([mine / its for mine, its in zip(updates, pairs.raw, strict=True)]),
        seconds=medians(phases),
        extra_memory_bytes=pair.extra_nbytes,
        **more,
    )
