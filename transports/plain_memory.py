"""Tensors as plain memory: contiguous ones on the CPU are bytes at an address.

A model has tens of thousands of tensors, and a call of torch for each of them takes as long as
moving its bytes (`transports.copy_batches`). An address keeps nothing alive: callers hold the
tensors while it is in use.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from statemachines.errors import Validation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_STRIDED = frozenset({torch.strided})
_LAYOUT: Callable[[torch.Tensor], torch.layout] = attrgetter("layout")
_IS_CPU: Callable[[torch.Tensor], bool] = attrgetter("is_cpu")
_NBYTES: Callable[[torch.Tensor], int] = attrgetter("nbytes")


def addresses_of(
    tensors: Sequence[torch.Tensor], nbytes: Sequence[int], known: list[int] | None = None
) -> list[int] | None:
    """Where the bytes of all these tensors lie; None where one is not plain memory of its size.

    Plain: on the CPU, contiguous, no subclass, no lazy conjugation or negation. An empty tensor
    has some address or other.

    Args:
        tensors: All of them.
        nbytes: Their sizes.
        known: Where they were when somebody found all of that, except that they are on the CPU.

    Raises:
        Validation: The storage of one of them was freed.
    """
    if (
        known is not None
        and all(map(_IS_CPU, tensors))
        and list(map(torch.Tensor.data_ptr, tensors)) == known
    ):
        return known
    if (
        _PLAIN.issuperset(map(type, tensors))
        and _STRIDED.issuperset(map(_LAYOUT, tensors))
        and all(map(_IS_CPU, tensors))
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
        and not any(map(torch.Tensor.is_conj, tensors))
        and list(map(_NBYTES, tensors)) == nbytes
    ):
        found = list(map(torch.Tensor.data_ptr, tensors))
        freed = 0 in found and any(size and not at for at, size in zip(found, nbytes, strict=True))
        if freed:  # since it was looked at; to touch it would end the process
            raise Validation("a tensor's storage was freed during the round: it has no data")
        return found
    return None


def chars_at(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """The bytes there as a buffer, which keeps nothing alive."""
    return _array(nbytes).from_address(address)


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """The bytes there as a 1-d uint8 tensor, which keeps nothing alive."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(chars_at(address, nbytes), dtype=torch.uint8)


@lru_cache(maxsize=1024)
def _array(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * nbytes
