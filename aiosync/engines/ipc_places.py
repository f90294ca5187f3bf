"""Where a trainer's tensors are, for workers that read them there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from aiosync.metadata import sizes_of
from transports.plain_memory import addresses_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from aiosync.feed import SourceFeed
    from transports.sharing import SharedStorage


@final
class SharedPlaces:
    """Handles of the tensors that lie in memory which `share_tensors` made."""

    def __init__(self, shared: Sequence[SharedStorage]) -> None:
        self._shared = shared
        self._known: tuple[SourceFeed, list[int], dict[int, tuple[Any, int]]] | None = None

    def of(self, feed: SourceFeed) -> dict[int, tuple[Any, int]]:
        """By their positions in the metadata."""
        if not self._shared:
            return {}
        tensors = staying(feed)
        # Contiguous tensors of the announced sizes: they are told apart by their addresses.
        found = feed.addresses or [
            -1 if tensor is None else tensor.data_ptr() for tensor in tensors
        ]
        addresses = found + [storage.segment.fileno() for storage in self._shared]  # -1 once closed
        known = self._known
        if known is not None and known[0] is feed and known[1] == addresses:
            return known[2]
        places: dict[int, tuple[Any, int]] = {}
        for index, tensor in enumerate(tensors):
            if tensor is None:
                continue
            for storage in self._shared:
                place = storage.locate(tensor)
                if place is not None:
                    places[index] = place
        self._known = (feed, addresses, places)
        return places


@final
class DirectPlaces:
    """Addresses of a module's parameters, for workers that copy from this process's memory."""

    def __init__(self) -> None:
        self._known: tuple[SourceFeed, list[int]] | None = None

    def of(self, feed: SourceFeed) -> list[int]:
        """By their positions in the metadata; none at all, unless all are plain memory that stays.

        The same list again while they are where they were.
        """
        if feed.plain is None:
            return []
        known = self._known
        if known is not None and known[0] is feed and known[1] is feed.addresses:
            return known[1]  # and of the same dtypes, on the same device
        found = addresses_of(feed.plain, sizes_of(feed.metadata), feed.addresses) or []
        self._known = (feed, found)
        return found


def staying(feed: SourceFeed) -> list[torch.Tensor | None]:
    """Of every announced tensor, where it is, if it stays there until the round is over."""
    if feed.plain is not None:
        return [*feed.plain]
    resident = getattr(feed.source, "resident", None)
    live: dict[str, torch.Tensor] = {} if resident is None else resident()
    return [live.get(meta.name) for meta in feed.metadata]
