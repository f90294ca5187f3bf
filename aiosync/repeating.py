"""Calls over a link that loses answers: the worker is asked what became of them.

A connection that breaks says nothing about the call it carried. So the worker is asked; if it
answers, and is the same process under the same owner, the call may be repeated: (epoch, round) and
the worker's record make a second one wait for the outcome of the first. Nothing is carried out
twice, and no payload moves twice. A peer that keeps no record is never called again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from aiosync.errors import AiosyncError, PeerLost, PhaseTimeout, RemoteError

if TYPE_CHECKING:
    from aiosync.members import MemberLink
    from aiosync.messages import RoundHeader
    from aiosync.round import Round

_REPEATS = 2
_RECORDED = ("start_weight_update", "start_draft_weight_update", "prepare_weight_update")
_HARMLESS = ("pause", "weight_update_status")
"""Repeated, they come to the same, whether a round is open or not."""


async def reliably(
    round: Round,
    link: MemberLink,
    method: str,
    *args: Any,
    header: RoundHeader | None = None,
    **options: Any,
) -> Any:
    """One call of `round` to `link`, repeated where that is the same call again.

    Raises:
        What the call raised: at once where it must not be repeated, or when the worker cannot be
        asked, or says that the round is over.
    """
    starts = round.starts_with_update and method == "update_weights"
    for left in reversed(range(_REPEATS + 1)):
        try:
            this = header or round.header(link, starts=starts)
            return await link.call(method, *args, header=this, **options)
        except (PeerLost, PhaseTimeout) as lost:
            if not left or isinstance(lost, RemoteError) or not _may_repeat(link, method):
                raise
            opens = starts or method.startswith("start_")
            if not await ask(round, link) or not _is_open(round, link, method, lost, opens=opens):
                raise
    raise AssertionError("unreachable")


async def ask(round: Round, link: MemberLink) -> bool:
    """Whether the worker that we initialised answers; ``link.peer`` is what it said."""
    for _ in range(_REPEATS):
        with anyio.move_on_after(round.budget.cleanup):
            try:
                await link.call("weight_update_status", header=round.header(link))
            except AiosyncError:
                continue
            return not link.restarted
    return False


def _may_repeat(link: MemberLink, method: str) -> bool:
    if not link.supports("status"):
        return False
    if method == "update_weights":
        return "one_update" in link.capabilities.features
    return method in _RECORDED + _HARMLESS


def _is_open(
    round: Round, link: MemberLink, method: str, lost: AiosyncError, *, opens: bool
) -> bool:
    """Whether the round goes on at the worker, or has not begun there."""
    if method in _HARMLESS or link.peer is None:
        return link.peer is not None
    detail = link.peer.detail
    if detail.get("round") != round.number:
        return opens and detail.get("round", 0) < round.number
    if detail.get("settled"):
        lost.message += f"; the worker says that the round is over: {detail.get('outcome')}"
        return False
    return True
