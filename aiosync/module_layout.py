"""What a module holds, read for a `ModuleSource`: names, ties, buffers, shards.

DTensors are known by their attributes; torch's distributed package is not imported for them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from aiosync.metadata import (
    ParamMeta,
    Replicate,
    Shard,
    first_few,
    plain_metas,
    validate_metadata,
)
from aiosync.module_walk import DTYPE, PLAIN_TYPES, are_strided, named_members, outline
from statemachines.errors import Validation

if TYPE_CHECKING:
    from torch import nn

    from aiosync.metadata import Placement
    from aiosync.module_walk import Members, Outline

Rename: TypeAlias = Callable[[str], str | None] | Mapping[str, str | None]


class Layout(NamedTuple):
    """What is announced about a module, and how to find it again."""

    metadata: list[ParamMeta]
    announced: list[ParamMeta]
    """The same as it was made: somebody may change the list."""
    keys: dict[str, str]
    """The module's own name by announced name."""
    aliases: dict[str, str]
    """Announced name by the further (renamed) names of the same tensor."""
    left_out: list[str]
    outline: Outline
    """What the module looked like."""


def live_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under every name they have, as they are now."""
    parameters, buffers = named_members(module)
    return parameters | buffers


def lay_out(
    module: nn.Module,
    *,
    rename: Rename | None,
    dtype: torch.dtype | None,
    persistent: bool,
    held: Members | None = None,
) -> Layout:
    """Decide what of `module` is sent, under which names.

    Args:
        held: What `named_members` has just found.

    Raises:
        Validation: A tensor has no data, two tensors get one name, or nothing is left to send.
    """
    held_parameters, held_buffers = held or named_members(module)
    live = held_parameters | held_buffers
    chosen, buffers = list(held_parameters), list(held_buffers)
    sent = _persistent(module, buffers) if persistent else []
    kept = set(sent)
    left_out = [name for name in buffers if name not in kept]
    aliases: dict[str, str] = {}
    order = _beside_their_layers(chosen, sent)
    # Of other kinds of tensors some have no shape; they are named below.
    look = outline(live) if are_strided(list(live.values())) else None
    if rename is None and look is not None and not look.firsts:
        keys = dict(zip(order, order, strict=True))
    else:
        keys, aliases, dropped = _named(order, rename, live)
        left_out += dropped
    if not keys:
        raise Validation(
            f"{type(module).__name__} has nothing to send; left out: {first_few(left_out)}"
        )
    tensors = list(map(live.__getitem__, keys.values()))
    if dtype is None and look is not None:
        shapes = dict(zip(look.names, look.shapes, strict=True))
        columns = map(DTYPE, tensors), map(shapes.__getitem__, keys.values())
        metas = plain_metas(keys, *columns)
    else:
        metas = [_describe(name, live[key], dtype) for name, key in keys.items()]
    metadata = validate_metadata(metas)
    return Layout(metadata, metadata.copy(), keys, aliases, left_out, look or outline(live))


def _named(
    order: list[str], rename: Rename | None, live: Mapping[str, torch.Tensor]
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """`Layout.keys` and `Layout.aliases` of tensors that may be tied, and what `rename` drops."""
    held: dict[str, str] = {}  # the module's own name by announced name
    firsts: dict[int, str] = {}  # announced name by tensor identity
    aliases: dict[str, str] = {}
    dropped: list[str] = []
    collisions: list[str] = []
    for key in order:
        name = key if rename is None else _new_name(key, rename)
        if name is None:
            dropped.append(key)
        elif name in held:
            if live[held[name]] is not live[key]:
                collisions.append(f"{held[name]} and {key} -> {name}")
        else:
            held[name] = key
            first = firsts.setdefault(id(live[key]), name)
            if first != name:
                aliases[name] = first
    if collisions:
        raise Validation(f"rename gives two tensors one name: {first_few(collisions)}")
    return {name: key for name, key in held.items() if name not in aliases}, aliases, dropped


def _new_name(key: str, rename: Rename) -> str | None:
    name = rename.get(key, key) if isinstance(rename, Mapping) else rename(key)
    if name is not None and not isinstance(name, str):
        raise Validation(f"rename({key!r}) gave {name!r}, not a name", tensor=key)
    return name


def _persistent(module: nn.Module, names: list[str]) -> list[str]:
    def kept(name: str) -> bool:
        owner, _, leaf = name.rpartition(".")
        submodule = module.get_submodule(owner)
        return leaf not in submodule._non_persistent_buffers_set  # noqa: SLF001 -- torch has no public form

    return [name for name in names if kept(name)]


def _beside_their_layers(parameters: list[str], buffers: list[str]) -> list[str]:
    """Each buffer right after the last parameter it shares most leading segments with."""
    if not buffers:
        return parameters
    last = {
        name[:cut]: at
        for at, name in enumerate(parameters)
        for cut in (i for i, char in enumerate(name) if char == ".")
    }
    after: dict[int, list[str]] = {}
    for name in buffers:
        prefix = name.rpartition(".")[0]
        while prefix and prefix not in last:
            prefix = prefix.rpartition(".")[0]
        after.setdefault(last.get(prefix, len(parameters) - 1), []).append(name)
    merged = after.pop(-1, [])  # there are no parameters at all
    for at, name in enumerate(parameters):
        merged += [name, *after.get(at, [])]
    return merged


def _describe(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> ParamMeta:
    if tensor.is_nested:
        raise Validation(f"{name} is a nested tensor; only strided ones are sent", tensor=name)
    if is_lazy(tensor):
        raise Validation(f"{name} is not initialised yet (lazy module)", tensor=name)
    if tensor.device.type == "meta":
        raise Validation(f"{name} is on the meta device: it has no data", tensor=name)
    if tensor.layout is not torch.strided:
        raise Validation(f"{name} has layout {tensor.layout}; only strided is sent", tensor=name)
    wire = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
    if not is_dtensor(tensor):
        return ParamMeta(name, wire, tuple(tensor.shape))
    mesh = tensor.device_mesh  # type: ignore[attr-defined] # a DTensor
    return ParamMeta(
        name,
        wire,
        tuple(tensor.shape),
        owners=tuple(mesh.mesh.flatten().tolist()),
        mesh_shape=tuple(mesh.mesh.shape),
        placements=placements_of(tensor),
    )


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, with the strides that a view as bytes needs; copies only what is strided.

    torch calls a dimension of size one contiguous whatever its stride, but then refuses to view
    the tensor as bytes.
    """
    tensor = tensor.contiguous()
    shape = tensor.shape
    if 1 not in shape and 0 not in shape:
        return tensor
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    plain = tuple(reversed(strides))
    return tensor if tensor.stride() == plain else tensor.as_strided(tensor.shape, plain)


def bit_equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bytes."""
    return torch.equal(_bytes(one), _bytes(two))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return compact(tensor).reshape(-1).view(torch.uint8)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor is sharded over a device mesh."""
    if type(tensor) in PLAIN_TYPES:
        return False
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "device_mesh")


def placements_of(tensor: Any) -> tuple[Placement, ...] | None:
    """A DTensor's placements, or None where one is neither plain `Shard` nor `Replicate`."""
    placements: list[Placement] = []
    for placement in tensor.placements:
        kind = type(placement)  # exact: a strided shard is a Shard by name of its base only
        if not kind.__module__.startswith("torch.distributed"):
            return None
        if kind.__name__ == "Shard":
            placements.append(Shard(placement.dim))
        elif kind.__name__ == "Replicate":
            placements.append(Replicate())
        else:
            return None
    return tuple(placements)


def full_piece(tensor: Any, cast: torch.dtype | None) -> torch.Tensor | None:
    """The whole tensor (a collective for a DTensor); None where this rank is not in its mesh."""
    if cast is None and type(tensor) in PLAIN_TYPES:
        return tensor  # type: ignore[no-any-return] # just checked
    if not is_dtensor(tensor):
        return _cast(tensor, cast)
    if tensor.device_mesh.get_coordinate() is None:
        return None
    if placements_of(tensor) is not None:
        tensor = _cast(tensor, cast)  # before the gather: fewer bytes, the same values
    return _cast(tensor.full_tensor(), cast)


def local_piece(tensor: Any, cast: torch.dtype | None) -> torch.Tensor | None:
    """This rank's shard; gathered where the placements cannot be described."""
    if not is_dtensor(tensor) or placements_of(tensor) is None:
        return full_piece(tensor, cast)
    if tensor.device_mesh.get_coordinate() is None:
        return None
    return _cast(tensor.to_local(), cast)


def _cast(tensor: torch.Tensor, cast: torch.dtype | None) -> torch.Tensor:
    return tensor if cast is None else tensor.to(cast)


def is_resident(tensor: torch.Tensor, meta: ParamMeta) -> bool:
    """Whether a pass yields the tensor's own memory: plain, contiguous, uncast."""
    return (
        not is_dtensor(tensor)
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and (tensor.dtype, tuple(tensor.shape)) == (meta.dtype, meta.shape)
    )


def opens_async(session: Any) -> bool:
    """Whether calling `session` gives a context manager that is async only."""
    while isinstance(session, functools.partial):
        session = session.func
    if inspect.isclass(session):
        return hasattr(session, "__aenter__") and not hasattr(session, "__enter__")
    return session is not None and inspect.isasyncgenfunction(inspect.unwrap(session))
