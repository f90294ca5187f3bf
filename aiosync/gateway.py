"""A fleet behind the routes of one worker, whose rounds another process lets in.

The trainer sees one worker. Its calls go to every member, each with the init info that is its own;
the bytes go from the trainer to the members without passing through here. Only ``start`` is held,
until somebody accepts or declines the round (`aiosync.offers`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Self, final

import msgspec

from aiosync.budget import check_seconds
from aiosync.concurrency import first_line, to_its_end
from aiosync.defaults import DEFAULTS
from aiosync.gateway_routes import gateway_routes
from aiosync.gateway_settling import conclude, outcomes_of, settle
from aiosync.group_spares import Spares
from aiosync.members import links_of
from aiosync.mixture import of_links
from aiosync.offers import ACCEPTED, OfferDesk
from aiosync.record_file import RecordFile
from aiosync.worker_group import WorkerGroup
from statemachines.tables import State, Trigger, Weights

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from aiosync.fleet import FleetClient
    from aiosync.generation import GenerationGate
    from aiosync.messages import PeerState, RoundHeader
    from aiosync.offers import Offer, RoundRecord
    from aiosync.route_types import Route, Step
    from statemachines.events import Transition
    from statemachines.hub import TransitionHub

logger = logging.getLogger(__name__)
_OVER = (Trigger.COMPLETE, Trigger.ABORT, Trigger.FAIL)


@final
class FleetGateway:
    """Enter it, then `serve` it like a worker engine; decide about its offers here or over HTTP.

    Finish is sent once every member (or as many as the fleet's policy asks for) has received and
    verified everything; the fleet learns who holds the version then. An offer that nobody decides
    about within `hold_s` seconds, or within what is left of the trainer's round, is refused; a
    trainer of ours is told while it waits, and counts that time neither as silence nor against its
    ``admit``.

    Args:
        fleet: Its members must be aiosync workers.
        name: Of the gateway, in events and errors.
        hold_s: Longest wait for a decision.
        record: Path of a file in which the record of rounds outlives this process. A decision is
            on the disk before it is acted on; a round that was under way when a gateway ended is
            ``unknown`` until the members of the next one have said what they hold.
        hub: Watch through a hub of your own.
        heartbeat_s, misses, wait_s: As for `WorkerGroup`.
    """

    def __init__(
        self,
        fleet: FleetClient,
        *,
        name: str = "gateway",
        hold_s: float = DEFAULTS.hold_s,
        record: str | Path | None = None,
        hub: TransitionHub | None = None,
        heartbeat_s: float = 1.0,
        misses: int = 3,
        wait_s: float = DEFAULTS.connect_s,
    ) -> None:
        links = links_of(fleet)
        self.name = name
        self.group = WorkerGroup(
            [link.client for link in links],
            name=name,
            hub=hub,
            heartbeat_s=heartbeat_s,
            misses=misses,
            wait_s=wait_s,
        )
        for rank, link in zip(self.group.ranks, links, strict=True):
            rank.link.name, rank.link.member = link.name, link.member
            rank.title = f"member {link.name}"
        self._roster = fleet.roster
        if self._roster.tolerant:
            self.group.spares = Spares(self.group, fleet.policy, fleet.patience)
        self.desk = OfferDesk(name, check_seconds(hold_s, "hold_s"))
        self._file = None if record is None else RecordFile(record)
        self._open_then: list[RoundRecord] = []
        self._running: RoundRecord | None = None
        self._unwatch = self.group.events.on_transition(self._note)

    async def __aenter__(self) -> Self:
        if self._file is not None:
            self._open_then = self.desk.restore(await self._file.open())
            self.desk.file = self._file
        try:
            await self.group.__aenter__()
        except BaseException:
            await self._leave_file()
            raise
        self._look_back()
        mix = of_links([rank.link for rank in self.group.ranks])
        if mix is not None:
            logger.warning("%s: %s", self.name, mix)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leave the members; a round under way is given up first. Idempotent."""
        await self.group.aclose()
        self._unwatch()
        await to_its_end(self._leave_file)

    async def _leave_file(self) -> None:
        if self._file is not None:
            await self._file.aclose()
            self.desk.file = None

    def __repr__(self) -> str:
        members = ", ".join(rank.link.name for rank in self.group.ranks)
        return f"<FleetGateway {self.name} {self.group.state.value} of {members}>"

    # -- deciding --------------------------------------------------------------------------------

    def offers(self) -> AsyncGenerator[Offer, None]:
        """Every offer that waits for a decision, and then each new one; endless."""
        return self.desk.offers()

    def rounds(self, last: int = 256) -> list[RoundRecord]:
        """The last rounds that were offered, oldest first, and what became of them."""
        self._look_back()
        return self.desk.records(last)

    def own_routes(self) -> dict[str, Route]:
        """What `serve` answers beside a worker's routes: offers, decisions, rounds."""
        return {**self.group.own_routes(), **gateway_routes(self.desk, self.rounds)}

    # -- the steps that differ from a group's ----------------------------------------------------

    async def start_weight_update(self, *, header: RoundHeader | None = None) -> None:
        """Wait for the decision, then open the round on all members.

        Raises:
            Refused: Declined, expired or withdrawn.
        """
        await self._start("start_weight_update", header)

    async def start_draft_weight_update(self, *, header: RoundHeader | None = None) -> None:
        """As `start_weight_update`, for the draft model."""
        await self._start("start_draft_weight_update", header)

    async def abort_weight_update(
        self, reason: str = "", *, header: RoundHeader | None = None
    ) -> None:
        """Withdraw an offer that waits; give an open round up on all members."""
        self.desk.withdraw(header, reason)
        await self.group.abort_weight_update(reason, header=header)

    def touch(self, header: RoundHeader | None) -> None:
        """Renew the lease of a round, or of an offer."""
        self.desk.touch(header)
        self.group.touch(header)

    def peer_state(self) -> PeerState:
        """The group's, and which start is held for how long (``detail["held"]``)."""
        peer = self.group.peer_state()
        waiting = self.desk.waiting()
        if waiting is None:
            return peer
        held = {"offer": waiting.id, "round": waiting.round, "seconds_left": waiting.seconds_left}
        return msgspec.structs.replace(peer, detail={**peer.detail, "held": held})

    async def _start(self, method: str, header: RoundHeader | None) -> None:
        group = self.group
        # What would be refused anyway is not offered.
        group.cycle.ownership.check(header, "start")
        is_open = group.cycle.session is not None
        if group.state is not State.INITIALIZED and not is_open:
            raise group.wrong_order("start")
        record = await self.desk.hold(header)
        # The same call may have come again, while gates still hold the first one up.
        begins = group.cycle.session is None and self._running is not record
        begins = begins and record.state == ACCEPTED
        if begins:
            self._look_back()
            self._open_then.clear()  # from here on the members may hold something newer
            self._running = record
            self._roster.begins()
        try:
            await getattr(group, method)(header=header)
        except BaseException as error:
            is_open = group.state in (State.UPDATING, State.FINALIZING)
            if begins and self._running is record and not is_open:
                self._over(record, "failed", f"{type(error).__name__}: {first_line(error)}")
            raise

    # -- the group's own -------------------------------------------------------------------------

    @property
    def init_transfer_engine(self) -> Step:
        return self.group.init_transfer_engine

    @property
    def update_weights(self) -> Step:
        return self.group.update_weights

    @property
    def prepare_weight_update(self) -> Step:
        return self.group.prepare_weight_update

    @property
    def finish_weight_update(self) -> Step:
        return self.group.finish_weight_update

    @property
    def shutdown(self) -> Step:
        return self.group.shutdown

    @property
    def pause_generation(self) -> Step:
        return self.group.pause_generation

    @property
    def resume_generation(self) -> Step:
        return self.group.resume_generation

    @property
    def is_paused(self) -> Step:
        return self.group.is_paused

    @property
    def abort_requests(self) -> Step:
        return self.group.abort_requests

    @property
    def update_weight_version(self) -> Step:
        return self.group.update_weight_version

    @property
    def weight_checker(self) -> Step:
        return self.group.weight_checker

    @property
    def weights(self) -> Weights:
        return self.group.weights

    @property
    def events(self) -> TransitionHub:
        """Transitions of the members as one worker."""
        return self.group.events

    @property
    def generation(self) -> GenerationGate:
        return self.group.generation

    # -- the record ------------------------------------------------------------------------------

    def _note(self, transition: Transition) -> None:
        record = self._running
        if record is None or transition.engine != self.group.name or transition.role != "worker":
            return
        if transition.trigger not in _OVER or transition.source not in (
            State.UPDATING,
            State.FINALIZING,
        ):
            return
        if transition.trigger == Trigger.COMPLETE:
            self._over(record, "committed", None)
            return
        unknown = transition.weights == Weights.UNKNOWN and transition.source == State.FINALIZING
        self._over(record, "unknown" if unknown else "failed", transition.error)

    def _look_back(self) -> None:
        """What became of a round that an earlier gateway did not see the end of, if one can say."""
        for record in tuple(self._open_then):
            if conclude(record, self.group.ranks, self._roster.policy):
                self._open_then.remove(record)
                if self.desk.file is not None:
                    self.desk.file.note(record)

    def _over(self, record: RoundRecord, state: str, reason: str | None) -> None:
        self._running = None
        target = record.version if state != "committed" else self.group.version
        record.version = target or record.version
        members = outcomes_of(self.group.ranks, target)
        self.desk.end(record, state, reason, members)
        settle(self._roster, self.group.ranks, members, target)
        self._roster.ended()
