"""Chunk digests for many small pieces: without a tensor, a check and a wrapper for each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from transports.digest import XXH3_64, ChunkDigest
from transports.plain_memory import bytes_at, chars_at

if TYPE_CHECKING:
    import torch


@final
class PieceDigest:
    """`transports.digest.ChunkDigest`, chunk after chunk.

    Attributes:
        by_piece: The value depends on where pieces end. That of ``xxh3_64`` does not: it is the
            plain XXH3 of all bytes, whatever pieces they come in.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.by_piece = kind != XXH3_64
        self._digest: Any = self._begin()

    def _begin(self) -> Any:
        if self.by_piece:
            return ChunkDigest(self._kind)
        import xxhash  # an optional package, and known to be here

        return xxhash.xxh3_64()

    def update(self, raw: torch.Tensor) -> None:
        """Take the next piece, a 1-d uint8 tensor."""
        self._digest.update(raw if self.by_piece else raw.numpy().data)

    def update_at(self, address: int, nbytes: int) -> None:
        """Take the next piece, which lies there; the caller holds what it belongs to."""
        self._digest.update((bytes_at if self.by_piece else chars_at)(address, nbytes))

    def end(self) -> int:
        """The chunk's digest; begins the next one's."""
        value: int = self._digest.value() if self.by_piece else self._digest.intdigest()
        self._digest = self._begin()
        return value
