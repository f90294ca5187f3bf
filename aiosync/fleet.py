"""Several replicas as one client, who of them may serve, and which rounds count."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self, final

from aiosync.budget import check_seconds
from aiosync.catch_up import CatchUps
from aiosync.concurrency import to_its_end
from aiosync.defaults import DEFAULTS
from aiosync.errors import Validation
from aiosync.fleet_health import Health
from aiosync.fleet_round import FleetRound
from aiosync.former_names import KnowsFormerNames
from aiosync.from_peer import FromPeer
from aiosync.member import Member
from aiosync.member_table import MemberState
from aiosync.members import MemberLink, fan_out, links_of, own_info
from aiosync.policies import policy_of
from aiosync.roster import Roster
from aiosync.round_options import NEXT
from statemachines.hub import TransitionHub

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiosync.client_protocol import VLLMWeightSyncClient
    from aiosync.policies import Policy
    from aiosync.round_options import Next
    from aiosync.version import Version
    from statemachines import Subscription, Transition

__all__ = ["FleetClient", "Member"]
_CATCH_UP = ("next_round", "peer", "snapshot")


@final
class FleetClient(KnowsFormerNames):
    """Reaches every member, waits for all, and says what became of each.

    Members may be added and removed at any time; that takes effect with the next round. While it
    is entered (``async with fleet:``) it probes all members every second, so that a killed one is
    found within about a second and a stopped one after three missed probes; otherwise only the
    rounds tell. It can be pickled: what travels is the specification, and members start anew.

    Args:
        members: `Member` objects, clients, or URLs; at least one, names unique.
        policy: ``"all"``, ``"quorum(k)"`` or ``"best_effort"``, or `All`, `Quorum`, `BestEffort`:
            how many must commit for a round to count. All but the first need a data plane per
            member, such as ``ipc``.
        catch_up: How a member that joins or missed a round gets the version: with the
            ``"next_round"``, or before that, between rounds while the fleet is entered, from a
            ``"snapshot"`` or from a ``"peer"``: a member that holds it.
        snapshot: Where the committed version is found then: ``"keep"`` (the fleet keeps two copies
            of the model in host memory, and copies each round's tensors on their way); a source,
            or a path to a safetensors file or a folder of them, that is brought up to date before
            members are caught up; or a function, perhaps async, that takes the `Version` and
            returns one of the two.
        retry_without_lost: Under ``"all"``, run a round that a lost member ended once more without
            it, under a new epoch.
        patience: How long, as a share of their own time, members wait for slower ones (at least a
            second) before those are left behind; not under ``"all"``.

    Raises:
        Validation: One of them cannot be right.
    """

    def __init__(
        self,
        members: Sequence[str | VLLMWeightSyncClient | Member],
        *,
        policy: str | Policy = "all",
        catch_up: str = "next_round",
        snapshot: Any = None,
        retry_without_lost: bool = False,
        patience: float = DEFAULTS.patience,
    ) -> None:
        self.policy = policy_of(policy)
        if isinstance(members, str) or not isinstance(members, Iterable):
            raise Validation(f"members must be a list, not {members!r}")
        _check_catch_up(catch_up, snapshot)
        self.catch_up = catch_up
        self.snapshot = snapshot
        self.retry_without_lost = retry_without_lost
        self.patience = check_seconds(patience, "patience")
        self._spec = tuple(
            member if isinstance(member, Member) else Member(_name_of(member, index), member)
            for index, member in enumerate(members)
        )
        self._begin()

    def _begin(self) -> None:
        names = [member.name for member in self._spec]
        if not names:
            raise Validation("a fleet needs at least one member")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise Validation(f"member names must be unique, these are not: {', '.join(twice)}")
        self.events = TransitionHub()
        """Publishes the members' transitions (role ``"member"``)."""
        # Not for users: what engines and rounds know the fleet by.
        self.roster = Roster(
            self._spec,
            self.events,
            policy=self.policy,
            patience=self.patience,
            retry_without_lost=self.retry_without_lost,
        )
        self._health = Health(self.roster)
        if self.catch_up == "snapshot":
            from aiosync.snapshots import KEEP, FromSnapshot, Keeper  # here: they need torch

            keeper = Keeper() if self.snapshot == KEEP else None
            way = FromSnapshot(self.snapshot, keeper)
            self.roster.keeper, self.roster.catch_ups = keeper, CatchUps(self.roster, way)
        elif self.catch_up == "peer":
            self.roster.catch_ups = CatchUps(self.roster, FromPeer(self.roster))

    def __getstate__(self) -> dict[str, Any]:
        kept = ("policy", "catch_up", "snapshot", "retry_without_lost", "patience")
        return {name: self.__dict__[name] for name in kept} | {"_spec": self.members}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    # -- members ---------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(standing.member for standing in self.roster.standings.values())

    @property
    def states(self) -> dict[str, MemberState]:
        """Every member's state, by name."""
        return {name: standing.state for name, standing in self.roster.standings.items()}

    @property
    def version(self) -> Version | None:
        """What the last round that counts has committed."""
        return self.roster.versions.version

    @property
    def held(self) -> dict[str, Version | None]:
        """What every member said last that it holds whole, by name; also where they differ."""
        return {name: standing.version for name, standing in self.roster.standings.items()}

    def add(self, member: Member | VLLMWeightSyncClient | str) -> Member:
        """Have a member take part from the next round on; until then it is ``joining``.

        One of that name which left or was lost is replaced.

        Raises:
            Validation: There is a member of that name.
        """
        if not isinstance(member, Member):
            member = Member(_name_of(member, len(self.members)), member)
        self.roster.add(member)
        return member

    def remove(self, name: str) -> Member:
        """Have a member take part in no further round; one that is under way goes on.

        Raises:
            Validation: There is no such member, or it is the last one.
        """
        return self.roster.remove(name)

    def routable(self) -> tuple[Member, ...]:
        """The members that requests may be sent to: they confirmed the newest version."""
        found = self.roster.standings.values()
        return tuple(each.member for each in found if each.state is MemberState.CURRENT)

    def on_member(self, hook: Callable[[Transition], object]) -> Callable[[], None]:
        """Call `hook` inside every change of a member's state; returns its remover."""
        return self.events.on_transition(hook)

    def subscribe(self, *, size: int = 256, since: int | None = None) -> Subscription:
        """The members' transitions as a stream."""
        return self.events.subscribe(size=size, since=since)

    async def wait_version(self, order: int, *, timeout: float | None = None) -> Version:
        """Wait until a version of at least `order` is committed.

        Raises:
            TimeoutError: Not within `timeout` seconds.
        """
        return await self.roster.versions.wait(order, timeout)

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until every member answers as a worker does.

        Raises:
            Unauthorized, ProtocolMismatch, Validation: Waiting will not help: a wrong token, or
                something else at that URL. Names the member.
            PhaseTimeout: Not all answered in time; says what each is doing: still loading (nothing
                listens there yet), or silent.
        """
        limit = DEFAULTS.admit_s if timeout is None else check_seconds(timeout, "timeout")
        await self._health.wait_ready(limit)

    # -- heartbeats ------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._health.start()
        if self.roster.catch_ups is not None:
            await self.roster.catch_ups.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await to_its_end(self._leave)  # or a cancelled block would leave the probes behind

    async def _leave(self) -> None:
        try:
            if self.roster.catch_ups is not None:
                await self.roster.catch_ups.stop()
        finally:
            await self._health.stop()

    # -- as one client ---------------------------------------------------------------------------

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each server gets its own: an int ``rank_offset`` is moved on by the ranks before it."""
        links = links_of(self)
        await fan_out(links, MemberLink.probe, phase="init", linger=DEFAULTS.cleanup_s)

        async def init(link: MemberLink) -> None:
            info = own_info(init_info, link, links)
            await link.call("init_weight_transfer_engine", info)

        await fan_out(links, init, phase="init", linger=DEFAULTS.cleanup_s)

    async def start_weight_update(self) -> None:
        await self._all("start", "start_weight_update")

    async def update_weights(self, update_info: Any) -> None:
        await self._all("update", "update_weights", update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self._all("finish", "finish_weight_update", weight_version)

    async def get_world_size(self, include_dp: bool = True) -> int:
        """Workers of all members together."""
        sizes = await fan_out(
            links_of(self),
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
        await fan_out(
            links_of(self),
            lambda link: link.call(method, *args),
            phase=phase,
            linger=DEFAULTS.cleanup_s,
        )

    def __repr__(self) -> str:
        states = ", ".join(f"{name} {state.value}" for name, state in self.states.items())
        return f"<FleetClient {self.policy} of {states}>"


def _check_catch_up(catch_up: Any, snapshot: Any) -> None:
    if catch_up not in _CATCH_UP:
        raise Validation(f"catch_up must be one of {', '.join(_CATCH_UP)}, not {catch_up!r}")
    if catch_up == "snapshot":
        from aiosync.snapshots import check_snapshot  # here: it needs torch

        check_snapshot(snapshot)
    elif snapshot is not None:
        raise Validation(f"snapshot= is for catch_up='snapshot', not for {catch_up!r}")


def _name_of(member: Any, index: int) -> str:
    if isinstance(member, str):
        return member
    return str(getattr(member, "name", None) or f"worker-{index}")
