"""Where announced tensors go in a model: decided, and checked, before any memory is touched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from aiosync.errors import Coverage, Validation
from aiosync.metadata import dtype_name, first_few
from aiosync.module_layout import compact, is_dtensor, live_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiosync.metadata import ParamMeta


class Destinations(NamedTuple):
    """For each announced tensor, the model's tensors it is written to (none: it is skipped)."""

    writes: list[list[torch.Tensor]]
    ties: list[tuple[int, int]]
    """Announced tensors that end in one memory here: (first, later). They must agree."""
    left_out: list[str]
    """Names of the model that keep their values."""
    skipped: int
    """Announced tensors this model does not have."""


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
        required = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        return Model(live_tensors(model), required)
    if not isinstance(model, Mapping):
        raise TypeError(
            f"a model is a torch.nn.Module, an object with load_weights(iterable), or a dict of "
            f"tensors, not {type(model).__name__}"
        )
    for name, tensor in model.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"model[{name!r}] is no tensor but {type(tensor).__name__}")
    return Model(dict(model), list(model))


def find_destinations(
    model: Model, metadata: Sequence[ParamMeta], aliases: Mapping[str, str], *, partial: bool
) -> Destinations:
    """Match an announcement with a model.

    Args:
        aliases: Further names of announced tensors; one that is a name here and is not announced
            itself gets the same data.
        partial: Names this model does not have are skipped, and modules that no name touches
            keep their values. A touched module is still covered whole.

    Raises:
        Coverage: Unknown or missing names; with `partial`, no name that is known.
        Validation: A shape or dtype differs, or a destination cannot be written (meta, lazy,
            sharded, sharing memory with another one).
    """
    further: dict[str, list[str]] = {}
    announced = {meta.name for meta in metadata}
    for alias, name in aliases.items():
        if alias not in announced:
            further.setdefault(name, []).append(alias)
    named = [
        [name for name in (meta.name, *further.get(meta.name, ())) if name in model.tensors]
        for meta in metadata
    ]
    left_out = _check_coverage(model, metadata, named, partial=partial)
    for meta, names in zip(metadata, named, strict=True):
        for name in names:
            _check_tensor(name, model.tensors[name], meta)
    ties = _share_memory(model, named)
    writes: list[list[torch.Tensor]] = []
    taken: set[tuple[Any, ...]] = set()  # of tied names, the first one writes
    for names in named:
        regions = {_region(model.tensors[name]): model.tensors[name] for name in names}
        fresh = [t.detach() for region, t in regions.items() if region not in taken]
        writes.append([compact(t) if t.is_contiguous() else t for t in fresh])
        taken.update(regions)
    return Destinations(writes, ties, left_out, sum(not names for names in named))


def _region(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for names that are the very same memory, seen the same way."""
    no_bytes = is_lazy(tensor) or tensor.device.type == "meta" or tensor.numel() == 0
    if no_bytes or tensor.layout is not torch.strided or is_dtensor(tensor):
        return ("by identity", id(tensor))
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _check_coverage(
    model: Model, metadata: Sequence[ParamMeta], named: list[list[str]], *, partial: bool
) -> list[str]:
    hits = [name for names in named for name in names]
    unknown = [meta.name for meta, names in zip(metadata, named, strict=True) if not names]
    covered = {_region(model.tensors[name]) for name in hits}
    untouched = [n for n, t in model.tensors.items() if _region(t) not in covered]
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


def _check_tensor(name: str, tensor: torch.Tensor, meta: ParamMeta) -> None:
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
        problem = f"of shape {tuple(tensor.shape)}, announced with {meta.shape}"
    elif tensor.dtype != meta.dtype:
        problem = f"{dtype_name(tensor.dtype)}, announced as {dtype_name(meta.dtype)}"
    elif tensor.is_conj() or tensor.is_neg():
        problem = "a lazily conjugated or negated view, not memory of its own"
    elif _overlaps_itself(tensor):
        problem = f"expanded (strides {tensor.stride()}): its elements may share memory"
    if problem is not None:
        raise Validation(f"{name} is {problem}", tensor=name)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


class _Span(NamedTuple):
    start: int
    end: int
    name: str
    tensor: torch.Tensor


def _share_memory(model: Model, named: list[list[str]]) -> list[tuple[int, int]]:
    """Ties between announced tensors; raises where destinations overlap in part."""
    first: dict[tuple[Any, ...], int] = {}
    ties: list[tuple[int, int]] = []
    spans: dict[torch.device, list[_Span]] = {}
    for index, names in enumerate(named):
        for name in names:
            tensor = model.tensors[name]
            region = _region(tensor)
            known = first.setdefault(region, index)
            if known != index:
                ties.append((known, index))
            elif tensor.numel():
                extent = sum(
                    s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True)
                )
                start, size = tensor.data_ptr(), tensor.element_size()
                span = _Span(start, start + (extent + 1) * size, name, tensor)
                spans.setdefault(tensor.device, []).append(span)
    for on_device in spans.values():
        _check_disjoint(on_device)
    return ties


def _check_disjoint(spans: list[_Span]) -> None:
    spans.sort(key=lambda span: span[:2])
    cluster: list[_Span] = []
    end = 0
    for span in spans:
        if cluster and span.start >= end:
            _check_cluster(cluster)
            cluster = []
        cluster.append(span)
        end = max(end, span.end) if len(cluster) > 1 else span.end
    _check_cluster(cluster)


def _check_cluster(cluster: list[_Span]) -> None:
    """Ranges that interleave are fine (columns of one matrix); shared bytes are not."""
    distinct = list({_region(s.tensor): s for s in cluster}.values())
    if len(distinct) < 2:
        return
    base = distinct[0].start
    unit = math.gcd(
        *(s.tensor.element_size() for s in distinct), *(s.start - base for s in distinct)
    )
    taken = torch.zeros((max(s.end for s in distinct) - base) // unit, dtype=torch.bool)
    for span in distinct:
        per = span.tensor.element_size() // unit
        view = taken.as_strided(
            (*span.tensor.shape, per),
            (*(stride * per for stride in span.tensor.stride()), 1),
            (span.start - base) // unit,
        )
        if bool(view.any()):
            others = [s.name for s in distinct if s is not span]
            raise Validation(
                f"{span.name} shares part of its memory with {first_few(others)}", tensor=span.name
            )
        view.fill_(True)


def write(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each source into its destination, same memory, and wait until it is there.

    Batched by device, dtype and kind, which is what the batched copy is fast for.
    """
    batches: dict[tuple[Any, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for destination, source in pairs:
        key = (destination.is_inference(), destination.device, source.device, destination.dtype)
        into, out_of = batches.setdefault(key, ([], []))
        into.append(destination)
        out_of.append(source)
    for (inference, *_), (into, out_of) in batches.items():
        # Tensors made in inference mode may be written in inference mode only.
        with torch.inference_mode() if inference else torch.no_grad():
            torch._foreach_copy_(into, out_of)
    for device in {key[1] for key in batches if key[1].type == "cuda"}:
        torch.cuda.synchronize(device)
