"""Finish: the point of no return.

Once finish has been sent to a member, only the member's own answer says what it holds. A
cancellation therefore waits out the clean-up budget for it; a lost answer is asked for, never sent
again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio
import msgspec

from aiosync.concurrency import first_line, hold_on, raise_ranked
from aiosync.errors import (
    AiosyncError,
    Fenced,
    OutcomeUnknown,
    PeerLost,
    PhaseTimeout,
    ProtocolMismatch,
)
from aiosync.version import weights_id
from aiosync.watchable import BUSY
from aiosync.weight_targets import MODEL

if TYPE_CHECKING:
    from aiosync.members import MemberLink
    from aiosync.messages import PeerState, RoundHeader
    from aiosync.round import Round

_ASK_AGAIN_S = 0.05


async def commit(round: Round) -> None:
    """Send finish to every member and settle each one's outcome.

    Raises:
        OutcomeUnknown: A member neither answered nor could be asked.
        RemoteError: A member refused or failed.
    """
    failures: list[BaseException] = []

    async def one(link: MemberLink) -> None:
        link.outcome = "unknown"
        await _finish(round, link, again=True)
        link.outcome = "committed"

    async def all_of_them() -> None:
        try:
            linger = round.budget.cleanup
            await round.attendance.call(
                round.links, one, phase="finish", linger=linger, direct=True
            )
        except Exception as error:  # noqa: BLE001  raised below, outside the shield
            failures.append(error)

    await hold_on(all_of_them, grace=round.budget.cleanup / 2)
    raise_ranked(failures)


async def _finish(round: Round, link: MemberLink, *, again: bool) -> None:
    """Send finish to one member; returns if it says that it committed."""
    try:
        reply = await link.call("finish_weight_update", round.label, header=_header(round, link))
        if link.speaks_ours and not confirms(round, getattr(reply, "peer", None)):
            raise ProtocolMismatch("the answer does not say that the version is committed")
    except (PeerLost, PhaseTimeout, ProtocolMismatch, Fenced) as error:
        # Fenced: the call may have come twice, and somebody taken over in between.
        await _ask(round, link, error, again=again)
    except AiosyncError as error:
        if "incarnations" in error.detail:
            raise  # one of two processes may have committed
        if error.code != AiosyncError.code or not link.supports("status"):
            link.outcome = "failed"
            raise
        await _settle(round, link, error)
    except Exception as error:
        if not link.supports("status"):
            raise
        await _ask(round, link, error, again=again)  # it says nothing about the worker


def _header(round: Round, link: MemberLink) -> RoundHeader | None:
    """Leaves the member a little less than there is: it says by itself what held it up."""
    header = round.header(link)
    if header is None:
        return None
    left = min(round.limit.deadline - anyio.current_time(), round.seconds_left)
    left -= min(left / 10, round.budget.cleanup)
    return msgspec.structs.replace(header, deadline_s=max(left, 0.001))


async def _settle(round: Round, link: MemberLink, error: AiosyncError) -> None:
    """Somebody reported a failure of finish; a gateway may have, before a worker that commits.

    Returns if the worker itself says that it committed. A round that is still open there ends.
    """
    with anyio.move_on_after(round.budget.cleanup):
        try:
            await link.call("weight_update_status", header=round.header(link))
            if link.peer is not None and link.peer.state in BUSY and link.supports("abort"):
                reason = f"finish failed: {first_line(error)}"[:500]
                await link.call("abort_weight_update", reason, header=round.header(link))
            link.outcome = "failed"
        except Exception:  # noqa: BLE001  it cannot be asked: its outcome stays unknown
            raise error from error.__cause__
    if not has_committed(round, link):
        raise error


def confirms(round: Round, peer: PeerState | None) -> bool:
    """Whether the peer says that it holds what this round carries."""
    if peer is None or peer.state in BUSY:
        return False
    mine, theirs = round.version, peer.held(round.target)
    # Not by label: finish may have given it another one.
    return theirs is not None and (mine.lineage, mine.order) == (theirs.lineage, theirs.order)


def has_committed(round: Round, link: MemberLink) -> bool:
    """`confirms` of one that was asked: a version that it held before must not pass for this one.

    Where that very version is sent once more, its weights have another name by now, or were these.
    """
    if not confirms(round, link.peer):
        return False
    if round.target != MODEL or not link.holds_the_same:
        return True
    digest = None if round.summary is None else round.summary.digest
    return digest is not None and link.weights_id == weights_id(round.version, digest)


async def _ask(round: Round, link: MemberLink, lost: Exception, *, again: bool) -> None:
    """Finish got no answer. Returns if the member says it committed.

    Finish is sent once more where the member says that it never came: its round is open, and it
    was not asked to commit.
    """
    deadline = time.monotonic() + round.budget.cleanup
    while link.supports("status") and time.monotonic() < deadline:
        try:
            await link.call("weight_update_status", header=round.header(link))
        except Exception:  # noqa: BLE001  asked again until the time is up
            await anyio.sleep(_ASK_AGAIN_S)
            continue
        peer = link.peer
        if has_committed(round, link):
            return
        if peer is not None and peer.state not in BUSY:
            link.outcome = "failed"
            raise lost
        if again and peer is not None and _never_came(round, peer):
            await _finish(round, link, again=False)
            return
        await anyio.sleep(_ASK_AGAIN_S)
    raise OutcomeUnknown(
        f"finish was sent, its answer never came: {first_line(lost)}",
        replica=link.name,
        phase="finish",
        weights="unknown",
    ) from lost


def _never_came(round: Round, peer: PeerState) -> bool:
    asked = peer.detail.get("asked")
    return (
        isinstance(asked, list)
        and peer.detail.get("round") == round.number
        and peer.owner == round.engine.owner
        and "finish" not in asked
    )
