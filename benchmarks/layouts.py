"""The models that trainer and worker build alike: how many tensors, and what they are called."""

from __future__ import annotations

import random
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

FULL_NBYTES = 2 << 30
COUNTS = {"one": 1, "dense": 400, "many": 18_000, "scattered": 18_000, "metadata": 37_000}
_PARTS = ("q", "k", "v", "o", "gate", "up", "down", "norm", "router", "bias")
_EXPERT = ("gate_proj", "up_proj", "down_proj")
_ALIGN = 64
_WIDTH = 32


def count(layout: str, nbytes: int) -> int:
    """Tensors in a run with `nbytes` of payload: fewer of the same size where it is less."""
    return min(COUNTS[layout], max(1, COUNTS[layout] * nbytes // FULL_NBYTES))


def names(layout: str) -> Iterator[str]:
    """Names without end, layer by layer."""
    layer = 0
    parts = list(_PARTS)
    if layout not in ("one", "dense"):
        experts = 256 if layout == "metadata" else 100
        parts = [f"mlp.experts.{expert}.{part}" for expert in range(experts) for part in _EXPERT]
    while True:
        yield from (f"model.layers.{layer}.{part}.weight" for part in parts)
        layer += 1


def build(
    layout: str, nbytes: int, tensors: int, *, trains: bool
) -> tuple[torch.Tensor, nn.Module]:
    """All bytes of the model as one tensor, and the module whose parameters are views of them.

    One allocation, so that a raw copy of everything and the copies of its tensors go over the same
    memory. Tensors are bfloat16, of equal sizes; `nbytes` is rounded down to what they take. They
    lie in the order of their names, neighbours side by side; ``scattered`` ones in no order at all.
    """
    each = max(nbytes // tensors // _ALIGN, 1) * _ALIGN
    flat = torch.zeros(each * tensors, dtype=torch.uint8)
    words = flat.view(torch.int64)
    if trains:
        torch.arange(1, len(words) + 1, out=words)
    else:
        words.zero_()  # `zeros` alone leaves pages to their first use
    modules = {"": nn.Module()}
    places = list(torch.split(flat, each))
    if layout == "scattered":
        random.Random(0).shuffle(places)  # alike on both sides, so that checksums are
    for name, place in zip(islice(names(layout), tensors), places, strict=True):
        weight = place.view(torch.bfloat16).view(-1, _WIDTH)
        path, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(weight, requires_grad=trains)
        _module(modules, path).register_parameter(leaf, parameter)
    return flat, modules[""]


def _module(modules: dict[str, nn.Module], path: str) -> nn.Module:
    if path not in modules:
        above, _, name = path.rpartition(".")
        modules[path] = nn.Module()
        _module(modules, above).add_module(name, modules[path])
    return modules[path]
