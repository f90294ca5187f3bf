"""Finish: the point of no return.

Once finish has been sent to a member, only the member's own answer says what it holds. A
cancellation therefore waits out the clean-up budget for it; a lost answer is asked for, never sent
again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio

from aiosync.concurrency import hold_on
from aiosync.errors import AiosyncError, OutcomeUnknown, PeerLost, PhaseTimeout, ProtocolMismatch
from aiosync.members import fan_out
from aiosync.watchable import BUSY

if TYPE_CHECKING:
    from aiosync.members import MemberLink
    from aiosync.round import Round

_ASK_AGAIN_S = 0.05


async def commit(round: Round, label: str | None = None) -> None:
    """Send finish to every member and settle each one's outcome.

    Args:
        label: The version as members are told; the round's own unless given.

    Raises:
        OutcomeUnknown: A member neither answered nor could be asked.
        RemoteError: A member refused or failed.
    """
    failures: list[Exception] = []
    name = round.label if label is None else label

    async def one(link: MemberLink) -> None:
        link.outcome = "unknown"
        try:
            await link.call("finish_weight_update", name, header=round.header(link))
        except (PeerLost, PhaseTimeout, ProtocolMismatch) as error:
            await _ask(round, link, error)
        except AiosyncError:
            link.outcome = "failed"
            raise
        link.outcome = "committed"

    async def all_of_them() -> None:
        try:
            await fan_out(round.links, one, phase="finish", linger=round.budget.cleanup)
        except Exception as error:  # noqa: BLE001  raised below, outside the shield
            failures.append(error)

    await hold_on(all_of_them, grace=round.budget.cleanup)
    if failures:
        raise failures[0]


async def _ask(round: Round, link: MemberLink, lost: AiosyncError) -> None:
    """Finish got no answer. Returns if the member says it committed."""
    deadline = time.monotonic() + round.budget.cleanup
    while link.supports("status") and time.monotonic() < deadline:
        try:
            await link.call("weight_update_status", header=round.header(link))
        except AiosyncError:
            await anyio.sleep(_ASK_AGAIN_S)
            continue
        peer = link.peer
        if peer is not None and peer.state not in BUSY:
            if peer.version == round.version:
                return
            link.outcome = "failed"
            raise lost
        await anyio.sleep(_ASK_AGAIN_S)
    raise OutcomeUnknown(
        f"finish was sent, its answer never came: {lost.message}",
        replica=link.name,
        phase="finish",
        weights="unknown",
    ) from lost
