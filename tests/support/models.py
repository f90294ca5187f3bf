"""Small models that trainer and replica build alike, in processes of their own."""

from __future__ import annotations

import hashlib
from typing import Any

import everything
import nccl_wire
import sliced
import torch
from torch import nn


def make(kind: str, seed: int, device: str = "cpu") -> Any:
    """A model with weights of `seed`; kinds differ in what their tensors look like."""
    model = _make(kind, seed)
    if isinstance(model, dict):
        return {name: tensor.to(device) for name, tensor in model.items()}
    return model.to(device)


def _make(kind: str, seed: int) -> Any:
    if kind == "everything":
        return everything.empty()
    if kind == "wire":
        return {
            name: torch.zeros(shape, dtype=getattr(torch, dtype))
            for name, dtype, shape in nccl_wire.DENSE
        }
    if kind == "resident":
        tensors = dict(everything.Everything().tensors)
        ours = {f"p{at}": t for at, t in enumerate(tensors.values()) if not t.is_conj()}
        ours |= {"tied": ours["p3"].clone(), "on_cpu": torch.zeros(40)}
        ours |= {"turned_on_cpu": torch.zeros(5, 8)}
        return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in ours.items()}
    if kind == "full" or kind.startswith("slice-"):
        return sliced.make(kind, seed)
    torch.manual_seed(seed)
    if kind == "small":
        model: nn.Module = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 7))
    elif kind == "odd":
        model = Odd()
    elif kind == "tied":
        model = Tied()
    elif kind == "ranks":
        model = Ranks()
    elif kind == "uneven":
        model = Ranks(width=5)
    elif kind == "many":
        model = nn.Sequential(*[nn.Linear(3, 2) for _ in range(150)])
    elif kind == "large":
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)])
    else:
        raise ValueError(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dtype.is_floating_point:
                parameter.copy_(torch.randn(parameter.shape).to(parameter.dtype))
    return model


class Odd(nn.Module):
    """0-d, empty, odd sizes, several dtypes, a transposed parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 7))
        self.halves = nn.Parameter(torch.zeros(97, 3, dtype=torch.bfloat16))
        self.flag = nn.Parameter(torch.zeros(5, dtype=torch.bool), requires_grad=False)
        self.count = nn.Parameter(torch.zeros(3, dtype=torch.int16), requires_grad=False)
        self.turned = nn.Parameter(torch.zeros(8, 5).t())
        self.big = nn.Parameter(torch.zeros(300, 301, dtype=torch.float64))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight


class Ranks(nn.Module):
    """What the ranks of `rank.py` train together."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.layers = nn.ModuleList()
        for _ in range(4):
            block = nn.Module()
            block.up = nn.Linear(width, 2 * width)
            block.down = nn.Linear(2 * width, width)
            self.layers.append(block)
        self.norm = nn.LayerNorm(width)


def fingerprint(model: Any) -> dict[str, str]:
    """SHA-256 over the bytes of every parameter, by name; the model may be a dict."""
    result = {}
    named = model if isinstance(model, dict) else None
    for name, parameter in (named or dict(model.named_parameters(remove_duplicate=False))).items():
        data = parameter.detach().resolve_conj().cpu().contiguous().reshape(-1).view(torch.uint8)
        result[name] = hashlib.sha256(data.numpy().tobytes()).hexdigest()
    return result
