"""Layer groups: names cut by the layer they belong to, and where a pass over a source may stop."""

from __future__ import annotations

import re
from itertools import chain, groupby, repeat
from typing import TYPE_CHECKING, Any

from aiosync.metadata import first_few
from statemachines.errors import Validation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LAYER = re.compile(r"(?:[^.]*\.)*?([0-9]+)(?=\.|\Z)")  # up to the first segment of digits


def layerwise_groups(names: Iterable[str]) -> list[list[str]]:
    """Group names by the outermost numeric dotted segment (``layers.3.``).

    Names without one go to a first group until an indexed name has been seen, to a last group
    afterwards. Stacks come in order of first appearance, layers by ascending index; empty groups
    are left out.
    """
    before: list[str] = []
    after: list[str] = []
    stacks: dict[str, dict[int, list[str]]] = {}
    heads: dict[str, list[str]] = {}  # layers by what their names begin with
    for name in names:
        found = _LAYER.match(name)
        if found is None:
            (after if stacks else before).append(name)
            continue
        head = found[0]
        layer = heads.get(head)
        if layer is None:
            stack = stacks.setdefault(head[: max(found.start(1) - 1, 0)], {})
            layer = heads[head] = stack.setdefault(int(found[1]), [])
        layer.append(name)
    layers = [stack[index] for stack in stacks.values() for index in sorted(stack)]
    return [group for group in (before, *layers, after) if group]


def layer_runs(names: Sequence[str]) -> list[list[str]]:
    """Names cut into runs of one layer each; unlike `layerwise_groups` the order is kept."""
    layer: dict[str, int] = {}
    for number, group in enumerate(layerwise_groups(names)):
        layer.update(zip(group, repeat(number)))
    return [list(run) for _, run in groupby(names, layer.__getitem__)]


def group_sizes(source: Any, names: Sequence[str]) -> list[int]:
    """How many of `names` each layer group has.

    Raises:
        Validation: The source's `groups()` are no partition of the names in their order; says why,
            and gives an order that works.
    """
    groups = getattr(source, "groups", None)
    cut = layer_runs(names) if groups is None else groups()
    grouped = list(chain.from_iterable(cut))
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
