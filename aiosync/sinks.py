"""How a model takes weights: staged and swapped in, in place as they arrive, or by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from aiosync.config import SINKS
from aiosync.crash_marker import CrashMarker
from aiosync.destinations import Writes, writable
from aiosync.errors import Validation
from aiosync.layerwise import LayerwiseSink
from aiosync.metadata import meta_nbytes
from aiosync.same_copies import SameCopies
from aiosync.shared_arena import SharedArena
from aiosync.sink_base import Sink
from aiosync.spare import Arena, needed_memory
from aiosync.staging import shares
from aiosync.targets import model_tensors
from aiosync.writing import note_written, write
from statemachines.tables import Weights
from transports.stream import run_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from aiosync.destinations import Destinations
    from aiosync.metadata import ParamMeta
    from aiosync.shared_arena import Map

__all__ = ["InPlaceSink", "LayerwiseSink", "Sink", "StagedSink", "build_sink", "make_sink"]


class StagedSink(Sink):
    """Receives everything into spare memory, then copies it into the model's own storage.

    Until `commit` the model is untouched, so an abort or a lost trainer costs nothing. The copy
    itself is the only moment in which a failure leaves the weights torn. The spare memory is as
    large as the announced tensors and is kept for the next round; with a model that has
    ``load_weights`` it is made anew for each round, since a loader may keep what it is given.

    Args:
        model, device, after_load, marker: As for `make_sink`.
        shared: The spare memory is one for all ranks of a host, which begin each round together
            (``staging="shared_host"``); for engines.
    """

    mode = "staged"
    _can_look_late = _looks_last = True

    def __init__(
        self,
        model: Any,
        *,
        device: torch.device | str | None = None,
        after_load: Callable[[], object] | None = None,
        marker: str | Path | None = None,
        shared: bool = False,
    ) -> None:
        super().__init__(model, device=device, after_load=after_load, marker=marker)
        self._shared = SharedArena() if shared else None
        self._arena = self._shared or Arena(self.device)
        self._staged: dict[int, torch.Tensor] = {}
        self._views: list[torch.Tensor] = []
        self._has_all = False
        self._swap: SameCopies | None = None

    def memory(self, metadata: Sequence[ParamMeta]) -> int:
        """A second copy; where ranks share it, all of them together."""
        return needed_memory(metadata)

    def share(self, map_: Map) -> None:
        """How the round that begins comes to the memory that all ranks map."""
        if self._shared is not None:
            self._shared.join(map_)

    def release(self) -> None:
        self._staged, self._views = {}, []
        self._swap = None
        self._arena.release()

    @property
    def takes_all(self) -> bool:
        return self._has_all

    def _prepare(self, metadata: list[ParamMeta], found: Destinations) -> None:
        single = isinstance(found.writes, Writes) and found.writes.are_single
        if single or self._shared is not None:  # what one rank lacks, another one has
            self._keep(metadata, range(len(metadata)))
            return
        tied = {later for _, later in found.ties}
        kept = [
            index
            for index, targets in enumerate(found.writes)
            if targets or index in tied or self._loader is not None
        ]
        self._keep(metadata, kept)

    def _keep(self, metadata: list[ParamMeta], kept: Sequence[int]) -> None:
        self._staged, self._views = {}, []  # the arena may need their memory for other ones
        self._views = self._arena.views([metadata[index] for index in kept])
        self._staged = dict(zip(kept, self._views, strict=True))
        self._has_all = len(kept) == len(metadata)

    def _destination(self, index: int) -> torch.Tensor:
        staged = self._staged.get(index)
        return self._scratch(index) if staged is None else staged

    @property
    def _addresses(self) -> list[int] | None:
        return self._arena.addresses if self._has_all else None

    def _neighbours(self, first: int, end: int) -> list[torch.Tensor] | None:
        return self._views[first:end] if self._has_all else None

    def _take(self, indices: Sequence[int]) -> None:
        if self._has_all:
            return
        for index in indices:
            if index not in self._staged:
                del self._handed[index]  # a name this model does not have

    def _apply(self) -> None:
        if self._loader is not None:
            try:
                if self._shared is not None:  # a loader may write to what it is given
                    self._handed = dict(enumerate(self._shared.own_views()))
                self._load(self._pairs(range(len(self._metadata))))
            finally:
                self.release()
            return
        writes = self._found.writes
        if self._has_all and isinstance(writes, Writes) and writes.device is not None:
            self._tear()
            if self._swap is None:
                self._swap = SameCopies()
            known = (writes.addresses, self._arena.addresses)
            targets = writes.plain(0, len(writes))
            self._swap(targets, self._views, known=known)
            if writes.is_tracked:
                note_written(targets)
            return
        copies = [
            (target, self._handed[index])
            for index, targets in enumerate(writes)
            for target in targets
        ]
        self._tear()
        write(copies)


class InPlaceSink(Sink):
    """Lets tensors arrive in the model's own memory: no second copy of the model is needed.

    The weights are torn from the first destination that is handed out until `commit`; an abort
    in between leaves them torn until a later full update is committed. Parameters that cannot be
    filled directly (strided, on another device, made in inference mode) and models with
    ``load_weights`` take private temporary tensors instead, one landed batch at a time.
    """

    mode = "in_place"
    _can_look_late = True

    def memory(self, metadata: Sequence[ParamMeta]) -> int:
        """The largest temporary tensor; a transport may have a few under way at once."""
        known = {} if self._loader is not None else model_tensors(self.model).tensors
        indirect = [m for m in metadata if m.name not in known or not self._direct(known[m.name])]
        return max(map(meta_nbytes, indirect), default=0)

    @property
    def takes_all(self) -> bool:
        return self._plain is not None

    def _prepare(self, metadata: list[ParamMeta], found: Destinations) -> None:
        del metadata
        self._tied = {index for pair in found.ties for index in pair}
        writes = found.writes
        plain = isinstance(writes, Writes) and writes.device == self.device and not self._tied
        self._plain = cast("Writes", writes) if plain else None

    @property
    def commits_at_once(self) -> bool:
        """Whether `commit` only says that all is there: no files, no code of others."""
        mine = type(self) is InPlaceSink and self.after_load is None and self.marker is None
        return mine and self._plain is not None

    def _direct(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device and tensor.is_contiguous() and not tensor.is_inference()

    def _destination(self, index: int) -> torch.Tensor:
        self._look_upto(index + 1)
        if self._plain is not None:
            self._tear()
            return writable(self._plain.plain(index, index + 1)[0])
        targets = self._found.writes[index]
        if not targets or not self._direct(targets[0]):
            return self._scratch(index)
        self._tear()  # from here on others may write to it at any time
        return targets[0]

    @property
    def _addresses(self) -> list[int] | None:
        return None if self._plain is None else self._plain.addresses

    def _neighbours(self, first: int, end: int) -> list[torch.Tensor] | None:
        self._look_upto(end)
        if self._plain is None:
            return None
        self._tear()
        return self._plain.plain(first, end)

    @property
    def _lends(self) -> bool:
        return self._plain is not None

    def _look_upto(self, end: int) -> None:
        """Before memory of the model is written to."""
        if self._plain is not None and not self._plain.are_seen(end):
            self._plain = self._look_again()
        self._lent_upto = max(self._lent_upto, end)

    def _end(self) -> None:
        super()._end()
        self._plain = None  # memory that the model gives up must be free

    def _take(self, indices: Sequence[int]) -> None:
        if self._plain is not None:
            if self._plain.is_tracked:
                note_written(_runs_of(self._plain, indices))
            for index in indices if self._handed else ():
                self._handed.pop(index, None)
            return
        if self._loader is not None:
            self._load(self._pairs(indices))
        copies = [
            (target, self._handed[index])
            for index in indices
            for at, target in enumerate(self._found.writes[index])
            if at or not self._direct(target)  # the first took it directly
        ]
        if copies:
            self._tear()
            write(copies)
        for index in indices:
            if index not in self._tied:  # tied ones are compared at the end
                del self._handed[index]

    def _apply(self) -> None:
        """All of it has been written as it landed."""


def _runs_of(writes: Writes, indices: Sequence[int]) -> list[torch.Tensor]:
    run = run_of(indices)
    if run is not None:
        return writes.plain(run.start, run.stop)
    return [writes.plain(index, index + 1)[0] for index in indices]


def make_sink(
    model: Any,
    mode: str = "staged",
    device: torch.device | str | None = None,
    *,
    after_load: Callable[[], object] | None = None,
    marker: str | Path | None = None,
) -> Sink:
    """A sink for a module, a dict of tensors, or an object with ``load_weights(iterable)``.

    Args:
        model: Written in its own storage: addresses, strides and ``requires_grad`` stay. One
            that has ``load_weights`` is only ever written through it.
        mode: ``"staged"``, ``"in_place"`` or ``"layerwise"``.
        device: Where tensors arrive; the CPU unless given.
        after_load: Called without arguments once per commit, after the last write.
        marker: File that exists while the weights are torn (`CrashMarker`); one that is there
            already makes the sink begin as torn.

    Raises:
        Validation: No such mode, or no folder for the marker.
        TypeError: No such kind of model.
    """
    for kind in (StagedSink, InPlaceSink, LayerwiseSink):
        if kind.mode == mode:
            return kind(model, device=device, after_load=after_load, marker=marker)
    modes = ", ".join(f'"{mode}"' for mode in SINKS)
    raise Validation(f"sink mode must be one of {modes}, not {mode!r}")


def build_sink(
    config: Any, model: Any, device: torch.device | str | None, *, is_own: bool = True
) -> Sink:
    """The sink that ``config.sink`` asks for: a mode, a sink, or a factory of sinks.

    Args:
        config: A `WeightTransferConfig`, or any object.
        model, device: As for `make_sink`.
        is_own: Whether `model` is the engine's own. Another one (a draft) has no crash marker,
            and a sink that was given ready made is not for it.

    Raises:
        Validation: The one sink that was given is for another model.
        TypeError: The factory made something else.
    """
    given = getattr(config, "sink", "staged")
    if isinstance(given, str):
        marker = getattr(config, "marker", None) if is_own else None
        if shares(config):
            return StagedSink(model, device=device, marker=marker, shared=True)
        return make_sink(model, given, device, marker=marker)
    if isinstance(given, Sink):
        if not is_own:
            raise Validation("config.sink is one sink: for several models give a factory")
        return given
    made = given(model, device)
    if not isinstance(made, Sink):
        raise TypeError(f"config.sink made no Sink but {type(made).__name__}")
    return made


def check_model(config: Any, model: Any) -> None:
    """Refuse, before the first round, a model that none of our sinks can fill.

    Raises:
        Validation: It is no model, or it holds something that is no tensor.
    """
    is_ours = isinstance(getattr(config, "sink", "staged"), str)
    if is_ours and not callable(getattr(model, "load_weights", None)):
        try:
            model_tensors(model)
        except TypeError as error:
            raise Validation(f"model: {error}") from error


def sink_name(config: Any) -> str:
    """What ``config.sink`` is called in replies."""
    given = getattr(config, "sink", "staged")
    return given if isinstance(given, str) else str(getattr(given, "mode", "custom"))


def first_weights(config: Any) -> Weights:
    """What a model holds before the first round: torn where a swap never ended."""
    given, marker = getattr(config, "sink", None), getattr(config, "marker", None)
    if isinstance(given, Sink):
        return given.weights
    return Weights.TORN if marker is not None and CrashMarker(marker).is_set else Weights.INTACT
