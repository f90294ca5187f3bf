"""A fleet's members as engines, rounds and probes know them."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from aiosync.attendance import Attendance
from aiosync.concurrency import first_line
from aiosync.errors import Validation
from aiosync.member import MemberStanding
from aiosync.member_table import MemberState, MemberTrigger
from aiosync.policies import All
from aiosync.version_watch import VersionWatch

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from aiosync.catch_up import CatchUps, Goal
    from aiosync.member import Member
    from aiosync.members import MemberLink
    from aiosync.policies import Policy
    from aiosync.snapshots import Keeper
    from aiosync.version import Version
    from statemachines.hub import TransitionHub


@final
class Roster:
    """Who belongs to a fleet, and what a round may do without.

    Attributes:
        standings: The members by name, in the order in which they came.
        versions: What rounds that count have committed.
        goal: The last of them, and how it was sent; None where another process sent it.
        keeper: Takes a copy of what is sent, where the fleet is to keep one.
        catch_ups: Who brings members up between rounds, where somebody does.
        hub: Of the members' transitions.
        followed: The version, where members said it and no round of this fleet's own.
        mixed: Who held what, where members differed when such a fleet looked last.
    """

    def __init__(
        self,
        members: Sequence[Member],
        hub: TransitionHub,
        *,
        policy: Policy,
        patience: float,
        retry_without_lost: bool,
    ) -> None:
        self.policy = policy
        self.patience = patience
        self.retry_without_lost = retry_without_lost
        self.standings = {member.name: MemberStanding(member, hub) for member in members}
        self.versions = VersionWatch("fleet")
        self.goal: Goal | None = None
        self.keeper: Keeper | None = None
        self.catch_ups: CatchUps | None = None
        self.hub = hub
        self._driving = 0
        self.followed: Version | None = None
        self.mixed: str | None = None

    @property
    def driving(self) -> int:
        """Rounds under way: meanwhile members may be newer than the fleet."""
        return self._driving

    def begins(self) -> None:
        """A round is under way."""
        self._driving += 1

    def ended(self) -> None:
        """It is over, and the fleet has been told of it."""
        self._driving -= 1
        if self.catch_ups is not None:
            self.catch_ups.kick()

    async def give_way(self) -> None:
        """The members are needed: nobody is brought up beside that."""
        if self.catch_ups is not None:
            await self.catch_ups.give_way()

    @property
    def follows(self) -> bool:
        """Whether its version is what members say: no round of its own has committed yet."""
        return self.versions.version is None or self.versions.version is self.followed

    @property
    def tolerant(self) -> bool:
        """Whether a round may go on without some members."""
        return not isinstance(self.policy, All)

    def add(self, member: Member) -> None:
        """See `FleetClient.add`."""
        known = self.standings.get(member.name)
        if known is not None and known.state is not MemberState.LOST:
            raise Validation(f"there is a member {member.name!r} already ({known.state.value})")
        if known is not None:
            known.fire(MemberTrigger.LEAVE)
        self.standings[member.name] = MemberStanding(member, self.hub)

    def remove(self, name: str) -> Member:
        """See `FleetClient.remove`."""
        if name not in self.standings:
            raise Validation(f"no member {name!r}; there are {', '.join(self.standings)}")
        if len(self.standings) == 1:
            raise Validation(f"{name!r} is the last member: close the engine instead")
        standing = self.standings.pop(name)
        standing.fire(MemberTrigger.LEAVE)
        return standing.member

    def standing_of(self, link: MemberLink) -> MemberStanding | None:
        """Of the member that the link leads to; None: it has left, whoever has its name now."""
        standing = self.standings.get(link.member)
        servers = () if standing is None else standing.member.servers
        return standing if any(server is link.given for server in servers) else None

    def attendance(self, links: Sequence[MemberLink]) -> Attendance:
        """The members of a new round."""
        return Attendance(links, self.policy, patience=self.patience)

    def wanted(self) -> list[MemberStanding]:
        """Who is to take part in a round: all but the lost, where it may go on without them.

        One that has not been let go by whoever was bringing it up joins the round after.
        """
        held = None if self.catch_ups is None else self.catch_ups.member
        every = list(self.standings.values())
        found = [each for each in every if each is not held] or every
        if self.tolerant or self.retry_without_lost:
            there = [each for each in found if each.state is not MemberState.LOST]
            return there or found  # if all are lost, as far as anybody knows: try them
        return found

    def lost(self) -> list[str]:
        """Names of the members that do not answer."""
        return [name for name, each in self.standings.items() if each.state is MemberState.LOST]

    def leave_out(
        self,
        links: Sequence[MemberLink],
        failed: Mapping[str, Exception],
        *,
        answered: Collection[str] = (),
    ) -> None:
        """Of the members of `links`, those that failed are lost, until they answer again.

        Args:
            answered: Those that answered, and failed nevertheless: they are not tried again before
                they have been away or are another process, so that a round is not held up twice.
        """
        members = {link.member: self.standing_of(link) for link in links}
        for name, error in failed.items():
            standing = members.get(name)
            if standing is not None:
                text = f"{type(error).__name__}: {first_line(error)}"
                standing.fire(MemberTrigger.LOSE, error=text)
                standing.barred = name in answered
