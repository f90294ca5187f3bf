"""A tensor-parallel model by hand: each rank keeps its part of the full tensors it is given."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

import torch
from torch import nn

WIDTH = 64


def full(seed: int) -> nn.Module:
    """What the trainer holds: one Linear that is split by rows, one by columns, and a norm."""
    torch.manual_seed(seed)
    model = nn.ModuleDict(
        {"up": nn.Linear(WIDTH, 2 * WIDTH), "down": nn.Linear(2 * WIDTH, WIDTH, bias=False)}
    )
    model["norm"] = nn.LayerNorm(WIDTH)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model


SPLIT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


def part(name: str, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Rank's part of a full tensor; replicated where it is not split."""
    if name not in SPLIT:
        return tensor
    dim = SPLIT[name]
    width = tensor.shape[dim] // size
    return tensor.narrow(dim, rank * width, width)


class Slice(nn.Module):
    """One rank's parameters; loads full tensors by narrowing them.

    `dies_at`: kills its own process while it loads that tensor, in the middle of the swap.
    """

    def __init__(self, rank: int, size: int, seed: int, dies_at: str | None = None) -> None:
        super().__init__()
        self.rank, self.size, self.dies_at = rank, size, dies_at
        for name, tensor in full(seed).named_parameters():
            here = part(name, tensor.detach(), rank, size).clone()
            self.register_parameter(name.replace(".", "_"), nn.Parameter(here))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            target = self.get_parameter(name.replace(".", "_"))
            target.copy_(part(name, tensor, self.rank, self.size))


def make(kind: str, seed: int) -> nn.Module:
    """``"full"``, ``"slice-RANK-SIZE"``, or ``"slice-RANK-SIZE-NAME"``: dies at that tensor."""
    if kind == "full":
        return full(seed)
    _, rank, size, *dies_at = kind.split("-")
    return Slice(int(rank), int(size), seed, *dies_at)
