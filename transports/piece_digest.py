"""Chunk digests for many small pieces: without a tensor, a check and a wrapper for each of them."""

from __future__ import annotations

import ctypes
from typing import Any, Union, final

import torch

from transports.digest import XXH3_64, ChunkDigest

Hashable = Union[memoryview, "ctypes.Array[ctypes.c_char]", torch.Tensor]
NO_BYTES = torch.empty(0, dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a 1-d uint8 view."""
    return tensor.detach().view(-1).view(torch.uint8) if tensor.nbytes else NO_BYTES


@final
class PieceDigest:
    """`transports.digest.ChunkDigest`, chunk after chunk.

    For ``xxh3_64``, which is the plain XXH3 of all bytes whatever pieces they come in, buffers go
    to the hash directly; ``wsum64`` gets its tensors.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._direct = kind == XXH3_64
        self.update: Any
        self._digest: Any
        self._begin()

    def _begin(self) -> None:
        if self._direct:
            import xxhash  # an optional package, and known to be here

            self._digest = xxhash.xxh3_64()
        else:
            self._digest = ChunkDigest(self._kind)
        self.update = self._digest.update

    def kept(self, raw: torch.Tensor) -> Hashable:
        """The form in which `update` takes a 1-d uint8 tensor; keeps its memory alive."""
        return raw.numpy().data if self._direct else raw

    def passing(self, tensor: torch.Tensor) -> Hashable:
        """The form for any contiguous tensor, to be used only while the tensor is."""
        if self._direct:
            return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        return bytes_of(tensor)

    def end(self) -> int:
        """The chunk's digest; begins the next one's."""
        value: int = self._digest.intdigest() if self._direct else self._digest.value()
        self._begin()
        return value
