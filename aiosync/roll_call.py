"""Before a round: bring in the members that joined, let go of those that left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from aiosync.attendance import Attendance
from aiosync.concurrency import quietly
from aiosync.defaults import DEFAULTS
from aiosync.giving_up import abort_members, let_go
from aiosync.member_table import MemberState
from aiosync.members import MemberLink
from aiosync.messages import PROTOCOL, RoundHeader
from aiosync.rendezvous import initialise, meet
from statemachines.tables import State, Trigger

if TYPE_CHECKING:
    from aiosync.errors import AiosyncError
    from aiosync.member import MemberStanding
    from aiosync.roster import Roster
    from aiosync.round import Round
    from aiosync.trainer import TrainerWeightTransferEngine


def convene(round: Round) -> None:
    """The engine's present links take part; for as long as nothing has begun."""
    engine, fleet = round.engine, round.engine.fleet
    links = engine.links
    round.attendance = Attendance(links) if fleet is None else fleet.attendance(links)
    round.attendance.nudge = engine.nudge
    round.attendance.leave = lambda link: let_go(round, link, "this round goes on without")


async def assemble(round: Round) -> None:
    """Settle who takes part in `round`, and have the channel reach all of them."""
    engine, fleet = round.engine, round.engine.fleet
    if fleet is not None and engine.is_sender:
        await _change_members(round, fleet)
    await engine.cycle.ensure_initialized(round)
    convene(round)


async def _change_members(round: Round, fleet: Roster) -> None:
    await fleet.give_way()
    engine = round.engine
    wanted = {standing.name: standing for standing in fleet.wanted()}
    # Another member may have come under the name of one that left.
    gone = [
        link
        for link in engine.links
        if link.member not in wanted or fleet.standing_of(link) is None
    ]
    known = {link.member for link in engine.links if link not in gone}
    again = [name for name in known & set(wanted) if _must_join(engine, wanted[name])]
    new = [link for name in wanted.keys() - known for link in wanted[name].member.links()]
    back = [link for link in engine.links if link.member in again]
    if not gone and not new and not back:
        return
    kept = [link for link in engine.links if link not in gone and link not in back]
    if engine.state is not State.INITIALIZED:
        engine.links = in_order(fleet, kept + back + new)
        return
    if new or gone:
        names = sorted({link.member for link in new}), sorted({link.member for link in gone})
        round.notes.append(
            f"joined: {', '.join(names[0]) or 'nobody'}; left: {', '.join(names[1]) or 'nobody'}"
        )
    joining = await _probed(fleet, new + back)
    if engine.per_member and all(engine.fits(link) for link in joining):
        engine.links = kept
        await _let_go(engine, gone)
        joined = await _initialised(engine, fleet, joining)
        engine.links = in_order(fleet, kept + joined)
        return
    # One stream through all of them: a new group, under a new epoch.
    engine.links = in_order(fleet, kept + joining)
    engine.dispose()
    engine.machine.fire(Trigger.RELEASE)
    await _let_go(engine, gone)


def _must_join(engine: TrainerWeightTransferEngine[Any], standing: MemberStanding) -> bool:
    """Whether it is another process than the one that was initialised, or not ours any more."""
    links = [link for link in engine.links if link.member == standing.name]
    seen = standing.incarnations
    other = any(
        link.known_incarnation is not None and seen.get(index) not in (None, link.known_incarnation)
        for index, link in enumerate(links)
    )
    other = other or standing.guest is not None
    return other or (engine.per_member and standing.state is MemberState.STALE)


def in_order(fleet: Roster, links: list[MemberLink]) -> list[MemberLink]:
    """`links` in the order of the fleet's members."""
    order = {name: place for place, name in enumerate(fleet.standings)}
    return sorted(links, key=lambda link: order.get(link.member, -1))


async def _probed(fleet: Roster, links: list[MemberLink]) -> list[MemberLink]:
    """Those of `links` that answer; the others cost this round their admission share, once."""
    failed: dict[str, Exception] = {}

    async def one(link: MemberLink) -> None:
        try:
            with anyio.fail_after(DEFAULTS.join_s):
                await link.probe()
        except Exception as error:  # noqa: BLE001  its own affair: the others go on
            failed[link.member] = error

    async with anyio.create_task_group() as group:
        for link in links:
            group.start_soon(one, link)
    fleet.leave_out(links, failed)
    return [link for link in links if link.member not in failed]


async def _initialised(
    engine: TrainerWeightTransferEngine[Any], fleet: Roster, links: list[MemberLink]
) -> list[MemberLink]:
    """Each of `links` by itself, into the channel that there is."""
    failed: dict[str, Exception] = {}
    payload = engine.get_worker_init_payload() if links else {}

    async def one(link: MemberLink) -> None:
        try:
            engine.check_peer(link)
            with anyio.fail_after(DEFAULTS.join_s):
                await initialise(
                    Attendance([link]),
                    lambda link: {**payload, **engine.member_payload(link)},
                    owner=engine.owner,
                    lease_s=engine.lease_s,
                )
        except Exception as error:  # noqa: BLE001
            failed[link.member] = error

    async with anyio.create_task_group() as group:
        for link in links:
            group.start_soon(one, link)
    fleet.leave_out(links, failed, answered=failed)
    return [link for link in links if link.member not in failed]


async def has_restarted(round: Round) -> bool:
    """Whether a member that refused `start` is another process, or lost its channel."""
    able = [link for link in round.present if link.speaks_ours]
    linger = round.budget.cleanup
    await round.attendance.call(able, MemberLink.probe, phase="start", linger=linger)
    # One that was shut down from elsewhere has lost its channel as well.
    lost = (State.IDLE, State.FAILED)
    return any(link.restarted or (link.peer and link.peer.state in lost) for link in able)


async def begin_again(round: Round, error: AiosyncError) -> None:
    """Initialise all members anew: noticed before a byte moved, within the same budget."""
    round.notes.append(f"initialised again, a worker had restarted: {error.message}")
    round.recovered = True
    await abort_members(round, error)  # those whose start went through
    await meet(round.engine)  # it, and all others, get a new epoch
    convene(round)
    for link in round.links:
        link.begin_round()
    if round.settings.ticket is not None:
        round.engine.tickets.check_epochs(round.settings.ticket)


async def _let_go(engine: TrainerWeightTransferEngine[Any], links: list[MemberLink]) -> None:
    """Tell those that left, quickly; one that is gone needs no goodbye."""

    async def leave(link: MemberLink) -> None:
        header = None
        if link.speaks_ours:
            header = RoundHeader(protocol=PROTOCOL, owner=engine.owner, epoch=link.epoch)
        await link.call("shutdown_weight_transfer_engine", header=header)

    with anyio.move_on_after(DEFAULTS.cleanup_s / 2):
        async with anyio.create_task_group() as group:
            for link in links:
                if hasattr(link.client, "shutdown_weight_transfer_engine"):
                    group.start_soon(quietly, leave, link)
