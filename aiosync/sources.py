"""Where a trainer's tensors come from: the source contract and the source over a module."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import nn

from aiosync.glance import FRESH_S, Glance, Looking
from aiosync.grouping import layer_runs
from aiosync.metadata import first_few
from aiosync.module_layout import (
    compact,
    full_piece,
    is_resident,
    lay_out,
    live_tensors,
    local_piece,
    opens_async,
)
from aiosync.module_walk import DTYPE, SHAPE, are_plain, named_members, outline, same
from aiosync.passes import each_alone, flattened
from statemachines.errors import Validation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from aiosync.metadata import ParamMeta
    from aiosync.module_layout import Layout, Rename
    from aiosync.module_walk import Members
    from aiosync.passes import Batches, Pair, Pairs

Session: TypeAlias = AbstractContextManager[Any] | AbstractAsyncContextManager[Any]
_Fetch: TypeAlias = Callable[[torch.Tensor, torch.dtype | None], torch.Tensor | None]


class SourceLike(Protocol):
    """The least a source has; upstream's source classes have it."""

    @property
    def metadata(self) -> Any:
        """A list of `ParamMeta`, or of objects with its attributes."""

    def iter_full(self) -> Any:
        """An iterator of ``(name, tensor)``, plain or async: who calls it knows its source."""


Source: TypeAlias = nn.Module | SourceLike
"""What is accepted as a source; `as_source` makes a `SourceLike` of it."""


class WeightSource(ABC):  # noqa: B024  it has, as seen at run time
    """Describes every parameter of the model and yields the ones this rank has.

    Each pass yields exactly ``owned_names(rank)``, in metadata order; a call starts a fresh pass.
    A pass may run collectives among a parameter's owners. Generators may be plain (they run on a
    lane, never on the event loop) or async (they run on the loop); a plain *function* that returns
    an async iterator sets ``is_async = True`` on the class.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "metadata" in cls.__dict__ and not isinstance(cls.__dict__["metadata"], cached_property):
            raise TypeError(
                f"{cls.__name__}.metadata must be a functools.cached_property: it is read often, "
                "on every rank, and must not change"
            )

    if TYPE_CHECKING:  # what a subclass writes; at run time this would not count as abstract

        @cached_property
        @abstractmethod
        def metadata(self) -> list[ParamMeta]: ...

    else:

        @property
        @abstractmethod
        def metadata(self) -> list[ParamMeta]:
            """Every parameter of the model, the same list on every rank; transfers nothing."""

    def owned_names(self, rank: int) -> list[str]:
        """Names that `rank` yields, in metadata order."""
        return [m.name for m in self.metadata if m.owners is None or rank in m.owners]

    def implements_iter_full(self) -> bool:
        """Whether the class (not the instance) defines `iter_full`."""
        return type(self).iter_full is not WeightSource.iter_full

    def implements_iter_local(self) -> bool:
        """Whether the class (not the instance) defines `iter_local`."""
        return type(self).iter_local is not WeightSource.iter_local

    def iter_full(self) -> Pairs:
        """Yield ``(name, full tensor)``."""
        raise NotImplementedError(f"{type(self).__name__} does not define iter_full")

    def iter_local(self) -> Pairs:
        """Yield ``(name, this rank's piece)``, shaped as the placements say."""
        raise NotImplementedError(f"{type(self).__name__} does not define iter_local")

    def groups(self) -> list[list[str]]:
        """All names, cut where a pass may stop: layer by layer, metadata order kept."""
        names = [meta.name for meta in self.metadata]
        known = self.__dict__.get("_cut")
        if known is None or known[0] != names:
            known = self.__dict__["_cut"] = (names, layer_runs(names))
        return [list(run) for run in known[1]]

    def iter_groups(self) -> Batches:
        """Yield lists of ``(name, full tensor)`` pairs, one list per resume.

        All tensors of a list are valid at once. By default each list holds one pair, since an
        `iter_full` may reuse its tensor on the next step.
        """
        return each_alone(self.iter_full())


class ModuleSource(WeightSource):
    """The parameters of a module, DTensors included.

    Args:
        module: Read anew in each pass, so replaced parameters are noticed.
        dtype: Floating-point tensors travel as this dtype; others keep theirs.
        rename: Applied once to each of the module's own names; a mapping leaves names alone that
            it does not list, None drops the tensor (it is then in `left_out`).
        session: Called for a context manager that is held around each pass and around reading
            the metadata (FSDP's ``summon_full_params``). Async: a pass then runs on the event
            loop, and metadata is read outside it.
        run_in: Kept for the engine: who runs the passes.
        buffers: ``"persistent"`` adds the persistent buffers, each with its layer.

    A tied parameter travels once, under its first name; `aliases` has the others. Reading
    `metadata` raises `Validation` for a tensor that has no data (meta, lazy) or two tensors that
    would get one name.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
        session: Callable[[], Session] | None = None,
        run_in: Any = None,
        buffers: str | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, not {dtype!r}")
        if rename is not None and not callable(rename) and not isinstance(rename, Mapping):
            raise TypeError(f"rename must be a function or a mapping, not {rename!r}")
        if dtype is not None and not dtype.is_floating_point:
            raise Validation(f"dtype= casts floating-point tensors, {dtype} is not one")
        if buffers not in (None, "persistent"):
            raise Validation(f'buffers must be None or "persistent", not {buffers!r}')
        self.module = module
        self.dtype = dtype
        self.rename = rename
        self.session = session
        self.run_in = run_in
        self.buffers = buffers
        self.is_async = opens_async(session)
        self._seen: dict[str, torch.Tensor] | None = None
        self._glance: Glance | None = None
        self._glanced: list[torch.Tensor] | None = None
        self.looking: Looking | None = None
        """What `look_late` began; a pass completes it."""
        self._was_plain = self._has_stayed = False
        self._looked_at = 0.0

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return self._layout.metadata

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied tensors, each with the name that travels."""
        return self._layout.aliases

    @property
    def left_out(self) -> list[str]:
        """Names of the module that are not sent: buffers, and what `rename` drops."""
        return self._layout.left_out

    def notice_changes(self) -> None:
        """Describe the module anew if its names, ties, dtypes or shapes are not as announced.

        Called before each round. With a session the module is looked at only inside of it: there
        a pass over a changed module raises `Validation`, and the round after that one sends it.
        """
        self.forget_tensors()
        known = self.__dict__.get("_layout")
        if known is None and self._is_plain:  # one walk for that and for the pass
            held = named_members(self.module)
            self.__dict__["_layout"] = self._lay_out(held)
            self._seen = held[0] | held[1]
        elif known is not None and self.session is None and not self._look():
            live = live_tensors(self.module)
            if known.outline.holds(live):
                self._seen = live
            else:
                self._forget()
        self._looked_at = time.monotonic()

    def look_late(self) -> bool:
        """Instead of `notice_changes`: whether all seems to be as and where it was.

        The pass itself then looks at each tensor right before it yields it (`SourceFeed`).
        """
        self.forget_tensors()
        # One that changes in every round would have each of them begin again.
        if self._glance is None or not self._has_stayed or not self._is_plain:
            return False
        if self.metadata != self._layout.announced:
            return False
        looking = Looking(self._glance, self.module)
        if looking.begins_well():  # what changes a module changes its beginning, most of the time
            self.looking = looking
        return self.looking is not None

    def forget_tensors(self) -> None:
        """Let go of what `notice_changes` has seen: the round is over, or others ran meanwhile."""
        self._seen = self._glanced = self.looking = None

    def _look(self) -> bool:
        """Whether all is as and where it was; then `_glanced` has it."""
        if self._glance is not None:
            self._glanced = self._glance.look(self.module)
            self._has_stayed = self._glanced is not None
            if self._glanced is None:
                self._glance = None
        return self._glanced is not None

    def iter_full(self) -> Pairs:
        return self._each(full_piece)

    def iter_local(self) -> Pairs:
        return self._each(local_piece)

    def iter_groups(self) -> Batches:
        return self._walk(full_piece, self.groups())

    def resident(self) -> dict[str, torch.Tensor]:
        """The tensors that a pass yields as they are, for senders that read them in place.

        Contiguous plain tensors that need no cast; they are the module's own memory. Empty for a
        source with a session, and for a subclass that overrides what is yielded.
        """
        read = self.read()
        return {
            meta.name: compact(read[meta.name].detach())
            for meta in self.metadata
            if meta.name in read and is_resident(read[meta.name], meta)
        }

    def read(self) -> dict[str, torch.Tensor]:
        """What a pass reads, by announced name; empty for a source whose pass may write to it."""
        if not self._is_plain:
            return {}
        live, keys = live_tensors(self.module), self._layout.keys
        return {name: live[key] for name, key in keys.items() if key in live}

    def plain_tensors(self) -> list[torch.Tensor] | None:
        """What a pass would yield, in metadata order: the parameters themselves, not detached.

        None where a pass does more than that: casts, gathers, opens a session, is overridden,
        or meets a tensor that is not contiguous memory.

        Raises:
            Validation: The module is not as announced.
        """
        if not self._is_plain or self.dtype is not None:
            return None
        if self.metadata != self._layout.announced:
            return None  # then only names tell which is which
        if time.monotonic() - self._looked_at > FRESH_S:  # others may have run meanwhile
            self._seen = self._glanced = None
        if self._glanced is not None or (self._seen is None and self._look()):
            return self._glanced
        # What this round's `notice_changes` has just walked is not walked again.
        live, self._seen = self._seen, None
        layout = self._layout
        if live is None:
            live = live_tensors(self.module)
            if not layout.outline.holds(live):
                raise self._changed(live, layout)
        tensors = list(map(live.__getitem__, layout.keys.values()))
        metadata = layout.metadata
        is_as_announced = (
            same([meta.dtype for meta in metadata], map(DTYPE, tensors))
            and same([meta.shape for meta in metadata], map(SHAPE, tensors))
            and are_plain(tensors)
        )
        if not is_as_announced:
            return None
        if self._was_plain:  # it seems to stay as it is
            self._glance = Glance.of(self.module, live, list(layout.keys.values()))
            self._has_stayed = False
        self._was_plain = True
        return tensors

    @property
    def plain_addresses(self) -> list[int] | None:
        """Where `plain_tensors` are, if that is known; the same list until one is elsewhere."""
        if self._glance is None or (self._glanced is None and self.looking is None):
            return None
        return self._glance.addresses

    @property
    def _is_plain(self) -> bool:
        overridden = any(
            getattr(type(self), member) is not getattr(ModuleSource, member)
            for member in ("metadata", "iter_full", "iter_groups", "groups")
        )
        return not overridden and self.session is None

    @cached_property
    def _layout(self) -> Layout:
        with nullcontext() if self.is_async else self._open():
            return self._lay_out()

    def _lay_out(self, held: Members | None = None) -> Layout:
        options: Any = {"rename": self.rename, "dtype": self.dtype, "held": held}
        return lay_out(self.module, persistent=self.buffers == "persistent", **options)

    def _open(self) -> AbstractContextManager[Any]:
        held = nullcontext() if self.session is None else self.session()
        if not isinstance(held, AbstractContextManager):
            raise TypeError(
                "session() returned an async context manager: pass the function that "
                "@asynccontextmanager made, or the class, so that it is known beforehand"
            )
        return held

    def _each(self, fetch: _Fetch) -> Pairs:
        return flattened(self._walk(fetch, [[meta.name] for meta in self.metadata]))

    def _walk(self, fetch: _Fetch, groups: list[list[str]]) -> Batches:
        return self._walk_async(fetch, groups) if self.is_async else self._walk_sync(fetch, groups)

    def _walk_sync(self, fetch: _Fetch, groups: list[list[str]]) -> Iterator[list[Pair]]:
        layout = self._layout  # before the session: reading it opens one too
        with self._open():
            yield from self._fetched(layout, fetch, groups)

    async def _walk_async(
        self, fetch: _Fetch, groups: list[list[str]]
    ) -> AsyncIterator[list[Pair]]:
        layout = self._layout
        async with self.session():  # type: ignore[misc, union-attr] # is_async: there is one
            for batch in self._fetched(layout, fetch, groups):
                yield batch

    def _fetched(
        self, layout: Layout, fetch: _Fetch, groups: list[list[str]]
    ) -> Iterator[list[Pair]]:
        live = live_tensors(self.module)
        if not self.is_async and not layout.outline.holds(live):
            raise self._changed(live, layout)
        dtypes = {} if self.dtype is None else {meta.name: meta.dtype for meta in layout.metadata}

        def pairs(group: list[str]) -> Iterator[Pair]:
            for name in group:
                tensor = live.get(layout.keys.get(name, ""))
                if tensor is None:
                    raise Validation(f"{name} is no longer in the module", tensor=name)
                tensor = fetch(tensor.detach(), dtypes.get(name))
                if tensor is not None:
                    yield name, tensor

        for group in groups:
            batch = list(pairs(group))
            if batch:
                yield batch
            del batch  # a gathered layer must not outlive the next one's gather

    def _changed(self, live: dict[str, torch.Tensor], layout: Layout) -> Validation:
        self._forget()
        now = outline(live)
        names = {entry[0] for entry in now.entries() ^ layout.outline.entries()}
        gone = sorted(names - live.keys())
        text = f"the module is not as announced: {first_few(sorted(names))} changed"
        if gone:
            text = f"{first_few(gone)} is no longer in the module"
        return Validation(text, tensor=min(gone or names, default=None))

    def _forget(self) -> None:
        self._glance, self._was_plain = None, False
        for name in ("metadata", "_layout"):
            self.__dict__.pop(name, None)
