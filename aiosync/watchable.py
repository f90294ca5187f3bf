"""What both engine kinds show of their state machine, and how they end."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from typing import TYPE_CHECKING, Any, Self, cast

from aiosync.budget import check_seconds
from aiosync.errors import InvalidTransition, PhaseTimeout
from aiosync.foreign import stoppable
from aiosync.former_names import KnowsFormerNames
from statemachines.events import callable_name
from statemachines.tables import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from statemachines import Check, GateContext, Subscription, Transition, TransitionHub
    from statemachines.machine import StateMachine

BUSY = (State.UPDATING, State.FINALIZING)
_GATE_ENDS_S = 0.25  # what a check has to end in once it is cancelled
logger = logging.getLogger(__name__)


class Watchable(KnowsFormerNames):
    """State, events and gates of an engine, and its end."""

    machine: StateMachine
    name: str
    pid: int
    """The process that made the engine; a forked child only inherits it."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        del args, options
        self = super().__new__(cls)
        self.pid = os.getpid()
        return self

    async def aclose(self) -> None:
        """End the engine. Idempotent."""
        raise NotImplementedError

    def free(self) -> None:
        """Let go of threads, sockets and memory, without an event loop; nobody is told."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # At exit the process's end frees everything, and a lock may belong to a thread that is
        # no more. A forked child has neither the threads nor the right to speak for its parent.
        if "machine" not in self.__dict__ or sys.is_finalizing() or self.pid != os.getpid():
            return
        if self.state in (State.IDLE, State.CLOSED):
            return  # it holds nothing; or its constructor raised, and half of it is missing
        logger.error(
            "%s was dropped in state %s, and the other side was not told: use `async with`,"
            " or `await engine.aclose()`",
            self.name,
            self.state.value,
        )
        self.free()

    @property
    def state(self) -> State:
        """The state of the life cycle (`statemachines.tables.ENGINE`)."""
        return cast("State", self.machine.state)  # the table's own member

    @property
    def events(self) -> TransitionHub:
        """The hub that publishes this engine's transitions."""
        return self.machine.hub

    def on_transition(self, hook: Callable[[Transition], object]) -> Callable[[], None]:
        """Call `hook` inside every flip; returns its remover. It must not block, raise or fire."""
        return self.machine.on_transition(hook)

    def subscribe(self, *, size: int = 256, since: int | None = None) -> Subscription:
        """A subscription to this engine's transitions that keeps the newest `size` of them."""
        return self.machine.subscribe(size=size, since=since)

    def gate(self, trigger: str, check: Check, *, timeout: float = 30.0) -> Callable[[], None]:
        """Have `check` judge ``initialize``, ``start`` or ``complete`` before the flip.

        Returning False or raising vetoes (`GateRejected`, state unchanged; a vetoed ``complete``
        ends the round). Returns the gate's remover.
        """
        return self.machine.gate(trigger, _judge(check), timeout=timeout)

    async def wait_for(self, *states: State | str, timeout: float | None = None) -> State:
        """Wait until the engine is in one of `states`; checks first.

        Args:
            timeout: Seconds; None waits until the engine ends.

        Raises:
            PhaseTimeout: `timeout` seconds have passed; names the state the engine is in.
            InvalidTransition: The engine has ended in another state.
            Validation: No states, or one that there is not.
        """
        limit = None if timeout is None else check_seconds(timeout, "timeout")
        try:
            return State(await self.machine.wait_for(*states, timeout=limit))
        except TimeoutError as error:
            text = f"{self.machine.name}: not {' or '.join(map(str, states))} within {timeout:g} s"
            raise PhaseTimeout(
                f"{text}; the state is {self.state.value}", phase="wait", detail=self.standing()
            ) from error

    def standing(self) -> dict[str, Any]:
        """State and legal triggers, as refusals carry them in ``detail``."""
        return {"state": self.state.value, "allowed": list(self.machine.allowed())}

    def wrong_order(self, what: str) -> InvalidTransition:
        """The error for a call that the present state does not allow."""
        allowed = self.machine.allowed()
        return InvalidTransition(
            f"{what}: not possible in state {self.state.value};"
            f" allowed now: {', '.join(allowed) or 'nothing'}",
            phase=what,
            detail=self.standing(),
        )


def _judge(check: Any) -> Any:
    """`check`, which cannot keep its caller by swallowing the cancellation at its timeout."""
    if not callable(check):
        return check  # the machine refuses it

    named = check if hasattr(check, "__qualname__") else type(check)

    @functools.wraps(named, updated=())
    def judge(context: GateContext) -> Any:
        answer = check(context)
        if not inspect.isawaitable(answer):
            return answer

        async def awaited() -> Any:
            return await answer

        return stoppable(awaited, grace=_GATE_ENDS_S, what=callable_name(check))

    return judge
