"""What the engines over collective groups have in common: joining on a lane of its own, in time."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio

from aiosync.defaults import DEFAULTS
from aiosync.errors import PhaseTimeout, Validation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aiosync.members import MemberLink
    from transports.lane import LaneFactory, LaneLike

# The join ends before the call that contains it does: it knows whom it waited for.
EARLIER_S = 0.5
LATER_S = 1.0  # a worker's own limit; the trainer's comes first


def join_seconds() -> float:
    """What a trainer's join may take, so that it ends before the scope it runs in."""
    left = anyio.current_effective_deadline() - anyio.current_time()
    left = DEFAULTS.admit_s if left == math.inf else left
    return left - min(EARLIER_S, left / 4)


async def join(
    enter: Callable[[float], Any],
    abort: Callable[[], object],
    seconds: float,
    *,
    lane_factory: LaneFactory,
    name: str,
) -> None:
    """Call ``enter(seconds)`` (blocking), and leave it behind a moment after that time.

    On a lane of its own: a join that is stuck for good must not keep the next one out.
    """
    async with own_lane(lane_factory, f"{name}-join") as lane:
        with anyio.move_on_after(seconds + EARLIER_S / 2) as scope:
            await lane.run(enter, seconds, abort=abort, grace=0.2)
        if scope.cancelled_caught:
            raise PhaseTimeout(f"the group did not come about within {seconds:g} s", phase="init")


def rank_in_group(config: Any, offset: int, size: int) -> int:
    """A worker's rank, as vLLM counts.

    Args:
        config: The parallel configuration of an engine inside vLLM, whose ranks all get the same
            init info; None: this rank has init info of its own.
        offset: ``rank_offset``, of the first rank that got the info.
        size: ``world_size``, the trainer among them.

    Raises:
        Validation: There is no such rank.
    """
    rank = offset
    if config is not None:
        replica = getattr(config, "data_parallel_index", 0)
        rank += replica * getattr(config, "world_size", 1) + getattr(config, "rank", 0)
    if not 0 <= rank < size:
        raise Validation(
            f"init_info: rank {rank} is not in a group of {size}", rank=rank, phase="init"
        )
    return rank


@asynccontextmanager
async def own_lane(lane_factory: LaneFactory, name: str) -> AsyncIterator[LaneLike]:
    """A lane for the length of the block."""
    lane = lane_factory(name)
    try:
        yield lane
    finally:
        lane.close()


def host_of(link: MemberLink) -> str | None:
    """Where a member's control server is; None for a client that does not say."""
    url = getattr(link.client, "base_url", None)
    if not isinstance(url, str):
        return None
    if url.startswith("unix:"):
        return "127.0.0.1"
    return urlsplit(url).hostname
