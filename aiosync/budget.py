"""How long the parts of a round may take."""

from __future__ import annotations

import math
import threading
from typing import Any, Self

import msgspec

from aiosync.defaults import DEFAULTS
from aiosync.errors import Validation
from aiosync.messages import LONGEST_S

_LONGEST_S = min(threading.TIMEOUT_MAX, LONGEST_S)


def check_seconds(value: Any, field: str) -> float:
    """`value` as a positive, finite number of seconds that a thread can wait for, and a peer takes.

    Raises:
        Validation: Names `field`; zero, negative, NaN, infinity, booleans and strings are refused.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Validation(f"{field} must be a number of seconds, not {value!r}")
    try:
        seconds = float(value)
    except OverflowError:  # an int may have any number of digits
        seconds = math.inf
    if not math.isfinite(seconds) or seconds <= 0:
        raise Validation(f"{field} must be a positive, finite number of seconds, not {value!r}")
    if seconds > _LONGEST_S:
        raise Validation(f"{field} must be at most {_LONGEST_S:.0f} seconds, not {value!r}")
    return seconds


class Budget(msgspec.Struct, frozen=True):
    """Seconds for each part of a round. ``None`` takes the table of `aiosync.defaults`.

    Attributes:
        total: The whole round. At its end the call returns within `cleanup`.
        admit: Until every member accepted ``start``.
        pause: Until generation is paused.
        stall: Longest time without progress; a round that moves is not cut short by it.
        finish: Prepare and commit.
        cleanup: What abort and the wait for it may take after the deadline or a failure.

    Raises:
        Validation: A value is not a positive, finite number; names the field.
    """

    total: float | None = None
    admit: float | None = None
    pause: float | None = None
    stall: float = DEFAULTS.stall_s
    finish: float | None = None
    cleanup: float = DEFAULTS.cleanup_s

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if value is not None:
                msgspec.structs.force_setattr(self, field, check_seconds(value, f"budget.{field}"))
        if self.stall is None:
            msgspec.structs.force_setattr(self, "stall", DEFAULTS.stall_s)
        if self.cleanup is None:
            msgspec.structs.force_setattr(self, "cleanup", DEFAULTS.cleanup_s)

    @classmethod
    def of(cls, budget: Self | None = None, timeout: float | None = None) -> Self:
        """The budget meant by a call's ``budget=`` and ``timeout=`` arguments.

        `timeout` is shorthand for `total`; giving both a timeout and a total is refused.
        """
        if budget is not None and not isinstance(budget, Budget):
            raise Validation(
                f"budget must be a Budget, not {budget!r}; for one number of seconds use timeout="
            )
        result = cls() if budget is None else budget
        if timeout is None:
            return result
        if result.total is not None:
            raise Validation(f"timeout={timeout!r} and budget.total={result.total!r}: give one")
        return msgspec.structs.replace(result, total=check_seconds(timeout, "timeout"))
