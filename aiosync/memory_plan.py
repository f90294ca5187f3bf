"""What a round will move and hold, before it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from aiosync.errors import Refused

if TYPE_CHECKING:
    from aiosync.members import MemberLink
    from transports.planning import Plan
    from transports.stream import StreamSummary

_SPARE = {"staged": 1.0, "in_place": 0.0}


class PlanSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A round in numbers.

    Attributes:
        tensors: How many are announced.
        nbytes: Payload bytes of a round, once per link.
        chunks: Pieces the payload is cut into.
        digest: Of the plan: equal wherever the same bytes are cut in the same way.
        trainer_bytes: Memory the trainer's side of the channel holds.
        worker_bytes: Spare memory by member, of all its ranks; None where its sink does not say.
        shared_staging: Members whose ranks share their spare memory: it is counted once.
    """

    tensors: int
    nbytes: int
    chunks: int
    digest: str
    trainer_bytes: int
    worker_bytes: dict[str, int | None]
    shared_staging: list[str] = []


def held_bytes(plan: Plan, buffers: int | None) -> int:
    """What a channel holds with so many chunks in flight; None: the whole payload at once."""
    largest = max((chunk.nbytes for chunk in plan.chunks), default=0)
    return plan.total_bytes if buffers is None else min(buffers, len(plan.chunks)) * largest


def summarise(plan: Plan, *, need: int, free: int | None, links: list[MemberLink]) -> PlanSummary:
    """Sum a plan up.

    Args:
        need: Bytes that the trainer's side of the channel holds.
        free: Bytes there are for it; None where nobody can tell.

    Raises:
        Refused: The trainer's side needs more memory than there is; names both.
    """
    if free is not None and need > free:
        raise Refused(
            f"the channel needs {need} bytes of memory, {free} are free",
            phase="admit",
            next_step="use packed=True with smaller buffers",
            detail={"need": need, "free": free},
        )
    return PlanSummary(
        tensors=len(plan.sizes),
        nbytes=plan.total_bytes,
        chunks=len(plan.chunks),
        digest=plan.digest,
        trainer_bytes=need,
        worker_bytes={link.name: _spare_of(link, plan.total_bytes) for link in links},
        shared_staging=[link.name for link in links if link.readers < link.world_size],
    )


def staging_notes(links: list[MemberLink], summary: StreamSummary | None) -> list[str]:
    """What a report says of members whose ranks share their spare memory."""
    size = "" if summary is None else f" of {summary.nbytes} bytes"
    return [
        f"{link.name}: {link.world_size} ranks share {link.readers} staging"
        f" {'copy' if link.readers == 1 else 'copies'}{size} in host memory"
        for link in links
        if link.readers < link.world_size
    ]


def _spare_of(link: MemberLink, nbytes: int) -> int | None:
    sink = link.peer.detail.get("sink") if link.peer is not None else None
    share = _SPARE.get(str(sink))
    return None if share is None else int(nbytes * share) * link.readers
