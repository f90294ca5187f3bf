"""What a model's next announcement will most likely be, found out before it comes.

A worker has nothing to do while the trainer describes its module to send it for the first time.
Meanwhile it does the same with its own, and matches the two. Nothing is believed because of it:
a round compares what was announced, and where the model's tensors are, with what was foreseen, as
later rounds do with what was found in the last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from aiosync.late_look import LooksLate
from aiosync.metadata import dtype_name, plain_metas, shared
from aiosync.module_walk import DTYPE, SHAPE, plain_members

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiosync.metadata import ParamMeta, Validated
    from aiosync.targets import Matcher


class Foresees(LooksLate):
    """Part of every sink."""

    model: Any
    _loader: Any
    _matcher: Matcher
    _validated: Validated

    def foresee(self) -> tuple[ParamMeta, ...] | None:
        """Match the model with an announcement of its parameters; before the first round.

        Runs nobody's code, and keeps what a first round would.

        Returns:
            That announcement; None where nothing can be foreseen: the model has a loader of its
            own, is no module or walks in its own way, or its tensors are tied or not plain.

        Raises:
            Validation: No announcement could be of this model.
            RecursionError: A module contains itself.
            Exception: What a tensor without a shape raises, or a model that is being changed.
        """
        members = None
        may = self._loader is None and self._matcher.is_unused
        if may and isinstance(self.model, nn.Module):
            members = plain_members(self.model)
        if members is None:
            return None
        parameters = members[0]
        tensors = list(parameters.values())
        if not tensors:
            return None
        shapes = shared(map(SHAPE, tensors))
        announced = tuple(plain_metas(parameters, map(DTYPE, tensors), shapes))
        is_foreseen = self._matcher.foresee(members, self._validated(announced))
        return announced if is_foreseen else None


def is_announced(
    metadata: Sequence[ParamMeta],
    names: Sequence[str],
    dtype_names: Sequence[str],
    shapes: Sequence[Sequence[int]],
) -> bool:
    """Whether `from_wire` would make just this, which has no owners, of the lists."""
    texts = {dtype: dtype_name(dtype) for dtype in {meta.dtype for meta in metadata}}
    return (
        names == [meta.name for meta in metadata]
        and dtype_names == [texts[meta.dtype] for meta in metadata]
        and shapes == [meta.shape for meta in metadata]
    )
