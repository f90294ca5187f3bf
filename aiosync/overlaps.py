"""Which destinations share memory: found out before anything is written."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from aiosync.errors import Validation
from aiosync.metadata import first_few

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may be one piece of memory (an expanded tensor)."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def lie_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these contiguous tensors of one device share no byte; empty ones share none."""
    starts = list(map(torch.Tensor.data_ptr, tensors))
    sizes = [tensor.nbytes for tensor in tensors]
    order = sorted((at for at, size in enumerate(sizes) if size), key=starts.__getitem__)
    return all(starts[one] + sizes[one] <= starts[next_] for one, next_ in pairwise(order))


class Span(NamedTuple):
    """The bytes between the first and the last of a tensor's elements."""

    device: str
    start: int
    end: int
    name: str
    tensor: torch.Tensor


def span_of(name: str, tensor: torch.Tensor) -> Span:
    """Where the tensor lies."""
    reach = sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    nbytes = (reach + 1) * tensor.element_size() if tensor.numel() else 0
    return Span(str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + nbytes, name, tensor)


def check_disjoint(spans: Iterable[Span]) -> None:
    """Refuse destinations that share bytes."""
    cluster: list[Span] = []
    end = 0
    for span in sorted((s for s in spans if s.end > s.start), key=lambda span: span[:3]):
        if cluster and (span.start >= end or span.device != cluster[0].device):
            _check_cluster(cluster)
            cluster, end = [], 0
        cluster.append(span)
        end = max(end, span.end)
    _check_cluster(cluster)


def _check_cluster(cluster: list[Span]) -> None:
    """Ranges that interleave are fine (columns of one matrix); shared bytes are not."""
    if len(cluster) < 2:
        return
    base, end = cluster[0].start, max(span.end for span in cluster)
    sizes = [span.tensor.element_size() for span in cluster]
    unit = math.gcd(*sizes, *(span.start - base for span in cluster))
    taken = torch.zeros((end - base) // unit, dtype=torch.bool)
    for span, size in zip(cluster, sizes, strict=True):
        strides = [stride * size // unit for stride in span.tensor.stride()]
        view = taken.as_strided(
            (*span.tensor.shape, size // unit), (*strides, 1), (span.start - base) // unit
        )
        if bool(view.any()):
            others = first_few([other.name for other in cluster if other is not span])
            raise Validation(
                f"{span.name} shares part of its memory with {others}", tensor=span.name
            )
        view.fill_(True)
