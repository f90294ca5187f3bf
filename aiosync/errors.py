"""The kinds of error of the protocol, and one place to import all of them from.

Each is raised as a `LocalError` by the side that found it and as a `RemoteError` by the side that
was told (`statemachines.errors`).
"""

from __future__ import annotations

from statemachines.errors import (
    AiosyncError,
    GateRejected,
    InvalidTransition,
    LocalError,
    ReentrantTransition,
    RemoteError,
    Validation,
    WrongThread,
)
from transports.errors import (
    DigestMismatch,
    LanePoisoned,
    OutOfSharedMemory,
    PeerLost,
    PhaseTimeout,
    TransportAborted,
)

__all__ = [
    "AiosyncError",
    "Busy",
    "Coverage",
    "DigestMismatch",
    "Fenced",
    "GateRejected",
    "GenerationAborted",
    "InvalidTransition",
    "LanePoisoned",
    "LocalError",
    "OutOfSharedMemory",
    "OutcomeUnknown",
    "Paused",
    "PeerLost",
    "PhaseTimeout",
    "ProtocolMismatch",
    "ReentrantTransition",
    "Refused",
    "RemoteError",
    "RoundCancelled",
    "Torn",
    "TransportAborted",
    "Unauthorized",
    "Validation",
    "WrongLoop",
    "WrongProcess",
    "WrongThread",
]


class Busy(AiosyncError):
    """Another round (or another call on this object) is under way."""

    code = "busy"
    default_retryable = True


class Refused(AiosyncError):
    """The peer will not take this round: another owner, an older version, too little memory."""

    code = "refused"


class Fenced(AiosyncError):
    """A newer trainer or a newer epoch owns the worker; what this one sends is dropped."""

    code = "fenced"
    default_next_step = (
        "another trainer has the workers now: end this one, or take them back with"
        " `await engine.initialize()`"
    )


class Coverage(AiosyncError, ValueError):
    """Announced names and the model's parameters do not cover each other."""

    code = "coverage"


class OutcomeUnknown(AiosyncError):
    """Finish was sent but its answer never came: the worker may hold either version."""

    code = "outcome_unknown"
    default_retryable = True


class Torn(AiosyncError):
    """The replica's weights are a mix of two versions; only a complete update mends it."""

    code = "torn"
    default_next_step = "send a complete update; the replica does not serve until it has one"


class Unauthorized(AiosyncError):
    """The token is missing or wrong."""

    code = "unauthorized"


class ProtocolMismatch(AiosyncError):
    """The peer answered with something that is not this protocol, or another version of it."""

    code = "protocol_mismatch"


class RoundCancelled(AiosyncError):
    """The round was cancelled by its handle or by the task that drove it."""

    code = "round_cancelled"


class Paused(AiosyncError):
    """Generation is held: a new request has to come back, ``detail["retry_after_s"]`` says when."""

    code = "paused"
    default_retryable = True


class GenerationAborted(AiosyncError):
    """A generation has to end with what it has."""

    code = "generation_aborted"
    default_retryable = True


class WrongLoop(AiosyncError):
    """A round is under way under another event loop."""

    code = "wrong_loop"


class WrongProcess(AiosyncError):
    """The engine was inherited through fork; make a new one in this process."""

    code = "wrong_process"


KINDS: dict[str, type[AiosyncError]] = {
    kind.code: kind
    for kind in map(globals().__getitem__, __all__)
    if kind not in (LocalError, RemoteError)  # these are sides of a kind
}
"""Kind by its wire code."""
