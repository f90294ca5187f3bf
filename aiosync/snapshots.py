"""Where a fleet finds the version that it has committed, after the trainer has moved on.

Somebody's copy (a source, a safetensors checkpoint, a function that gives one), or the fleet's
own: two copies of the model in host memory, one of the committed version, and one that the next
round fills.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from aiosync.defaults import DEFAULTS
from aiosync.errors import Refused, Validation
from aiosync.held_source import HeldSource
from aiosync.lone_round import bring_up
from aiosync.overrides import call_step
from aiosync.source_kinds import as_source
from transports.lane import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiosync.catch_up import Goal
    from aiosync.feed import SourceFeed
    from aiosync.member import MemberStanding
    from aiosync.messages import PeerState
    from aiosync.metadata import ParamMeta
    from aiosync.round import Round
    from aiosync.version import Version

KEEP = "keep"


@final
class Keeper:
    """Copies what each round sends; `begin` and `take` are called on the source's lane."""

    def __init__(self) -> None:
        self._filling: dict[str, torch.Tensor] = {}
        self._filled = 0
        self._kept: dict[str, torch.Tensor] = {}
        self._version: Version | None = None
        self._names: list[str] = []

    def begin(self, feed: SourceFeed) -> None:
        """A round's pass begins; memory is made anew only when the metadata has changed."""
        self._names = [meta.name for meta in feed.metadata]
        self._filled = 0
        fits = len(self._filling) == len(feed.metadata) and all(
            _fits(self._filling.get(meta.name), meta) for meta in feed.metadata
        )
        if not fits:
            self._filling = {}  # before the new memory is asked for
            self._filling = {
                meta.name: torch.empty(tuple(meta.shape), dtype=meta.dtype)
                for meta in feed.metadata
            }

    def take(self, batch: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Pairs of a position in the metadata and its tensor."""
        with torch.no_grad():
            for index, tensor in batch:
                self._filling[self._names[index]].copy_(tensor)
        self._filled += len(batch)

    def commit(self, round: Round) -> None:
        """The round counts: what it filled is kept from here on."""
        if round.summary is not None and self._filled == len(self._names):
            self._kept, self._filling = self._filling, self._kept
            self._version = round.version

    def source(self, goal: Goal) -> HeldSource:
        """What is kept.

        Raises:
            Refused: It is of another version.
        """
        if self._version != goal.version:
            raise Refused(f"no copy of version {goal.version.wire!r} was kept")
        return HeldSource(goal.metadata, self._kept.__getitem__, aliases=goal.aliases)


def _fits(tensor: torch.Tensor | None, meta: ParamMeta) -> bool:
    shape = tuple(meta.shape)
    return tensor is not None and tensor.dtype == meta.dtype and tuple(tensor.shape) == shape


@final
class FromSnapshot:
    """Sends a copy of the committed version.

    Args:
        given: See `FleetClient`.
        keeper: Where the fleet keeps the copy itself.
    """

    def __init__(self, given: Any, keeper: Keeper | None) -> None:
        self._given = given
        self._keeper = keeper

    async def bring(
        self,
        standing: MemberStanding,
        goal: Goal,
        arrived: Callable[[Sequence[PeerState | None]], None],
    ) -> None:
        """See `Way.bring`."""
        await bring_up(standing, goal, lambda: self._source(goal), arrived)

    async def _source(self, goal: Goal) -> Any:
        if self._keeper is not None:
            return self._keeper.source(goal)
        found = self._given
        if _makes_one(found):
            async with Lane("fleet-snapshot") as lane:
                found = await call_step(
                    self, found, goal.version, lane=lambda: lane, grace=DEFAULTS.cleanup_s / 2
                )
        elif goal.digest is None:
            raise Refused(
                "the workers check no digests, so nobody can tell which version this snapshot has",
                next_step="give a function that takes the version, or snapshot='keep'",
            )
        if isinstance(found, str | os.PathLike):
            return HeldSource(goal.metadata, Checkpoint(Path(found)), aliases=goal.aliases)
        return as_source(found)


def check_snapshot(given: Any) -> None:
    """Refuse what no tensors can come from.

    Raises:
        Validation: Says what may be given.
    """
    if given is None:
        raise Validation(
            "catch_up='snapshot' needs snapshot=: 'keep', a source, a path to safetensors, or a"
            " function that takes the version and returns one of them"
        )
    if isinstance(given, str | os.PathLike) or _makes_one(given):
        return
    try:
        as_source(given)
    except TypeError as error:
        raise Validation(f"snapshot: {error}") from error


def _makes_one(given: Any) -> bool:
    is_source = isinstance(given, torch.nn.Module) or hasattr(given, "iter_full")
    return callable(given) and not is_source and not isinstance(given, os.PathLike)


@final
class Checkpoint:
    """The tensors of one safetensors file, or of a folder's; called with a name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: Mapping[str, Any] | None = None

    def __call__(self, name: str) -> torch.Tensor:
        """The tensor of that name; blocking.

        Raises:
            Refused: There is none, or no such file; names both.
        """
        if self._files is None:
            self._files = _opened(self._path)
        if name not in self._files:
            raise Refused(f"{self._path} has no tensor {name!r}", tensor=name)
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor


def _names_in(opened: Any) -> list[str]:
    return list(opened.keys())


def _opened(path: Path) -> dict[str, Any]:
    try:
        from safetensors import SafetensorError, safe_open  # here: only this needs it
    except ImportError as error:
        text = f"reading {path} needs the package safetensors"
        raise Refused(text, next_step="pip install safetensors") from error
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    files: dict[str, Any] = {}
    for each in found:
        try:
            opened = safe_open(each, framework="pt")
        except (SafetensorError, OSError) as error:
            raise Refused(f"{each} cannot be read: {error}") from error
        files |= dict.fromkeys(_names_in(opened), opened)
    if not files:
        raise Refused(f"there is no tensor in {path}")
    return files
