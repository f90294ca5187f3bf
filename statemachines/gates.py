"""Gates: checks that may wait and may veto, before a flip."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, final

import anyio
import msgspec

from statemachines.errors import GateRejected, Validation
from statemachines.events import callable_name
from statemachines.tables import Trigger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

# Everything else must always be possible at once: above all `fail`.
GATED = (Trigger.INITIALIZE, Trigger.START, Trigger.COMPLETE)


class GateContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a check is asked about; `state` is the state before the flip."""

    engine: str
    role: str
    trigger: str
    state: str
    round: int | None = None
    version: int | str | None = None


Check: TypeAlias = "Callable[[GateContext], Awaitable[bool | None] | bool | None]"


@dataclass(eq=False, slots=True)
class _Gate:
    trigger: str
    check: Check
    timeout: float
    removed: bool = False


@final
class Gates:
    """The gates of one machine, asked one after the other in the order they were added."""

    __slots__ = ("_gates",)

    def __init__(self) -> None:
        self._gates: list[_Gate] = []

    def __len__(self) -> int:
        return len(self._gates)

    def add(self, trigger: str, check: Check, timeout: float) -> Callable[[], None]:
        """Put `check` before `trigger`; returns what removes it again.

        Raises:
            Validation: `trigger` takes no gates, `check` is not callable, or `timeout` is not a
                positive, finite number of seconds.
        """
        if trigger not in GATED:
            raise Validation(f"trigger {str(trigger)!r} takes no gates; {', '.join(GATED)} do")
        if not callable(check):
            raise Validation(f"the check of a gate must be callable, not {check!r}")
        if not _is_seconds(timeout):
            raise Validation(f"timeout of a gate must be positive seconds, not {timeout!r}")
        gate = _Gate(trigger, check, timeout)
        self._gates.append(gate)

        def remove() -> None:
            if not gate.removed:
                gate.removed = True
                self._gates.remove(gate)

        return remove

    def has(self, trigger: str) -> bool:
        """Whether there is a gate of `trigger`."""
        return any(gate.trigger == trigger for gate in self._gates)

    async def ask(self, context: GateContext) -> bool:
        """Return when every gate of ``context.trigger`` has let it pass; whether there was one.

        Raises:
            GateRejected: A gate vetoed, raised or took longer than its timeout.
        """
        asked = False
        for gate in tuple(self._gates):
            if gate.trigger == context.trigger and not gate.removed:
                asked = True
                await _ask_one(gate, context)
        return asked


def _is_seconds(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def _judged(gate: _Gate, context: GateContext) -> Any:
    try:
        return gate.check(context)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # The cancellation of a future that the check looked at: a plain call cannot be cancelled.
        raise _rejection(gate, context, f"raised {type(error).__name__}") from error


async def _answer(gate: _Gate, context: GateContext, answer: Awaitable[Any]) -> Any:
    """Await the answer in a task of its own: only a cancellation of *this* one may pass."""
    answers: list[Any] = []

    async def ask() -> None:
        answers.append(await answer)

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
    except BaseExceptionGroup as error:
        raise error.exceptions[0] from None  # one child, one error
    if not answers:  # a stray cancellation, of a future that the check awaited
        raise _rejection(gate, context, "was cancelled from elsewhere")
    return answers[0]


async def _ask_one(gate: _Gate, context: GateContext) -> None:
    vetoed = False
    try:
        with anyio.move_on_after(gate.timeout) as scope:
            answer = _judged(gate, context)
            if inspect.isawaitable(answer):
                answer = await _answer(gate, context, answer)
            # Not `is False`: numpy's False is a veto as well. A check that says nothing agrees.
            vetoed = answer is not None and not answer
    except GateRejected:
        raise
    except Exception as error:
        raise _rejection(gate, context, f"raised {type(error).__name__}") from error
    if scope.cancelled_caught:
        raise _rejection(gate, context, f"did not answer within {gate.timeout:g} s") from (
            TimeoutError()
        )
    if vetoed:
        raise _rejection(gate, context, "said no")


def _rejection(gate: _Gate, context: GateContext, reason: str) -> GateRejected:
    name = callable_name(gate.check)
    return GateRejected(
        f"{context.engine} ({context.role}): gate {name} before {context.trigger!r} {reason}",
        phase=context.trigger,
        round=context.round,
        detail={"gate": name, "state": context.state},
    )
