"""The two GPU payloads: the shapes of a dense model, and of the experts of a sparse one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

PAYLOADS = ("dense", "moe")
_LAYERS = {"dense": 36, "moe": 48}
_EXPERTS = 128
_DTYPE = torch.bfloat16


def shapes(payload: str, layers: int | None = None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes: Qwen3-8B's 399 tensors, or 18,432 expert matrices of 1024 by 384."""
    count = _LAYERS[payload] if layers is None else layers
    shape: tuple[int, ...]
    if payload == "moe":
        for layer in range(count):
            for expert in range(_EXPERTS):
                for part, shape in (
                    ("gate", (384, 1024)),
                    ("up", (384, 1024)),
                    ("down", (1024, 384)),
                ):
                    yield f"layers.{layer}.experts.{expert}.{part}", shape
        return
    hidden, inner, key, head, words = 4096, 12288, 1024, 128, 151936
    yield "embed", (words, hidden)
    for layer in range(count):
        for part, shape in (
            ("q", (hidden, hidden)),
            ("k", (key, hidden)),
            ("v", (key, hidden)),
            ("o", (hidden, hidden)),
            ("gate", (inner, hidden)),
            ("up", (inner, hidden)),
            ("down", (hidden, inner)),
            ("norm_in", (hidden,)),
            ("norm_out", (hidden,)),
            ("norm_q", (head,)),
            ("norm_k", (head,)),
        ):
            yield f"layers.{layer}.{part}", shape
    yield "norm", (hidden,)
    yield "head", (words, hidden)


def build(
    payload: str, device: torch.device, *, trains: bool, layers: int | None = None
) -> nn.Module:
    """The module; a trainer's tensors are random, a worker's zero."""
    root = nn.Module()
    modules = {"": root}
    make = torch.randn if trains else torch.zeros
    with torch.no_grad():
        for name, shape in shapes(payload, layers):
            path, _, leaf = name.rpartition(".")
            weight = make(shape, dtype=_DTYPE, device=device)
            _module(modules, path).register_parameter(
                leaf, nn.Parameter(weight, requires_grad=False)
            )
    return root


def nbytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def checksum(model: nn.Module) -> list[int]:
    """Over the bits of every parameter, and their order."""
    total, mixed = 0, 0
    for parameter in model.parameters():
        value = int(parameter.detach().view(torch.int16).sum(dtype=torch.int64))
        total, mixed = total + value, (mixed * 31 + value) % (1 << 61)
    return [total, mixed]


def _module(modules: dict[str, nn.Module], path: str) -> nn.Module:
    if path not in modules:
        above, _, name = path.rpartition(".")
        modules[path] = nn.Module()
        _module(modules, above).add_module(name, modules[path])
    return modules[path]
