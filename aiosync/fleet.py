"""Several replicas as one client."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, final

from aiosync.client import HTTPVLLMWeightSyncClient
from aiosync.defaults import DEFAULTS
from aiosync.errors import Validation
from aiosync.fleet_round import FleetRound
from aiosync.former_names import KnowsFormerNames
from aiosync.members import MemberLink, fan_out
from aiosync.round_options import NEXT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiosync.client_protocol import VLLMWeightSyncClient
    from aiosync.round_options import Next
    from aiosync.version import Version


@final
class Member:
    """One replica: a name and how to reach it.

    Args:
        name: Shown in reports and errors; unique in a fleet.
        client: A `VLLMWeightSyncClient`, or a URL (``http://...`` or ``unix:///path``).
    """

    def __init__(self, name: str, client: VLLMWeightSyncClient | str) -> None:
        self.name = name
        self.client: VLLMWeightSyncClient = (
            HTTPVLLMWeightSyncClient(client) if isinstance(client, str) else client
        )

    def __repr__(self) -> str:
        return f"Member({self.name!r}, {self.client!r})"


@final
class FleetClient(KnowsFormerNames):
    """Reaches every member, waits for all, and raises with each member's name on failure.

    Commit policy ``"all"``: a round is committed when every member has it.

    Args:
        members: `Member` objects, clients, or URLs; at least one, names unique.
    """

    def __init__(
        self, members: Sequence[str | VLLMWeightSyncClient | Member], *, policy: str = "all"
    ) -> None:
        if policy != "all":
            raise Validation(f"policy must be 'all', not {policy!r}")
        if isinstance(members, str) or not isinstance(members, Iterable):
            raise Validation(f"members must be a list, not {members!r}")
        self.policy = policy
        self.members = tuple(
            member if isinstance(member, Member) else Member(_name_of(member, index), member)
            for index, member in enumerate(members)
        )
        names = [member.name for member in self.members]
        if not names:
            raise Validation("a fleet needs at least one member")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise Validation(f"member names must be unique, these are not: {', '.join(twice)}")

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        await self._all("init", "init_weight_transfer_engine", init_info)

    async def start_weight_update(self) -> None:
        await self._all("start", "start_weight_update")

    async def update_weights(self, update_info: Any) -> None:
        await self._all("update", "update_weights", update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self._all("finish", "finish_weight_update", weight_version)

    async def get_world_size(self, include_dp: bool = True) -> int:
        """Workers of all members together."""
        links = [MemberLink(member.name, member.client) for member in self.members]
        sizes = await fan_out(
            links,
            lambda link: link.client.get_world_size(include_dp),
            phase="world_size",
            linger=DEFAULTS.cleanup_s,
        )
        return sum(sizes.values())

    def round(
        self,
        *,
        version: int | str | Version | Next = NEXT,
        timeout: float | None = None,
        pause: str | None = None,
        lineage: str | None = None,
        opaque: str = "",
    ) -> FleetRound:
        """A round that this process drives and a trainer elsewhere carries out.

        ``async with fleet.round(version=7, timeout=60) as rnd:`` announces it to every member;
        ``rnd.ticket`` goes to the trainer's ranks. Leaving the block waits for the outcome.

        Args:
            version: As for `send_weights`; left out, the order after the newest that is held.
            timeout: Seconds from the block's beginning to the commit.
            pause: Keep generation of all members still (``"keep"``, ``"wait"``, ``"abort"``) from
                the first commit to the last; None: each pauses for its own swap alone.
            lineage: Name of the training run; None: that of the newest version held.
            opaque: A text of your own that travels in the ticket.
        """
        return FleetRound(
            self, version=version, timeout=timeout, pause=pause, lineage=lineage, opaque=opaque
        )

    async def _all(self, phase: str, method: str, *args: Any) -> None:
        links = [MemberLink(member.name, member.client) for member in self.members]
        await fan_out(
            links,
            lambda link: link.call(method, *args),
            phase=phase,
            linger=DEFAULTS.cleanup_s,
        )

    def __repr__(self) -> str:
        return f"<FleetClient of {', '.join(member.name for member in self.members)}>"


def _name_of(member: Any, index: int) -> str:
    if isinstance(member, str):
        return member
    return str(getattr(member, "name", None) or f"worker-{index}")
