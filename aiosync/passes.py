"""Shapes of one pass over a source, plain or async, and how to turn one into another.

Whoever wraps a pass closes it: a source's ``finally`` (it may leave a collective or free a
gathered layer) runs when the wrapper ends, on the thread that drives the wrapper.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeAlias

import torch

Pair: TypeAlias = tuple[str, torch.Tensor]
Pairs: TypeAlias = Iterator[Pair] | AsyncIterator[Pair]
Batches: TypeAlias = Iterator[list[Pair]] | AsyncIterator[list[Pair]]


def each_alone(pairs: Pairs) -> Batches:
    """Every pair as a batch of its own."""
    return _alone_async(pairs) if hasattr(pairs, "__aiter__") else _alone(pairs)


def flattened(batches: Batches) -> Pairs:
    """The pairs of all batches, one by one."""
    return _flat_async(batches) if hasattr(batches, "__aiter__") else _flat(batches)


def close(passed: Any) -> None:
    """End a plain pass now, if it can be ended (a list iterator cannot)."""
    if hasattr(passed, "close"):
        passed.close()


async def aclose(passed: Any) -> None:
    """End an async pass now, if it can be ended."""
    if hasattr(passed, "aclose"):
        await passed.aclose()


def _alone(pairs: Any) -> Iterator[list[Pair]]:
    try:
        for pair in pairs:
            yield [pair]
    finally:
        close(pairs)


async def _alone_async(pairs: Any) -> AsyncIterator[list[Pair]]:
    try:
        async for pair in pairs:
            yield [pair]
    finally:
        await aclose(pairs)


def _flat(batches: Any) -> Iterator[Pair]:
    try:
        for batch in batches:
            yield from batch
    finally:
        close(batches)


async def _flat_async(batches: Any) -> AsyncIterator[Pair]:
    try:
        async for batch in batches:
            for pair in batch:
                yield pair
    finally:
        await aclose(batches)
