"""A source over iterators that can be walked once: a new one for each round."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from aiosync import passes
from aiosync.metadata import dtype_name, from_wire
from aiosync.sources import WeightSource
from statemachines.errors import Validation

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence

    import torch

    from aiosync.metadata import ParamMeta
    from aiosync.passes import Pair, Pairs


class IteratorSource(WeightSource):
    """Yields what an iterator yields; `set` gives it the iterator of the next round.

        source = IteratorSource(names, dtypes, shapes)
        source.set((name, tensor) for name, tensor in exporter())
        await engine.send_weights(version=1)

    A plain iterator runs on the source's lane, an async one on the event loop. It must yield
    every announced name, in order, as announced. A round that has looked at the source closes its
    iterator, however the round ends; one that failed before (say, `Busy`) leaves it set.

    Args:
        names: Names in the order in which the iterators yield them.
        dtypes: ``torch.dtype`` objects, or their names.
        shapes: Full shapes.

    Raises:
        Validation: The lists differ in length or describe impossible tensors. In a round: no new
            iterator was set since the last one.
    """

    def __init__(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype | str],
        shapes: Sequence[Sequence[int]],
    ) -> None:
        self._announced = from_wire(
            list(names),
            [dtype if isinstance(dtype, str) else dtype_name(dtype) for dtype in dtypes],
            [list(shape) for shape in shapes],
        )
        self._next: Any = None
        self._claimed: Any = None
        self._used = False

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return self._announced

    def set(self, iterator: Iterable[Pair] | AsyncIterable[Pair]) -> None:
        """Have the next round yield from `iterator`; one that was set before is closed.

        Raises:
            TypeError: It cannot be iterated.
        """
        if not hasattr(iterator, "__aiter__") and not hasattr(iterator, "__iter__"):
            raise TypeError(f"{type(iterator).__name__} is no iterable of (name, tensor)")
        passes.close(self._next)
        self._next = iterator

    @property
    def is_async(self) -> bool:
        """Whether the iterator that comes next is async."""
        return hasattr(self._coming, "__aiter__")

    def iter_full(self) -> Pairs:
        return self._walk_async() if self.is_async else self._walk()

    def claim(self) -> None:
        """A round begins: the iterator that is set belongs to it.

        Raises:
            Validation: There is none.
        """
        if self._next is None:
            raise self._exhausted()
        self._claimed, self._next = self._next, None

    def unclaim(self) -> Any:
        """The round is over: its iterator, if no pass has begun it; else None."""
        left, self._claimed = self._claimed, None
        return left

    @property
    def _coming(self) -> Any:
        return self._next if self._claimed is None else self._claimed

    def _take(self) -> Any:
        coming = self._coming
        if coming is None:
            raise self._exhausted()
        if self._claimed is None:
            self._next = None
        self._claimed = None
        self._used = True
        return coming

    def _exhausted(self) -> Validation:
        state = "its iterator has been used up" if self._used else "it has no iterator yet"
        return Validation(
            f"{type(self).__name__}: {state}; call source.set(iterator) before each round",
            phase="admit",
        )

    # Taken inside: a generator that is closed before its first step runs no `finally`.
    def _walk(self) -> Iterator[Pair]:
        iterator = iter(self._take())
        try:
            yield from iterator
        finally:
            passes.close(iterator)

    async def _walk_async(self) -> AsyncIterator[Pair]:
        iterator = aiter(self._take())
        try:
            async for pair in iterator:
                yield pair
        finally:
            await passes.aclose(iterator)
