"""Sources of vLLM's earlier generation, which say what they hold by yielding None for the rest."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from aiosync import passes
from aiosync.metadata import validate_metadata
from aiosync.sources import WeightSource
from statemachines.errors import Validation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiosync.metadata import ParamMeta
    from aiosync.passes import Pair


class LegacySource(WeightSource):
    """Makes a source out of an object with ``metadata()``, ``__iter__`` and ``held_names()``.

    Its four rules, all checked:

    1. ``metadata()`` lists the whole model, alike on every rank; it is called once.
    2. Every name is held by some rank: ``held_names()`` lists this rank's (None, or no such
       method: all). The ranks compare at the start of a round; the first orphan is named.
    3. Iteration runs through all names in order; one that this rank does not hold comes as None.
    4. Tensors come in the announced dtype. They need not be contiguous.

    Raises:
        TypeError: `obj` has no ``metadata`` method or cannot be iterated.
        Validation: In a round, or on reading `metadata`: a rule is broken; the name is told.
    """

    is_async = False

    def __init__(self, obj: Any) -> None:
        if not callable(getattr(obj, "metadata", None)) or not hasattr(obj, "__iter__"):
            raise TypeError(
                f"{type(obj).__name__} is no earlier source: it needs metadata() and __iter__()"
            )
        self.obj = obj

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return validate_metadata(self.obj.metadata())

    def owned_names(self, rank: int) -> list[str]:
        """The names held here; the object knows of no rank but its own."""
        return [meta.name for meta in self.metadata if meta.name in self._held]

    def iter_full(self) -> Iterator[Pair]:
        passed = iter(self.obj)
        try:
            yield from self._held_pairs(passed)
        finally:
            passes.close(passed)

    @cached_property
    def _held(self) -> set[str]:
        names = {meta.name for meta in self.metadata}
        held_names = getattr(self.obj, "held_names", None)
        held = None if held_names is None else held_names()
        if held is None:
            return names
        held = set(held)
        if unknown := sorted(held - names):
            raise Validation(f"held_names() has {unknown[0]!r}, which metadata() does not announce")
        return held

    def _held_pairs(self, passed: Iterator[Any]) -> Iterator[Pair]:
        at = -1
        for at, item in enumerate(passed):
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise Validation(
                    f"position {at}: expected (name, tensor or None), got {item!r:.80}"
                )
            name, tensor = item
            expected = self.metadata[at].name if at < len(self.metadata) else "the end"
            if name != expected:
                raise Validation(f"position {at}: expected {expected}, got {name}", tensor=name)
            if tensor is None and name in self._held:
                raise Validation(f"{name} is in held_names() but came as None", tensor=name)
            if tensor is not None:
                if name not in self._held:
                    text = f"{name} is not in held_names() but came as a tensor"
                    raise Validation(text, tensor=name)
                yield name, tensor
        if at + 1 < len(self.metadata):
            missing = self.metadata[at + 1].name
            text = f"iteration ended after {at + 1} of {len(self.metadata)} names"
            raise Validation(f"{text}: {missing} is missing", tensor=missing)
