"""Compares what a source yields with what it announced, a batch at a time where it can."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from aiosync.metadata import dtype_name
from aiosync.module_layout import compact, is_dtensor
from aiosync.module_walk import DTYPE, SHAPE, are_strided, have_memory, is_freed, same
from statemachines.errors import Validation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiosync.feed import SourceFeed
    from aiosync.metadata import ParamMeta


_CONTIGUOUS = torch.Tensor.is_contiguous
_NEGATED, _CONJUGATED = torch.Tensor.is_neg, torch.Tensor.is_conj


class Checker:
    """Walks the owned metadata beside one pass.

    Args:
        settles: Hand tensors out settled, which may copy them; else only detached.
    """

    __slots__ = ("_feed", "_metadata", "_next", "_owned", "_positions", "_settles")

    def __init__(self, feed: SourceFeed, *, settles: bool = True) -> None:
        self._feed = feed
        self._settles = settles
        self._metadata: Sequence[ParamMeta] = feed.metadata
        self._owned: Sequence[int] = feed.owned
        self._positions: dict[str, int] = {}  # of names already seen
        self._next = 0

    def take_all(self, pairs: Sequence[Any]) -> list[tuple[int, torch.Tensor]]:
        """A batch: at once where all of it is plain and as announced, else one by one."""
        taken = self._take_plain(pairs) if len(pairs) > 1 else None
        return [self.take(pair) for pair in pairs] if taken is None else taken

    def _take_plain(self, pairs: Sequence[Any]) -> list[tuple[int, torch.Tensor]] | None:
        """None, with nothing taken, where any pair needs a closer look."""
        at, end = self._next, self._next + len(pairs)
        if set(map(type, pairs)) != {tuple} or set(map(len, pairs)) != {2}:
            return None
        indices = self._owned[at:end]
        metas = [self._metadata[index] for index in indices]
        names, tensors = map(list, zip(*pairs, strict=True))
        # Plain strings only: a subclass might compare as it likes.
        if set(map(type, names)) != {str} or names != [meta.name for meta in metas]:
            return None
        dtypes, shapes = [meta.dtype for meta in metas], [meta.shape for meta in metas]
        if not are_strided(tensors) or not same(dtypes, map(DTYPE, tensors)):
            return None
        if not same(shapes, map(SHAPE, tensors)) or not all(map(_CONTIGUOUS, tensors)):
            return None
        if any(map(_NEGATED, tensors)) or any(map(_CONJUGATED, tensors)):
            return None
        if not have_memory(tensors):
            return None
        self._positions.update(zip(names, range(at, end), strict=True))
        self._next = end
        ready = [
            compact(t.detach()) if t.requires_grad or 1 in shape or 0 in shape else t
            for t, shape in zip(tensors, shapes, strict=True)
        ]
        return list(zip(indices, ready, strict=True))

    def take(self, pair: Any) -> tuple[int, torch.Tensor]:
        at = self._next
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise Validation(f"position {at}: expected (name, tensor), got {kind_of(pair)}")
        name, tensor = pair
        if at >= len(self._owned) or self._metadata[self._owned[at]].name != name:
            raise self._misplaced(name)
        index = self._owned[at]
        meta = self._metadata[index]
        problem = _mismatch(meta, tensor)
        if problem is not None:
            raise Validation(f"{name} (position {at}): {problem}", tensor=name)
        self._positions[name] = at
        self._next = at + 1
        tensor = tensor.detach()
        return index, settled(tensor) if self._settles else tensor

    def finish(self) -> None:
        if self._next < len(self._owned):
            missing = self._metadata[self._owned[self._next]].name
            raise Validation(
                f"the source ended after {self._next} of {len(self._owned)} tensors: "
                f"{missing} is missing",
                tensor=missing,
            )

    def _misplaced(self, name: str) -> Validation:
        at = self._next
        if name in self._positions:
            text = f"{name} came twice, at positions {self._positions[name]} and {at}"
        elif at >= len(self._owned):
            text = f"{name} (position {at}) is extra: only {len(self._owned)} tensors are announced"
        else:
            expected = self._metadata[self._owned[at]].name
            text = f"position {at}: expected {expected}, got {name}"
            if all(meta.name != name for meta in self._metadata):
                text += ", which is not announced"
            elif all(self._metadata[i].name != name for i in self._owned):
                text += f", which rank {self._feed.rank} does not own"
        return Validation(text, tensor=name)


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as plain contiguous bytes; copies only what is not."""
    return compact(tensor.resolve_conj().resolve_neg())


def _mismatch(meta: ParamMeta, tensor: Any) -> str | None:
    if not isinstance(tensor, torch.Tensor):
        return f"expected a tensor, got {kind_of(tensor)}"
    if tensor.dtype != meta.dtype:
        return f"announced as {dtype_name(meta.dtype)}, yielded as {dtype_name(tensor.dtype)}"
    if tuple(tensor.shape) != meta.shape:
        return f"announced with shape {meta.shape}, yielded with {tuple(tensor.shape)}"
    if tensor.device.type == "meta":
        return "on the meta device: it has no data"
    if is_dtensor(tensor):
        return "a DTensor; yield materialize_full_tensor(tensor)"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}; only strided tensors are sent"
    if is_freed(tensor):
        return "its storage was freed: it has no data"
    return None


def kind_of(value: object) -> str:
    """The type of a value as it stands in a message."""
    return "None" if value is None else f"a {type(value).__name__}"
