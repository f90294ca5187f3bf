"""Which bytes of which tensor go where in which chunk: pure, the same on both sides.

Both ends of a transfer compute the plan from sizes and a limit, nothing of it is sent but its
digest. The rules:

* ``nccl_packed``, vLLM's broadcast wire: append a tensor, cut once *more* than the limit is in
  the chunk. Every chunk but the last exceeds the limit, by up to its last tensor.
* ``ipc_packed``, vLLM's CUDA IPC wire: cut before a tensor that would not fit. No chunk exceeds
  the limit, and no tensor may.
* ``graded``, ours for a broadcast: whole tensors without padding, small chunks at both ends. Before
  the first chunk travels it is packed, and after the last one it is loaded, while nothing is on the
  wire. A chunk has at most half of what went before it, at most half of what comes after it, and
  no more than the limit; but always half of the limit in the first half and a quarter in the
  second, or a tensor: smaller ones would be through before the host has the next one ready.
* ``each``, vLLM's unpacked broadcast: every tensor is a chunk of its own, whatever its size.
* ``aligned``, ours: every tensor starts at a multiple of 64 bytes within its chunk and no chunk
  exceeds the limit. A tensor that fits into a chunk is never split; a larger one begins in the
  room that is left and goes on in the next chunks.

A tensor without bytes keeps its place as a piece of 0 bytes, so a chunk may have 0 bytes, too.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from itertools import accumulate, chain, repeat
from operator import mod
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from statemachines.errors import Validation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

NCCL_PACKED = "nccl_packed"
IPC_PACKED = "ipc_packed"
ALIGNED = "aligned"
GRADED = "graded"
EACH = "each"

ALIGNMENT = 64
_FIRST, _LAST = 2, 4  # the limit over the size of the first and of the last chunks
_MAX = 2**63 - 1  # what a torch size or an int64 on the wire can hold


class Piece(msgspec.Struct, frozen=True, gc=False):  # tuples would be looked at in collections
    """Bytes ``start`` up to ``start + nbytes`` of a tensor, at byte `offset` of a chunk."""

    tensor: int
    start: int
    offset: int
    nbytes: int


class Chunk(NamedTuple):
    """One unit of transfer; `nbytes` counts the padding between its pieces."""

    index: int  # type: ignore[assignment]  # hides tuple.index, of no use here
    nbytes: int
    pieces: tuple[Piece, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All chunks of a round, in order.

    Attributes:
        limit: Bytes, as the rule applies it (`aligned` rounds down to a multiple of 64).
        sizes: Bytes of each tensor.
        total_bytes: Payload, padding not counted.
        digest: Hex over rule, limit, sizes and itemsizes; equal digests mean equal chunks.
    """

    rule: str
    limit: int
    sizes: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    total_bytes: int
    digest: str


def plan_chunks(
    sizes: Iterable[int],
    itemsizes: Iterable[int],
    *,
    limit: int,
    rule: str,
    names: Sequence[str] | None = None,
) -> Plan:
    """Cut tensors of these byte sizes into chunks.

    Args:
        sizes: Bytes of each tensor, in the order both sides agreed on.
        itemsizes: Bytes of one element of each tensor.
        limit: Bytes of a chunk; what exactly it limits depends on the rule.
        rule: ``"nccl_packed"``, ``"ipc_packed"``, ``"graded"``, ``"each"`` or ``"aligned"``.
        names: Used in errors only.

    Raises:
        Validation: A size, itemsize, limit or rule that cannot be right, named; with
            ``ipc_packed`` also a tensor that exceeds the limit.
    """
    sizes, itemsizes = tuple(sizes), tuple(itemsizes)
    _check_sizes(sizes, itemsizes, names)
    limit = _checked_limit(limit, rule)
    if rule == NCCL_PACKED:
        chunks = _cut_after_overflow(sizes, limit)
    elif rule == IPC_PACKED:
        chunks = _cut_before_overflow(sizes, limit, names)
    elif rule == GRADED:
        chunks = _cut_graded(sizes, limit)
    elif rule == EACH:
        chunks = [Chunk(i, size, (Piece(i, 0, 0, size),)) for i, size in enumerate(sizes)]
    else:
        chunks = _cut_aligned(sizes, limit)
    return Plan(
        rule=rule,
        limit=limit,
        sizes=sizes,
        chunks=tuple(chunks),
        total_bytes=sum(sizes),
        digest=_digest(rule, limit, sizes, itemsizes),
    )


def check_alignment(
    plan: Plan, itemsizes: Sequence[int], names: Sequence[str] | None = None
) -> None:
    """Refuse a plan whose chunks cannot be read through typed views.

    vLLM's receivers view each tensor inside its chunk, which torch refuses at an offset that is
    no multiple of the element size; padding is not part of their wire.

    Raises:
        Validation: Names the first tensor at such an offset.
    """
    for chunk in plan.chunks:
        for piece in chunk.pieces:
            itemsize = itemsizes[piece.tensor]
            if piece.offset % itemsize:
                name = _name(piece.tensor, names)
                raise Validation(
                    f"{name} starts at byte {piece.offset} of chunk {chunk.index}, which is no "
                    f"multiple of its itemsize {itemsize}",
                    tensor=name,
                    next_step="Order tensors by descending itemsize, or use unpacked mode.",
                )


def _cut_after_overflow(sizes: tuple[int, ...], limit: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    running = 0
    for tensor, size in enumerate(sizes):
        pieces.append(Piece(tensor, 0, running, size))
        running += size
        if running > limit:
            chunks.append(Chunk(len(chunks), running, tuple(pieces)))
            pieces, running = [], 0
    if pieces:
        chunks.append(Chunk(len(chunks), running, tuple(pieces)))
    return chunks


def _cut_before_overflow(
    sizes: tuple[int, ...], limit: int, names: Sequence[str] | None
) -> list[Chunk]:
    for tensor, size in enumerate(sizes):
        if size > limit:
            name = _name(tensor, names)
            raise Validation(
                f"{name} has {size} bytes, more than a chunk of {limit}",
                tensor=name,
                next_step=f"Raise the packed buffer size to {size} or more.",
            )
    return _cut_before(sizes, lambda done, left: limit)


def _cut_graded(sizes: tuple[int, ...], limit: int) -> list[Chunk]:
    def most(done: int, left: int) -> int:
        least = max(limit // (_FIRST if done <= left else _LAST), 1)
        # Half of what comes after it: a third of what is left.
        return min(limit, max(least, min(done // 2, left // 3)))

    return _cut_before(sizes, most)


def _cut_before(sizes: tuple[int, ...], most: Callable[[int, int], int]) -> list[Chunk]:
    """Cut before a tensor with which a chunk would exceed ``most(bytes before it, bytes left)``."""
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    done, left, running = 0, sum(sizes), 0
    limit = most(done, left)
    for tensor, size in enumerate(sizes):
        if pieces and running + size > limit:
            chunks.append(Chunk(len(chunks), running, tuple(pieces)))
            done, left = done + running, left - running
            pieces, running = [], 0
            limit = most(done, left)
        pieces.append(Piece(tensor, 0, running, size))
        running += size
    if pieces:
        chunks.append(Chunk(len(chunks), running, tuple(pieces)))
    return chunks


def _cut_aligned(sizes: tuple[int, ...], limit: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    running = tensor = 0
    starts = list(accumulate(map(_aligned, sizes), initial=0))  # in one chunk without an end
    base = 0  # where in it the current chunk begins
    while tensor < len(sizes):
        # What fits is taken at once: with tens of thousands of tensors a step for each shows.
        end = bisect_right(starts, base + limit, lo=tensor) - 1
        if end > tensor:
            offsets = [start - base for start in starts[tensor:end]]
            pieces += map(Piece, range(tensor, end), repeat(0), offsets, sizes[tensor:end])
            running = offsets[-1] + sizes[end - 1]
            tensor = end
            continue
        offset, size, start = starts[tensor] - base, sizes[tensor], 0
        if size <= limit or offset == limit:
            chunks.append(Chunk(len(chunks), running, tuple(pieces)))
            pieces, base = [], starts[tensor]
            continue
        while size - start > limit - offset:
            room = limit - offset
            pieces.append(Piece(tensor, start, offset, room))
            chunks.append(Chunk(len(chunks), limit, tuple(pieces)))
            start += room
            pieces, offset = [], 0
        pieces.append(Piece(tensor, start, offset, size - start))
        running = offset + size - start
        tensor += 1
        base = starts[tensor] - _aligned(running)
    if pieces:
        chunks.append(Chunk(len(chunks), running, tuple(pieces)))
    return chunks


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _check_sizes(
    sizes: tuple[int, ...], itemsizes: tuple[int, ...], names: Sequence[str] | None
) -> None:
    if len(sizes) != len(itemsizes):
        raise Validation(f"{len(sizes)} sizes, but {len(itemsizes)} itemsizes")
    if names is not None and len(names) != len(sizes):
        raise Validation(f"{len(sizes)} sizes, but {len(names)} names")
    if not _are_sound(sizes, itemsizes):
        _check_each(sizes, itemsizes, names)
    if sum(sizes) > _MAX:
        raise Validation(f"all tensors together have {sum(sizes)} bytes, more than 2**63 - 1")


def _are_sound(sizes: tuple[int, ...], itemsizes: tuple[int, ...]) -> bool:
    """All at once: with tens of thousands of tensors a step of Python for each shows."""
    return (
        {int}.issuperset(map(type, chain(sizes, itemsizes)))
        and min(itemsizes, default=1) > 0
        and min(sizes, default=0) >= 0
        and max(chain(sizes, itemsizes), default=0) <= _MAX
        and not any(map(mod, sizes, itemsizes))
    )


def _check_each(
    sizes: tuple[int, ...], itemsizes: tuple[int, ...], names: Sequence[str] | None
) -> None:
    pairs = zip(sizes, itemsizes, strict=True)
    for tensor, (size, itemsize) in enumerate(pairs):  # pragma: no branch - one is wrong
        # type() and not isinstance(): a bool is no size
        if type(itemsize) is not int or not 0 < itemsize <= _MAX:
            _refuse(tensor, names, f"itemsize must be a positive int, not {itemsize!r}")
        if type(size) is not int or not 0 <= size <= _MAX:
            _refuse(tensor, names, f"size must be an int from 0 to 2**63 - 1, not {size!r}")
        if size % itemsize:
            _refuse(tensor, names, f"{size} bytes are no multiple of its itemsize {itemsize}")


def _refuse(tensor: int, names: Sequence[str] | None, problem: str) -> None:
    name = _name(tensor, names)
    raise Validation(f"{name}: {problem}", tensor=name)


def _checked_limit(limit: int, rule: str) -> int:
    if rule not in (NCCL_PACKED, IPC_PACKED, ALIGNED, GRADED, EACH):
        raise Validation(f"rule must be one of the five of this module, not {rule!r}")
    lowest = ALIGNMENT if rule == ALIGNED else 1
    if type(limit) is not int or not lowest <= limit <= _MAX:
        raise Validation(f"limit must be an int from {lowest} to 2**63 - 1, not {limit!r}")
    return limit // ALIGNMENT * ALIGNMENT if rule == ALIGNED else limit


def _name(tensor: int, names: Sequence[str] | None) -> str:
    return f"tensor {tensor}" if names is None else names[tensor]


def _digest(rule: str, limit: int, sizes: tuple[int, ...], itemsizes: tuple[int, ...]) -> str:
    name = f"{rule} {_FIRST} {_LAST}" if rule == GRADED else rule
    digest = hashlib.sha256(f"plan 1 {name} {limit} {len(sizes)}\n".encode())
    digest.update(struct.pack(f"<{len(sizes)}Q", *sizes))
    digest.update(struct.pack(f"<{len(itemsizes)}Q", *itemsizes))
    return digest.hexdigest()
