"""A member that holds the fleet's version sends it to one that does not.

The fleet asks, and the two do the rest: the sender drives a round of the receiver's own, as a
trainer would. What the fleet sees is the answer, and what the receiver then says of itself.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, final

import anyio

from aiosync.concurrency import run_to_end
from aiosync.copy_order import CopyOrder
from aiosync.defaults import DEFAULTS
from aiosync.errors import AiosyncError, PeerLost, Refused
from aiosync.lone_round import holds, look
from aiosync.member import common_version
from aiosync.member_table import MemberState
from aiosync.messages import PROTOCOL, RoundHeader
from aiosync.rendezvous import owner_name
from aiosync.watchable import BUSY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiosync.catch_up import Goal
    from aiosync.copy_order import Reach
    from aiosync.member import MemberStanding
    from aiosync.members import MemberLink
    from aiosync.messages import PeerState
    from aiosync.roster import Roster
    from statemachines.events import Transition


@final
class FromPeer:
    """Has a current member send what it holds."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    async def bring(
        self,
        standing: MemberStanding,
        goal: Goal,
        arrived: Callable[[Sequence[PeerState | None]], None],
    ) -> None:
        """See `Way.bring`."""
        peers = await look(standing, goal)
        if not holds(peers, goal):
            order = await _order(standing, goal)
            standing.guest = order.owner
            try:
                await self._sent(standing, goal, order)
            except BaseException:
                await run_to_end(lambda: _let_go(standing, order), seconds=DEFAULTS.cleanup_s / 2)
                raise
            peers = await look(standing, goal)
            if common_version(peers) != goal.version:  # of its bytes the sender made sure
                raise Refused(f"{standing.name} does not say that it holds the version")
        arrived(peers)

    async def _sent(self, standing: MemberStanding, goal: Goal, order: CopyOrder) -> None:
        """Ask one after the other, until one begins.

        Raises:
            Refused: None of them can.
        """
        refused: AiosyncError | None = None
        for source, link in self._able(standing, goal):
            try:
                await self._ask(source, link, goal, order)
                return
            except AiosyncError as error:
                if error.detail.get("begun") is not False:
                    raise
                refused = error
        raise refused or Refused(
            "there is no current member that can send its model", next_step="catch_up='snapshot'"
        )

    def _able(
        self, standing: MemberStanding, goal: Goal
    ) -> list[tuple[MemberStanding, MemberLink]]:
        found = []
        for link in goal.engine.links:
            other = self._roster.standing_of(link)
            # One that was brought up itself belongs to nobody until the next round.
            mine = other is not None and other.guest is None and other is not standing
            able = hasattr(link.client, "send_copy") and "copies" in link.capabilities.features
            if mine and able and other is not None and other.state is MemberState.CURRENT:
                found.append((other, link))
        return found

    async def _ask(
        self, source: MemberStanding, link: MemberLink, goal: Goal, order: CopyOrder
    ) -> None:
        owner = goal.engine.owner
        header = RoundHeader(protocol=PROTOCOL, owner=owner, epoch=link.epoch)
        lost = anyio.CancelScope()
        done = False

        def judge(transition: Transition) -> None:
            if transition.engine == source.name and transition.dest != MemberState.CURRENT:
                lost.cancel()

        remove = self._roster.hub.on_transition(judge)
        try:
            with lost:
                seconds = order.seconds + 2 * DEFAULTS.cleanup_s
                await link.client.send_copy(order, header=header, timeout=seconds)
                done = True
        finally:
            remove()
            if not done:
                await run_to_end(
                    lambda: link.client.cancel_copy(order.id, header=header),
                    seconds=DEFAULTS.cleanup_s,
                )
        if not done:
            text = f"{source.name}, which sent its model, is {source.state.value} now"
            raise PeerLost(text, replica=source.name)


async def _order(standing: MemberStanding, goal: Goal) -> CopyOrder:
    engine: Any = goal.engine
    if goal.wire_digest is None or not hasattr(engine, "buffer_nbytes"):
        raise Refused(f"backend {engine.backend_name} has no members that send their models")
    return CopyOrder(
        id=secrets.token_hex(16),
        owner=owner_name(),
        version=goal.version,
        digest=goal.digest,
        digest_kind=None if goal.digest is None else engine.digest,
        buffer_size_bytes=engine.buffer_nbytes,
        wire_digest=goal.wire_digest,
        member=standing.name,
        servers=[await _reach(standing, client) for client in standing.member.servers],
        seconds=DEFAULTS.total_s,
    )


async def _reach(standing: MemberStanding, client: Any) -> Reach:
    reach = getattr(client, "reach", None)
    if reach is None:
        raise Refused(f"{standing.name} has no URL that another member could reach it by")
    found: Reach = await reach()
    return found


async def _let_go(standing: MemberStanding, order: CopyOrder) -> None:
    """End the round that a sender which is no more has left open with the receiver."""
    for client in standing.member.servers:
        peer = (await client.capabilities(refresh=True)).peer  # type: ignore[attr-defined]
        if peer is not None and peer.owner == order.owner and peer.state in BUSY:
            header = RoundHeader(
                protocol=PROTOCOL,
                owner=order.owner,
                epoch=peer.epoch,
                round=peer.detail.get("round", 0),
            )
            await client.abort_weight_update("its sender is gone", header=header)  # type: ignore[attr-defined]
