"""Looking at a model while its tensors arrive, instead of before the first of them.

Where a round takes no longer than a look at tens of thousands of tensors, a model that seems to be
as it was is looked at step by step: each of its tensors before it is written to. One that turns out
to be another is matched anew on the spot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from operator import is_
from typing import TYPE_CHECKING, cast

import torch

from aiosync.destinations import Writes, moved

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiosync.destinations import Destinations
    from aiosync.metadata import ParamMeta
    from statemachines.tables import Weights


class LooksLate(ABC):
    """Part of every sink."""

    weights: Weights
    left_out: list[str]
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

    def look_meanwhile(self, count: int | None) -> None:
        """The transport would have to wait: look at what has to be looked at later.

        Args:
            count: How much of the announced tensors it waits for; None: it waits for the end.
        """
        writes = self._found.writes
        if self._looks_last and isinstance(writes, Writes):
            writes.are_seen(count)

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

    @abstractmethod
    def _find(
        self, metas: list[ParamMeta], aliases: Mapping[str, str], *, partial: bool
    ) -> Destinations:
        """Match an announcement with the model."""
