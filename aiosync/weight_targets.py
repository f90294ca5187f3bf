"""What a round updates: the model, its draft, or an adapter. Each has a version of its own."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from aiosync.errors import Validation


class Model(msgspec.Struct, frozen=True, tag_field="kind", tag="model"):
    """The model that serves; what a round updates unless it says otherwise."""

    @property
    def key(self) -> str:
        """Names the target in ``PeerState.versions`` and in errors."""
        return "model"


class Draft(msgspec.Struct, frozen=True, tag_field="kind", tag="draft"):
    """The draft model of speculative decoding."""

    @property
    def key(self) -> str:
        """As `Model.key`."""
        return "draft"


class Adapter(msgspec.Struct, frozen=True, tag_field="kind", tag="adapter"):
    """A named adapter over the model.

    Attributes:
        name: Tells it from other adapters.
        config: What the engine needs to load it, as plain JSON.
    """

    name: str
    config: dict[str, Any] = {}

    def __post_init__(self) -> None:
        name: Any = self.name
        if not isinstance(name, str) or not name or len(name) > 512:
            raise Validation(
                f"an adapter's name must be a short non-empty string, not {name!r:.40}"
            )

    @property
    def key(self) -> str:
        """As `Model.key`."""
        return f"adapter:{self.name}"


Target: TypeAlias = Model | Draft | Adapter

MODEL = Model()


def check_target(given: Any) -> Target:
    """`given` as a target.

    Raises:
        Validation: It is none.
    """
    if not isinstance(given, Model | Draft | Adapter):
        raise Validation(f"target must be a Model, a Draft or an Adapter, not {given!r}")
    return given


def of_header(target: Target | None) -> Target:
    """The target that a header means; one that says nothing means the model."""
    return MODEL if target is None else target
