"""The record of one transition: what hooks, streams and the wire carry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import msgspec

from statemachines.errors import Validation
from statemachines.tables import Weights

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMA = 1
_LONGEST = 1000


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One flip of one machine; its JSON form is stable under `schema`.

    Attributes:
        engine, role: Which machine; the pair is its identity on a shared hub.
        seq: 1 for a machine's first transition, then contiguous. A gap means lost events.
        phase: What the engine was doing, where it says so.
        wall_time: Seconds since the epoch, for people.
        monotonic: Seconds of the machine's own clock, for arithmetic within one process.
        seconds_in_source: How long the machine had been in `source`.
        nbytes: Payload bytes of the round so far.
        weights: ``"intact"``, ``"torn"``, ``"unknown"``, or None where nothing is said.
        error: ``"Type: message"`` of what ended the phase.
    """

    engine: str
    role: str
    seq: int
    trigger: str
    source: str
    dest: str
    wall_time: float
    monotonic: float
    seconds_in_source: float
    phase: str | None = None
    round: int | None = None
    version: int | str | None = None
    nbytes: int = 0
    weights: str | None = None
    error: str | None = None
    schema: int = SCHEMA


class Facts(TypedDict, total=False):
    """What is known about a transition beyond its trigger; see `Transition`."""

    phase: str | None
    error: BaseException | str | None
    round: int | None
    version: int | str | None
    nbytes: int
    weights: Weights | str | None


def render_facts(**facts: Unpack[Facts]) -> dict[str, Any]:
    """The facts as an event carries them.

    Raises:
        Validation: ``weights`` is not one of `Weights`.
    """
    rendered: dict[str, Any] = dict(facts)
    error, weights = facts.get("error"), facts.get("weights")
    if error is not None:
        rendered["error"] = describe_error(error)
    if weights is not None:
        if weights not in tuple(Weights):
            raise Validation(f"weights must be one of {', '.join(Weights)}, not {weights!r}")
        rendered["weights"] = str(weights)
    return rendered


def describe_error(error: BaseException | str) -> str:
    """``"Type: first line"`` for an exception, the text itself otherwise; never raises.

    It is called on the way to `failed`, where nothing may go wrong any more: a message that
    cannot be rendered or encoded must not keep a machine from failing.
    """
    if isinstance(error, BaseException):
        name = type(error).__name__
        try:
            lines = str(error).strip().splitlines()
        except Exception:  # noqa: BLE001 - a broken __str__ is the raiser's defect, not ours
            lines = ["<message not printable>"]
        text = f"{name}: {lines[0]}" if lines else name
    else:
        text = error
    # File names and native messages bring lone surrogates, which JSON cannot carry.
    return text[:_LONGEST].encode("utf-8", "backslashreplace").decode()


def callable_name(fn: Callable[..., object]) -> str:
    """How statistics and errors call a hook or a check."""
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{named.__module__}.{named.__qualname__}"
