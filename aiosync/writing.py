"""Copies into a model's tensors: batched, and seen by autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


def write(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each source into its destination, same memory, and wait until it is there.

    Batched by device, dtype and kind, which is what the batched copy is fast for.
    """
    batches: dict[tuple[Any, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for destination, source in pairs:
        key = (destination.is_inference(), destination.device, source.device, destination.dtype)
        into, out_of = batches.setdefault(key, ([], []))
        into.append(destination)
        out_of.append(source)
    for (inference, *_), (into, out_of) in batches.items():
        # Tensors made in inference mode may be written in inference mode only.
        with torch.inference_mode() if inference else torch.no_grad():
            torch._foreach_copy_(into, out_of)
    for device in {key[1] for key in batches if key[1].type == "cuda"}:
        # Not the device: a transfer that runs beside this may wait for its peer.
        torch.cuda.current_stream(device).synchronize()


def note_written(tensors: list[torch.Tensor]) -> None:
    """Have autograd know that these changed: what writes to addresses does not tell it."""
    torch.autograd.graph.increment_version(tensors)
