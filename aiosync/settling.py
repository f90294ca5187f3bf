"""After a round: what became of each member, as the fleet sees it."""

from __future__ import annotations

import functools
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio

from aiosync.catch_up import Goal
from aiosync.concurrency import first_line
from aiosync.defaults import DEFAULTS
from aiosync.errors import (
    AiosyncError,
    Coverage,
    Fenced,
    InvalidTransition,
    PeerLost,
    PhaseTimeout,
    RemoteError,
    Validation,
)
from aiosync.fleet_health import confirm_lost, is_refused
from aiosync.giving_up import tell_ranks
from aiosync.iterator_source import IteratorSource
from aiosync.member_table import MemberState, MemberTrigger
from aiosync.ranks import awaits_word
from aiosync.roll_call import has_restarted
from aiosync.weight_targets import MODEL
from statemachines.tables import Trigger, Weights

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from aiosync.member import MemberStanding
    from aiosync.members import MemberLink
    from aiosync.round import Round


@contextmanager
def driving(round: Round) -> Iterator[None]:
    """While the round runs, its word on the members counts; then the fleet gets it."""
    fleet, cycle = round.engine.fleet, round.engine.cycle
    if fleet is None:
        yield
        cycle.mixed = None
        return
    fleet.begins()
    try:
        yield
        cycle.mixed = None  # all that take part hold the same again
    except BaseException as error:
        _settle(round, error)
        raise
    else:
        _settle(round, None)
    finally:
        fleet.ended()


async def at_most_twice(round: Round, run: Callable[[], Awaitable[None]]) -> None:
    """Await ``run()``, and once more where a lost member ended it and may be left, or where the
    source, or a member's model, turned out not to be as it was (`may_look_late`, `LooksLate`), or
    where a member that was to start with the update had restarted.

    All trainer ranks do so, or none: rank 0, whose fleet it is, decides, and the others wait for
    its word wherever it told them with the reason that there will be one.
    """
    ranks = round.engine.ranks
    round.starts_with_update = False  # settled anew by each try
    ranks.may_begin_again = functools.partial(_may_leave, round)
    try:
        await run()
    except BaseException as error:
        ranks.may_begin_again = None
        if not isinstance(error, AiosyncError):  # cancelled, say, after that was promised
            await _take_back(round, error)
            raise
        alone = ranks.size == 1
        if _has_moved(round, error):
            round.has_moved = True
            round.notes.append(f"begun again: {error.message}")
            ranks.begin(round.settings.deadline)
            await at_most_twice(round, run)
            return
        if await _could_not_start(round, error):
            round.recovered = True
            round.notes.append(f"begun again, a worker had restarted: {error.message}")
            ranks.begin(round.settings.deadline)
            await at_most_twice(round, run)
            return
        if not await (_lost_a_member(round, error) if alone else _all_begin_again(round, error)):
            raise
        round.notes.append(f"begun again without {error.replica}: {error.message}")
        round.recovered = True
        ranks.begin(round.settings.deadline)
        await run()
    finally:
        ranks.may_begin_again = None


def may_look_late(round: Round) -> bool:
    """Whether the source is looked at while its tensors are sent.

    Then a source that is not as it was ends the round when members have some of its tensors: it
    has to be one that can begin again.
    """
    engine = round.engine
    has_begun_again = round.has_moved or round.recovered
    # A gate runs others' code after the first look, which is then worth nothing.
    is_gated = engine.machine.is_gated(Trigger.START)
    may_begin_again = can_begin_again(round) and not has_begun_again
    return engine.looks_late and may_begin_again and not is_gated


def _has_moved(round: Round, error: AiosyncError) -> bool:
    """Whether a model, here or there, turned out to be another one than in the round before.

    What a member has to say against an announcement that nobody has looked at counts as well.
    """
    if not isinstance(error, Validation | Coverage) or round.has_moved or round.sent_finish:
        return False
    is_doubtful = round.looks_late and isinstance(error, RemoteError)
    return bool(is_doubtful or error.detail.get("moved")) and can_begin_again(round)


def can_begin_again(round: Round) -> bool:
    """Whether nobody else counts on this very round, and its tensors can be had once more."""
    engine, side = round.engine, round.source_side
    is_there = not side.is_pushed and not isinstance(side.source, IteratorSource)
    return is_there and round.settings.ticket is None and engine.recovers and engine.ranks.size == 1


async def _could_not_start(round: Round, error: AiosyncError) -> bool:
    """Whether the update found a worker that has to be initialised before it can start a round."""
    is_refusal = isinstance(error, Fenced | InvalidTransition) and error.phase == "start"
    # An older release that came back under the address knows no header that says so.
    is_refusal = is_refusal or (isinstance(error, Validation) and isinstance(error, RemoteError))
    if not (round.starts_with_update and is_refusal):
        return False
    with anyio.move_on_after(round.seconds_left):
        return await has_restarted(round)
    return False


async def _take_back(round: Round, error: BaseException) -> None:
    """No word comes as to whether the round begins again: the others need not wait for it."""
    ranks = round.engine.ranks
    if ranks.promised and not ranks.broken:
        ranks.begin(round.settings.deadline)
        await tell_ranks(round, error)


async def _all_begin_again(round: Round, error: AiosyncError) -> bool:
    """Rank 0 decides, and every rank hears it before any of them goes on."""
    engine, ranks = round.engine, round.engine.ranks
    decides = ranks.promised
    if ranks.broken or not (decides or awaits_word(error)):
        return False
    ranks.begin(round.settings.deadline)
    if decides:
        try:
            lost = await _lost_a_member(round, error)
        except BaseException as why:  # the others wait: there is nothing to wait for any more
            await tell_ranks(round, why)
            raise
        if not lost:
            await tell_ranks(round, error)
            return False
    # Rank 0 asks the member as often as it takes, which is bounded by less.
    limit = min(time.monotonic() + 2 * DEFAULTS.probe_s, round.settings.deadline)
    meet = functools.partial(ranks.meet, "again", deadline=limit)
    try:
        await engine.source_lane.run(meet, abort=ranks.abort, grace=round.source_grace)
    except AiosyncError as other:
        error.add_note(f"not begun again: {first_line(other)}")
        return False
    return True


def _may_leave(round: Round, error: BaseException) -> bool:
    """Whether `round` could begin again without the member that `error` names, were it lost."""
    fleet = round.engine.fleet
    if fleet is None or not fleet.retry_without_lost or round.sent_finish:
        return False
    if not isinstance(error, PeerLost | PhaseTimeout) or len(fleet.standings) == 1:
        return False
    if round.settings.ticket is not None or round.source_side.is_pushed:
        return False  # others count on this very round; or what was handed over once is gone
    return _standing(round, error.replica) is not None


def _standing(round: Round, name: str | None) -> MemberStanding | None:
    fleet = round.engine.fleet
    if fleet is None or name is None:
        return None
    link = next((x for x in round.links if name == x.name or name.startswith(f"{x.name}/")), None)
    return None if link is None else fleet.standing_of(link)


async def _lost_a_member(round: Round, error: AiosyncError) -> bool:
    """Whether `round` may begin again without the member that ended it, which is lost."""
    fleet, standing = round.engine.fleet, _standing(round, error.replica)
    if fleet is None or standing is None or not _may_leave(round, error):
        return False
    return await confirm_lost(fleet, standing.name)


def _settle(round: Round, error: BaseException | None) -> None:
    """After a round: tell the fleet what became of each member."""
    fleet = round.engine.fleet
    if fleet is None:
        return
    links = round.links
    outcomes: dict[str, list[MemberLink]] = {}
    for link in links:
        outcomes.setdefault(link.member, []).append(link)
    began = round.number > 0  # else what the links say is of an earlier round
    if round.target != MODEL or (not began and error is None):
        return  # a draft or an adapter; or a ticket's round, answered from the record
    committed = {name for name, own in outcomes.items() if began and _all_committed(own)}
    if error is None or committed:
        fleet.versions.set(round.version)
        if fleet.catch_ups is not None:
            fleet.goal = Goal.of(round)
        if fleet.keeper is not None:
            fleet.keeper.commit(round)
        there = [fleet.standing_of(link) for link in links]
        for other in fleet.standings.values():
            if other not in there and other.state is MemberState.CURRENT:
                other.fire(MemberTrigger.MISS, error="a round went on without it")
    for name, own in outcomes.items():
        standing = fleet.standing_of(own[0])
        if standing is None:
            continue
        for index, link in enumerate(own):
            if link.known_incarnation is not None:
                standing.incarnations[index] = link.known_incarnation
        why = next((link.error for link in own if link.error), None)
        cause = round.attendance.lost.get(name)
        facts: dict[str, Any] = {"round": round.number, "version": round.label}
        if name in committed:
            standing.version, standing.guest = round.version, None
            standing.fire(MemberTrigger.COMMIT, **facts)
        elif is_refused(cause) or (cause is None and is_refused(_error_of(error, own))):
            standing.fire(MemberTrigger.LOSE, error=why, **facts)
        elif not began:
            continue
        elif committed or error is None or not all(_holds_the_old_one(link) for link in own):
            standing.fire(MemberTrigger.MISS, error=why, **facts)


def _holds_the_old_one(link: MemberLink) -> bool:
    return link.outcome != "unknown" and (link.peer is None or link.peer.weights == Weights.INTACT)


def _all_committed(links: list[MemberLink]) -> bool:
    return all(link.outcome == "committed" for link in links)


def _error_of(error: BaseException | None, links: list[MemberLink]) -> BaseException | None:
    name = getattr(error, "replica", None)
    return error if any(name in (link.name, link.member) for link in links) else None
