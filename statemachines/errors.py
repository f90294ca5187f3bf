"""Root of the error tree.

Every error has a *kind* (``Busy``, ``Validation``, ...) and a *side*: `LocalError` when this
process found it, `RemoteError` when a peer reported it. A kind that is raised directly is local;
``Kind.remote(...)`` makes the remote form. ``except Busy`` catches both sides, ``except
RemoteError`` catches every kind that came over the wire.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self, cast

_FIELDS = ("replica", "rank", "phase", "tensor", "round", "weights", "next_step")


class AiosyncError(Exception):
    """Something went wrong in a weight update.

    Attributes:
        code: Stable name of the kind on the wire.
        replica, rank, phase, tensor, round: Where it happened, where that is known.
        weights: ``"intact"``, ``"torn"`` or ``"unknown"``: what the replica's weights are now.
        retryable: Whether the same call may succeed later without a change by the caller.
        next_step: One sentence of advice.
        report: The round's report, once the round has one.
        detail: Further JSON-able facts (allowed triggers, both digests, ...).
    """

    code: ClassVar[str] = "error"
    default_retryable: ClassVar[bool] = False
    default_next_step: ClassVar[str | None] = None
    kind: ClassVar[type[AiosyncError]]
    _variants: ClassVar[dict[type, type]]

    replica: str | None
    rank: int | None
    phase: str | None
    tensor: str | None
    round: int | None
    weights: str | None
    next_step: str | None
    retryable: bool
    report: Any
    detail: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__name__ not in ("LocalError", "RemoteError") and "kind" not in cls.__dict__:
            cls.kind = cls

    def __new__(cls, *args: Any, **_kwargs: Any) -> Self:
        side = cls if issubclass(cls, (LocalError, RemoteError)) else cls._on_side(LocalError)
        if issubclass(side, MemoryError):  # its own __new__ refuses a class with more bases
            return cast("Self", Exception.__new__(side, *args[:1]))
        return super().__new__(side, *args[:1])

    def __init__(
        self,
        message: str = "",
        *,
        replica: str | None = None,
        rank: int | None = None,
        phase: str | None = None,
        tensor: str | None = None,
        round: int | None = None,
        weights: str | None = None,
        retryable: bool | None = None,
        next_step: str | None = None,
        report: Any = None,
        detail: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.replica = replica
        self.rank = rank
        self.phase = phase
        self.tensor = tensor
        self.round = round or None  # 0: it had no number yet
        self.weights = weights
        self.retryable = self.default_retryable if retryable is None else retryable
        self.next_step = next_step if next_step is not None else self.default_next_step
        self.report = report
        self.detail = dict(detail or {})

    @classmethod
    def remote(cls, message: str = "", **fields: Any) -> Self:
        """The form of this kind that a peer reported: also a `RemoteError`."""
        variant: type[Self] = cls.kind._on_side(RemoteError)  # noqa: SLF001  own class
        return variant(message, **fields)

    @classmethod
    def _on_side(cls, side: type[AiosyncError]) -> type[Any]:
        variants = cls.__dict__.get("_variants")
        if variants is None:
            variants = cls._variants = {}
        if side not in variants:
            if cls is AiosyncError:
                variants[side] = side
            else:
                body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "kind": cls}
                variants[side] = type(cls.__name__, (side, cls), body)
        return variants[side]

    def locate(self, **fields: Any) -> Self:
        """Fill in where it happened, keeping what is known already; returns itself."""
        for field, value in fields.items():
            if getattr(self, field) is None:
                setattr(self, field, value)
        return self

    def __str__(self) -> str:
        rows = [(field, getattr(self, field)) for field in _FIELDS]
        table = "".join(f"\n  {field:<9} {value}" for field, value in rows if value is not None)
        return f"{self.message or self.code}{table}"

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {field: getattr(self, field) for field in _FIELDS}
        fields |= {"retryable": self.retryable, "report": self.report, "detail": self.detail}
        return _rebuild, (self.kind, isinstance(self, RemoteError), self.message, fields)


class LocalError(AiosyncError):
    """Found by this process."""

    kind = AiosyncError


class RemoteError(AiosyncError):
    """Reported by a peer."""

    kind = AiosyncError


AiosyncError.kind = AiosyncError


def _rebuild(
    kind: type[AiosyncError], is_remote: bool, message: str, fields: dict[str, Any]
) -> AiosyncError:
    return kind.remote(message, **fields) if is_remote else kind(message, **fields)


class Validation(AiosyncError, ValueError):
    """Input that cannot be right, found before anything moved."""

    code = "validation"


class InvalidTransition(AiosyncError):
    """A call in the wrong order; ``detail["allowed"]`` lists the triggers that are legal now."""

    code = "invalid_transition"


class ReentrantTransition(AiosyncError):
    """A hook tried to fire a trigger from inside a transition."""

    code = "reentrant_transition"


class GateRejected(AiosyncError):
    """A gate vetoed a transition or did not answer in time; the state is unchanged."""

    code = "gate_rejected"
    default_retryable = True


class WrongThread(AiosyncError):
    """A machine was driven from a thread other than the one that owns it."""

    code = "wrong_thread"
