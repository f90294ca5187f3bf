"""Configuration and request types of vLLM's API, accepted wherever a dict is."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from aiosync.budget import check_seconds
from aiosync.errors import Validation
from aiosync.staging import check_staging
from statemachines.hub import TransitionHub

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typing_extensions import TypeVar  # known to every type checker

    from aiosync.sink_base import Sink
else:
    from typing import TypeVar

SINKS = ("staged", "in_place", "layerwise")
VERIFY = ("digest", "counts")
TOKEN_VARIABLE = "AIOSYNC_TOKEN"
TOKEN_FILE_VARIABLE = "AIOSYNC_TOKEN_FILE"


def environment_token() -> tuple[str | None, str | None]:
    """The control plane's token, and the file that holds it, as the environment gives them."""
    return os.environ.get(TOKEN_VARIABLE), os.environ.get(TOKEN_FILE_VARIABLE)


@dataclass(frozen=True)
class WeightTransferConfig:
    """How a worker takes weights.

    Attributes:
        backend: Registered name of the engine (`WeightTransferEngineFactory`).
        sink: ``"staged"`` receives into spare memory and swaps at commit; ``"in_place"`` writes
            into the model as bytes arrive; ``"layerwise"`` stages and writes one layer group
            after the other. Or a `Sink`, or a factory of sinks: ``callable(model, device)``.
        verify: ``"digest"`` compares checksums of every chunk, ``"counts"`` only completeness.
        lease_s: Longest silence of a trainer, in seconds, that an open round survives; None takes
            what the trainer asks for.
        marker: File that exists while the weights are torn, on a local disk: a worker whose
            process died in the middle of a swap begins as torn, not silently mixed. Looked for
            when the engine is made. For a `Sink` or a factory, give it to the sink itself.
        staging: Whose memory ``sink="staged"`` receives into: ``"private"``, the rank's own, or
            ``"shared_host"``, one copy for all ranks of a `WorkerGroup`, which are processes of
            one host. For backends that receive into the host's memory (``ipc``, ``gloo``).
    """

    backend: str = "nccl"
    sink: str | Sink | Callable[[Any, Any], Sink] = "staged"
    verify: str = "digest"
    lease_s: float | None = None
    marker: str | Path | None = None
    staging: str = "private"

    def __post_init__(self) -> None:
        check_worker_config(self)


def check_worker_config(config: Any) -> None:
    """Refuse a config that no engine can work with; any object with a `backend` may be one.

    Raises:
        Validation: Names the field.
    """
    backend = getattr(config, "backend", None)
    if not isinstance(backend, str) or not backend:
        raise Validation(f"backend must be a non-empty string, not {backend!r}")
    sink, verify = getattr(config, "sink", "staged"), getattr(config, "verify", "digest")
    by_name = isinstance(sink, str)
    if sink not in SINKS if by_name else not _makes_sinks(sink):
        raise Validation(
            f"sink must be one of {', '.join(SINKS)}, a Sink or a factory, not {sink!r}"
        )
    if getattr(config, "marker", None) is not None and not by_name:
        raise Validation("give the marker to the sink itself: config.sink is not a mode")
    check_staging(config)
    if verify not in VERIFY:
        raise Validation(f"verify must be one of {', '.join(VERIFY)}, not {verify!r}")
    lease_s = getattr(config, "lease_s", None)
    if lease_s is not None:
        check_seconds(lease_s, "lease_s")


def _makes_sinks(value: object) -> bool:
    """Whether it is a sink or a factory, without importing what sinks need."""
    return callable(value) or all(
        hasattr(value, name) for name in ("begin", "landed", "commit", "abort")
    )


@dataclass
class WeightTransferInitRequest:
    """Body of ``init_weight_transfer_engine``."""

    init_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class WeightTransferUpdateRequest:
    """Body of ``update_weights``: one payload, or one per worker rank."""

    update_info: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)


def check_count(name: str, value: object, low: int, high: int) -> None:
    """Refuse a size or count that cannot be right.

    Raises:
        Validation: Names the option.
    """
    if type(value) is not int or not low <= value <= high:
        raise Validation(f"{name} must be an int in {low}..{high}, not {value!r}")


def check_identity(rank: object, lineage: object, hub: object) -> None:
    """Refuse what an engine cannot be told by.

    Raises:
        Validation: Names the argument.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise Validation(f"rank must be an int of at least 0, not {rank!r}")
    if lineage is not None and (not isinstance(lineage, str) or not lineage):
        raise Validation(f"lineage must be a non-empty string or None, not {lineage!r}")
    if hub is not None and not isinstance(hub, TransitionHub):
        raise Validation(f"hub must be a TransitionHub or None, not {hub!r}")


def check_factory(name: str, value: object) -> None:
    """Refuse what cannot be called.

    Raises:
        Validation: Names the argument.
    """
    if not callable(value):
        raise Validation(f"{name} must be callable, not {value!r}")


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


if TYPE_CHECKING:
    # Without type arguments an engine is one whose infos are not known any further.
    TrainerInit = TypeVar("TrainerInit", default=TrainerInitInfo)
    WorkerInit = TypeVar("WorkerInit", default=WeightTransferInitInfo)
    Update = TypeVar("Update", default=WeightTransferUpdateInfo)
else:  # Python 3.11 has no defaults
    TrainerInit = TypeVar("TrainerInit")
    WorkerInit = TypeVar("WorkerInit")
    Update = TypeVar("Update")
