"""Where tensors lie: told apart, and found unchanged, before anything is written to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from aiosync.metadata import shared
from aiosync.module_layout import is_dtensor
from aiosync.module_walk import DEVICE, DTYPE, SHAPE, are_strided, same

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def region_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for names that are the very same memory, seen the same way."""
    if is_lazy(tensor):
        return (id(tensor),)
    # A plain tuple: the garbage collector leaves those alone that hold numbers only.
    kind = (tensor.device, tuple(tensor.shape), tensor.dtype)
    if tensor.device.type == "meta" or tensor.layout is not torch.strided or is_dtensor(tensor):
        return (id(tensor), *kind)
    if not tensor.numel():
        return (id(tensor), *kind)
    return (tensor.data_ptr(), tensor.stride(), *kind)


class Places:
    """Holds only while every name is the same memory, seen the same way: see `region_of`.

    Lists side by side: with as many names as this is made for, a tuple for each takes longer to
    make and to compare, and the garbage collector walks all of them.
    """

    __slots__ = ("_ids", "_names", "_regions", "_views")

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._names = list(tensors)
        self._ids = list(map(id, tensors.values()))
        plain = are_strided(list(tensors.values()))
        self._regions = None if plain else [region_of(t) for t in tensors.values()]
        self._views: list[list[Any]] = []
        if plain:
            held = tensors.values()
            self._views = [shared(map(read, held)) for read in _STEPS]
            self._views += [list(map(read, held)) for read in _PLACE]

    def hold(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether `tensors` are those, where they were."""
        held = list(tensors.values())
        if self._names != list(tensors):
            return False
        if self._regions is not None or not are_strided(held):
            return self._regions == [region_of(tensor) for tensor in held]
        return self._ids == list(map(id, held)) and all(
            same(view, map(read, held))
            for view, read in zip(self._views, _STEPS + _PLACE, strict=True)
        )


_STEPS: tuple[Callable[[torch.Tensor], Any], ...] = (SHAPE, torch.Tensor.stride)
_PLACE: tuple[Callable[[torch.Tensor], Any], ...] = (torch.Tensor.data_ptr, DTYPE, DEVICE)
