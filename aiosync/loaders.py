"""Models that write themselves: ``load_weights(iterable of (name, tensor))``."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch

from aiosync.errors import Coverage
from statemachines.tables import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


def load_all(
    loader: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    pairs: Sequence[tuple[str, torch.Tensor]],
) -> None:
    """Have a model's own loader take all of these tensors; it may keep them.

    Raises:
        Coverage: It left some; names the first.
        TypeError: It is async.
        Exception: What it raised.
    """
    taken = 0

    def arrived() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal taken
        for pair in pairs:
            taken += 1
            yield pair

    with torch.no_grad():
        refuse_awaitable(loader(arrived()), "load_weights")
    if taken < len(pairs):
        name = pairs[taken][0]
        raise Coverage(
            f"load_weights took {taken} of {len(pairs)} tensors and left {name}",
            tensor=name,
            weights=Weights.TORN,
        )


def refuse_awaitable(result: object, what: str) -> None:
    """Close and refuse what an ``async def`` gave to a caller that cannot await."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(f"{what} must be a plain function: it runs on a lane, not on the loop")
