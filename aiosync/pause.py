"""How a round keeps its members' generation still: the option ``pause=``."""

from __future__ import annotations

from typing import Any

import msgspec

from aiosync.budget import check_seconds
from aiosync.errors import Validation
from aiosync.generation_table import PauseMode

_SCOPES = ("round", "swap")


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """Pause every member for a round, and let it go on afterwards.

    Afterwards means: weights intact, generation goes on; torn or unknown, it stays paused, and
    the report says so.

    Attributes:
        mode: What happens to running requests: ``"keep"`` freezes them, ``"wait"`` lets them
            finish, ``"abort"`` ends them with what they have.
        clear_cache: Empty the KV and prefix caches. False keeps them, also over the update.
        drain_timeout: Seconds that running requests may take to stop; None: ``budget.pause``.
        scope: ``"round"``: from before the first byte to the commit. ``"swap"``: for the commit
            alone, where the member receives into spare memory; others take it as ``"round"``.
        optional: Send also to members that cannot pause; the report names them.

    Raises:
        Validation: A value cannot be right; names the field.
    """

    mode: str = PauseMode.KEEP.value
    clear_cache: bool = True
    drain_timeout: float | None = None
    scope: str = "round"
    optional: bool = False

    def __post_init__(self) -> None:
        if self.mode not in tuple(PauseMode):
            raise Validation(f"pause.mode must be one of {', '.join(PauseMode)}, not {self.mode!r}")
        if self.scope not in _SCOPES:
            raise Validation(f"pause.scope must be round or swap, not {self.scope!r}")
        for field in ("clear_cache", "optional"):
            value: Any = getattr(self, field)
            if not isinstance(value, bool):
                raise Validation(f"pause.{field} must be True or False, not {value!r}")
        if self.drain_timeout is not None:
            check_seconds(self.drain_timeout, "pause.drain_timeout")


def pause_of(given: Any) -> Pause | None:
    """What a ``pause=`` argument means.

    Raises:
        Validation: It is no `Pause`.
    """
    if given is None or isinstance(given, Pause):
        return given
    raise Validation(f"pause must be a Pause or None, not {given!r}; for a mode: Pause(mode=...)")


def arounds_of(given: Any) -> tuple[Any, ...]:
    """What an ``around=`` argument means.

    Raises:
        Validation: It is no list of functions.
    """
    if isinstance(given, str | bytes) or not hasattr(given, "__iter__"):
        raise Validation(f"around must be a list of functions, not {given!r}")
    found = tuple(given)
    for index, each in enumerate(found):
        if not callable(each):
            raise Validation(
                f"around[{index}] must be a function that takes a member and returns an async"
                f" context manager, not {each!r}"
            )
    return found
