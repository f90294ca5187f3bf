"""One member's round of its own: the version that the fleet has, from a source that has it too."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, final

import anyio

from aiosync.budget import Budget
from aiosync.defaults import DEFAULTS
from aiosync.errors import GateRejected, PhaseTimeout, Refused
from aiosync.fleet_health import ask
from aiosync.member import common_version
from aiosync.version import weights_id
from statemachines.tables import State, Trigger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiosync.catch_up import Goal
    from aiosync.member import Member, MemberStanding
    from aiosync.messages import PeerState
    from aiosync.trainer import TrainerWeightTransferEngine
    from aiosync.version import Version
    from statemachines.gates import GateContext

_NOT_AT_WORK = (State.IDLE, State.FAILED)


@final
class Alone:
    """A client that is a fleet of one; whoever asked keeps the books."""

    def __init__(self, member: Member) -> None:
        self.members = (member,)


class Sent(Protocol):
    """What is delivered: the version, the digests of its bytes and of its announcement."""

    @property
    def version(self) -> Version: ...
    @property
    def digest(self) -> str | None: ...
    @property
    def wire_digest(self) -> str | None: ...


async def bring_up(
    standing: MemberStanding,
    goal: Goal,
    source: Callable[[], Awaitable[Any]],
    arrived: Callable[[Sequence[PeerState | None]], None],
) -> None:
    """Send `goal` from ``source()``, unless the member says that it holds it.

    The member is initialised for an engine of its own, which is gone when this returns.

    Raises:
        Refused: The member is another trainer's, or no worker of ours; or the source has other
            bytes than the fleet.
        Exception: What ended the round.
    """
    peers = await look(standing, goal)
    if holds(peers, goal):
        arrived(peers)
        return
    engine = goal.engine.sibling(client=Alone(standing.member), source=await source())
    standing.guest = engine.owner  # from the first call on it may be no longer the fleet's
    async with engine:
        await deliver(engine, goal)
        arrived([link.peer for link in engine.links])


async def deliver(engine: TrainerWeightTransferEngine[Any], what: Sent) -> None:
    """Send `what` to the members of `engine`, which is new; they commit nothing else.

    Raises:
        GateRejected: The engine's source has other tensors, or other bytes.
        Exception: What ended the round.
    """
    engine.gate(Trigger.START, partial(_same_tensors, engine, what))
    engine.gate(Trigger.COMPLETE, partial(_same_bytes, engine, what))
    await engine.initialize(timeout=DEFAULTS.join_s)
    limits = Budget(admit=DEFAULTS.join_s)
    await engine.send_weights(version=what.version, rollback=True, budget=limits)


async def look(standing: MemberStanding, goal: Goal) -> list[PeerState]:
    """What the member's servers say; they must be free to be taken.

    Raises:
        PhaseTimeout: No answer.
        Refused: One belongs to another trainer, or says nothing of itself.
    """
    peers: list[PeerState] = []
    with anyio.move_on_after(DEFAULTS.join_s) as limit:
        for client in standing.member.servers:
            peer = await ask(client)
            if peer is None:
                raise Refused(f"{standing.name} is no aiosync worker", replica=standing.name)
            peers.append(peer)
    if limit.cancelled_caught:
        raise PhaseTimeout(f"no answer within {DEFAULTS.join_s:g} s", replica=standing.name)
    standing.note(peers)
    for peer in peers:
        known = (None, goal.engine.owner, standing.guest)
        if peer.owner not in known and peer.state not in _NOT_AT_WORK:
            raise Refused(
                f"{standing.name} belongs to {peer.owner}",
                replica=standing.name,
                detail={"owner": peer.owner},
            )
    return peers


def holds(peers: Sequence[PeerState], goal: Goal) -> bool:
    """Whether all servers hold the version whole, and the very bytes where that is known."""
    if common_version(peers) != goal.version:
        return False
    return goal.digest is None or all(
        peer.detail.get("weights_id") == weights_id(goal.version, goal.digest) for peer in peers
    )


def _same_tensors(
    engine: TrainerWeightTransferEngine[Any], what: Sent, context: GateContext
) -> None:
    feed = engine.admission.current.feed if engine.admission.current else None
    if feed is None or feed.wire_digest != what.wire_digest:
        raise GateRejected(
            "the copy has other names, dtypes or shapes than what was sent, or another order",
            phase="start",
        )
    del context


def _same_bytes(engine: TrainerWeightTransferEngine[Any], what: Sent, context: GateContext) -> None:
    this = engine.admission.current
    digest = None if this is None or this.summary is None else this.summary.digest
    if digest != what.digest:
        raise GateRejected(
            f"the copy is not version {what.version.wire!r}: its bytes differ", phase="finish"
        )
    del context
