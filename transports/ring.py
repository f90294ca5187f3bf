"""Where the chunks of a plan lie in one piece of device memory, decided once for all rounds.

Chunks take their places one behind the other, and from the beginning again where the end is
reached. Which earlier chunk has to be done with its place first follows from that, so a round only
waits for marks. A chunk of one tensor needs no place: it moves from and into the tensor itself. But
a reader may want one for the first chunk, to take it before anybody knows where it goes.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

import torch

from transports.cuda import copy_batch, copy_form, in_form
from transports.pointer_copy import PointerCopy, pointer_copies

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transports.planning import Plan

_ALIGN = 512
_FEW = 4  # copies that are made one by one
_ADDRESS: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_IS_CUDA: Callable[[torch.Tensor], bool] = attrgetter("is_cuda")


class Described(Protocol):
    """What is known of a tensor before it is there; ``ParamMeta`` is one."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Block(NamedTuple):
    """One chunk: tensors `first` up to, not including, `end`.

    Attributes:
        place: Its first byte in the ring; -1 for a chunk that has none.
        after: The last earlier chunk whose place overlaps; -1: the place is free from the start.
    """

    first: int
    end: int
    nbytes: int
    place: int
    after: int


def blocks_of(plan: Plan, nbytes: int, *, early: bool = False) -> tuple[list[Block], int]:
    """All chunks of a plan, and the ring's size: `nbytes`, or more where a chunk needs it.

    Args:
        early: The first chunk gets a place in any case, where that needs no more memory.
    """
    placed = [len(chunk.pieces) > 1 for chunk in plan.chunks]
    if early and placed and 0 < plan.chunks[0].nbytes <= nbytes:
        placed[0] = True
    packed = [chunk.nbytes for chunk in plan.chunks if placed[chunk.index]]
    total = sum(_rounded(size) for size in packed)
    size = min(total, max(nbytes, max(map(_rounded, packed), default=0)))
    found: list[Block] = []
    taken: list[tuple[int, int, int]] = []  # chunk, begin, end; in the order they were given
    head = 0
    for chunk in plan.chunks:
        first, end = chunk.pieces[0].tensor, chunk.pieces[-1].tensor + 1
        if not placed[chunk.index]:
            found.append(Block(first, end, chunk.nbytes, -1, -1))
            continue
        room = _rounded(chunk.nbytes)
        place = head if head + room <= size else 0
        head = place + room
        overlapping = [i for i, begin, stop in taken if begin < head and stop > place]
        after = max(overlapping, default=-1)
        taken = [entry for entry in taken if entry[0] > after]
        taken.append((chunk.index, place, head))
        found.append(Block(first, end, chunk.nbytes, place, after))
    return found, size


@final
class Ring:
    """The memory, and the tables of what is copied into and out of it; kept between rounds."""

    def __init__(
        self,
        plan: Plan,
        tensors: Sequence[Described],
        nbytes: int,
        device: torch.device,
        *,
        early: bool = False,
    ) -> None:
        self.plan = plan
        self.tensors = tensors
        self.blocks, size = blocks_of(plan, nbytes, early=early)
        with torch.inference_mode(False):
            self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._copies: dict[tuple[int, int], _Copy] = {}

    def raw(self, index: int) -> torch.Tensor:
        """A chunk's bytes."""
        block = self.blocks[index]
        return self.memory[block.place : block.place + block.nbytes]

    def pack(
        self,
        index: int,
        first: int,
        tensors: Sequence[torch.Tensor],
        addresses: list[int] | None = None,
    ) -> None:
        """Queue copies of contiguous tensors, `first` and those behind it, into their places.

        On the current stream; the tensors must stay until they are done. A chunk is sent while
        the next one is packed, so only the first one's copies go at full speed.

        Args:
            addresses: Theirs, if known.
        """
        copy = self._copy_of(index, first, tensors)
        if copy is None:
            places, sources = self._pairs(index, first, tensors)
            copy_batch(places, sources)
        else:
            if addresses is None:
                addresses = list(map(_ADDRESS, tensors))
            copy.move(copy.places, copy.kept(addresses), gently=index > 0)

    def unpack(
        self, index: int, tensors: Sequence[torch.Tensor], addresses: list[int] | None = None
    ) -> None:
        """Queue copies of a whole chunk out of the ring, into contiguous tensors.

        Others still arrive meanwhile, except beside the last one.

        Args:
            addresses: Theirs, if known; then all are on one device.
        """
        first = self.blocks[index].first
        copy = self._copy_of(index, first, tensors, alike=addresses is not None)
        if copy is None:
            places, targets = self._pairs(index, first, tensors)
            copy_batch(targets, places)
        else:
            if addresses is None:
                addresses = list(map(_ADDRESS, tensors))
            is_last = index == len(self.blocks) - 1
            copy.move(copy.kept(addresses), copy.places, gently=not is_last)

    def _copy_of(
        self, index: int, first: int, tensors: Sequence[torch.Tensor], *, alike: bool = False
    ) -> _Copy | None:
        if (
            len(tensors) < _FEW
            or not pointer_copies(self.memory.device)
            or not all(map(_IS_CUDA, tensors[:1] if alike else tensors))
        ):
            return None
        key = (first, len(tensors))
        copy = self._copies.get(key)
        if copy is None:
            start = first - self.blocks[index].first
            pieces = self.plan.chunks[index].pieces[start : start + len(tensors)]
            base = self.memory.data_ptr() + self.blocks[index].place
            copy = self._copies[key] = _Copy(
                [base + piece.offset for piece in pieces],
                [piece.nbytes for piece in pieces],
                self.memory.device,
            )
        return copy

    def _pairs(
        self, index: int, first: int, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Places and tensors in the form that `copy_batch` takes, without those that are empty."""
        block, raw = self.blocks[index], self.raw(index)
        start = first - block.first
        pieces = self.plan.chunks[index].pieces[start : start + len(tensors)]
        places, others = [], []
        for piece, tensor in zip(pieces, tensors, strict=True):
            if not piece.nbytes:
                continue
            form = copy_form(tensor.dtype, aligned=piece.offset % tensor.itemsize == 0)
            dtype = tensor.dtype if form is None else form
            place = raw[piece.offset : piece.offset + piece.nbytes]
            other = in_form(tensor.detach(), form)
            places.append(place.view(dtype).view(other.shape))
            others.append(other)
        return places, others


@final
class _Copy:
    """Places in the ring that are copied together, and how to."""

    def __init__(self, places: list[int], nbytes: list[int], device: torch.device) -> None:
        self._at = None if all(nbytes) else [at for at, size in enumerate(nbytes) if size]
        self.places = self.kept(places)
        self.move = PointerCopy(self.kept(nbytes), device)

    def kept(self, column: list[int]) -> list[int]:
        """Those that have bytes."""
        return column if self._at is None else [column[at] for at in self._at]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
