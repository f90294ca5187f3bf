"""Where a pass over a source may stop: its layer groups, checked against what is announced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiosync.metadata import first_few, layer_runs
from statemachines.errors import Validation

if TYPE_CHECKING:
    from collections.abc import Sequence


def group_sizes(source: Any, names: Sequence[str]) -> list[int]:
    """How many of `names` each layer group has.

    Raises:
        Validation: The source's `groups()` are no partition of the names in their order; says why,
            and gives an order that works.
    """
    groups = getattr(source, "groups", None)
    cut = layer_runs(names) if groups is None else groups()
    grouped = [name for group in cut for name in group]
    if grouped != list(names):
        raise Validation(
            f"{type(source).__name__}.groups() must list every announced name once, in metadata"
            f" order: {_why_no_partition(grouped, names)}"
        )
    return [len(group) for group in cut]


def _why_no_partition(grouped: list[str], names: Sequence[str]) -> str:
    known, seen = set(names), set(grouped)
    if unknown := [name for name in grouped if name not in known]:
        return f"{unknown[0]!r} is not announced"
    if missing := [name for name in names if name not in seen]:
        return f"it lacks {first_few(missing)}"
    if len(grouped) != len(names):
        return f"it repeats {next(name for name in names if grouped.count(name) > 1)!r}"
    at = next(i for i, (a, b) in enumerate(zip(grouped, names, strict=True)) if a != b)
    return (
        f"at position {at} the metadata has {names[at]}, groups() has {grouped[at]};"
        f" metadata in this order would fit: {first_few(grouped, 6)}"
    )
