"""Spare memory that all ranks of a host share: `Arena` where each rank has a part in a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from aiosync.errors import InvalidTransition, OutOfSharedMemory, Refused
from aiosync.spare import needed_memory, views_into
from transports.staging import StagingMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from aiosync.metadata import ParamMeta

    Map: TypeAlias = Callable[[StagingMemory, int], torch.Tensor]


@final
class SharedArena:
    """A view per tensor into the segment of `transports.staging`, whichever rank fills it.

    Attributes:
        addresses: Of the views.
    """

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self._memory = StagingMemory(self._forget)
        self._map: Map | None = None
        self._metadata: list[ParamMeta] = []
        self._bytes: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []

    def join(self, map_: Map) -> None:
        """How the round that begins comes to its memory; for one call of `views`."""
        self._map = map_

    def views(self, metadata: Sequence[ParamMeta]) -> list[torch.Tensor]:
        """Contiguous tensors of the announced dtypes and shapes; blocks until all ranks have them.

        Raises:
            Refused: More memory is needed than is free.
            InvalidTransition: Nobody said how: it takes an engine whose backend shares.
        """
        join, self._map = self._map, None
        if join is None:
            raise InvalidTransition("staging that ranks share needs an engine, and a WorkerGroup")
        need, metas = needed_memory(metadata), list(metadata)
        # Never an inference tensor, whatever the lane's mode: transports write from other threads.
        with torch.inference_mode(False):
            try:
                memory = join(self._memory, need)
            except OutOfSharedMemory as error:
                raise Refused(
                    f"staging for all ranks of this host: {error.message}",
                    weights="intact",
                    next_step='use the sink mode "in_place", which needs no second copy',
                    detail=error.detail,
                ) from error
            if memory is not self._bytes or metas != self._metadata:
                self._views = views_into(memory, metas)
                self.addresses = list(map(torch.Tensor.data_ptr, self._views))
                self._bytes, self._metadata = memory, metas
        return self._views

    def own_views(self) -> list[torch.Tensor]:
        """The same bytes, for somebody who may write to them: no other rank sees that."""
        with torch.inference_mode(False):
            return views_into(self._memory.private(), self._metadata)

    def release(self) -> None:
        """Give the memory back, once nobody else holds a view."""
        self._memory.release()
        self._forget()

    def _forget(self) -> None:
        """The segment is given back: a view would keep it mapped beside the next one."""
        self._metadata, self._bytes, self._views, self.addresses = [], None, [], []
