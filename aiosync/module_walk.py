"""What a module holds at this moment: one quick walk, done on both sides in every round.

`Module.named_parameters` is a generator through all levels of the tree for each tensor. Models
with tens of thousands of tensors are walked here with one plain call per submodule instead.
"""

from __future__ import annotations

import functools
from operator import attrgetter, eq, ge
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn

from aiosync.metadata import shared
from statemachines.errors import Validation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

PLAIN_TYPES = frozenset({torch.Tensor, nn.Parameter})
"""Tensors of exactly these types are no DTensors, not lazy and no other subclass."""

# Mapped over thousands of tensors without a step of Python for each.
DTYPE: Callable[[torch.Tensor], torch.dtype] = attrgetter("dtype")
SHAPE: Callable[[torch.Tensor], torch.Size] = attrgetter("shape")
DEVICE: Callable[[torch.Tensor], torch.device] = attrgetter("device")
LAYOUT: Callable[[torch.Tensor], torch.layout] = attrgetter("layout")
IS_META: Callable[[torch.Tensor], bool] = attrgetter("is_meta")
_STORAGE = torch.Tensor.untyped_storage
_HELD = torch.UntypedStorage.nbytes
_NBYTES: Callable[[torch.Tensor], int] = attrgetter("nbytes")

_Named = dict[str, torch.Tensor]
Members: TypeAlias = tuple[_Named, _Named]
"""Parameters, and buffers, by name."""
_WALKED = ("named_parameters", "named_buffers", "named_modules", "_named_members")


def named_members(module: nn.Module) -> Members:
    """Parameters, and buffers, under every name they have, as they are now.

    Raises:
        Validation: A module contains itself, so that its names have no end.
    """
    try:
        return _named_members(module)
    except RecursionError:
        raise Validation(f"{type(module).__name__} contains itself: it has no end") from None


def _named_members(module: nn.Module) -> Members:
    # Some wrappers rename what they hold; only they know how.
    return plain_members(module) or (
        dict(module.named_parameters(remove_duplicate=False)),
        dict(module.named_buffers(remove_duplicate=False)),
    )


def plain_members(module: nn.Module) -> Members | None:
    """`named_members` of a tree without a class that walks in its own way; else None.

    Raises:
        RecursionError: A module contains itself.
    """
    parameters: _Named = {}
    buffers: _Named = {}
    own = module.__dict__.keys() & set(_WALKED)
    if own or not walks_plainly(type(module)):  # type: ignore[arg-type] # a class is hashable
        return None
    _add(module, "", parameters, buffers)
    return (parameters, buffers) if _collect(module, "", parameters, buffers) else None


def _collect(module: nn.Module, prefix: str, parameters: _Named, buffers: _Named) -> bool:
    """Add what is below `module`; False for a tree with a class that walks in its own way."""
    known: type | None = None
    for name, child in module._modules.items():  # noqa: SLF001 -- torch has no quick public form
        if child is None:
            continue
        kind = type(child)
        if kind is not known:  # neighbours are mostly of one class
            if not walks_plainly(kind):  # type: ignore[arg-type] # a class is hashable
                return False
            known = kind
        path = f"{prefix}{name}."
        # As `_add`: with tens of thousands of modules a call for each shows.
        for key, parameter in child._parameters.items():  # noqa: SLF001
            if parameter is not None:
                parameters[path + key] = parameter
        if child._buffers:  # noqa: SLF001
            _add_buffers(child, path, buffers)
        if child._modules and not _collect(child, path, parameters, buffers):  # noqa: SLF001
            return False
    return True


def _add(module: nn.Module, prefix: str, parameters: _Named, buffers: _Named) -> None:
    for name, parameter in module._parameters.items():  # noqa: SLF001
        if parameter is not None:
            parameters[prefix + name] = parameter
    _add_buffers(module, prefix, buffers)


def _add_buffers(module: nn.Module, prefix: str, buffers: _Named) -> None:
    for name, buffer in module._buffers.items():  # noqa: SLF001
        if buffer is not None:
            buffers[prefix + name] = buffer


@functools.lru_cache(maxsize=1024)
def walks_plainly(cls: type) -> bool:
    return all(getattr(cls, name, None) is getattr(nn.Module, name) for name in _WALKED)


def are_strided(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are of plain types and have memory with strides."""
    return (
        PLAIN_TYPES.issuperset(map(type, tensors))
        and {torch.strided}.issuperset(map(LAYOUT, tensors))
        and not any(map(IS_META, tensors))
    )


def have_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether none of these plain tensors `is_freed`."""
    held = map(_HELD, map(_STORAGE, tensors))
    return all(map(ge, held, map(_NBYTES, tensors))) or not any(map(is_freed, tensors))


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether the memory was taken from under the tensor: to read or write it ends the process.

    Sharded and offloaded modules resize the storage to nothing while a layer is not in use.
    """
    try:
        held = tensor.untyped_storage().nbytes()
    except RuntimeError:  # a subclass that keeps its values elsewhere
        return False
    if not tensor.numel():
        return False
    steps = ((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return held < (tensor.storage_offset() + sum(steps) + 1) * tensor.itemsize


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are strided and contiguous, and no lazy view: their bytes are their values."""
    return (
        are_strided(tensors)
        and have_memory(tensors)
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
        and not any(map(torch.Tensor.is_conj, tensors))
    )


class Outline(NamedTuple):
    """Names, ties, dtypes, shapes and kinds of device: while it is the same, a layout holds.

    Lists side by side: an object for each tensor would be one more for the garbage collector.
    """

    names: list[str]
    firsts: list[str]
    """For each name the first one of the same tensor; empty where no tensor has two names."""
    dtypes: list[torch.dtype]
    shapes: list[tuple[int, ...]]
    devices: list[str]

    def entries(self) -> set[tuple[Any, ...]]:
        """One tuple per name, the name first."""
        firsts = self.firsts or self.names
        return set(zip(self.names, firsts, *self[2:], strict=True))

    def holds(self, live: Mapping[str, torch.Tensor]) -> bool:
        """Whether `live` looks like this; makes next to nothing for the garbage collector.

        Names may come in another order: they say which tensor is which.
        """
        if self.names != list(live):
            if live.keys() != set(self.names):
                return False
            live = {name: live[name] for name in self.names}
        tensors = list(live.values())
        return (
            self.firsts == _firsts(self.names, tensors)
            and same(self.dtypes, map(DTYPE, tensors))
            and same(self.shapes, map(SHAPE, tensors))
            and self.devices == _device_types(tensors)
        )


def outline(live: Mapping[str, torch.Tensor]) -> Outline:
    """What tensors of these names look like."""
    names, tensors = list(live), list(live.values())
    return Outline(
        names,
        _firsts(names, tensors),
        list(map(DTYPE, tensors)),
        shared(map(SHAPE, tensors)),
        _device_types(tensors),
    )


def same(known: Sequence[object], now: Iterable[object]) -> bool:
    """Whether equal values come again, as far as both go; none of them is kept."""
    return all(map(eq, known, now))


def _firsts(names: list[str], tensors: list[torch.Tensor]) -> list[str]:
    ids = list(map(id, tensors))
    if len(set(ids)) == len(ids):
        return []
    by_id: dict[int, str] = {}
    return [by_id.setdefault(key, name) for key, name in zip(ids, names, strict=True)]


def _device_types(tensors: list[torch.Tensor]) -> list[str]:
    devices = list(map(DEVICE, tensors))
    types = {device: device.type for device in set(devices)}
    return [types[device] for device in devices]
