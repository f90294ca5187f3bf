"""Shapes of one pass over a source, plain or async, and how to turn one into another.

Whoever wraps a pass closes it: a source's ``finally`` (it may leave a collective or free a
gathered layer) runs when the wrapper ends, on the thread that drives the wrapper.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias, TypeVar

import anyio
import torch

T = TypeVar("T")
CLOSE_SECONDS = 1.0

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


@contextmanager
def closing(passed: T) -> Iterator[T]:
    """End a plain pass with the block; what its ``finally`` raises does not hide what came first.

    A pass that is itself being closed lets such an error out: whoever closes it notes it.
    """
    try:
        yield passed
    except BaseException as error:
        try:
            close(passed)
        except Exception as also:
            if isinstance(error, GeneratorExit):
                raise
            _note(error, also)
        raise
    close(passed)


@asynccontextmanager
async def aclosing(passed: T, *, seconds: float) -> AsyncIterator[T]:
    """`closing` for an async pass; its own clean-up may await, for at most `seconds`."""

    async def end() -> None:
        # Shielded: the source's clean-up must not be cut off by what ended the pass.
        with anyio.move_on_after(seconds, shield=True):
            await aclose(passed)

    try:
        yield passed
    except BaseException as error:
        try:
            await end()
        except Exception as also:
            if isinstance(error, GeneratorExit):
                raise
            _note(error, also)
        raise
    await end()


def _note(error: BaseException, also: Exception) -> None:
    error.add_note(f"also, while the source was closed: {type(also).__name__}: {also}")


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
