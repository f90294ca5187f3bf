"""What trainer ranks compare before a round: what is announced, and who holds which tensor."""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from aiosync.errors import Validation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiosync.feed import SourceFeed
    from aiosync.metadata import ParamMeta

Runs: TypeAlias = list[tuple[int, int]]
"""Positions in the metadata, as ``(first, one past the last)``, ascending."""


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank contributes to a round.

    Attributes:
        sends: Whether its tensors go out by its own connections.
        lacks: What it does not yield.
    """

    sends: bool
    lacks: Runs = []


def holding_of(feed: SourceFeed, *, sends: bool) -> Holding:
    """What the rank of `feed` contributes."""
    lacks: Runs = []
    start = 0
    for position in (*feed.owned, len(feed.metadata)):
        if position > start:
            lacks.append((start, position))
        start = position + 1
    return Holding(sends=sends, lacks=lacks)


def facts_of(feed: SourceFeed) -> dict[str, str]:
    """What must be equal on all ranks."""
    cut = hashlib.sha256(repr(feed.group_cut()).encode()).hexdigest()[:32]
    return {"metadata": feed.digest, "layer groups": cut}


def check_holdings(
    metadata: Sequence[ParamMeta], holdings: Sequence[Holding], *, backend: str
) -> None:
    """Refuse a round in which some tensor would never be sent.

    Raises:
        Validation: Names the first tensor that no rank holds, or that no sending rank does.
    """
    unsent = _lacked_by_all([holding.lacks for holding in holdings if holding.sends])
    if not unsent:
        return
    orphans = _lacked_by_all([holding.lacks for holding in holdings])
    if orphans:
        orphan = metadata[orphans[0][0]]
        raise Validation(_orphan(orphan, holdings), tensor=orphan.name)
    first = unsent[0][0]
    name = metadata[first].name
    holders = [rank for rank, holding in enumerate(holdings) if not _has(holding.lacks, first)]
    senders = [rank for rank, holding in enumerate(holdings) if holding.sends]
    raise Validation(
        f"{name} is held by {_ranks(holders)} only, and with backend {backend!r} only"
        f" {_ranks(senders)} sends",
        tensor=name,
        next_step=f"gather it on {_ranks(senders)}, or use a backend in which every rank sends",
    )


def _orphan(meta: ParamMeta, holdings: Sequence[Holding]) -> str:
    owners = "" if meta.owners is None else f"; its owners are {_ranks(meta.owners)}"
    of = "the only trainer rank does not hold" if len(holdings) == 1 else "no trainer rank holds"
    return f"{of} {meta.name}, which is announced{owners}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _has(runs: Runs, position: int) -> bool:
    return any(start <= position < stop for start, stop in runs)


def _lacked_by_all(lacks: Sequence[Runs]) -> Runs:
    return functools.reduce(_in_both, lacks) if lacks else []


def _in_both(left: Runs, right: Runs) -> Runs:
    common, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            common.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common
