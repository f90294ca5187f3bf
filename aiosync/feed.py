"""One pass over a source, checked against what was announced before anything is handed on.

A tensor that differs from its announcement would shift every later byte on the wire, or leave the
peer waiting for bytes that never come. Each pair is compared with the metadata first, so such a
source ends in one sentence that names the tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch

from aiosync import passes
from aiosync.grouping import group_sizes
from aiosync.metadata import (
    dtype_name,
    from_wire,
    metadata_digest,
    to_wire,
    validate_metadata,
)
from aiosync.module_layout import compact, is_dtensor
from aiosync.module_walk import PLAIN_TYPES
from aiosync.sources import WeightSource
from statemachines.errors import Validation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Sequence

    from aiosync.metadata import ParamMeta

_END: Final = object()


class SourceFeed:
    """What rank `rank` of a source yields, as ``(position in the metadata, tensor)``.

    Making one reads ``source.metadata``, which may be a collective: do it on every rank, on the
    thread that runs the source. `metadata`, `owned` (positions this rank yields) and `left_out`
    (names that the source says it does not send) stay valid for all passes.

    Tensors are handed out detached and contiguous; the trainer's graph, gradients and version
    counters are not touched. They are valid until the next batch is asked for.

    Raises:
        Validation: The metadata is impossible (see `validate_metadata`).
        TypeError: ``source.metadata`` is a method, or holds something that is no `ParamMeta`.
    """

    def __init__(self, source: Any, *, rank: int = 0) -> None:
        announced = source.metadata
        if callable(announced):
            raise TypeError(
                f"{type(source).__name__}.metadata is a method: wrap it in LegacySource"
            )
        if not isinstance(announced, Iterable):
            raise TypeError(
                f"{type(source).__name__}.metadata must be a list of ParamMeta, not"
                f" {_kind(announced)}"
            )
        self.source = source
        self.rank = rank
        self.announced = list(announced)
        self.metadata: list[ParamMeta] = validate_metadata(self.announced)
        self.left_out = [str(name) for name in getattr(source, "left_out", None) or ()]
        self.owned: list[int] = self._owned()
        self._grouped = _by_groups(type(source))

    def announces(self, metadata: Iterable[ParamMeta]) -> bool:
        """Whether `metadata` is what this feed was made from; a list may change in place."""
        return list(metadata) == self.announced

    @cached_property
    def digest(self) -> str:
        """Of the whole announcement; must be the same on every trainer rank."""
        return metadata_digest(self.metadata)

    @cached_property
    def wire_digest(self) -> str:
        """Of what the workers are told; owners and meshes are the trainer's own."""
        return metadata_digest(from_wire(*to_wire(self.metadata)))

    @property
    def is_async(self) -> bool:
        """Whether passes run on the event loop (`aiter_batches`)."""
        declared = getattr(self.source, "is_async", None)
        if declared is not None:
            return bool(declared)
        default = getattr(type(self.source), "iter_groups", None) is WeightSource.iter_groups
        method = self.source.iter_full if default else self._iterate
        return inspect.isasyncgenfunction(inspect.unwrap(method))

    @property
    def _iterate(self) -> Any:
        # Looked up for each pass: what a source does may change, its metadata may not.
        return self.source.iter_groups if self._grouped else self.source.iter_full

    def group_cut(self) -> list[int]:
        """Sizes of the layer groups, over all announced names.

        Raises:
            Validation: The source's `groups()` are no partition of its names in metadata order.
        """
        return self._group_cut

    @cached_property
    def _group_cut(self) -> list[int]:
        return group_sizes(self.source, [meta.name for meta in self.metadata])

    def group_counts(self) -> list[int]:
        """How many tensors this rank yields of each layer group."""
        return self._group_counts

    @cached_property
    def _group_counts(self) -> list[int]:
        owned = set(self.owned)
        counts, at = [], 0
        for size in self.group_cut():
            counts.append(sum(index in owned for index in range(at, at + size)))
            at += size
        return counts

    def iter_batches(self) -> Generator[list[tuple[int, torch.Tensor]]]:
        """One pass over a source with plain generators.

        Drive it, and close it, on one thread: the source runs there under ``no_grad``, and its
        ``finally`` runs there exactly once, when the pass ends or is closed.

        Raises:
            Validation: What came differs from the metadata; nothing of that batch was handed out.
            TypeError: The source is async.
            Exception: Whatever the source raised, as it is.
        """
        passed: Any = self._iterate()
        if hasattr(passed, "__aiter__"):
            raise TypeError(f"{self._what} yields asynchronously; set is_async = True on its class")
        passed, checker = iter(passed), _Checker(self)
        with passes.closing(passed):
            while True:
                with torch.no_grad():  # per step: grad mode belongs to the thread, not to us
                    batch = next(passed, _END)
                if batch is _END:
                    break
                yield self._taken(checker, batch)
                del batch  # the source may free it before it makes the next one
        checker.finish()

    async def aiter_batches(self) -> AsyncGenerator[list[tuple[int, torch.Tensor]]]:
        """One pass over a source with async generators, in the calling task.

        Close it (``aclose``) when leaving early. On cancellation the source's ``finally`` still
        runs, for at most a second. Raises what `iter_batches` raises.
        """
        passed: Any = self._iterate()
        if not hasattr(passed, "__aiter__"):
            raise TypeError(f"{self._what} yields synchronously; use iter_batches")
        passed, checker = aiter(passed), _Checker(self)
        async with passes.aclosing(passed, seconds=passes.CLOSE_SECONDS):
            while True:
                try:
                    batch = await anext(passed)
                except StopAsyncIteration:
                    break
                yield self._taken(checker, batch)
                del batch
        checker.finish()

    def __repr__(self) -> str:
        return f"<SourceFeed of {len(self.owned)}/{len(self.metadata)} tensors, rank {self.rank}>"

    @property
    def _what(self) -> str:
        return f"{type(self.source).__name__}.{'iter_groups' if self._grouped else 'iter_full'}"

    def _owned(self) -> list[int]:
        if not hasattr(self.source, "owned_names"):
            metas = enumerate(self.metadata)
            return [i for i, m in metas if m.owners is None or self.rank in m.owners]
        positions = {meta.name: i for i, meta in enumerate(self.metadata)}
        names = self.source.owned_names(self.rank)
        unknown = next((name for name in names if name not in positions), None)
        if unknown is not None:
            raise Validation(f"owned_names({self.rank}) has {unknown!r}, which is not announced")
        owned = [positions[name] for name in names]
        if owned != sorted(set(owned)):
            raise Validation(f"owned_names({self.rank}) repeats names or leaves metadata order")
        return owned

    def _taken(self, checker: _Checker, batch: Any) -> list[tuple[int, torch.Tensor]]:
        pairs = batch if self._grouped else [batch]
        if not isinstance(pairs, list | tuple):
            raise Validation(f"{self._what} yielded {_kind(pairs)}, not a list of pairs")
        return checker.take_all(pairs)


class _Checker:
    """Walks the owned metadata beside one pass."""

    __slots__ = ("_feed", "_metadata", "_next", "_owned", "_positions")

    def __init__(self, feed: SourceFeed) -> None:
        self._feed = feed
        self._metadata: Sequence[ParamMeta] = feed.metadata
        self._owned: Sequence[int] = feed.owned
        self._positions: dict[str, int] = {}  # of names already seen
        self._next = 0

    def take_all(self, pairs: Sequence[Any]) -> list[tuple[int, torch.Tensor]]:
        """A batch: at once where all of it is plain and as announced, else one by one."""
        taken = self._take_plain(pairs) if len(pairs) > 1 else None
        return [self.take(pair) for pair in pairs] if taken is None else taken

    def _take_plain(self, pairs: Sequence[Any]) -> list[tuple[int, torch.Tensor]] | None:
        """None, with nothing taken, where any pair needs a closer look."""
        at, end = self._next, self._next + len(pairs)
        if set(map(type, pairs)) != {tuple} or set(map(len, pairs)) != {2}:
            return None
        indices = self._owned[at:end]
        metas = [self._metadata[index] for index in indices]
        names, tensors = map(list, zip(*pairs, strict=True))
        # Plain strings only: a subclass might compare as it likes.
        if set(map(type, names)) != {str} or not PLAIN_TYPES.issuperset(map(type, tensors)):
            return None
        if names != [meta.name for meta in metas]:
            return None
        if [t.dtype for t in tensors] != [meta.dtype for meta in metas]:
            return None
        shapes = [meta.shape for meta in metas]
        if [t.shape for t in tensors] != shapes or not all(map(_is_ready, tensors)):
            return None
        self._positions.update(zip(names, range(at, end), strict=True))
        self._next = end
        ready = [
            (compact(t) if 1 in shape or 0 in shape else t).detach()
            for t, shape in zip(tensors, shapes, strict=True)
        ]
        return list(zip(indices, ready, strict=True))

    def take(self, pair: Any) -> tuple[int, torch.Tensor]:
        at = self._next
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise Validation(f"position {at}: expected (name, tensor), got {_kind(pair)}")
        name, tensor = pair
        if at >= len(self._owned) or self._metadata[self._owned[at]].name != name:
            raise self._misplaced(name)
        index = self._owned[at]
        meta = self._metadata[index]
        problem = _mismatch(meta, tensor)
        if problem is not None:
            raise Validation(f"{name} (position {at}): {problem}", tensor=name)
        self._positions[name] = at
        self._next = at + 1
        return index, compact(tensor.detach().resolve_conj().resolve_neg())

    def finish(self) -> None:
        if self._next < len(self._owned):
            missing = self._metadata[self._owned[self._next]].name
            raise Validation(
                f"the source ended after {self._next} of {len(self._owned)} tensors: "
                f"{missing} is missing",
                tensor=missing,
            )

    def _misplaced(self, name: str) -> Validation:
        at = self._next
        if name in self._positions:
            text = f"{name} came twice, at positions {self._positions[name]} and {at}"
        elif at >= len(self._owned):
            text = f"{name} (position {at}) is extra: only {len(self._owned)} tensors are announced"
        else:
            expected = self._metadata[self._owned[at]].name
            text = f"position {at}: expected {expected}, got {name}"
            if all(meta.name != name for meta in self._metadata):
                text += ", which is not announced"
            elif all(self._metadata[i].name != name for i in self._owned):
                text += f", which rank {self._feed.rank} does not own"
        return Validation(text, tensor=name)


def _is_ready(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor's memory is what is sent, as it lies there."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def _mismatch(meta: ParamMeta, tensor: Any) -> str | None:
    if not isinstance(tensor, torch.Tensor):
        return f"expected a tensor, got {_kind(tensor)}"
    if tensor.dtype != meta.dtype:
        return f"announced as {dtype_name(meta.dtype)}, yielded as {dtype_name(tensor.dtype)}"
    if tuple(tensor.shape) != meta.shape:
        return f"announced with shape {meta.shape}, yielded with {tuple(tensor.shape)}"
    if tensor.device.type == "meta":
        return "on the meta device: it has no data"
    if is_dtensor(tensor):
        return "a DTensor; yield materialize_full_tensor(tensor)"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}; only strided tensors are sent"
    return None


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _by_groups(cls: type) -> bool:
    """Whether `iter_groups` is at least as derived as `iter_full`.

    A subclass that overrides only `iter_full` (say, to quantise) must not be bypassed by the
    batches of its base.
    """
    order = cls.__mro__

    def depth(member: str) -> int:
        return next((i for i, base in enumerate(order) if member in base.__dict__), len(order))

    return depth("iter_groups") <= depth("iter_full") and depth("iter_groups") < len(order)
