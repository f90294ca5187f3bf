"""A worker sends its model to another one, between rounds.

The copy holds the generation gate together with requests, so the weights stay as they are. It is
the first to give way: a round that opens here, a pause, a change of the channel end it at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import anyio

from aiosync.client import HTTPVLLMWeightSyncClient
from aiosync.copy_order import CancelCopyBody, CopyBody
from aiosync.defaults import DEFAULTS
from aiosync.errors import AiosyncError, Busy, PhaseTimeout, Refused, RoundCancelled
from aiosync.generation_table import GateState
from aiosync.lone_round import Alone, deliver
from aiosync.member import Member
from aiosync.messages import read_header
from aiosync.route_types import Answer, Route
from aiosync.version import weights_id
from statemachines.tables import State, Weights

if TYPE_CHECKING:
    from aiosync.copy_order import CopyOrder
    from aiosync.messages import RoundHeader
    from aiosync.route_types import Request
    from aiosync.trainer import TrainerWeightTransferEngine
    from aiosync.worker import WeightTransferEngine
    from statemachines.events import Transition


class SendsCopies:
    """Part of every worker engine; a backend that can send overrides both."""

    name: str
    sends_copies: bool = False
    """Whether there is a `sending_side`."""

    def sending_side(self, client: Any, order: CopyOrder) -> TrainerWeightTransferEngine[Any]:
        """A trainer engine of this model, for `client`.

        Raises:
            Refused: The backend has none, or what this worker holds is not what the order says.
        """
        del client, order
        raise Refused(f"{type(self).__name__} has no sending side", replica=self.name)


@final
class _Copy:
    def __init__(self, id: str, *machines: str) -> None:
        self.id = id
        self._machines = machines
        self.scope = anyio.CancelScope()
        self.over = anyio.Event()
        self.why = "cancelled by who asked for it"

    def stop(self, why: str) -> None:
        if not self.scope.cancel_called:
            self.why = why
            self.scope.cancel()

    def moved(self, transition: Transition) -> None:
        """The engine, or its gate: nothing but standing still is good."""
        # A hub may be shared with others.
        if transition.engine in self._machines and transition.dest != GateState.RUNNING:
            self.stop(f"{transition.engine} goes on: {transition.trigger} ({transition.role})")


@final
class Copies:
    """The copies that one worker engine sends; one at a time."""

    def __init__(self, engine: WeightTransferEngine[Any, Any]) -> None:
        self._engine = engine
        self._open: _Copy | None = None

    async def send(self, order: CopyOrder, *, header: RoundHeader | None) -> None:
        """Send the model; returns once the receiver has committed it.

        Cancelling the call leaves the copy alone: `cancel` ends it.

        Raises:
            Fenced: The caller is not this worker's trainer.
            Refused, Busy, Paused: Nothing was begun; ``detail["begun"]`` is False.
            RoundCancelled: Something else had to go on here.
            Exception: What ended the receiver's round.
        """
        engine = self._engine
        engine.cycle.ownership.check(header, "send_weights")
        try:
            if header is None:
                raise Refused("only the trainer that a worker belongs to may have it send")
            if self._open is not None:
                raise Busy("it sends its model to somebody else")
            self._check(order)
            sending = engine.sending_side(_receiver(order), order)
        except AiosyncError as error:
            error.detail["begun"] = False
            raise
        copy = self._open = _Copy(order.id, engine.name, engine.generation.machine.name)

        def over() -> None:
            self._open = None
            copy.over.set()

        task = engine.cycle.supervisor.start(
            self._run(copy, order, sending), name=f"{engine.name}-copy", after=over
        )
        await task.wait()
        try:
            task.result()
        except anyio.get_cancelled_exc_class():
            raise RoundCancelled("the worker engine was closed") from None

    async def cancel(self, id: str, *, header: RoundHeader | None) -> None:
        """End the copy of that id; returns once the receiver was let go."""
        self._engine.cycle.ownership.check(header, "send_weights")
        copy = self._open
        if copy is not None and copy.id == id:
            copy.stop("cancelled by who asked for it")
            with anyio.move_on_after(2 * DEFAULTS.cleanup_s):
                await copy.over.wait()

    async def _run(self, copy: _Copy, order: CopyOrder, sending: Any) -> None:
        engine = self._engine
        removers = [
            engine.on_transition(copy.moved),
            engine.generation.on_transition(copy.moved),
        ]
        sending.owner = order.owner
        try:
            with copy.scope, anyio.move_on_after(order.seconds) as limit:
                async with engine.generation.request(id=f"copy-{order.id}") as reading:
                    self._check(order)
                    await reading.run(deliver, sending, order)
                if reading.abort_reason is not None:
                    raise RoundCancelled(reading.abort_reason)
                return
            if copy.scope.cancelled_caught:
                raise RoundCancelled(copy.why)
            if limit.cancelled_caught:
                raise PhaseTimeout(f"the copy took longer than its {order.seconds:g} s")
        finally:
            for remove in removers:
                remove()
            await sending.aclose()

    def _check(self, order: CopyOrder) -> None:
        """Whether this worker has what is asked for, and has it as it was sent.

        Raises:
            Refused: It has not; says why.
        """
        engine = self._engine
        what = _why_not(engine, order)
        if what is not None:
            raise Refused(f"{engine.name} cannot send its model: {what}", replica=engine.name)


def _why_not(engine: WeightTransferEngine[Any, Any], order: CopyOrder) -> str | None:
    held, gate = engine.version, engine.generation
    if not isinstance(getattr(engine.config, "sink", "staged"), str):
        return "its sink is one of its own, which may change what was sent"
    if callable(getattr(engine.model, "load_weights", None)):
        return "its model has a load_weights, which may change what was sent"
    if engine.state is not State.INITIALIZED or engine.weights is not Weights.INTACT:
        return f"it is {engine.state.value}, its weights are {engine.weights.value}"
    if gate.state is not GateState.RUNNING:
        return "its generation is paused"
    wanted = order.version
    if held is None or (held.lineage, held.order) != (wanted.lineage, wanted.order):
        return f"it holds {None if held is None else held.wire!r}, not {wanted.wire!r}"
    if order.digest is not None and gate.weights.weights_id != weights_id(wanted, order.digest):
        return "its weights are not those that the fleet has"
    return None


def _receiver(order: CopyOrder) -> Alone:
    servers = [HTTPVLLMWeightSyncClient(each.url, token=each.token) for each in order.servers]
    return Alone(Member(order.member, servers=servers))


def copy_routes(copies: Copies) -> dict[str, Route]:
    """Path to route, for the copies of one worker."""
    return {
        "/send_weights": Route("POST", _Handlers(copies).send, DEFAULTS.init_body_bytes),
        "/send_weights/cancel": Route("POST", _Handlers(copies).cancel),
    }


@final
class _Handlers:
    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    async def send(self, request: Request) -> Answer:
        body = request.read(CopyBody, needs_body=True)
        await self._copies.send(body.order, header=read_header(body.aiosync))
        return Answer({"message": "Weights sent"})

    async def cancel(self, request: Request) -> Answer:
        body = request.read(CancelCopyBody, needs_body=True)
        await self._copies.cancel(body.id, header=read_header(body.aiosync))
        return Answer({"message": "Copy ended"})
