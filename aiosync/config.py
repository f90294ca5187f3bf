"""Configuration and request types of vLLM's API, accepted wherever a dict is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from aiosync.errors import Validation

SINKS = ("staged", "in_place")
VERIFY = ("digest", "counts")


@dataclass(frozen=True)
class WeightTransferConfig:
    """How a worker takes weights.

    Attributes:
        backend: Registered name of the engine (`WeightTransferEngineFactory`).
        sink: ``"staged"`` receives into spare memory and swaps at commit; ``"in_place"`` writes
            into the model as bytes arrive.
        verify: ``"digest"`` compares checksums of every chunk, ``"counts"`` only completeness.
        lease_s: Longest silence of a trainer, in seconds, that an open round survives; None takes
            what the trainer asks for.
    """

    backend: str = "nccl"
    sink: str = "staged"
    verify: str = "digest"
    lease_s: float | None = None

    def __post_init__(self) -> None:
        backend: object = self.backend  # a config may come from JSON
        if not isinstance(backend, str) or not backend:
            raise Validation(f"backend must be a non-empty string, not {backend!r}")
        if self.sink not in SINKS:
            raise Validation(f"sink must be one of {', '.join(SINKS)}, not {self.sink!r}")
        if self.verify not in VERIFY:
            raise Validation(f"verify must be one of {', '.join(VERIFY)}, not {self.verify!r}")


@dataclass
class WeightTransferInitRequest:
    """Body of ``init_weight_transfer_engine``."""

    init_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class WeightTransferUpdateRequest:
    """Body of ``update_weights``: one payload, or one per worker rank."""

    update_info: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)


class WeightTransferInitInfo:
    """Base of a backend's init info (worker side); a dataclass or a plain class of fields."""


class WeightTransferUpdateInfo:
    """Base of a backend's update info (worker side)."""


@dataclass(kw_only=True)
class TrainerInitInfo:
    """Base of a backend's init info (trainer side).

    Attributes:
        backend: Class-level name of the backend; every subclass must set it.
        rank: This trainer rank; rank 0 sends.
    """

    backend: ClassVar[str] = ""
    rank: int = field(kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.backend:
            raise TypeError(f"{cls.__name__} must set the class attribute 'backend'")

    @property
    def is_sender(self) -> bool:
        return self.rank == 0
