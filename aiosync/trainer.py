"""Base of the trainer engines: what owns the source, the links to the workers and the state.

The path of a round: `TrainerWeightTransferEngine.send_weights` here, `aiosync.round.Round.run`,
the backend's `transmit` (`aiosync.engines`), and on the other side `aiosync.worker_cycle`. Between
rounds an engine owns no task, timer or lease: the next round may run under another event loop.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Unpack

from aiosync.admission import Admission
from aiosync.budget import check_seconds
from aiosync.concurrency import Supervisor, run_to_end, to_its_end
from aiosync.config import TrainerInit as Init
from aiosync.config import check_factory, check_identity
from aiosync.defaults import DEFAULTS
from aiosync.errors import Validation
from aiosync.gathering import gathered
from aiosync.handle import in_background
from aiosync.lane_calls import as_seen_here
from aiosync.members import fleet_of, links_of
from aiosync.overrides import class_step, is_inside, step, wrap_steps
from aiosync.proxy import ClientProxy
from aiosync.push import open_session
from aiosync.ranks import TrainerRanks
from aiosync.rendezvous import open_channel, owner_name, say_goodbye
from aiosync.round_options import NEXT
from aiosync.source_kinds import as_source
from aiosync.source_side import SourceSide
from aiosync.ticket_desk import TicketDesk
from aiosync.trainer_cycle import TrainerCycle, watched_init
from aiosync.trainer_hooks import TrainerHooks
from aiosync.version_watch import VersionWatch
from aiosync.watchable import BUSY, Watchable
from aiosync.weight_targets import MODEL, check_target
from statemachines.machine import StateMachine
from statemachines.tables import ENGINE, State, Trigger
from transports.lane import Lane

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiosync.client_protocol import VLLMWeightSyncClient
    from aiosync.handle import WeightUpdate
    from aiosync.members import MemberLink
    from aiosync.report import Report
    from aiosync.roster import Roster
    from aiosync.round import Round
    from aiosync.round_options import Next, RoundOptions
    from aiosync.sources import Source
    from aiosync.ticket import RoundTicket
    from aiosync.version import Version
    from aiosync.weight_targets import Target
    from statemachines.hub import TransitionHub
    from transports.lane import LaneFactory, LaneLike


class TrainerWeightTransferEngine(Watchable, TrainerHooks[Init]):
    """Sends a source's weights to the workers behind `client`.

    Args:
        client: A `VLLMWeightSyncClient` (async, or blocking: it is adapted), or a fleet of them.
        source: A `WeightSource`, a ``torch.nn.Module``, or an object with their members.
        is_sender: Whether this rank touches client and wire.
        rank: This trainer rank.
        hub: Watch through a hub of your own (init itself is then watched, too).
        name: Shown in events and errors.
        lineage: Name of this training run; random unless given.
        recover: ``"auto"`` lets the next round reset and initialise a failed engine, ``"manual"``
            makes it raise `InvalidTransition`.
        lease_s: Silence of this trainer, in seconds, that a worker's open round survives.
        lane_factory: Makes the thread for blocking calls (simulation passes inline lanes).

    Attributes:
        version: What every member confirmed last; None before the first round.
        target_versions: The same of other targets (draft, adapters), by `Target.key`.
        round_defaults: Options of every round that does not give its own.
        last_report: Report of the last round, failed or not.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        wrap_steps(cls, {"send_weights": "send"})
        if "trainer_init" in cls.__dict__:
            setattr(cls, "trainer_init", watched_init(cls.__dict__["trainer_init"]))  # noqa: B010

    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient | None,
        source: Source | None = None,
        is_sender: bool = True,
        rank: int = 0,
        hub: TransitionHub | None = None,
        name: str | None = None,
        lineage: str | None = None,
        recover: str = "auto",
        lease_s: float | None = None,
        lane_factory: LaneFactory = Lane,
    ) -> None:
        if recover not in ("auto", "manual"):
            raise Validation(f"recover must be 'auto' or 'manual', not {recover!r}")
        check_identity(rank, lineage, hub)
        check_factory("lane_factory", lane_factory)
        self.source: Any = None if source is None else as_source(source)
        self.is_sender = is_sender
        self.rank = rank
        self.name = name or f"{self.backend_name}-trainer-{rank}"
        self.lineage = lineage or secrets.token_hex(8)
        self.owner = owner_name()
        self.lease_s = DEFAULTS.lease_s if lease_s is None else check_seconds(lease_s, "lease_s")
        self.recovers = recover == "auto"
        self.last_report: Report | None = None
        self.machine = StateMachine(ENGINE, name=self.name, role="trainer", hub=hub)
        self.links: list[MemberLink] = links_of(client) if is_sender else []
        self.fleet: Roster | None = fleet_of(client) if is_sender else None
        self._proxy = ClientProxy(self)
        self.admission = Admission(self)
        self.tickets = TicketDesk(self)
        self.cycle = TrainerCycle(self)
        self.source_side = SourceSide(
            self.source, name=self.name, rank=rank, lane_factory=lane_factory
        )
        self._supervisor = Supervisor()
        self.rounds = 0
        self.is_opening = False
        self.ranks = TrainerRanks.alone()
        self._versions = VersionWatch(self.name)
        self.target_versions: dict[str, Version] = {}
        self.round_defaults: RoundOptions = {}

    @class_step
    async def trainer_init(
        cls: Any,
        init_info: Init,
        *,
        client: VLLMWeightSyncClient | None,
        source: Source | None = None,
        group: Any = None,
        hub: TransitionHub | None = None,
    ) -> Any:
        """Construct and `initialize`; nothing is left open if that raises."""
        engine = cls.from_init_info(init_info, client=client, source=source, hub=hub)
        try:
            await engine.gather_ranks(group)
            await engine.initialize()
        except BaseException:
            await run_to_end(engine.aclose, seconds=DEFAULTS.cleanup_s)
            raise
        return engine

    # -- what callers use ------------------------------------------------------------------------

    async def gather_ranks(self, group: Any = None) -> None:
        """Meet the other trainer ranks; called on every rank, before `initialize`.

        Args:
            group: A process group with a CPU backend; None: all ranks of torch.distributed, if it
                is initialised, else this rank is alone.
        """
        alone = self.ranks
        self.ranks = await gathered(self.source_lane, group)
        alone.close()

    async def initialize(self, *, timeout: float | None = None) -> None:
        """Rendezvous with every worker: idle to initialized; a failed engine is reset first.

        Cancelling leaves the engine failed and the channel freed.

        Raises:
            PhaseTimeout: Not done within `timeout` seconds.
            InvalidTransition, Busy: Initialized already, closed; or another is under way.
        """
        self.admission.check_process()
        if self.state is State.FAILED:
            await self.reset()
        if self.state is not State.IDLE:
            raise self.wrong_order("initialize")
        self.cycle.fenced = None
        await open_channel(self, timeout)

    @step
    async def send_weights(
        self, *, version: int | str | Version | Next = NEXT, **options: Unpack[RoundOptions]
    ) -> Report:
        """Bring every worker to the source's present weights.

        When it returns, every worker has confirmed the version and the tensors may change again.
        Cancelling it cancels the round: the data plane is aborted, the workers are told, and the
        cancellation is raised within the budget's `cleanup` seconds.

        Args:
            version: Label of the new weights; an int is its own order. Left out: the order after
                the last one, or the ticket's version.
            options: `RoundOptions`: ``timeout``, ``budget``, ``rollback``, ``on_busy``, ``ticket``,
                ``target``, ``source``, ``pause``, ``around``.

        Raises:
            AiosyncError: One of its kinds, or the source's own exception; with ``.report``.
        """
        given = self.round_defaults | options
        settings = self.admission.settings("send_weights", version, given)
        if is_inside(self):  # an override calls this one
            return await self.run_round(self.admission.make_inner(settings))
        this = self.admission.make(settings)
        self.admission.join(this)
        return await self.run_round(this)

    def begin_update(
        self, *, version: int | str | Version | Next = NEXT, **options: Unpack[RoundOptions]
    ) -> WeightUpdate:
        """Start a round in the background and return its handle; takes what `send_weights` does.

        With ``on_busy="wait"`` or ``"supersede"`` the handle waits for the round's turn.

        Raises:
            Busy: Another round is under way, and this one was not to wait.
        """
        given = self.round_defaults | options
        this = self.admission.make(self.admission.settings("begin_update", version, given))
        self.admission.join(this)
        return self.start_round(this, self.cycle.own_body(this))

    def make_ticket(
        self,
        *,
        version: int | str | Version | Next = NEXT,
        target: Target = MODEL,
        timeout: float | None = None,
        plan_digest: str | None = None,
        opaque: str = "",
    ) -> RoundTicket:
        """A ticket for this engine's next round, for all ranks to carry out. Moves nothing.

        Args:
            version: As for `send_weights`; left out, the order after the last one sent or issued.
            target: What the round updates.
            timeout: Seconds from now that the round may take; None: the default of a round.
            plan_digest: What the ranks' chunk plan must be (``(await engine.plan()).digest``).
            opaque: A text of your own that travels along.

        Raises:
            Validation: One of them cannot be right; named.
            InvalidTransition: The engine is closed.
        """
        self.admission.check_process()
        if self.state is State.CLOSED:
            raise self.wrong_order("start")
        check_target(target)
        meant = self.admission.next_after(version, target, self.tickets.last_version(target))
        return self.tickets.issue(
            meant, target=target, timeout=timeout, plan_digest=plan_digest, opaque=opaque
        )

    session = open_session

    async def wait_version(self, order: int, *, timeout: float | None = None) -> Version:
        """Wait until a version of at least `order` is committed; it cannot be missed.

        Raises:
            PhaseTimeout: Not within `timeout` seconds; names the version there is.
            InvalidTransition: The engine is closed.
        """
        return await self._versions.wait(order, timeout)

    async def reset(self) -> None:
        """Dispose the channel of a failed engine: failed to idle."""
        self.admission.check_process()
        if self.state is not State.FAILED:
            raise self.wrong_order("reset")
        self.dispose()
        self.machine.fire(Trigger.RESET)

    async def shutdown(self) -> None:
        """Free the channel on both sides; idempotent, `initialize` works again afterwards.

        Raises:
            Busy: A round, an `initialize` or another `shutdown` is under way.
        """
        if self.state is State.CLOSED:
            return
        self.admission.check_free()
        if self.state is State.FAILED:
            await self.reset()
        if self.state is State.INITIALIZED:
            with self.admission.closed_for("a shutdown"):
                await run_to_end(lambda: say_goodbye(self), seconds=DEFAULTS.cleanup_s)
            if self.state is State.INITIALIZED:  # not closed meanwhile
                self.dispose()
                self.machine.fire(Trigger.RELEASE)

    async def aclose(self) -> None:
        """End the engine; a round under way is cancelled first. Idempotent."""
        self.admission.check_process()
        if self.state is not State.CLOSED:
            await to_its_end(self._close)

    async def _close(self) -> None:
        if rounds := self.admission.end():
            for each in rounds:
                each.cancel()
            await run_to_end(rounds[-1].over.wait, seconds=2 * DEFAULTS.cleanup_s)
            await self._supervisor.aclose(seconds=DEFAULTS.cleanup_s)
        if self.state in BUSY:
            self.machine.fire(Trigger.FAIL, error="closed during a round")
        elif self.state is State.INITIALIZED:
            await run_to_end(lambda: say_goodbye(self), seconds=DEFAULTS.cleanup_s)
        self.free()
        if self.machine.may(Trigger.CLOSE):
            self.machine.fire(Trigger.CLOSE)
        self._versions.close()

    def free(self) -> None:
        self.dispose()
        self.source_side.close()
        self.ranks.close()

    def __repr__(self) -> str:
        version = self.version.label if self.version else None
        return f"<{type(self).__name__} {self.name} {self.state.value} version={version}>"

    @property
    def version(self) -> Version | None:
        return self._versions.version

    def held(self, target: Target) -> Version | None:
        """What every member confirmed last of `target`."""
        return self.version if target == MODEL else self.target_versions.get(target.key)

    @property
    def source_lane(self) -> LaneLike:
        """The thread that iterates the source; share it: ``await engine.source_lane.run(step)``."""
        return self.source_side.lane

    @property
    def client(self) -> ClientProxy:
        """All members as one client, for engines that drive a round by themselves.

        Awaitable in an ``async def``; in a plain ``def``, which runs on a lane, its methods block.
        """
        return as_seen_here(self._proxy)

    # -- used by the round -----------------------------------------------------------------------

    async def run_round(
        self, round: Round, body: Callable[[], Awaitable[None]] | None = None
    ) -> Report:
        """Carry out the round that has the slot, and give the slot back."""
        try:
            return await round.run(body)
        finally:
            self._ended(round)

    def start_round(
        self, round: Round, body: Callable[[], Awaitable[None]] | None = None
    ) -> WeightUpdate:
        """`run_round` in a task of its own."""
        running, name = self.run_round(round, body), f"{self.name}-round"
        return in_background(round, running, self._supervisor, name=name, over=self._ended)

    def next_round(self, round: Round) -> None:
        """Number the round; called right before the flip to ``updating``."""
        ticket = round.settings.ticket
        self.rounds = round.number = self.rounds + 1 if ticket is None else ticket.round
        for link in self.links:
            link.begin_round()

    def committed(self, round: Round) -> None:
        """Every member holds the round's version."""
        if round.settings.ticket is not None:
            self.lineage = round.version.lineage  # the driver's run goes on from here
        if round.target == MODEL:
            self._versions.set(round.version)
        else:
            self.target_versions[round.target.key] = round.version

    # -- inside ----------------------------------------------------------------------------------

    def _ended(self, round: Round) -> None:
        """The round is over; also if its task was cancelled before it began."""
        ticket, report = round.settings.ticket, round.report
        if report is not None and report.outcome == "committed":
            if ticket is not None:
                self.tickets.record(ticket, report)
            if round.outer is not None:
                round.outer.agreed = report
        if self.admission.current is round:
            self.last_report = report
        self.admission.free(round)
