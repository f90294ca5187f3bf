"""Many copies between addresses of one device, again and again, in few launches."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, final

import torch

from transports.device_memory import copy_async
from transports.pointer_copy import PointerCopy, pointer_copies

if TYPE_CHECKING:
    from collections.abc import Sequence


@final
class AddressCopy:
    """Copies of these sizes; those of 0 bytes are left out.

    Args:
        nbytes: Of each copy.
        device: Whose current stream takes them; on the CPU they are made at once.
    """

    def __init__(self, nbytes: Sequence[int], device: torch.device) -> None:
        self._device = device
        self._nbytes = list(nbytes)
        self._at = None if all(nbytes) else [at for at, size in enumerate(nbytes) if size]
        self._table: PointerCopy | None = None
        sizes = self._kept(self._nbytes)
        if sizes and pointer_copies(device):
            self._table = PointerCopy(sizes, device)

    def __call__(self, to: list[int], out_of: list[int]) -> None:
        """Queue them all; the memory on both sides must stay until they are done."""
        to, out_of = self._kept(to), self._kept(out_of)
        if self._table is not None:
            self._table(to, out_of)
            return
        sizes = self._kept(self._nbytes)
        if self._device.type != "cuda":
            for target, source, size in zip(to, out_of, sizes, strict=True):
                ctypes.memmove(target, source, size)
            return
        stream = int(torch.cuda.current_stream(self._device).cuda_stream)
        for target, source, size in zip(to, out_of, sizes, strict=True):
            copy_async(self._device, target, source, size, stream)

    def _kept(self, column: list[int]) -> list[int]:
        return column if self._at is None else [column[at] for at in self._at]
