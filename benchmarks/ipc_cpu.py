"""Whole rounds over shared memory, beside the memcpys they are made of.

Raw is what two processes can do with the same bytes: one copies into a shared ring, the other out
of it. With `share_tensors` the worker reads the trainer's own memory; raw is then its one copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import layouts
from benchmarks.measure import alternate, median, payload, record, spread
from benchmarks.processes import peer
from benchmarks.setting import setting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.measure import Options, Pairs
    from benchmarks.processes import Peer
    from benchmarks.setting import Setting

_GB = 1e9


@dataclass(frozen=True)
class _Variant:
    name: str
    layout: str
    target: float
    sink: str = "in_place"
    verify: str = "counts"
    share: bool = False


VARIANTS = (
    _Variant("in place, counts", "dense", 0.85),
    _Variant("in place, counts", "many", 0.80),
    _Variant("in place, counts, scattered", "scattered", 0.80),
    _Variant("staged, digest", "dense", 0.45, sink="staged", verify="digest"),
    _Variant("staged, digest", "many", 0.40, sink="staged", verify="digest"),
    _Variant("zero-copy source, in place, counts", "dense", 0.85, share=True),
    _Variant("zero-copy source, in place, counts", "many", 0.85, share=True),
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
        sink=variant.sink,
        verify=variant.verify,
        share=variant.share,
    ) as pair:
        updates: list[float] = []
        by_tensor: list[float] = []
        phases: list[dict[str, float]] = []

        async def ours() -> float:
            seconds, report = await pair.round()
            updates.append(pair.nbytes / report.seconds["update"] / _GB)
            phases.append(report.seconds)
            return pair.nbytes / seconds / _GB

        async def raw() -> float:
            if not variant.share:
                return pair.nbytes / await pair.two_copies() / _GB
            by_tensor.append(pair.nbytes / await pair.one_copy(pair.nbytes // tensors) / _GB)
            return pair.nbytes / await pair.one_copy() / _GB

        await raw()  # the first one pays for pages
        by_tensor.clear()
        pairs = await alternate(ours, raw, options.repeat)
        found = _record(variant, tensors, pair, pairs, updates, phases)
        if by_tensor:
            found |= {"raw_by_tensor": median(by_tensor), "raw_by_tensor_spread": spread(by_tensor)}
        return found


def _record(
    variant: _Variant,
    tensors: int,
    pair: Setting,
    pairs: Pairs,
    updates: list[float],
    phases: list[dict[str, float]],
) -> dict[str, Any]:
    update = median(updates)
    return record(
        "ipc_cpu",
        pairs,
        variant=variant.name,
        payload=payload(pair.nbytes, tensors),
        unit="GB/s",
        target=f"ratio >= {variant.target:g}",
        raw_is="one memcpy by the worker" if variant.share else "two memcpys through a ring",
        nbytes=pair.nbytes,
        tensors=tensors,
        ours_update=update,
        ours_update_spread=spread(updates),
        ratio_update=median([mine / raw for mine, raw in zip(updates, pairs.raw, strict=True)]),
        seconds={name: median([phase[name] for phase in phases]) for name in phases[0]},
        extra_memory_bytes=pair.extra_nbytes,
    )
