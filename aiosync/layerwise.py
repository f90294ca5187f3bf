"""Layer by layer: stage one group, post-process it, copy it into the model, go on.

Groups are the runs of one layer in the order of the announcement (`aiosync.grouping.layer_runs`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from aiosync.destinations import Destinations, writable
from aiosync.errors import AiosyncError, Coverage, InvalidTransition, Validation
from aiosync.grouping import layer_runs
from aiosync.loaders import refuse_awaitable
from aiosync.metadata import ParamMeta, first_few
from aiosync.module_layout import bit_equal
from aiosync.overlaps import check_disjoint, span_of
from aiosync.places import region_of
from aiosync.sink_base import Sink
from aiosync.spare import needed_memory
from aiosync.targets import (
    Model,
    check_coverage,
    check_tensor,
    further_names,
    model_tensors,
)
from aiosync.writing import write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import TypeAlias

    Named: TypeAlias = tuple[str, torch.Tensor]
    Process: TypeAlias = Callable[[list[str], list[torch.Tensor]], Iterable[Named] | None]

_NO_MODEL = Model({}, [])


class LayerwiseSink(Sink):
    """Holds one layer group beside the model, however large the model is.

    The weights are torn from the first group's copy until `commit`; an abort in between leaves
    them torn until a later full update is committed. After any failure no further group is
    processed: the round can only be aborted.

    Args:
        model, device, after_load, marker: As for `make_sink`.
        process: Called as ``process(names, tensors)`` once per group, on the lane, as soon as the
            group is whole, in the order in which groups became whole. It owns the tensors and may
            return None (they are copied as they are now) or pairs of name and tensor, which may
            be others than announced: quantised, fused, split. Those are matched against the
            model, and by the end they must cover every parameter that a round without it would
            have to. It must not write to the model.
    """

    mode = "layerwise"

    def __init__(
        self,
        model: Any,
        *,
        process: Process | None = None,
        device: torch.device | str | None = None,
        after_load: Callable[[], object] | None = None,
        marker: str | Path | None = None,
    ) -> None:
        super().__init__(model, device=device, after_load=after_load, marker=marker)
        self.process = process
        self._partial = False
        self._failed = False
        self._groups: list[list[int]] = []
        self._group_of: dict[int, int] = {}
        self._waiting: list[int] = []
        self._here = _NO_MODEL
        self._written: dict[tuple[Any, ...], str] = {}
        self._given: dict[str, tuple[ParamMeta, list[str]]] = {}

    @property
    def staged_bytes(self) -> int:
        """Bytes held beside the model now."""
        return sum(tensor.nbytes for tensor in self._handed.values())

    def memory(self, metadata: Sequence[ParamMeta]) -> int:
        """The largest group; a transport may have a few tensors of the next one under way.

        What `process` allocates comes on top.
        """
        groups = _groups(metadata)
        return max((needed_memory([metadata[i] for i in group]) for group in groups), default=0)

    def _find(
        self, metas: list[ParamMeta], aliases: Mapping[str, str], *, partial: bool
    ) -> Destinations:
        self._partial = partial
        if self.process is not None and self._loader is None:
            self._further = further_names(metas, aliases)
            return Destinations([()] * len(metas), [], [], 0)  # judged as it comes out
        found = super()._find(metas, aliases, partial=partial)
        # Tied names are compared as they are written: nothing is kept for the end.
        return found._replace(ties=[])

    def _prepare(self, metadata: list[ParamMeta], found: Destinations) -> None:
        del found
        self._groups = _groups(metadata)
        self._group_of = {index: n for n, group in enumerate(self._groups) for index in group}
        self._waiting = [len(group) for group in self._groups]
        if self._loader is None:
            self._here = model_tensors(self.model)

    def _destination(self, index: int) -> torch.Tensor:
        return self._scratch(index)

    def _take(self, indices: Sequence[int]) -> None:
        for index in indices:
            number = self._group_of[index]
            self._waiting[number] -= 1
            if not self._waiting[number]:
                self._finish_group(self._groups[number])

    def _finish_group(self, indices: list[int]) -> None:
        self._failed = True  # until the group is in the model
        pairs = self._pairs(indices)
        for index in indices:
            del self._handed[index]
        pairs = self._processed(pairs)
        if self._loader is not None:
            self._load(pairs)
        else:
            self._store(pairs)
        self._failed = False

    def _processed(self, pairs: list[Named]) -> list[Named]:
        if self.process is None:
            return pairs
        names, tensors = [name for name, _ in pairs], [tensor for _, tensor in pairs]
        try:
            with torch.no_grad():
                result = self.process(names, tensors)
                refuse_awaitable(result, "process")
                return pairs if result is None else [_checked(pair) for pair in result]
        except AiosyncError as error:
            raise error.locate(tensor=names[0])  # noqa: B904  the same error, now with its place
        except Exception as error:
            raise AiosyncError(
                f"process failed on the group {first_few(names)}: {type(error).__name__}: {error}",
                tensor=names[0],
                weights=self.weights,
            ) from error

    def _store(self, pairs: list[Named]) -> None:
        """Match a group with the model, then copy it."""
        fresh: dict[tuple[Any, ...], tuple[str, torch.Tensor]] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, tensor in pairs:
            meta = ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            for target in self._targets(meta):
                here = self._here.tensors[target]
                check_tensor(target, here, meta, how="given")
                region = region_of(here)
                if region in fresh:
                    self._compare(name, tensor, *fresh[region])
                elif region in self._written:
                    self._compare(name, tensor, self._written[region], here)
                else:
                    fresh[region] = target, tensor
                    copies.append((writable(here), tensor))
        check_disjoint(span_of(name, self._here.tensors[name]) for name, _ in fresh.values())
        if copies:
            self._tear()
            write(copies)
        self._written |= {region: name for region, (name, _) in fresh.items()}

    def _targets(self, meta: ParamMeta) -> list[str]:
        """Where one tensor goes; noted for the count at the end."""
        if meta.name in self._given:
            raise Coverage(f"process gave {meta.name} twice", tensor=meta.name)
        names = (meta.name, *self._further.get(meta.name, ()))
        found = [name for name in names if name in self._here.tensors]
        if not found and not self._partial:
            raise Coverage(
                f"process gave {meta.name}, which is unknown here",
                tensor=meta.name,
                weights=self.weights,
            )
        self._given[meta.name] = meta, found
        return found

    def _compare(self, name: str, tensor: torch.Tensor, first: str, other: torch.Tensor) -> None:
        if tensor is not other and not bit_equal(tensor.detach(), other.detach()):
            raise Coverage(
                f"{first} and {name} are one tensor here, but arrived with different values",
                tensor=name,
                weights=self.weights,
            )

    def _check_complete(self) -> None:
        super()._check_complete()
        if self.process is None or self._loader is not None:
            return
        metas = [meta for meta, _ in self._given.values()]
        named = [names for _, names in self._given.values()]
        here = self._here
        regions = {name: region_of(tensor) for name, tensor in here.tensors.items()}
        try:
            check_disjoint(span_of(name, here.tensors[name]) for name in self._written.values())
            self.left_out = check_coverage(here, regions, metas, named, partial=self._partial)
        except (Coverage, Validation) as error:
            raise error.locate(weights=self.weights)  # noqa: B904  as above
        self.skipped = sum(not names for names in named)
        self.applied = len(named) - self.skipped

    def _apply(self) -> None:
        """All of it has been written, group by group."""

    def _check_open(self, call: str) -> None:
        super()._check_open(call)
        if self._failed:
            raise InvalidTransition(f"{call}: a group of this round failed: abort it")

    def _end(self) -> None:
        super()._end()
        self._failed = False
        self._groups, self._group_of, self._waiting = [], {}, []
        self._further, self._written, self._given = {}, {}, {}
        self._here = _NO_MODEL


def _groups(metadata: Sequence[ParamMeta]) -> list[list[int]]:
    """Indices by layer group."""
    position = {meta.name: index for index, meta in enumerate(metadata)}
    return [[position[name] for name in run] for run in layer_runs([m.name for m in metadata])]


def _checked(pair: Any) -> Named:
    """One result of `process`."""
    if isinstance(pair, tuple) and len(pair) == 2:
        name, tensor = pair
        if isinstance(name, str) and isinstance(tensor, torch.Tensor):
            return name, tensor
    raise Validation(f"process must give pairs of a name and a tensor, not {type(pair).__name__}")
