"""What is announced about a tensor before it moves: name, dtype, shape, owners, placement.

`ParamMeta` and the helpers keep the names and rules of vLLM's weight transfer, so that a source
written for it describes its tensors here unchanged. torch is imported on first use only.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from dataclasses import dataclass, field, fields
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from aiosync.few_collections import few_collections
from statemachines.errors import Validation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

_MAX_DIMS = 64
_MAX_BYTES = 2**63 - 1
# Quantised tensors carry state beside their bytes; torch cannot copy the sub-byte shells at all.
_UNSENDABLE = re.compile(r"q|bit|u?int[1-7]$")


@dataclass(frozen=True)
class Replicate:
    """Every rank along this mesh axis holds the whole tensor."""


@dataclass(frozen=True)
class Shard:
    """Dimension `dim` is split along this mesh axis, as `torch.chunk` splits."""

    dim: int


Placement: TypeAlias = Replicate | Shard


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """One parameter as it travels.

    Attributes:
        name: Checkpoint name.
        dtype: Dtype on the wire.
        shape: Full shape, whatever the sharding.
        owners: Trainer ranks that have it, in mesh order; None: every rank.
        mesh_shape: Mesh over `owners`, row-major; ``(len(owners),)`` unless given.
        placements: One per mesh axis, describing what `WeightSource.iter_local` yields. When two
            axes split the same dimension, the outer axis splits first. All-`Replicate` is None.

    Raises:
        Validation: (a `ValueError`) owners, mesh and placements contradict each other.
        TypeError: A placement is neither `Replicate` nor `Shard`.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Placement, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if type(self.shape) is not tuple:
            self._set("shape", tuple(self.shape))
        if self.owners is None:
            if self.mesh_shape is not None or self.placements is not None:
                raise self._wrong("mesh_shape and placements need owners")
            return
        owners = tuple(self.owners)
        self._set("owners", owners)
        if not owners or not all(_is_count(rank) for rank in owners):
            raise self._wrong(f"owners must be ranks (ints >= 0), at least one, not {owners!r}")
        if len(set(owners)) != len(owners):
            raise self._wrong(f"owners {owners!r} repeat a rank")
        mesh = (len(owners),) if self.mesh_shape is None else tuple(self.mesh_shape)
        self._set("mesh_shape", mesh)
        if not all(_is_count(size) and size > 0 for size in mesh) or math.prod(mesh) != len(owners):
            raise self._wrong(f"mesh_shape {mesh!r} does not hold {len(owners)} owners")
        if self.placements is not None:
            self._set("placements", self._checked(tuple(self.placements), mesh))

    def _checked(
        self, placements: tuple[Any, ...], mesh: tuple[int, ...]
    ) -> tuple[Placement, ...] | None:
        if len(placements) != len(mesh):
            raise self._wrong(f"{len(placements)} placements for a mesh of {len(mesh)} axes")
        for placement in placements:
            if not isinstance(placement, Replicate | Shard):
                raise TypeError(
                    f"{self.name}: placements are Replicate() or Shard(dim), not {placement!r}"
                )
            if isinstance(placement, Shard) and not (
                _is_count(placement.dim) and placement.dim < len(self.shape)
            ):
                raise self._wrong(f"{placement!r} of a tensor with {len(self.shape)} dimensions")
        return placements if any(isinstance(p, Shard) for p in placements) else None

    def _set(self, attribute: str, value: object) -> None:
        object.__setattr__(self, attribute, value)

    def _wrong(self, message: str) -> Validation:
        return Validation(f"{self.name}: {message}", tensor=self.name)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def materialize_full_tensor(tensor: Any) -> Any:
    """``tensor.full_tensor()`` where there is one (a DTensor: a collective), else `tensor`."""
    full = getattr(tensor, "full_tensor", None)
    return full() if callable(full) else tensor


def first_few(names: Sequence[str], limit: int = 4) -> str:
    """The names as they stand in a message: the first `limit`, then how many more."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} (+{len(names) - limit} more)"


@functools.cache
def _dtypes() -> dict[str, torch.dtype]:
    import torch

    found = ((name, getattr(torch, name, None)) for name in dir(torch))
    return {name: dtype for name, dtype in found if isinstance(dtype, torch.dtype)}


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name on the wire, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name.

    Raises:
        Validation: No such dtype, or one whose tensors are more than their bytes (quantised,
            sub-byte).
    """
    dtype = _dtypes().get(str(name))
    if dtype is None or not is_sendable(dtype):
        raise Validation(f"{name!r} is not a torch dtype whose tensors can be sent")
    return dtype


def is_sendable(dtype: Any) -> bool:
    """Whether this is a dtype whose tensors are whole bytes that torch can copy."""
    try:
        return _is_sendable(dtype)
    except TypeError:  # it cannot be hashed
        return False


@functools.lru_cache(maxsize=256)
def _is_sendable(dtype: Any) -> bool:
    return dtype in _dtypes().values() and _UNSENDABLE.match(dtype_name(dtype)) is None


def meta_nbytes(meta: ParamMeta) -> int:
    """Bytes of the full tensor.

    Raises:
        Validation: A dimension is negative or no int, there are more than 64 of them, or the
            size does not fit in 63 bits.
    """
    shape = meta.shape
    if len(shape) > _MAX_DIMS:
        text = f"{meta.name}: {len(shape)} dimensions, at most {_MAX_DIMS}"
        raise Validation(text, tensor=meta.name)
    total, extent = meta.dtype.itemsize, meta.dtype.itemsize
    for size in shape:
        if not _is_count(size):
            raise Validation(f"{meta.name}: bad dimension in shape {shape!r}", tensor=meta.name)
        total *= size
        extent *= max(size, 1)  # torch computes strides of empty tensors too
        if extent > _MAX_BYTES:
            raise Validation(f"{meta.name}: shape {shape!r} overflows 63 bits", tensor=meta.name)
    return total


def _as_meta(value: Any, position: int) -> ParamMeta:
    if isinstance(value, ParamMeta):
        return value
    try:  # vLLM's own ParamMeta has the same fields
        placements = value.placements
        return ParamMeta(
            value.name,
            value.dtype,
            value.shape,
            owners=value.owners,
            mesh_shape=value.mesh_shape,
            placements=None if placements is None else tuple(map(_as_placement, placements)),
        )
    except AttributeError:
        raise TypeError(
            f"metadata[{position}] must be a ParamMeta, not {type(value).__name__}"
        ) from None


def _as_placement(value: Any) -> Any:
    kind = type(value).__name__
    if kind == "Replicate":
        return Replicate()
    return Shard(value.dim) if kind == "Shard" else value


def validate_metadata(metadata: Iterable[Any]) -> list[ParamMeta]:
    """Check a whole announcement; vLLM's `ParamMeta` objects are converted.

    Raises:
        Validation: It is empty, a name is empty, repeated or no text, a dtype cannot be sent, or
            a size is impossible. Names that differ in any byte are different names.
        TypeError: Something in it is no `ParamMeta`.
    """
    metas = list(metadata)
    if set(map(type, metas)) != {ParamMeta}:
        metas = [_as_meta(value, position) for position, value in enumerate(metas)]
    if not metas:
        raise Validation("metadata announces no tensor")
    if not _are_sound([meta.name for meta in metas]):
        _check_names(metas)
    for dtype in {id(meta.dtype): meta.dtype for meta in metas}.values():
        if not is_sendable(dtype):
            name = next(meta.name for meta in metas if meta.dtype is dtype)
            raise Validation(f"{name}: dtype {dtype!r} cannot be sent", tensor=name)
    sizes_of(metas)
    return metas


def sizes_of(metadata: Sequence[ParamMeta]) -> list[int]:
    """`meta_nbytes` of each; each shape object is looked at once a dtype.

    Raises:
        Validation: As `meta_nbytes`.
    """
    # By identity: `True` is equal to 1, but no dimension. The metadata keeps the shapes alive.
    tables: dict[torch.dtype, dict[int, int]] = {}
    sizes: list[int] = []
    for meta in metadata:
        table = tables.get(meta.dtype)
        if table is None:
            table = tables[meta.dtype] = {}
        nbytes = table.get(id(meta.shape))
        if nbytes is None:
            nbytes = table[id(meta.shape)] = meta_nbytes(meta)
        sizes.append(nbytes)
    return sizes


class Validated:
    """`validate_metadata`, which has nothing to do for the very same `ParamMeta`s as last time.

    Least where they come in the very same tuple: a look at each takes a while, too.
    """

    __slots__ = ("_from", "_last")

    def __init__(self) -> None:
        self._from: tuple[Any, ...] | None = None
        self._last: list[ParamMeta] = []

    def __call__(self, metadata: Iterable[Any]) -> list[ParamMeta]:
        """See `validate_metadata`; what it returns is not to be changed."""
        if self._from is not None and metadata is self._from:
            return self._last
        metas = list(metadata)
        # By identity, which is enough: they are frozen.
        if len(metas) != len(self._last) or not all(map(is_, metas, self._last)):
            self._last = validate_metadata(metas)
        self._from = None
        if type(metadata) is tuple and all(map(is_, metadata, self._last)):
            self._from = metadata  # nothing in it can change
        return self._last


def _are_sound(names: list[Any]) -> bool:
    """Whether all of them are different non-empty strings of valid Unicode."""
    if set(map(type, names)) != {str} or "" in names or len(set(names)) != len(names):
        return False
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_names(metas: Sequence[ParamMeta]) -> None:
    seen: set[str] = set()
    for position, meta in enumerate(metas):
        _check_name(meta.name, position)
        if meta.name in seen:
            raise Validation(f"metadata[{position}] repeats {meta.name!r}", tensor=meta.name)
        seen.add(meta.name)


def _check_name(name: object, position: int) -> None:
    if not isinstance(name, str) or not name:
        raise Validation(f"metadata[{position}]: a name is non-empty text, not {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Validation(f"metadata[{position}]: {name!r} is not valid Unicode") from None


def metadata_digest(metadata: Sequence[ParamMeta]) -> str:
    """32 hex digits over order, names, dtypes, shapes, owners, meshes and placements."""
    texts = _dtype_texts(metadata)

    def row(meta: ParamMeta) -> tuple[Any, ...]:
        dims = (placed := meta.placements) and [getattr(p, "dim", -1) for p in placed]
        return meta.name, texts[meta.dtype], meta.shape, meta.owners, meta.mesh_shape, dims

    digest, encode = hashlib.blake2b(digest_size=16), msgspec.msgpack.encode
    for start in range(0, len(metadata), 15):  # how many there are is then said in one byte
        digest.update(encode(list(map(row, metadata[start : start + 15])))[1:])
    return digest.hexdigest()  # rows are self-delimiting: no two share bytes


def _dtype_texts(metadata: Sequence[ParamMeta]) -> dict[torch.dtype, str]:
    return {dtype: dtype_name(dtype) for dtype in {meta.dtype for meta in metadata}}


def to_wire(metadata: Sequence[ParamMeta]) -> tuple[list[str], list[str], list[list[int]]]:
    """``(names, dtype_names, shapes)`` as update infos carry them."""
    names = [meta.name for meta in metadata]
    texts = _dtype_texts(metadata)
    lists = {shape: list(shape) for shape in {meta.shape for meta in metadata}}  # one if equal
    return names, [texts[meta.dtype] for meta in metadata], [lists[meta.shape] for meta in metadata]


def from_wire(
    names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[ParamMeta]:
    """The reverse of `to_wire`, for lists from a peer.

    Raises:
        Validation: The lists differ in length, or what they say is impossible.
    """
    if not len(names) == len(dtype_names) == len(shapes):
        lengths = f"{len(names)}, {len(dtype_names)}, {len(shapes)}"
        raise Validation(f"names, dtype_names and shapes differ in length: {lengths}")
    for name, shape in zip(names, shapes, strict=True):
        if not isinstance(shape, list | tuple):
            raise Validation(f"{name}: shape must be a list of ints, not {shape!r}")
    dtypes: dict[str, torch.dtype] = {}
    for text in dict.fromkeys(dtype_names):
        try:
            dtypes[text] = parse_dtype(text)
        except Validation as error:
            name = names[list(dtype_names).index(text)]
            raise error.locate(tensor=str(name))  # noqa: B904 -- the same error, now with its place
    with few_collections:
        kept = list(map(tuple, shapes))
        if {int}.issuperset(map(type, chain.from_iterable(kept))):  # `True` equals 1: no dimension
            kept = shared(kept)
        return validate_metadata(plain_metas(names, map(dtypes.__getitem__, dtype_names), kept))


def plain_metas(
    names: Iterable[str], dtypes: Iterable[torch.dtype], shapes: Iterable[tuple[int, ...]]
) -> list[ParamMeta]:
    """`ParamMeta` of each name, without owners; what a constructor does for one takes long."""
    made = []
    with few_collections:
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            meta = _BARE(ParamMeta)
            _NAME(meta, name)
            _DTYPE(meta, dtype)
            _SHAPE(meta, shape)
            _OWNERS(meta, None)
            _MESH(meta, None)
            _PLACEMENTS(meta, None)
            made.append(meta)
    return made


_BARE = object.__new__
_NAME, _DTYPE, _SHAPE, _OWNERS, _MESH, _PLACEMENTS = (
    getattr(ParamMeta, attribute.name).__set__ for attribute in fields(ParamMeta)
)


def shared(shapes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Plain tuples, one object for all that are equal: `sizes_of` looks at each object once."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    return [known.setdefault(shape, shape) for shape in map(tuple, shapes)]
