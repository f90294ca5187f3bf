"""Versions of weights: what they are called and which may follow which."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from aiosync.errors import Refused, Validation

MAX_ORDER = 2**63 - 1

Order = Annotated[int, msgspec.Meta(ge=0, le=MAX_ORDER)]


class Version(msgspec.Struct, frozen=True):
    """One version of a model's weights.

    Attributes:
        label: What the trainer calls it.
        lineage: Names one uninterrupted training run.
        order: The only thing compared, and only within a lineage. An int label is its own order.
    """

    label: int | str
    lineage: str
    order: Order

    def __post_init__(self) -> None:
        check_label(self.label)
        lineage: Any = self.lineage
        if not isinstance(lineage, str) or not lineage:
            raise Validation(f"version.lineage must be a non-empty string, not {lineage!r}")
        _check_order(self.order, "version.order")
        if isinstance(self.label, int) and self.label != self.order:
            raise Validation(
                f"an int label is its own order: label {self.label}, order {self.order}"
            )

    @property
    def wire(self) -> str:
        """The label as vLLM's wire carries it: always a string."""
        return str(self.label)

    def __str__(self) -> str:
        return self.wire


def _check_order(value: Any, field: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Validation(f"{field} must be an int, not {value!r}")
    if not 0 <= value <= MAX_ORDER:
        raise Validation(f"{field} must be at least 0 and below 2**63, not {value}")


def check_label(label: Any) -> None:
    """Refuse what cannot name a version.

    Raises:
        Validation: Says what a label may be.
    """
    if label is None:
        raise Validation(
            "a version is needed: pass version=<int that grows> or version=<non-empty str>"
        )
    if isinstance(label, str):
        if not label:
            raise Validation("a version label must not be the empty string")
        if not label.isascii() and not _is_encodable(label):
            raise Validation(f"a version label must be valid Unicode, not {label!r}")
        return
    if isinstance(label, bool) or not isinstance(label, int):
        raise Validation(f"a version label must be an int or a str, not {label!r}")
    _check_order(label, "an int version label")


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def next_version(current: Version | None, label: Any, *, lineage: str) -> Version:
    """The version called `label` that a trainer of `lineage` sends after `current`.

    An int label is its own order; a str label takes the order after `current`'s, or 1. Whether
    the result may follow `current` is `check_successor`'s question.

    Raises:
        Validation: The label is None, empty, a bool, negative, not below 2**63, or another type.
    """
    check_label(label)
    if isinstance(label, int):
        return Version(label, lineage, label)
    return Version(label, lineage, 1 if current is None else current.order + 1)


def renamed(version: Version, label: str) -> Version:
    """`version` under the label that finish carries; the same object where it is its own."""
    if label == version.wire:
        return version
    check_label(label)
    return Version(label, version.lineage, version.order)


def check_successor(current: Version | None, new: Version, *, rollback: bool = False) -> None:
    """Refuse going back or repeating within a lineage; a new lineage may start anywhere.

    Raises:
        Refused: ``detail["version"]`` is what the worker holds.
    """
    if current is None or rollback or new.lineage != current.lineage:
        return
    if new.order > current.order:
        return
    what = "repeats" if new.order == current.order else "goes back from"
    raise Refused(
        f"version {new.wire!r} (order {new.order}) {what} version {current.wire!r}"
        f" (order {current.order}), which the worker holds",
        next_step="send a newer version, or say rollback=True if going back is meant",
        detail={
            "version": msgspec.to_builtins(current),
            "refused": msgspec.to_builtins(new),
        },
    )


def weights_id(version: Version, digest: str | None) -> str:
    """A name for exactly these weights: salts caches, stands in spans.

    Two rounds that carry the same version but other bytes differ by digest; without a digest the
    name says so.
    """
    return f"{version.lineage}/{version.order}/{digest or 'unverified'}"


def label_of(version: Version | None) -> str | None:
    """The label on the wire, or None before the first version."""
    return None if version is None else version.wire
