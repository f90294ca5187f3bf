"""What every sink does: order of calls, coverage, verification, and what the weights are.

A sink is synchronous and lives on one lane. A round is ``begin``, then ``destination`` and
``landed`` for every tensor, ``verify``, and ``commit`` or ``abort``. Whatever fails, ``weights``
says what the model holds: it turns torn right before the first byte of the model can change and
intact right after the last one did.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from aiosync.crash_marker import CrashMarker
from aiosync.destinations import Destinations, moved
from aiosync.errors import Busy, Coverage, InvalidTransition, Torn, Validation
from aiosync.foreign import LeftBehind
from aiosync.foresight import Foresees
from aiosync.loaders import load_all, refuse_awaitable
from aiosync.metadata import Validated, first_few, meta_nbytes
from aiosync.module_layout import bit_equal
from aiosync.targets import Matcher, further_names, model_tensors, wanted_names
from statemachines.tables import Weights
from transports.stream import Pieces, run_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from aiosync.lane_calls import LaneCalls
    from aiosync.metadata import ParamMeta
    from aiosync.version import Version


_NOTHING = Destinations([], [], [], 0)


class Sink(Foresees, ABC):
    """One model's side of a round. Made by `make_sink`.

    Attributes:
        weights: What the model holds now.
        applied, skipped: Announced tensors of the last round that this model has or has not.
        left_out: Names of the model that the last round did not cover (buffers; with
            ``partial``, whole modules).
        target: The version that the next commit makes visible; set by the engine.
    """

    mode: ClassVar[str]

    def __init__(
        self,
        model: Any,
        *,
        device: torch.device | str | None = None,
        after_load: Callable[[], object] | None = None,
        marker: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.device = torch.device("cpu" if device is None else device)
        self.after_load = after_load
        self.marker = None if marker is None else CrashMarker(marker)
        crashed = self.marker is not None and self.marker.is_set
        self.weights = Weights.TORN if crashed else Weights.INTACT
        self.applied = 0
        self.skipped = 0
        self.left_out: list[str] = []
        self.target: Version | None = None
        self.left = LeftBehind()
        """Calls of this sink's that outlived their round."""
        self._loader: Callable[[Iterable[tuple[str, torch.Tensor]]], object] | None = None
        self._adopt(model)
        self._matcher = Matcher()
        self._metadata: list[ParamMeta] = []
        self._found = _NOTHING
        self._landed = bytearray()
        self._pieces = Pieces()
        self._handed: dict[int, torch.Tensor] = {}
        self._lent: dict[int, int] = {}
        """Neighbours that were handed out and have not landed: from the first up to, by the first.

        Those of `_neighbours` where nobody asks for them again.
        """
        self._open = False
        self._validated = Validated()
        self._further: dict[str, list[str]] = {}
        """Names that travel under another one, by that one."""

    @property
    def is_open(self) -> bool:
        """Whether a round has begun, and was neither committed nor aborted."""
        return self._open

    def begin(
        self,
        metadata: Iterable[ParamMeta],
        *,
        aliases: Mapping[str, str] | None = None,
        partial: bool = False,
    ) -> None:
        """Check the announcement against the model and get ready; writes nothing.

        Args:
            metadata: What will arrive; the position in it is the index used below.
            aliases: Further names of announced tensors (tied parameters of the trainer).
            partial: A subset of the model is enough, and names it does not have are skipped.

        Raises:
            Busy: The last round was neither committed nor aborted.
            Coverage, Validation: See `Matcher.find`.
            Refused: The spare memory does not fit.
            Torn: A partial update cannot mend torn weights.
        """
        if self._open:
            raise Busy("this sink has a round under way: commit or abort it first")
        metas = self._validated(metadata)
        if partial and self.weights != Weights.INTACT:
            raise Torn("a partial update cannot mend these weights", weights=self.weights)
        self._aliases, self._partial = dict(aliases or {}), partial
        found = self._find(metas, self._aliases, partial=partial)
        self._prepare(metas, found)
        self._metadata, self._found = metas, found
        self._landed = bytearray(len(metas))
        self._begin_look(found)
        self.skipped = found.skipped
        self.applied = len(metas) - self.skipped
        self.left_out = found.left_out
        self._open = True

    def destination(self, index: int) -> torch.Tensor:
        """The contiguous tensor on `device` to fill with announced tensor `index`."""
        self._check_open("destination")
        if self._landed[self._known(index)]:
            name = self._metadata[index].name
            raise Coverage(f"{name} has landed: its destination is taken", tensor=name)
        handed = self._handed.get(index)
        if handed is None or handed.requires_grad:
            handed = self._handed[index] = self._destination(index)
        return handed

    def destinations(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """`destination` for many; they may require gradients, so write to them under no_grad."""
        run = run_of(indices)
        if (
            self._open
            and type(self).destination is Sink.destination  # else each is asked for
            and run is not None
            and self._are_due(run)
        ):
            found = self._neighbours(run.start, run.stop)
            if found is not None:
                if self._lends:
                    self._lent[run.start] = run.stop
                else:
                    self._handed.update(zip(run, found, strict=True))
                return found
        return [self.destination(index) for index in indices]

    def known_addresses(self, indices: Sequence[int]) -> list[int] | None:
        """Where `destinations` of these lay at `begin`, if all are contiguous there."""
        known, run = self._addresses, run_of(indices)
        return self._pieces.of(known, run) if known and run is not None else None

    def _are_due(self, run: range) -> bool:
        """Whether these are announced, and none of them has landed."""
        is_known = run.start >= 0 and run.stop <= len(self._metadata)
        return is_known and self._landed.find(1, run.start, run.stop) < 0

    def landed(self, indices: Iterable[int]) -> None:
        """These tensors are complete in their destinations.

        Raises:
            Coverage: One landed twice, or before anybody had its destination.
        """
        self._check_open("landed")
        fresh = indices if isinstance(indices, range) else list(indices)
        if not self._note_landed(fresh):
            self._note_each(fresh)
        self._take(fresh)

    def _note_landed(self, fresh: Sequence[int]) -> bool:
        """All at once; False, with nothing done, where that is not as simple."""
        run = run_of(fresh)
        simple = run is not None and self._are_due(run)
        if run is None or not simple or self._lent.get(run.start) != run.stop:
            self._hand_over()
            simple = simple and all(map(self._handed.__contains__, fresh))
        if simple and run is not None:
            self._lent.pop(run.start, None)
            self._landed[run.start : run.stop] = b"\1" * len(run)
        return simple

    def _hand_over(self) -> None:
        """What was lent comes back in other parts: from here on it is known one by one."""
        for first, end in self._lent.items():
            found = self._neighbours(first, end) or []
            self._handed.update(zip(range(first, end), found, strict=True))
        self._lent.clear()

    def _note_each(self, fresh: Sequence[int]) -> None:
        for index in fresh:
            name = self._metadata[self._known(index)].name
            if self._landed[index]:
                raise Coverage(f"{name} landed twice", tensor=name)
            if index not in self._handed:
                if meta_nbytes(self._metadata[index]):
                    raise Coverage(f"{name} landed, but nobody asked where to put it", tensor=name)
                self._handed[index] = self._destination(index)  # empty: no bytes to put anywhere
            self._landed[index] = 1

    def verify(self) -> None:
        """Everything announced has landed, tied names agree, and the model is still the same.

        Raises:
            Coverage: Names the first tensor that is missing, or two tied names that differ; or
                tensors of the model were replaced since `begin`: what arrived is not for them.
        """
        self._check_complete()
        looks_itself = type(self).check_model is not Sink.check_model
        if not self._finish_look() or not self._looks_last or looks_itself:
            self.check_model()

    def verify_stream(self) -> None:
        """`verify` right after the round's one stream: a look that went along with it counts."""
        kind = type(self)
        if kind.verify is not Sink.verify or kind.check_model is not Sink.check_model:
            self.verify()  # a subclass has more to say
            return
        self._check_complete()
        if not self._finish_look() and not self._was_just_looked_at():
            self.check_model()

    def check_model(self) -> None:
        """The model is still the one that `begin` has seen; part of `verify`.

        Raises:
            Coverage: Tensors of it were replaced, renamed or moved.
        """
        if not self._is_as_begun():
            raise moved(self.weights)

    def _check_complete(self) -> None:
        self._check_open("verify")
        if 0 in self._landed:
            missing = [
                m.name for m, landed in zip(self._metadata, self._landed, strict=True) if not landed
            ]
            raise Coverage(
                f"{len(missing)} of {len(self._metadata)} tensors never landed: "
                f"{first_few(missing)}",
                tensor=missing[0],
                weights=self.weights,
            )
        for first, later in self._found.ties:
            if not bit_equal(self._handed[first], self._handed[later]):
                one, two = self._metadata[first].name, self._metadata[later].name
                raise Coverage(
                    f"{one} and {two} are one tensor here, but arrived with different values",
                    tensor=two,
                    weights=self.weights,
                )

    def commit(self) -> None:
        """Verify, make the model new, run `after_load`.

        Raises:
            Coverage: Something is missing; the model is as `weights` says, the round still open.
            Exception: What the model's loader or `after_load` raised; the weights are torn.
        """
        self._check_complete()  # not all of `verify`: generation waits meanwhile
        try:
            self._apply()
            if self.after_load is not None:
                refuse_awaitable(self.after_load(), "after_load")
            self._mend()
        finally:
            self._end()

    def abort(self) -> None:
        """End the round without a commit; fine at any time, also when there is none."""
        self._end()

    def attach(self, calls: LaneCalls) -> None:
        """How this round's calls on the lane reach the event loop; called by the engine."""

    def interrupt(self) -> None:
        """Unblock a call that waits for the event loop; from a thread of its own."""

    async def withdraw(self) -> None:
        """What giving up has to await, on the loop, before `abort`; the caller limits it."""

    def release(self) -> None:
        """Give spare memory back. Also for when an aborted round's writer may still be writing."""

    @property
    def takes_all(self) -> bool:
        """Whether this round's destinations are there anyway, however many are asked for."""
        return False

    @abstractmethod
    def memory(self, metadata: Sequence[ParamMeta]) -> int:
        """Bytes a round of this announcement needs beside the model."""

    def __repr__(self) -> str:
        state = f"round of {sum(self._landed)}/{len(self._landed)}" if self._open else "no round"
        return f"<{type(self).__name__} weights={self.weights} {state}>"

    @abstractmethod
    def _prepare(self, metadata: list[ParamMeta], found: Destinations) -> None: ...

    @abstractmethod
    def _destination(self, index: int) -> torch.Tensor: ...

    @property
    def _lends(self) -> bool:
        """Whether nobody needs what `_neighbours` handed out, once that has landed."""
        return False

    @property
    def _addresses(self) -> list[int] | None:
        """Of all destinations of the round, where that is known; they may have moved since."""
        return None

    def _neighbours(self, first: int, end: int) -> list[torch.Tensor] | None:
        """Destinations `first` up to `end` in a quick way; None where there is none."""
        return None

    @abstractmethod
    def _take(self, indices: Sequence[int]) -> None:
        """Note what landed; whatever `_apply` or a tie still needs stays in `_handed`."""

    @abstractmethod
    def _apply(self) -> None:
        """Write what the model does not have yet; sets the weights torn before that."""

    def _adopt(self, model: Any) -> None:
        """Find out how `model` is written; one of the wrong kind is told now."""
        if callable(getattr(model, "load_weights", None)):
            self._loader = model.load_weights
        elif not isinstance(model, torch.nn.Module):
            model_tensors(model)

    def _find(
        self, metas: list[ParamMeta], aliases: Mapping[str, str], *, partial: bool
    ) -> Destinations:
        self._further = further_names(metas, aliases)
        if self._loader is None:
            late = self.looks_late and self._can_look_late and not self._open
            return self._matcher.find(self.model, metas, aliases, partial=partial, late=late)
        self._further = wanted_names(self.model, self._further)
        return Destinations([()] * len(metas), [], [], 0)

    def _tear(self) -> None:
        """From here on the model may be a mix; called before each write, cheap but the first."""
        if self.marker is not None and self.weights != Weights.TORN:
            self.marker.set()
        self.weights = Weights.TORN

    def _mend(self) -> None:
        """The model is one version again."""
        if self.marker is not None:
            self.marker.clear()
        self.weights = Weights.INTACT

    def _end(self) -> None:
        self._open = False
        self._handed.clear()
        self._lent.clear()
        self._landed = bytearray()
        self._metadata, self._found = [], _NOTHING

    def _check_open(self, call: str) -> None:
        if not self._open:
            raise InvalidTransition(f"{call} needs a round: call begin first")

    def _known(self, index: int) -> int:
        if isinstance(index, bool) or not 0 <= index < len(self._metadata):
            raise Validation(f"no tensor {index} in a round of {len(self._metadata)}")
        return index

    def _scratch(self, index: int) -> torch.Tensor:
        meta = self._metadata[index]
        with torch.inference_mode(False):  # never an inference tensor: others write to it
            return torch.empty(meta.shape, dtype=meta.dtype, device=self.device)

    def _load(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Give tensors to the model's own loader; it may keep them."""
        if self._loader is None or not pairs:
            return
        if self._further:  # a tied tensor comes under each name that the loader may need
            pairs = [(n, t) for name, t in pairs for n in (name, *self._further.get(name, ()))]
        self._tear()
        load_all(self._loader, pairs)

    def _pairs(self, indices: Iterable[int]) -> list[tuple[str, torch.Tensor]]:
        return [(self._metadata[index].name, self._handed[index]) for index in indices]
