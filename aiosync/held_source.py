"""Tensors that somebody holds, announced as they once travelled."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, final

from aiosync.metadata import ParamMeta
from aiosync.sources import WeightSource

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
