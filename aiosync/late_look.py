"""Looking at a model while its tensors arrive, instead of before the first of them.

Where a round takes no longer than a look at tens of thousands of tensors, a model that seems to be
as it was is looked at step by step: each of its tensors before it is written to. One that turns out
to be another is matched anew on the spot.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import suppress
from operator import is_
from typing import TYPE_CHECKING, Any, cast

import torch

from aiosync.destinations import Writes, moved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from aiosync.destinations import Destinations
    from aiosync.metadata import ParamMeta
    from aiosync.targets import Matcher
    from statemachines.tables import Weights

_MOMENT_S = 0.25  # in which the last bytes come, mostly


class LooksLate(ABC):
    """Part of every sink."""

    weights: Weights
    left_out: list[str]
    model: Any
    _loader: Callable[[Iterable[tuple[str, torch.Tensor]]], object] | None
    _matcher: Matcher
    _metadata: list[ParamMeta]
    _found: Destinations

    _can_look_late = False
    """Whether this kind knows what to do where a late look finds another model."""
    _looks_last = False
    """Whether it needs no tensor of the model before all has landed."""

    def __init__(self) -> None:
        self.looks_late = False
        """Whether a model that seems to be as it was is looked at while tensors arrive.

        For receivers that ask for destinations as they go; set before `begin`, by the engine.
        """
        self._aliases: dict[str, str] = {}
        self._partial = False
        self._lent_upto = 0  # of the model's own tensors
        self._looks_now = False
        self._stayed_at: float | None = None

    def look_meanwhile(self, count: int | None) -> None:
        """The transport would have to wait: look at what has to be looked at later.

        Args:
            count: How much of the announced tensors it waits for; None: it waits for the end, with
                all destinations in its hands.
        """
        writes = self._found.writes
        if self._looks_now:
            if self._looks_last and isinstance(writes, Writes):
                writes.are_seen(count)
        elif count is None:
            with suppress(Exception):  # what is still so at the end is said there
                self._stayed_at = time.monotonic() if self._is_as_begun() else None

    def _was_just_looked_at(self) -> bool:
        """Whether the model was as begun a moment ago, while the last bytes came; counts once."""
        seen, self._stayed_at = self._stayed_at, None
        return seen is not None and time.monotonic() - seen < _MOMENT_S

    def _finish_look(self) -> bool:
        """Complete a late look at the model; False: there was none, all was looked at before."""
        writes = self._found.writes
        if not self._looks_now or not isinstance(writes, Writes):
            return False
        if not writes.are_seen():
            self._look_again()
        return True

    def _look_again(self) -> Writes:
        """The model changed since the round before: match it anew, now that the round is open.

        Raises:
            Coverage, Validation: It cannot take the round's tensors, or not in the same way.
        """
        before = cast("Writes", self._found.writes)
        found = self._find(self._metadata, self._aliases, partial=self._partial)
        now = found.writes
        alike = isinstance(now, Writes) and now.are_single and now.device == before.device
        if not isinstance(now, Writes) or not alike or found.ties:
            raise moved(self.weights, again=True)
        if not self._are_still_there(before, now):
            raise moved(self.weights)
        self._found, self.left_out, self._looks_now = found, found.left_out, False
        return now

    def _are_still_there(self, before: Writes, now: Writes) -> bool:
        """Whether what was handed out, and may have been written to, is the model's still."""
        end = self._lent_upto
        assert before.looking is not None  # it has just failed
        assert before.addresses is not None
        found = now.plain(0, end)
        is_same = all(map(is_, before.looking.tensors(0, end), found))
        return is_same and list(map(torch.Tensor.data_ptr, found)) == before.addresses[:end]

    def _begin_look(self, found: Destinations) -> None:
        """What `begin` has found is what the round is about."""
        writes = found.writes
        self._looks_now = isinstance(writes, Writes) and writes.is_looked_at
        self._stayed_at = None
        self._lent_upto = 0

    def _is_as_begun(self) -> bool:
        """Whether the model is still the one that `begin` has seen."""
        return self._loader is not None or self._matcher.holds(self.model)

    @abstractmethod
    def _find(
        self, metas: list[ParamMeta], aliases: Mapping[str, str], *, partial: bool
    ) -> Destinations:
        """Match an announcement with the model."""
