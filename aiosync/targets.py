"""Where announced tensors go in a model: decided, and checked, before any memory is touched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from aiosync.destinations import Destinations, Names, Writes
from aiosync.errors import Coverage, Validation
from aiosync.glance import Glance, Looking
from aiosync.metadata import dtype_name, first_few
from aiosync.module_layout import is_dtensor
from aiosync.module_walk import DEVICE, DTYPE, SHAPE, are_plain, is_freed, named_members, same
from aiosync.overlaps import check_disjoint, lie_apart, overlaps_itself, span_of
from aiosync.places import Places, region_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiosync.metadata import ParamMeta
    from aiosync.module_walk import Members


class Model(NamedTuple):
    """A model's tensors by name, and the names a full update must cover."""

    tensors: dict[str, torch.Tensor]
    required: list[str]


def model_tensors(model: Any) -> Model:
    """Every named tensor of a module or of a mapping, under all its names.

    Raises:
        TypeError: `model` is neither, or the mapping holds something that is no tensor.
    """
    if isinstance(model, nn.Module):
        parameters, buffers = named_members(model)
        return Model(parameters | buffers, list(parameters))
    if not isinstance(model, Mapping):
        raise TypeError(
            f"a model is a torch.nn.Module, an object with load_weights(iterable), or a dict of "
            f"tensors, not {type(model).__name__}"
        )
    for name, tensor in model.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"model[{name!r}] is no tensor but {type(tensor).__name__}")
    return Model(dict(model), list(model))


class _Match(NamedTuple):
    names: Names
    """For each announced tensor, the names here that get it; tied ones under the first only."""
    ties: list[tuple[int, int]]
    left_out: list[str]
    skipped: int
    device: torch.device | None  # see `Writes`


class Matcher:
    """Matches announcements with one model; a match is kept while both sides stay as they are.

    It keeps names and addresses, never tensors: memory that the model gives up is free at once.
    """

    __slots__ = ("_glance", "_is_foreseen", "_key", "_match", "_places")

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._glance: Glance | None = None
        self._places: Places | None = None
        self._match = _Match(Names([]), [], [], 0, None)
        self._is_foreseen = False

    def find(
        self,
        model: Any,
        metadata: list[ParamMeta],
        aliases: Mapping[str, str],
        *,
        partial: bool,
        late: bool = False,
    ) -> Destinations:
        """Decide where everything goes.

        Args:
            aliases: Further names of announced tensors; one that is a name here and is not
                announced itself gets the same data.
            partial: Names this model does not have are skipped, and modules that no name touches
                keep their values. A touched module is still covered whole.
            late: A model that seems to be as it was is looked at when tensors of it are asked for:
                see `Writes.are_seen`.

        Raises:
            Coverage: Unknown or missing names; with `partial`, no name that is known.
            Validation: A shape or dtype differs, or a destination cannot be written (meta, lazy,
                sharded, sharing memory with another one).
        """
        glanced = self._at_a_glance(model, metadata, aliases, partial=partial, late=late)
        if glanced is not None:
            return glanced
        found = model_tensors(model)
        tensors = found.tensors
        key = (metadata, dict(aliases), partial, found.required)
        if key != self._key or self._places is None or not self._places.hold(tensors):
            self._places = None
            self._match = _matched(found, metadata, aliases, partial=partial)
            self._key, self._places = key, Places(tensors)
        elif self._match.device is not None and not self._is_foreseen:  # it seems to stay as it is
            self._glance = Glance.of(model, tensors, self._match.names.single)
        self._is_foreseen = False
        names, ties, left_out, skipped, device = self._match
        return Destinations(Writes(names, tensors, device), ties, left_out, skipped)

    def foresee(self, members: Members, metadata: list[ParamMeta]) -> bool:
        """Match an announcement that may come with a module's tensors, before the first `find`.

        Then `find` has but to see that both are as they were. False, and nothing is kept: the
        tensors are not plain, or not apart.
        """
        parameters, buffers = members
        model = Model(parameters | buffers, list(parameters))
        # The places first: what changes while it is matched is then elsewhere later on.
        places = Places(model.tensors)
        match = _matched_plainly(model, metadata, {})
        if match is None:
            return False
        self._key, self._places = (metadata, {}, False, model.required), places
        self._match, self._is_foreseen = match, True
        return True

    def _at_a_glance(
        self,
        model: Any,
        metadata: list[ParamMeta],
        aliases: Mapping[str, str],
        *,
        partial: bool,
        late: bool,
    ) -> Destinations | None:
        """What `find` found last, if everything is as it was; quickly."""
        glance = self._glance
        if glance is None or self._key is None:
            return None
        if self._key[:3] == (metadata, dict(aliases), partial):
            writes = Writes.of(glance, Looking(glance, model), self._match.device)
            # What changes a model changes its first tensors, most of the time.
            if writes.are_seen(1 if late else None):
                _, ties, left_out, skipped, _ = self._match
                return Destinations(writes, ties, left_out, skipped)
        self._glance = None
        return None

    def holds(self, model: Any) -> bool:
        """Whether the model still has the tensors of the last match, where they were."""
        if self._glance is not None and self._glance.look(model) is not None:
            return True
        return self._places is None or self._places.hold(model_tensors(model).tensors)


def _common_device(written: list[torch.Tensor]) -> torch.device | None:
    """Where these plain tensors are, if they are in one place and can be written to as they are."""
    devices = set(map(DEVICE, written))
    if len(devices) != 1 or any(map(torch.Tensor.is_inference, written)):
        return None
    return devices.pop()


def further_names(
    metadata: Sequence[ParamMeta], aliases: Mapping[str, str]
) -> dict[str, list[str]]:
    """The aliases that are not announced themselves, by the name that travels for them."""
    further: dict[str, list[str]] = {}
    if aliases:
        announced = {meta.name for meta in metadata}
        for alias, name in aliases.items():
            if alias not in announced:
                further.setdefault(name, []).append(alias)
    return further


def wanted_names(model: Any, further: dict[str, list[str]]) -> dict[str, list[str]]:
    """Those that a model with its own loader has to be given, as far as one can tell.

    A module that ties the names itself has each tensor under one name only, and its loader may
    know no other. Of any other object nobody knows, and a name left out would keep its old value.
    """
    if not further or not isinstance(model, nn.Module):
        return further
    own = dict(model.named_parameters())
    return {name: [alias for alias in more if alias in own] for name, more in further.items()}


def _matched(
    model: Model, metadata: Sequence[ParamMeta], aliases: Mapping[str, str], *, partial: bool
) -> _Match:
    plainly = _matched_plainly(model, metadata, aliases)
    if plainly is not None:
        return plainly
    regions = {name: region_of(tensor) for name, tensor in model.tensors.items()}
    further = further_names(metadata, aliases)
    named = [
        [name for name in (meta.name, *further.get(meta.name, ())) if name in model.tensors]
        for meta in metadata
    ]
    left_out = check_coverage(model, regions, metadata, named, partial=partial)
    for meta, names in zip(metadata, named, strict=True):
        for name in names:
            check_tensor(name, model.tensors[name], meta)
    firsts: dict[tuple[Any, ...], tuple[int, str]] = {}
    ties: list[tuple[int, int]] = []
    for index, names in enumerate(named):
        for name in names:
            first, _ = firsts.setdefault(regions[name], (index, name))
            if first != index:
                ties.append((first, index))
    check_disjoint([span_of(name, model.tensors[name]) for _, name in firsts.values()])
    writers = [[n for n in names if firsts[regions[n]][1] == n] for names in named]
    made = Names(writers)
    written = list(map(model.tensors.__getitem__, made.all()))
    device = _common_device(written) if not made.more and are_plain(written) else None
    return _Match(made, ties, left_out, sum(not names for names in named), device)


def _matched_plainly(
    model: Model, metadata: Sequence[ParamMeta], aliases: Mapping[str, str]
) -> _Match | None:
    """The match of a model all of whose tensors are plain and apart, each announced under its name.

    Without an object for each of many thousands of tensors; None where anything is less simple.
    """
    names, live = [meta.name for meta in metadata], list(model.tensors.values())
    announced = set(names)
    simple = (
        announced.issuperset(aliases)
        and model.tensors.keys() >= announced >= set(model.required)
        and len(set(map(id, live))) == len(live)
        and are_plain(live)
        and len(set(map(DEVICE, live))) == 1
        and lie_apart(live)
    )
    if not simple:
        return None
    tensors = list(map(model.tensors.__getitem__, names))
    if not same([meta.dtype for meta in metadata], map(DTYPE, tensors)):
        return None
    if not same([meta.shape for meta in metadata], map(SHAPE, tensors)):
        return None
    left_out = [name for name in model.tensors if name not in announced]
    device = None if any(map(torch.Tensor.is_inference, tensors)) else live[0].device
    return _Match(Names.of(names), [], left_out, 0, device)


def check_coverage(
    model: Model,
    regions: Mapping[str, tuple[Any, ...]],
    metadata: Sequence[ParamMeta],
    named: list[list[str]],
    *,
    partial: bool,
) -> list[str]:
    """Names of the model that no tensor goes to; raises where one of them had to.

    Args:
        regions: `region_of` by name.
        named: For each announced tensor, the names here that get it.
    """
    hits = [name for names in named for name in names]
    unknown = [meta.name for meta, names in zip(metadata, named, strict=True) if not names]
    covered = {regions[name] for name in hits}
    untouched = [name for name, region in regions.items() if region not in covered]
    touched = {name.rpartition(".")[0] for name in hits}
    required = set(model.required)
    if partial:
        unknown = [] if hits else unknown
        required = {name for name in required if name.rpartition(".")[0] in touched}
    missing = [name for name in untouched if name in required]
    if not unknown and not missing:
        return untouched
    problems = []
    if unknown:
        problems.append(
            f"{len(unknown)} of {len(metadata)} announced names are unknown here: "
            f"{first_few(unknown)}"
        )
    if missing:
        problems.append(f"{len(missing)} names here are missing from it: {first_few(missing)}")
    raise Coverage(
        f"the {'partial ' if partial else ''}update does not cover the model; "
        + "; ".join(problems),
        tensor=(missing or unknown)[0],
        detail={"unknown": len(unknown), "missing": len(missing)},
    )


def check_tensor(
    name: str, tensor: torch.Tensor, meta: ParamMeta, *, how: str = "announced"
) -> None:
    """Refuse a destination that cannot take what `meta` describes."""
    problem: str | None = None
    if is_lazy(tensor):
        problem = "not initialised yet (lazy module)"
    elif tensor.device.type == "meta":
        problem = "on the meta device: nothing can be written to it"
    elif is_dtensor(tensor):
        problem = "a DTensor; give the model a load_weights that shards"
    elif tensor.layout is not torch.strided:
        problem = f"of layout {tensor.layout}; only strided tensors are written"
    elif tuple(tensor.shape) != meta.shape:
        problem = f"of shape {tuple(tensor.shape)}, {how} with {meta.shape}"
    elif tensor.dtype != meta.dtype:
        problem = f"{dtype_name(tensor.dtype)}, {how} as {dtype_name(meta.dtype)}"
    elif tensor.is_conj() or tensor.is_neg():
        problem = "a lazily conjugated or negated view, not memory of its own"
    elif is_freed(tensor):
        problem = "without memory: its storage was freed"
    elif overlaps_itself(tensor):
        problem = f"expanded (strides {tensor.stride()}): its elements may share memory"
    if problem is not None:
        raise Validation(f"{name} is {problem}", tensor=name)
