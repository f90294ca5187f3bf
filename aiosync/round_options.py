"""What every way to begin a round takes: one table, and its checked form.

A new option is an entry of `RoundOptions` and a field of `RoundSettings`; `send_weights`,
`begin_update` and `session` pass what they get through.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, TypedDict, final

import msgspec

from aiosync.budget import Budget
from aiosync.defaults import DEFAULTS
from aiosync.errors import Validation
from aiosync.pause import Pause, arounds_of, pause_of
from aiosync.ticket import RoundTicket, ticket_of
from aiosync.weight_targets import MODEL, Target, check_target

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiosync.fleet import Member
    from aiosync.sources import Source

OnBusy = Literal["raise", "wait", "supersede"]
Around: TypeAlias = Callable[["Member"], AbstractAsyncContextManager[Any]]
_ON_BUSY = ("raise", "wait", "supersede")


@final
class Next:
    """Type of `NEXT`: distinct, so that passing None is a type error."""

    def __repr__(self) -> str:
        return "NEXT"


NEXT: Final = Next()
"""Default of ``version=``: the order after the last one."""


class RoundOptions(TypedDict, total=False):
    """Keywords of `send_weights`, `begin_update` and `session`, beside ``version=``.

    Attributes:
        timeout: Shorthand for ``Budget(total=timeout)``, seconds; counted from the call, waiting
            included.
        budget: Limits per phase; None takes the defaults, never infinity.
        rollback: Allow a version that is not newer than the workers'.
        on_busy: What to do while another round runs: ``"raise"`` `Busy`, ``"wait"`` for its end,
            in the order of the calls, or ``"supersede"``: cancel whatever runs and waits.
        ticket: A `RoundTicket`, or its string: the round runs under its number, its version, its
            target and its deadline.
        target: What the round updates: `Model`, `Draft` or `Adapter`; each has its own version.
        source: Where the tensors come from, if not from the engine's own source: what an engine
            takes as its source. Every trainer rank gives one. The last one of each target is kept,
            with its plan, until the engine is closed.
        pause: A `Pause`: generation of every member stands still meanwhile.
        around: Functions that take a `Member` and return an async context manager, which is
            entered once the member is paused and left before it goes on.
    """

    timeout: float | None
    budget: Budget | None
    rollback: bool
    on_busy: OnBusy
    ticket: RoundTicket | str | None
    target: Target
    source: Source | None
    pause: Pause | None
    around: Sequence[Around]


OPTIONS: Final = tuple(RoundOptions.__annotations__)


class RoundSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A version and `RoundOptions`, checked as far as they can be without an engine.

    Attributes:
        version: As it was given: a label, a `Version` or `NEXT`.
        total: Seconds from the call to the deadline.
        deadline: Of `time.monotonic`.
        expired_s: Seconds since the ticket's own deadline, where that has passed.
        refusal: What was wrong with the call: the round ends by it before anything moves, once
            the trainer's other ranks have heard of it.
    """

    version: Any = NEXT
    budget: Budget
    rollback: bool = False
    on_busy: OnBusy = "raise"
    ticket: RoundTicket | None = None
    target: Target = MODEL
    source: Any = None
    pause: Pause | None = None
    around: tuple[Around, ...] = ()
    total: float
    deadline: float
    expired_s: float | None = None
    refusal: Any = None

    @property
    def driven(self) -> str | None:
        """Id of the ticket of a round that somebody else drives."""
        ticket = self.ticket
        return None if ticket is None or ticket.driver is None else ticket.id

    @classmethod
    def of(cls, what: str, version: Any, options: Mapping[str, Any]) -> Self:
        """Check what `what` was called with.

        Raises:
            TypeError: There is no such keyword.
            Validation: One of them cannot be right; named.
        """
        for name in options:
            if name not in OPTIONS:
                raise TypeError(f"{what}() takes no {name}=; it takes {', '.join(OPTIONS)}")
        return cls._made(version=version, **options)

    @classmethod
    def refused(cls, error: Exception, options: Mapping[str, Any]) -> Self:
        """Of a call that cannot be carried out; what is right in it still counts."""
        on_busy = options.get("on_busy")
        try:
            limits = Budget.of(options.get("budget"), options.get("timeout"))
        except Exception:  # noqa: BLE001  this may be what is wrong
            limits = None
        made = cls._made(budget=limits, on_busy=on_busy if on_busy in _ON_BUSY else "raise")
        return msgspec.structs.replace(made, refusal=error)

    def inside(self, outer: Self) -> Self:
        """Of a round inside another: its ticket and target are that one's, and so is a pause.

        So is its source, unless it has one of its own.
        """
        changes: dict[str, Any] = {"target": outer.target}
        if self.source is None:
            changes["source"] = outer.source
        if self.ticket is None:
            changes["ticket"] = outer.ticket
        if outer.pause is not None or outer.around:
            changes |= {"pause": None, "around": ()}
        return msgspec.structs.replace(self, **changes)

    @classmethod
    def _made(
        cls,
        *,
        timeout: float | None = None,
        budget: Budget | None = None,
        rollback: Any = False,
        on_busy: Any = "raise",
        ticket: RoundTicket | str | None = None,
        target: Target | None = None,
        pause: Pause | None = None,
        around: Sequence[Around] = (),
        **others: Any,
    ) -> Self:
        if not isinstance(rollback, bool):
            raise Validation(f"rollback must be True or False, not {rollback!r}", phase="admit")
        if on_busy not in _ON_BUSY:
            raise Validation(f"on_busy must be raise, wait or supersede, not {on_busy!r}")
        limits = Budget.of(budget, timeout)
        total = DEFAULTS.total_s if limits.total is None else limits.total
        promise = None if ticket is None else ticket_of(ticket)
        left = math.inf if promise is None else promise.seconds_left
        if left > 0:
            total = min(total, left)
        return cls(
            budget=limits,
            rollback=rollback,
            on_busy=on_busy,
            ticket=promise,
            target=_target(target, promise),
            pause=pause_of(pause),
            around=arounds_of(around),
            total=total,
            deadline=time.monotonic() + total,
            expired_s=None if left > 0 else -left,
            **others,
        )


def _target(given: Any, ticket: RoundTicket | None) -> Target:
    """The target that is meant; one beside a ticket must not contradict it.

    Raises:
        Validation: It does, or is no target.
    """
    if ticket is None:
        return MODEL if given is None else check_target(given)
    if given is not None and check_target(given) != ticket.target:
        raise Validation(
            f"target={given!r} was given, ticket.target is {ticket.target.key}", phase="admit"
        )
    return ticket.target
