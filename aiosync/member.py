"""One member of a fleet: how to reach its servers, and what the fleet knows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from aiosync.client import HTTPVLLMWeightSyncClient
from aiosync.errors import Validation
from aiosync.member_table import MEMBER, MemberState, MemberTrigger
from aiosync.members import MemberLink
from statemachines.machine import StateMachine
from statemachines.tables import Weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiosync.client_protocol import VLLMWeightSyncClient
    from aiosync.messages import PeerState
    from aiosync.version import Version
    from statemachines.hub import TransitionHub

_SETBACKS = (MemberTrigger.MISS, MemberTrigger.LOSE, MemberTrigger.FALL_BACK)
_ALWAYS_SAID = (MemberTrigger.COMMIT, MemberTrigger.CATCH_UP, MemberTrigger.FALL_BACK)


@final
class Member:
    """One replica: a name and how to reach it.

    Args:
        name: Shown in reports and errors; unique in a fleet.
        client: A `VLLMWeightSyncClient`, or a URL (``http://...`` or ``unix:///path``).
        servers: Instead of `client`, where a replica is several servers (prefill and decode,
            data-parallel ranks): each gets init info of its own, and they commit together or not
            at all.
    """

    def __init__(
        self,
        name: str,
        client: VLLMWeightSyncClient | str | None = None,
        *,
        servers: Sequence[VLLMWeightSyncClient | str] | None = None,
    ) -> None:
        given: Any = name
        if not isinstance(given, str) or not given:
            raise Validation(f"a member's name must be a non-empty str, not {name!r}")
        if (client is None) == (servers is None):
            raise Validation(f"member {name!r} needs a client, or a list of servers: one of both")
        if isinstance(servers, str):
            raise Validation(f"member {name!r}: servers must be a list, not {servers!r}")
        found = [client] if servers is None else list(servers)
        if not found:
            raise Validation(f"member {name!r} needs at least one server")
        self.name = name
        self.servers: tuple[VLLMWeightSyncClient, ...] = tuple(
            HTTPVLLMWeightSyncClient(each) if isinstance(each, str) else each  # type: ignore[misc]
            for each in found
        )

    @property
    def client(self) -> VLLMWeightSyncClient:
        """The client of the member's (first) server."""
        return self.servers[0]

    def links(self) -> list[MemberLink]:
        """New links, one to each server."""
        if len(self.servers) == 1:
            return [MemberLink(self.name, self.client)]
        return [
            MemberLink(f"{self.name}#{index}", client, member=self.name)
            for index, client in enumerate(self.servers)
        ]

    def __repr__(self) -> str:
        what = ", ".join(map(repr, self.servers))
        return f"Member({self.name!r}, {what})"


@final
class MemberStanding:
    """What a fleet knows of one member; its machine says whether it may serve.

    Attributes:
        error: Why it is stale or lost.
        incarnations: Of its servers' processes, as they were last seen.
        version: What all of its servers said last that they hold.
        misses: Probes in a row that it has not answered.
        barred: It answers, and could not be brought in: that alone does not bring it back.
        guest: As whom it was brought up since its last round; the fleet's engine has to
            initialise it again.
        tried: What was tried last to bring it up, in vain.
    """

    def __init__(self, member: Member, hub: TransitionHub) -> None:
        self.member = member
        self.machine = StateMachine(MEMBER, name=member.name, role="member", hub=hub)
        self.error: str | None = None
        self.incarnations: dict[int, str] = {}
        self.version: Version | None = None
        self.misses = 0
        self.barred = False
        self.guest: str | None = None
        self.tried: tuple[Any, ...] | None = None

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def state(self) -> MemberState:
        return MemberState(self.machine.state)

    def fire(self, trigger: MemberTrigger, *, error: str | None = None, **facts: Any) -> None:
        """Move, unless that leads nowhere new."""
        target = MEMBER.target(self.state, trigger)
        if trigger in _SETBACKS:
            self.error = error or self.error
        elif trigger in (MemberTrigger.COMMIT, MemberTrigger.JOIN):
            self.error, self.misses = None, 0
        if trigger == MemberTrigger.LOSE:
            self.tried = None  # when it is back, it may be well
        if target is not None and (target != self.state or trigger in _ALWAYS_SAID):
            self.machine.fire(trigger, error=error, **facts)

    def note(self, peers: Sequence[PeerState | None]) -> bool:
        """Take in what its servers say of themselves; whether one of them is another process."""
        known, restarted = self.incarnations, False
        for index, peer in enumerate(peers):
            if peer is not None and peer.incarnation:
                before = known.get(index)
                restarted = restarted or before not in (None, peer.incarnation)
                known[index] = peer.incarnation
        self.version = common_version(peers)
        return restarted

    def __repr__(self) -> str:
        version = None if self.version is None else self.version.label
        return f"<member {self.name} {self.state.value} version={version}>"


def common_version(peers: Sequence[PeerState | None]) -> Version | None:
    """The version that all servers of a member hold whole, or None."""
    found = [p.version for p in peers if p is not None and p.weights == Weights.INTACT]
    if len(found) != len(peers) or not found or any(each != found[0] for each in found):
        return None
    return found[0]
