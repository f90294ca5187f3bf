"""The life cycle around trainer engines that write their own `trainer_init` or `send_weights`.

Such an engine drives `self.client` by itself; the proxy (`aiosync.proxy`) fires the flips that
belong to the calls, and the cycle here makes sure that no exit leaves the engine in between.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, final

from aiosync.attendance import Attendance
from aiosync.client_protocol import adapt_client
from aiosync.defaults import DEFAULTS
from aiosync.errors import Fenced, InvalidTransition, Validation
from aiosync.lane_calls import LaneCalls
from aiosync.liveness import kept_alive
from aiosync.member_checks import check_options
from aiosync.members import MemberLink, fan_out, fleet_of, links_of, opened, own_info
from aiosync.overrides import bare_of, call_step
from aiosync.rendezvous import check_policy, initialise, owner_name
from aiosync.round_options import NEXT, OPTIONS
from aiosync.watchable import BUSY
from statemachines.tables import State, Trigger
from transports.lane import Lane

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiosync.round import Round
    from aiosync.trainer import TrainerWeightTransferEngine
    from aiosync.version import Version
    from aiosync.weight_targets import Target


@final
class TrainerCycle:
    """What `aiosync.overrides` runs around an overridden `send_weights`."""

    def __init__(self, engine: TrainerWeightTransferEngine[Any]) -> None:
        self.engine = engine
        self.mixed: tuple[Target, Version] | None = None
        """A version that some members may hold and others not: it may be sent again."""
        self.found: str | None = None
        """That members differed when this trainer met them; its next round's report says so."""
        self.fenced: Fenced | None = None
        """What a worker said that belongs to another trainer now; cleared by `initialize`."""

    async def send(self, bare: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run the bare method as a round; whatever it leaves half done fails the engine.

        What `send_weights` of the base takes is understood whether the override takes it or not.
        """
        engine = self.engine
        ours = {name: value for name, value in options.items() if name in OPTIONS}
        ours = engine.round_defaults | ours
        version = options.get("version", NEXT)
        settings = engine.admission.settings("send_weights", version, ours)
        options.pop("on_busy", None)  # settled here
        this = engine.admission.make(settings)
        engine.admission.join(this)
        results: list[Any] = []
        body = self._body(this, functools.partial(bare, *args), lambda: options, results)
        report = await engine.run_round(this, body)
        return report if not results or results[0] is None else results[0]

    async def ensure_initialized(self, round: Round) -> None:
        """Mend a failed or released engine, once, within the round's budget."""
        if self.engine.state is not State.INITIALIZED:
            await self._mend(round)
        if self.found is not None:
            round.notes.append(self.found)
            self.found = None

    async def _mend(self, round: Round) -> None:
        engine = self.engine
        if self.fenced is not None:
            # Taking the worker back by itself would start a tug-of-war between two trainers.
            raise Fenced(self.fenced.message, phase="admit", detail=self.fenced.detail)
        if engine.state not in (State.FAILED, State.IDLE) or not engine.recovers:
            raise engine.wrong_order("start")
        if engine.state is State.FAILED or engine.rounds:
            round.recovered = True
            round.notes.append(f"initialised again from state {engine.state.value}")
        await engine.initialize()

    def own_body(self, this: Round) -> Callable[[], Awaitable[None]] | None:
        """What a round in the background does: None for the phases of `Round`."""
        bare = bare_of(type(self.engine), "send_weights")
        if not getattr(type(self.engine).send_weights, "is_override", False):
            return None

        def options() -> dict[str, Any]:  # at its turn: not before is the version settled
            settings = this.settings
            ticket = {} if settings.ticket is None else {"ticket": settings.ticket}
            if settings.source is not None:
                ticket["source"] = settings.source
            limits = {"budget": settings.budget, "rollback": settings.rollback}
            return {"version": this.version, **limits, **ticket}

        return self._body(this, functools.partial(bare, self.engine), options, [])

    def _body(
        self,
        this: Round,
        bare: Callable[..., Any],
        options: Callable[[], dict[str, Any]],
        results: list[Any],
    ) -> Callable[[], Awaitable[None]]:
        engine = self.engine

        async def body() -> None:
            if this.settings.source is not None and "source" not in _accepted(bare, {"source": 0}):
                raise Validation(
                    f"send_weights of {type(engine).__name__} takes no source=", phase="admit"
                )
            await self.ensure_initialized(this)
            engine.tickets.check(this.settings)
            engine.tickets.check_unused(this.settings.ticket)
            engine.tickets.check_plan(this)
            check_options(this)
            await kept_alive(this, step)
            self._check_finished()

        async def step() -> None:
            await this.holds.take("round")
            calls = LaneCalls()
            result = await call_step(
                engine,
                functools.partial(bare, **_accepted(bare, options())),
                lane=lambda: engine.source_lane,
                abort=calls.abort,
                grace=this.budget.cleanup / 2,
                calls=calls,
            )
            results.append(result)
            await this.holds.lift_all(seconds=this.budget.cleanup)

        return body

    def _check_finished(self) -> None:
        if self.engine.state in BUSY:
            raise InvalidTransition(
                "send_weights returned without finish_weight_update", phase="finish"
            )


def _accepted(bare: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options that an override takes; those of the base's are otherwise ours alone."""
    known = inspect.signature(bare).parameters
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return options
    ours = ("version", *OPTIONS)
    return {name: value for name, value in options.items() if name in known or name not in ours}


@final
class _FirstMeeting:
    """The client as an overridden `trainer_init` sees it.

    Its init makes this trainer the owner of every member that knows owners, and is remembered for
    the next initialisation.
    """

    def __init__(self, client: Any) -> None:
        self.inner = client
        self.links = links_of(client)
        self.owner = owner_name()
        self.payload: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.payload = init_info
        async with opened(self.links):
            await fan_out(self.links, MemberLink.probe, phase="init", linger=DEFAULTS.cleanup_s)
            await initialise(
                Attendance(self.links),
                lambda link: own_info(init_info, link, self.links),
                owner=self.owner,
                lease_s=DEFAULTS.lease_s,
            )

    def adopt(self, engine: TrainerWeightTransferEngine[Any]) -> None:
        """Give the engine what was learnt."""
        engine.owner = self.owner
        if engine.is_sender:
            engine.links, engine.fleet = self.links, fleet_of(self.inner)
            check_policy(engine)
        if engine.init_payload is None:
            engine.init_payload = self.payload


def watched_init(method: Any) -> Any:
    """A `trainer_init` written by a user, returning an engine whose state says so.

    Async, it gets an async client whatever the caller gave; a plain one runs on a lane and gets a
    client that blocks.
    """
    bare = method.__func__ if isinstance(method, classmethod) else method
    known = inspect.signature(bare).parameters
    is_async = inspect.iscoroutinefunction(bare)

    @functools.wraps(bare)
    async def trainer_init(
        cls: type, init_info: Any, *, client: Any, source: Any = None, **options: Any
    ) -> Any:
        options = {name: value for name, value in options.items() if value is not None}
        if unknown := [name for name in options if name not in known]:
            raise Validation(f"{cls.__name__}.trainer_init takes no {', '.join(unknown)}")
        meeting = _FirstMeeting(adapt_client(client))
        seen = meeting if is_async else LaneCalls().bind(meeting)
        call = functools.partial(bare, cls, init_info, client=seen, source=source, **options)
        if is_async:
            engine = await call()
        else:
            async with Lane(f"{cls.__name__}-init") as lane:
                engine = await lane.run(call)
        meeting.adopt(engine)
        if engine.state is State.IDLE:
            engine.machine.fire(Trigger.INITIALIZE)
        return engine

    return classmethod(trainer_init)  # type: ignore[arg-type] # functools.wraps hides the type
