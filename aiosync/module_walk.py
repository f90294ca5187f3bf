"""What a module holds at this moment: one quick walk, done on both sides in every round.

`Module.named_parameters` is a generator through all levels of the tree for each tensor. Models
with tens of thousands of tensors are walked here with one plain call per submodule instead.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping

PLAIN_TYPES = frozenset({torch.Tensor, nn.Parameter})
"""Tensors of exactly these types are no DTensors, not lazy and no other subclass."""

_Named = dict[str, torch.Tensor]
_WALKED = ("named_parameters", "named_buffers", "named_modules", "_named_members")


def named_members(module: nn.Module) -> tuple[_Named, _Named]:
    """Parameters, and buffers, under every name they have, as they are now."""
    parameters: _Named = {}
    buffers: _Named = {}
    own = module.__dict__.keys() & set(_WALKED)
    if not own and _collect(module, "", parameters, buffers):
        return parameters, buffers
    # Some wrappers rename what they hold; only they know how.
    return (
        dict(module.named_parameters(remove_duplicate=False)),
        dict(module.named_buffers(remove_duplicate=False)),
    )


def _collect(module: nn.Module, prefix: str, parameters: _Named, buffers: _Named) -> bool:
    """False for a tree with a class that walks itself in its own way."""
    if not _walks_plainly(type(module)):  # type: ignore[arg-type] # a class is hashable
        return False
    # torch has no quick public form of these three.
    held, kept, below = module._parameters, module._buffers, module._modules  # noqa: SLF001
    for name, parameter in held.items():
        if parameter is not None:
            parameters[prefix + name] = parameter
    if kept:
        for name, buffer in kept.items():
            if buffer is not None:
                buffers[prefix + name] = buffer
    if below:
        for name, child in below.items():
            if child is not None and not _collect(child, f"{prefix}{name}.", parameters, buffers):
                return False
    return True


@functools.lru_cache(maxsize=1024)
def _walks_plainly(cls: type) -> bool:
    return all(getattr(cls, name, None) is getattr(nn.Module, name) for name in _WALKED)


class Outline(NamedTuple):
    """Names, ties, dtypes, shapes and kinds of device: while it is the same, a layout holds.

    Lists side by side: an object for each tensor would be one more for the garbage collector.
    """

    names: list[str]
    firsts: list[str]
    """For each name the first one of the same tensor; empty where no tensor has two names."""
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    devices: list[str]

    def entries(self) -> set[tuple[Any, ...]]:
        """One tuple per name, the name first."""
        firsts = self.firsts or self.names
        return set(zip(self.names, firsts, *self[2:], strict=True))


def outline(live: Mapping[str, torch.Tensor]) -> Outline:
    """What tensors of these names look like."""
    names, tensors = list(live), list(live.values())
    ids = list(map(id, tensors))
    firsts: list[str] = []
    if len(set(ids)) < len(ids):
        by_id: dict[int, str] = {}
        firsts = [by_id.setdefault(key, name) for key, name in zip(ids, names, strict=True)]
    devices = [tensor.device for tensor in tensors]
    types = {device: device.type for device in set(devices)}
    return Outline(
        names,
        firsts,
        [tensor.dtype for tensor in tensors],
        [tensor.shape for tensor in tensors],
        [types[device] for device in devices],
    )
