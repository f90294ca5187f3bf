"""The digest ``wsum64`` of large pieces, computed where they are: no step waits for the device.

`transports.digest.ChunkDigest` defines the value and asks the device for every 8 MiB. Here the same
arithmetic (int64, which wraps) leaves each piece's value in a tensor on the device; the host reads
all of a round's values at once when it is over.
"""

from __future__ import annotations

from functools import cache
from typing import final

import torch

from transports.digest import WSUM64_CHAIN, WSUM64_ROW, WSUM64_ROWS, wsum64_weights

_GROUP_WORDS = WSUM64_ROW * WSUM64_ROWS
_GROUP_NBYTES = 8 * _GROUP_WORDS
_AT_ONCE = 8  # groups whose weighted words exist at the same time: 64 MiB
_MIX_MASK = 2**35 - 1


@final
class DeviceDigests:
    """Values of the pieces of one round, in order; all calls on one stream."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.values = torch.zeros(count, dtype=torch.int64, device=device)
        self._next = 0

    def update(self, data: torch.Tensor) -> None:
        """Take the next piece: contiguous 1-d uint8, whose memory begins at a multiple of 8."""
        nbytes = data.numel()
        state = _wsum(data) * _signed(WSUM64_CHAIN) + nbytes
        self.values[self._next].copy_(state)
        self._next += 1

    def read(self) -> list[int]:
        """The values so far as unsigned ints; waits for the device."""
        return [value % 2**64 for value in self.values[: self._next].tolist()]


def _wsum(data: torch.Tensor) -> torch.Tensor:
    groups, rest = divmod(data.numel(), _GROUP_NBYTES)
    total = groups + (rest > 0)
    zero = torch.zeros((), dtype=torch.int64, device=data.device)
    if not total:
        return zero
    values = []
    if groups:
        words = data[: groups * _GROUP_NBYTES].view(torch.int64)
        for start in range(0, groups, _AT_ONCE):
            some = words[start * _GROUP_WORDS : (start + _AT_ONCE) * _GROUP_WORDS]
            values.append(_full_groups(some))
    if rest:
        values.append(_part(data[groups * _GROUP_NBYTES :]).view(1))
    powers = _powers(total, data.device)
    return (torch.cat(values) * powers).sum()


def _full_groups(words: torch.Tensor) -> torch.Tensor:
    weights = wsum64_weights(words.device)
    sums = (words.view(-1, WSUM64_ROW) * weights.columns).sum(1)
    return (_mixed(sums).view(-1, WSUM64_ROWS) * weights.rows).sum(1)


def _part(data: torch.Tensor) -> torch.Tensor:
    weights = wsum64_weights(data.device)
    n_words, odd = divmod(data.numel(), 8)
    n_rows, rest = divmod(n_words, WSUM64_ROW)
    words = data[: n_words * 8].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    if n_rows:
        sums = (words[: n_rows * WSUM64_ROW].view(n_rows, WSUM64_ROW) * weights.columns).sum(1)
        total = (_mixed(sums) * weights.rows[:n_rows]).sum()
    if rest or odd:
        last = (words[n_rows * WSUM64_ROW :] * weights.columns[:rest]).sum()
        if odd:
            tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
            tail[:odd].copy_(data[n_words * 8 :])
            last = last + tail.view(torch.int64)[0] * weights.columns[rest]
        total = total + _mixed(last) * weights.rows[n_rows]
    return total


def _mixed(sums: torch.Tensor) -> torch.Tensor:
    return sums ^ ((sums >> 29) & _MIX_MASK)


@cache
def _powers(count: int, device: torch.device) -> torch.Tensor:
    """Chaining `count` values is one weighted sum with these."""
    powers = [1]
    for _ in range(count - 1):
        powers.append(powers[-1] * WSUM64_CHAIN % 2**64)
    return torch.tensor([_signed(p) for p in reversed(powers)], device=device)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
