"""Whole rounds between two processes' CPUs, beside memcpys.

Raw is what two processes can do with the same bytes: one copies into a shared ring, the other out
of it. With `share_tensors` the worker has the trainer's memory mapped; raw is then its one copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import layouts
from benchmarks.cpu_rounds import Variant, measure, pair_for
from benchmarks.measure import GB, median, spread
from benchmarks.processes import peer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.measure import Options
    from benchmarks.processes import Peer

VARIANTS = (
    Variant("in place, counts", "dense", 0.85),
    Variant("in place, counts", "many", 0.80),
    Variant("in place, counts, scattered", "scattered", 0.80),
    Variant("in place, counts, through buffers", "dense", None, direct=False),
    Variant("in place, counts, through buffers", "many", None, direct=False),
    Variant("staged, digest", "dense", 0.45, sink="staged", verify="digest"),
    Variant("staged, digest", "many", 0.40, sink="staged", verify="digest"),
    Variant("zero-copy source, in place, counts", "dense", 0.85, share=True),
    Variant("zero-copy source, in place, counts", "many", 0.85, share=True),
)


async def run(options: Options) -> AsyncIterator[dict[str, Any]]:
    async with peer() as other:
        for variant in VARIANTS:
            yield await _measure(other, variant, options)


async def _measure(other: Peer, variant: Variant, options: Options) -> dict[str, Any]:
    tensors = layouts.count(variant.layout, options.nbytes)
    by_tensor: list[float] = []
    async with pair_for(other, variant, options, backend="ipc") as pair:

        async def raw() -> float:
            if not variant.share:
                return pair.nbytes / await pair.two_copies() / GB
            by_tensor.append(pair.nbytes / await pair.one_copy(pair.nbytes // tensors) / GB)
            return pair.nbytes / await pair.one_copy() / GB

        await raw()  # the first one pays for pages
        by_tensor.clear()
        raw_is = "one memcpy by the worker" if variant.share else "two memcpys through a ring"
        found = await measure("ipc_cpu", pair, variant, raw, options, raw_is=raw_is)
    if by_tensor:
        found |= {"raw_by_tensor": median(by_tensor), "raw_by_tensor_spread": spread(by_tensor)}
    return found
