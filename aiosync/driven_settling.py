"""After a driven round: what became of each member, as its fleet sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiosync.driven import COMMITTED
from aiosync.member_table import MemberTrigger

if TYPE_CHECKING:
    from aiosync.driven_members import DrivenMembers
    from aiosync.roster import Roster
    from aiosync.ticket import RoundTicket


def settle(roster: Roster, members: DrivenMembers, ticket: RoundTicket) -> None:
    """Tell the fleet of `roster` who holds the ticket's version now, and who does not."""
    own = {
        name: [link for link in members.links if roster.standing_of(link) is standing]
        for name, standing in roster.standings.items()
    }
    done = {
        name
        for name, links in own.items()
        if links and all(members.phases.get(link.name) == COMMITTED for link in links)
    }
    if done:
        roster.versions.set(ticket.version)
    facts: dict[str, Any] = {"round": ticket.round, "version": str(ticket.version.label)}
    for name, links in own.items():
        standing = roster.standings[name]
        if name in done:
            standing.version = ticket.version
            standing.fire(MemberTrigger.COMMIT, **facts)
        elif links and (done or any(members.phases.get(x.name) == "unknown" for x in links)):
            found = (members.failures.get(link.name) for link in links)
            why = next((str(error) for error in found if error is not None), None)
            standing.fire(MemberTrigger.MISS, error=why, **facts)
