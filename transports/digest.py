"""Digests of what was moved: they find corruption, not tampering.

Anyone can make other bytes with the same digest; what these catch is a chunk that was never
written, written twice, cut short, mixed up with another one, or damaged on the way.

``xxh3_64`` is the fastest where all bytes pass through a CPU. ``wsum64`` needs torch alone, so it
can be computed where the tensors are. It is defined modulo 2**64 on little-endian 8-byte words
(the last one filled up with zero bytes): words of a row of 512 are summed with fixed odd weights,
each row's sum is mixed (``s ^ s >> 29``), the rows of a group of 2,048 are summed with odd weights
of their own, and groups, then the piece's length, then pieces are chained: ``state * M + value``.
Every change within one word is found. So is nearly every other one: only changes in the highest
bits of several words of one row can cancel (flipping bit 63 of two of them does), which no way to
lose or mix up bytes does by itself.
"""

from __future__ import annotations

import hashlib
import importlib.util
import struct
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from statemachines.errors import Validation

if TYPE_CHECKING:
    from collections.abc import Iterable

XXH3_64 = "xxh3_64"
WSUM64 = "wsum64"

_MASK = 2**64 - 1
WSUM64_ROW = 512  # words
WSUM64_ROWS = 2048  # rows of a group: 8 MiB, which also bounds the temporaries
_GROUP_NBYTES = 8 * WSUM64_ROW * WSUM64_ROWS
WSUM64_CHAIN = 0x9E3779B97F4A7C15


@cache
def available() -> tuple[str, ...]:
    """The kinds this process can compute, best first."""
    needed = ("xxhash", "numpy")
    has_xxh3 = all(importlib.util.find_spec(name) is not None for name in needed)
    return (XXH3_64, WSUM64) if has_xxh3 else (WSUM64,)


def chain(values: Iterable[int]) -> str:
    """One hex digest over the chunks' values; their order matters."""
    packed = b"".join(value.to_bytes(8, "little") for value in values)
    return hashlib.sha256(packed).hexdigest()


@final
class ChunkDigest:
    """The digest of one chunk.

    Args:
        kind: ``"xxh3_64"`` (CPU tensors; needs the package xxhash) or ``"wsum64"`` (any device).

    Raises:
        Validation: The kind is unknown, or cannot be computed here.
    """

    __slots__ = ("_hash", "_state", "kind")

    def __init__(self, kind: str) -> None:
        if kind not in available():
            hint = "; install aiosync[digest]" if kind == XXH3_64 else ""
            raise Validation(f"digest {kind!r} is not one of {', '.join(available())}{hint}")
        self.kind = kind
        self._state = 0
        self._hash: Any = None
        if kind == XXH3_64:
            import xxhash  # optional

            self._hash = xxhash.xxh3_64()

    def update(self, tensor_bytes: torch.Tensor) -> None:
        """Take the next piece: a contiguous 1-d uint8 tensor, of any alignment.

        Call it once a piece, in the plan's order; ``wsum64`` depends on where pieces end. No byte
        is copied, except that ``wsum64`` copies pieces that do not begin at a multiple of 8 bytes
        in memory, 8 MiB at a time. ``xxh3_64`` works without the GIL.
        """
        if (
            tensor_bytes.dtype != torch.uint8
            or tensor_bytes.dim() != 1
            or not tensor_bytes.is_contiguous()
        ):
            shape = tuple(tensor_bytes.shape)
            raise Validation(f"a piece is contiguous 1-d uint8, not {tensor_bytes.dtype} {shape}")
        if self._hash is None:
            self._state = _chain(self._state, _wsum(tensor_bytes))
            self._state = _chain(self._state, tensor_bytes.numel())
        elif tensor_bytes.device.type == "cpu":
            self._hash.update(tensor_bytes.numpy())  # through the buffer protocol, no copy
        else:
            raise Validation(f"xxh3_64 reads CPU tensors, not {tensor_bytes.device}; use wsum64")

    def value(self) -> int:
        """The digest so far, from 0 to 2**64 - 1."""
        value: int = self._state if self._hash is None else self._hash.intdigest()
        return value


def _chain(state: int, value: int) -> int:
    return (state * WSUM64_CHAIN + value) & _MASK


def _wsum(data: torch.Tensor) -> int:
    state = 0
    for start in range(0, data.numel(), _GROUP_NBYTES):
        state = _chain(state, _group_sum(data[start : start + _GROUP_NBYTES]))
    return state


def _group_sum(data: torch.Tensor) -> int:
    weights = wsum64_weights(data.device)
    # view() looks at the offset in the storage, the processor at the address
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    n_words, n_rows = data.numel() // 8, data.numel() // (8 * WSUM64_ROW)
    words = data[: n_words * 8].view(torch.int64)
    total = 0
    if n_rows:
        sums = _dot(words[: n_rows * WSUM64_ROW].view(n_rows, WSUM64_ROW), weights.columns)
        # int64 shifts copy the sign; the mask makes the shift logical, and so the mix invertible
        sums ^= (sums >> 29) & (2**35 - 1)
        total = int(_dot(sums.view(1, -1), weights.rows[:n_rows]))
    rest = n_words - n_rows * WSUM64_ROW
    if rest or data.numel() % 8:
        last = 0
        if rest:
            last = int(_dot(words[n_rows * WSUM64_ROW :].view(1, -1), weights.columns[:rest]))
        if data.numel() % 8:
            tail = int.from_bytes(bytes(data[n_words * 8 :].tolist()), "little")
            last += tail * int(weights.columns[rest])
        last &= _MASK
        total += (last ^ (last >> 29)) * int(weights.rows[n_rows])
    return total & _MASK


def _dot(matrix: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if matrix.device.type == "cpu":
        return torch.mv(matrix, weights)
    return (matrix * weights).sum(1)  # torch has no integer mv elsewhere


class _Weights(NamedTuple):
    rows: torch.Tensor
    columns: torch.Tensor


@cache
def wsum64_weights(device: torch.device) -> _Weights:
    """Odd pseudo-random weights of rows and columns (splitmix64 from 0), made once a device."""
    if sys.byteorder != "little":  # pragma: no cover - the words would differ
        raise Validation("wsum64 is defined on little-endian words")
    values = []
    state = 0
    for _ in range(WSUM64_ROWS + WSUM64_ROW):
        state = (state + WSUM64_CHAIN) & _MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        values.append((z ^ (z >> 31)) | 1)
    signed = struct.unpack(f"<{len(values)}q", struct.pack(f"<{len(values)}Q", *values))
    weights = torch.tensor(signed, dtype=torch.int64, device=device)
    return _Weights(weights[:WSUM64_ROWS], weights[WSUM64_ROWS:])
