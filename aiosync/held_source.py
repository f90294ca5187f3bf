"""Tensors that somebody holds, announced as they once travelled."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, final

from aiosync.errors import Refused
from aiosync.metadata import ParamMeta
from aiosync.sources import WeightSource
from aiosync.targets import model_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch


@final
class HeldSource(WeightSource):
    """Yields what `fetch` gives for each of the announced names, in their order.

    Args:
        fetch: Called on the source's lane, tensor by tensor.
        aliases: Further names of tied tensors, each with the name that travels.
    """

    def __init__(
        self,
        metadata: Sequence[ParamMeta],
        fetch: Callable[[str], torch.Tensor],
        *,
        aliases: Mapping[str, str],
    ) -> None:
        self._announced = metadata
        self._fetch = fetch
        self.aliases = dict(aliases)

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Without owners and placements: whoever holds it has all of it."""
        return [ParamMeta(meta.name, meta.dtype, tuple(meta.shape)) for meta in self._announced]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self.metadata:
            yield meta.name, self._fetch(meta.name)


@final
class ByName:
    """Tensors of a module or a mapping, by the names that travel; called on the source's lane."""

    def __init__(self, model: Any, aliases: Mapping[str, str]) -> None:
        self._model = model
        self._aliases = aliases
        self._tensors: dict[str, torch.Tensor] | None = None

    def __call__(self, name: str) -> torch.Tensor:
        """The tensor of that name, or of another one that it is tied to.

        Raises:
            Refused: There is none.
        """
        if self._tensors is None:
            self._tensors = model_tensors(self._model).tensors
        others = [alias for alias, travels in self._aliases.items() if travels == name]
        found = next((each for each in (name, *others) if each in self._tensors), None)
        if found is None:
            raise Refused(f"there is no tensor {name!r} any more", tensor=name)
        return self._tensors[found]
