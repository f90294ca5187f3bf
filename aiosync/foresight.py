"""What a model's next announcement will most likely be, found out before it comes.

A worker has nothing to do while the trainer describes its module to send it for the first time.
Meanwhile it does the same with its own, and matches the two. Nothing is believed because of it:
a round compares what was announced, and where the model's tensors are, with what was foreseen, as
later rounds do with what was found in the last one.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Self, final

from torch import nn

from aiosync.late_look import LooksLate
from aiosync.metadata import Validated, dtype_name, plain_metas, shared
from aiosync.module_walk import DTYPE, SHAPE, plain_members
from aiosync.targets import Matcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiosync.metadata import ParamMeta


@final
class Foresight:
    """What the sink of a first round would find; it holds no tensor and no module.

    Attributes:
        metadata: An announcement of the module's parameters.
    """

    def __init__(self, module: nn.Module, metadata: tuple[ParamMeta, ...]) -> None:
        self.metadata = metadata
        self.validated = Validated()
        self.matcher = Matcher()
        self._module = weakref.ref(module)

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Match a model with an announcement of its parameters; runs nobody's code.

        Returns:
            None where nothing can be foreseen: the model has a loader of its own, is no module or
            walks in its own way, or its tensors are tied or not plain.

        Raises:
            Validation: No announcement could be of this model.
            RecursionError: A module contains itself.
            Exception: What a tensor without a shape raises, or a model that is being changed.
        """
        members = None
        if isinstance(model, nn.Module) and not callable(getattr(model, "load_weights", None)):
            members = plain_members(model)
        if members is None:
            return None
        parameters = members[0]
        tensors = list(parameters.values())
        if not tensors:
            return None
        shapes = shared(map(SHAPE, tensors))
        made = cls(model, tuple(plain_metas(parameters, map(DTYPE, tensors), shapes)))
        return made if made.matcher.foresee(members, made.validated(made.metadata)) else None

    def is_of(self, model: Any) -> bool:
        """Whether this very module was looked at."""
        return self._module() is model


class Foresees(LooksLate):
    """Part of every sink."""

    model: Any
    _matcher: Matcher
    _validated: Validated

    def take_over(self, foresight: Foresight) -> None:
        """Begin with what was foreseen of this model; for a sink that was just made."""
        if foresight.is_of(self.model):
            self._matcher, self._validated = foresight.matcher, foresight.validated


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
