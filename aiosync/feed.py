"""One pass over a source, checked against what was announced before anything is handed on.

A tensor that differs from its announcement would shift every later byte on the wire, or leave the
peer waiting for bytes that never come. Each pair is compared with the metadata first, so such a
source ends in one sentence that names the tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import nullcontext
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import torch

from aiosync import passes
from aiosync.feed_checker import Checker, kind_of
from aiosync.grouping import group_sizes
from aiosync.metadata import (
    from_wire,
    metadata_digest,
    to_wire,
    validate_metadata,
)
from aiosync.short_turns import short_turns
from aiosync.sources import WeightSource
from statemachines.errors import Validation
from transports.stream import Run

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Iterator

    from aiosync.glance import Looking
    from aiosync.metadata import ParamMeta

_END: Final = object()


class SourceFeed:
    """What rank `rank` of a source yields, as ``(position in the metadata, tensor)``.

    Making one reads ``source.metadata``, which may be a collective: do it on every rank, on the
    thread that runs the source. `metadata`, `owned` (positions this rank yields) and `left_out`
    (names that the source says it does not send) stay valid for all passes.

    Tensors are handed out detached, and contiguous unless they come from an async source; the
    trainer's graph, gradients and version counters are not touched. They are valid until the next
    batch is asked for.

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
                f" {kind_of(announced)}"
            )
        self.source = source
        self.rank = rank
        self.announced = list(announced)
        self.metadata: list[ParamMeta] = validate_metadata(self.announced)
        self.left_out = [str(name) for name in getattr(source, "left_out", None) or ()]
        self.owned: list[int] = self._owned()
        self._grouped = _by_groups(type(source))
        self.plain: list[torch.Tensor] | None = None
        """What the next pass yields, while `look` knows it."""
        self.addresses: list[int] | None = None
        """Where those are, if `look` knows that: the same list while they stay there."""
        self.looking: Looking | None = None
        """Instead of `plain`: the pass finds them as it goes, or that the source has changed."""

    def announces(self, metadata: Iterable[ParamMeta]) -> bool:
        """Whether `metadata` is what this feed was made from; a list may change in place."""
        # A list as it is: a copy counts each entry, and those are in no cache by now.
        return (metadata if isinstance(metadata, list) else list(metadata)) == self.announced

    @cached_property
    def digest(self) -> str:
        """Of the whole announcement; must be the same on every trainer rank."""
        return metadata_digest(self.metadata)

    @cached_property
    def wire_digest(self) -> str:
        """Of what the workers are told; owners and meshes are the trainer's own."""
        if not self.has_owners:
            return self.digest  # they are told all of it
        return metadata_digest(from_wire(*to_wire(self.metadata)))

    @cached_property
    def has_owners(self) -> bool:
        """Whether some tensors are not on every trainer rank."""
        return any(meta.owners is not None for meta in self.metadata)

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
        if len(self.owned) == len(self.metadata):
            return self.group_cut()
        owned = set(self.owned)
        counts, at = [], 0
        for size in self.group_cut():
            counts.append(sum(index in owned for index in range(at, at + size)))
            at += size
        return counts

    def look(self) -> None:
        """Find out, on the thread that runs the source, whether a pass is but a walk.

        Then `plain` has its tensors: parameters as they are, announced as they are, perhaps
        requiring gradients. Otherwise it is None.
        """
        look: Callable[[], list[torch.Tensor] | None] | None
        look = getattr(self.source, "plain_tensors", None)
        self.forget()
        self.looking = getattr(self.source, "looking", None)
        if self.looking is not None:
            self.addresses = self.source.plain_addresses
            self.source.looking = None  # another engine of the same source has its own
        elif look is not None and self.announces(self.source.metadata):
            self.plain = look()
            if self.plain is not None:
                self.addresses = getattr(self.source, "plain_addresses", None)

    def look_to_the_end(self) -> None:
        """Have `plain` instead of `looking`: somebody needs all tensors before the pass.

        Raises:
            Validation: The source is not as it was; see `settling.may_look_late`.
        """
        looking, self.looking = self.looking, None
        if looking is not None:
            looking = looking.renewed()
            if not looking.ends_well():
                raise moved()
            self.plain = looking.tensors(0, len(self.metadata))

    def forget(self) -> None:
        """Let go of what `look` found, where no pass has taken it."""
        self.plain = self.addresses = self.looking = None

    def iter_plain(self, *, grows: bool = True) -> Generator[Run]:
        """The pass that `look` found: as many layer groups as went before, at least one.

        Or as far into a group as a look has come.

        Args:
            grows: False: one layer group at a time.

        Raises:
            Validation: The source is not as it was; see `settling.may_look_late`.
        """
        tensors, addresses, looking, at = self.plain or [], self.addresses, self.looking, 0
        self.forget()
        if looking is not None:
            looking = looking.renewed()  # readers may have been waited for
            grows = False
        # All along, not step by step: a thread that begins to wait between two steps, as each write
        # to a socket has it do, waits for as long as the setting says at that moment.
        with nullcontext() if looking is None else short_turns:
            for end in self._graded_ends() if grows else accumulate(self.group_cut()):
                while at < end:
                    upto, found = end, tensors[at:end]
                    if looking is not None:
                        upto = self._reached(looking, at)
                        found = looking.tensors(at, upto)
                    yield Run(at, found, None if addresses is None else addresses[at:upto])
                    at = upto

    def _graded_ends(self) -> Iterator[int]:
        """Where runs of whole groups end, that grow: the first one is soon on its way."""
        ends = list(accumulate(self.group_cut()))
        at = 1
        while at < len(ends):
            yield ends[at - 1]
            at *= 2
        yield from ends[-1:]

    def _reached(self, looking: Looking, at: int) -> int:
        """Up to where tensors are known, beyond `at`; the last ones with all of the module."""
        is_there = looking.reaches(at + 1)
        if looking.known == len(self.metadata):
            is_there = looking.ends_well()
        if not is_there:
            raise moved()
        return looking.known

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
        if not hasattr(passed, "__iter__"):
            raise TypeError(f"{self._what} returned {kind_of(passed)}, nothing to iterate over")
        passed, checker = iter(passed), Checker(self)
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

        It runs on the loop and copies nothing: `feed_checker.settled` makes tensors contiguous
        elsewhere. Close it (``aclose``) when leaving early. On cancellation the source's
        ``finally`` still runs, for at most a second. Raises what `iter_batches` raises.
        """
        passed: Any = self._iterate()
        if not hasattr(passed, "__aiter__"):
            raise TypeError(f"{self._what} yields synchronously; use iter_batches")
        passed, checker = aiter(passed), Checker(self, settles=False)
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
        source: Any = self.source
        method = getattr(source, "owned_names", None)
        is_own = getattr(method, "__self__", None) is source  # not that of something it wraps
        if method is None or (is_own and method.__func__ is WeightSource.owned_names):
            metas = enumerate(self.metadata)
            return [i for i, m in metas if m.owners is None or self.rank in m.owners]
        positions = {meta.name: i for i, meta in enumerate(self.metadata)}
        names = method(self.rank)
        unknown = next((name for name in names if name not in positions), None)
        if unknown is not None:
            raise Validation(f"owned_names({self.rank}) has {unknown!r}, which is not announced")
        owned = [positions[name] for name in names]
        if owned != sorted(set(owned)):
            raise Validation(f"owned_names({self.rank}) repeats names or leaves metadata order")
        return owned

    def _taken(self, checker: Checker, batch: Any) -> list[tuple[int, torch.Tensor]]:
        pairs = batch if self._grouped else [batch]
        if not isinstance(pairs, list | tuple):
            raise Validation(f"{self._what} yielded {kind_of(pairs)}, not a list of pairs")
        return checker.take_all(pairs)


def moved() -> Validation:
    """The round begins again because of it (`settling.may_look_late`)."""
    return Validation(
        "the module is not as it was in the round before", phase="update", detail={"moved": True}
    )


def _by_groups(cls: type) -> bool:
    """Whether `iter_groups` is at least as derived as `iter_full`.

    A subclass that overrides only `iter_full` (say, to quantise) must not be bypassed by the
    batches of its base.
    """
    order = cls.__mro__

    def depth(member: str) -> int:
        return next((i for i, base in enumerate(order) if member in base.__dict__), len(order))

    return depth("iter_groups") <= depth("iter_full") and depth("iter_groups") < len(order)
