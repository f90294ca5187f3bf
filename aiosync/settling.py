"""After a round: what became of each member, as the fleet sees it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aiosync.catch_up import Goal
from aiosync.errors import AiosyncError, PeerLost, PhaseTimeout
from aiosync.fleet_health import confirm_lost, is_refused
from aiosync.member_table import MemberState, MemberTrigger
from aiosync.weight_targets import MODEL
from statemachines.tables import Weights

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

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
    """Await ``run()``, and once more where a lost member ended it and may be left."""
    try:
        await run()
    except AiosyncError as error:
        if not await _lost_a_member(round, error):
            raise
        round.notes.append(f"begun again without {error.replica}: {error.message}")
        round.recovered = True
        round.engine.ranks.begin(round.settings.deadline)
        await run()


async def _lost_a_member(round: Round, error: AiosyncError) -> bool:
    """Whether `round` may begin again without the member that ended it, which is lost."""
    fleet, name = round.engine.fleet, error.replica
    if fleet is None or not fleet.retry_without_lost or round.sent_finish or name is None:
        return False
    engine = round.engine
    if engine.ranks.size > 1 or round.settings.ticket is not None:
        return False  # others count on this very round
    if round.source_side.is_pushed:
        return False  # what was handed over once is gone
    if not isinstance(error, PeerLost | PhaseTimeout) or len(fleet.standings) == 1:
        return False
    link = next((x for x in round.links if name == x.name or name.startswith(f"{x.name}/")), None)
    standing = None if link is None else fleet.standings.get(link.member)
    if standing is None:
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
        for other in fleet.standings.values():
            if other.name not in outcomes and other.state is MemberState.CURRENT:
                other.fire(MemberTrigger.MISS, error="a round went on without it")
    for name, own in outcomes.items():
        standing = fleet.standings.get(name)
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
