"""Leaving a round that began: tell the members, then flip, then say what each one holds.

By the time this runs the data plane has been aborted by its lane. The flip is synchronous and
last: ``abort`` when every member confirmed that it is whole and the channel can carry another
round, ``fail`` otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from aiosync.commit import has_committed
from aiosync.concurrency import first_line, quietly, run_to_end
from aiosync.errors import Fenced
from aiosync.watchable import BUSY
from statemachines.tables import State, Trigger, Weights
from transports.lane import Lane

if TYPE_CHECKING:
    from aiosync.members import MemberLink
    from aiosync.round import Round


async def give_up(round: Round, cause: BaseException) -> None:
    """End the round because of `cause`, within half of the clean-up budget.

    The other half belongs to the lane that had to be aborted before.
    """
    engine = round.engine
    ahead, round.ahead = round.ahead, None
    if ahead is not None:
        ahead.close()
    mine = engine.machine.state in BUSY and engine.admission.current is round
    # Else there is nothing to end; or its loop was closed, and the slot is another round's by now.
    try:
        await tell_ranks(round, cause)
    finally:
        if mine:
            await _end(round, cause)


async def _end(round: Round, cause: BaseException) -> None:
    try:
        # After finish, too: a member that still waits for its swap would keep new requests out
        # until its lease ends. One that is swapping already is left to finish.
        await run_to_end(lambda: abort_members(round, cause), seconds=round.budget.cleanup / 2)
    finally:
        _flip(round, cause)


async def tell_ranks(round: Round, cause: BaseException) -> None:
    """The other trainer ranks wait at a meeting: they must hear that this round is over."""
    ranks = round.engine.ranks
    if ranks.size == 1 or ranks.parted:
        return

    async def say() -> None:
        # A lane of its own: the source's may be stuck for good.
        async with Lane(f"{round.engine.name}-farewell") as lane:
            await lane.run(ranks.say_stop, round.phase, cause, abort=ranks.abort, grace=0.1)

    await run_to_end(say, seconds=round.budget.cleanup / 2)


async def abort_members(round: Round, cause: BaseException) -> None:
    """Have every member that knows how give the round up; its state then confirms it."""
    reason = f"{type(cause).__name__}: {first_line(cause)}"

    async def one(link: MemberLink) -> None:
        await let_go(round, link, reason)

    async with anyio.create_task_group() as group:
        for link in round.links:
            group.start_soon(quietly, one, link)


def _settle(round: Round, link: MemberLink) -> None:
    """The member has answered the abort, and so says what became of the round there."""
    if link.peer is None or link.peer.state in BUSY:
        return
    if not round.sent_finish:
        link.outcome = "aborted"
    elif link.outcome == "unknown":  # finish had no answer, or none in time
        link.outcome = "committed" if has_committed(round, link) else "failed"


async def let_go(round: Round, link: MemberLink, reason: str) -> None:
    """One member gives the round up, and the round what it holds of it."""
    try:
        await tell_to_abort(round, link, reason)
    finally:
        await round.holds.lift(link)


async def tell_to_abort(round: Round, link: MemberLink, reason: str) -> None:
    """Have one member give the round up, if it can and has not ended it by itself."""
    if not link.supports("abort") or link.outcome in ("committed", "failed"):
        return
    before = link.phase, link.error
    try:
        await link.call("abort_weight_update", reason[:500], header=round.header(link))
    except Fenced as error:
        _note_rival(round, error)
        raise
    link.phase, link.error = before
    _settle(round, link)


def _flip(round: Round, cause: BaseException) -> None:
    engine = round.engine
    sent_all = round.sent_finish and all(link.outcome == "committed" for link in round.present)
    if sent_all or round.agreed is not None:
        # Cancelled, or out of time, while the last answer was on its way: it is committed.
        engine.committed(round)
        engine.machine.fire(Trigger.COMPLETE, weights=Weights.INTACT, **round.facts())
        return
    confirmed = all(
        link.outcome == "aborted"
        and link.peer is not None
        and link.peer.weights == Weights.INTACT
        and link.peer.state == State.INITIALIZED
        for link in round.links
    )
    if round.sent_finish:
        engine.cycle.mixed = (round.target, round.version)
    if isinstance(cause, Fenced):
        _note_rival(round, cause)
    untouched = all(link.untouched for link in round.links)  # a pause costs no channel
    reusable = untouched or (confirmed and engine.reusable_after_abort)
    usable = reusable and round.source_side.healthy
    engine.machine.fire(
        Trigger.ABORT if usable else Trigger.FAIL,
        phase=round.phase,
        error=cause,
        weights=worst_weights(round),
        **round.facts(),
    )


def _note_rival(round: Round, error: Fenced) -> None:
    """Another trainer has the worker; one that belongs to nobody was just restarted."""
    if error.detail.get("owner") not in (None, round.engine.owner):
        round.engine.cycle.fenced = error


def worst_weights(round: Round) -> Weights:
    """The least that can be said of all members' weights."""
    states = {_weights_of(link) for link in round.links}
    for worst in (Weights.UNKNOWN, Weights.TORN):
        if worst in states:
            return worst
    return Weights.INTACT


def _weights_of(link: MemberLink) -> Weights:
    if link.outcome == "unknown" or link.peer is None:
        return Weights.UNKNOWN
    return Weights(link.peer.weights)
