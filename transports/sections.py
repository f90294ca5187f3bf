"""How a plan's tensors travel by broadcasts: large ones from their own memory, small ones packed.

Both sides derive the same sections from the plan they share. A section is a run of tensors of at
most the plan's limit (a larger tensor is one alone). Its large tensors go first, each from and into
its own memory, in pieces of at most the limit. Then comes one frame: the small tensors, packed, and
the digests of all that the section carried. So a receiver can hand on a section's tensors,
verified, before the next one is complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

import torch

from transports.planning import ALIGNMENT

if TYPE_CHECKING:
    from transports.planning import Plan

DIRECT_NBYTES = 1 << 20
"""Tensors of at least this size are not copied; part of the protocol."""
_WORD = 8


class Part(NamedTuple):
    """`nbytes` of a tensor from byte `start` on; of a packed one, at `start` in the frame."""

    tensor: int
    start: int
    nbytes: int


class Section(NamedTuple):
    """Tensors `first` up to, not including, `end`."""

    first: int
    end: int
    direct: tuple[Part, ...]
    packed: tuple[Part, ...]
    packed_nbytes: int

    @property
    def digests(self) -> int:
        """How many its frame carries: one a direct part, one for the packed bytes."""
        return len(self.direct) + (1 if self.packed_nbytes else 0)

    def frame_nbytes(self, *, verified: bool) -> int:
        """Bytes of its frame; a section may have none."""
        return self.packed_nbytes + (_WORD * self.digests if verified else 0)


def sections_of(plan: Plan) -> list[Section]:
    """All sections of a plan, in order."""
    least = min(DIRECT_NBYTES, plan.limit)
    found: list[Section] = []
    direct: list[Part] = []
    packed: list[Part] = []
    first = total = offset = 0
    for tensor, size in enumerate(plan.sizes):
        room = -(-size // ALIGNMENT) * ALIGNMENT
        if total and total + room > plan.limit:
            found.append(Section(first, tensor, tuple(direct), tuple(packed), offset))
            direct, packed, first, total, offset = [], [], tensor, 0, 0
        if size >= least:
            for start in range(0, size, plan.limit):
                direct.append(Part(tensor, start, min(plan.limit, size - start)))
        else:
            packed.append(Part(tensor, offset, size))
            offset += room
        total += room
    if first < len(plan.sizes):
        found.append(Section(first, len(plan.sizes), tuple(direct), tuple(packed), offset))
    return found


@final
class Frames:
    """Two buffers that a plan's frames take turns in; made once a plan."""

    def __init__(self, plan: Plan, *, verified: bool) -> None:
        self.digest = plan.digest
        self.sections = sections_of(plan)
        self._verified = verified
        frames = [section.frame_nbytes(verified=verified) for section in self.sections]
        size = max(frames, default=0)
        # One at least: tensors without a byte have their place in a frame, too.
        count = max(1, min(2, sum(1 for nbytes in frames if nbytes)))
        self._buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(count)]

    def frame(self, index: int) -> torch.Tensor:
        """The bytes of a section's frame; empty where it has none."""
        nbytes = self.sections[index].frame_nbytes(verified=self._verified)
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return self._buffers[self.buffer_of(index)][:nbytes]

    def buffer_of(self, index: int) -> int:
        """Which buffer a section's frame lies in."""
        return index % len(self._buffers)

    def packed(self, index: int) -> torch.Tensor:
        """The packed bytes of a section's frame, padding included."""
        return self.frame(index)[: self.sections[index].packed_nbytes]

    def blank(self, index: int) -> None:
        """Before a section is packed: what lies between its tensors is sent, and hashed, as zeros.

        Else the digest of the same tensors would depend on what this memory held before.
        """
        section = self.sections[index]
        if sum(part.nbytes for part in section.packed) < section.packed_nbytes:
            self.packed(index).zero_()

    def address(self, index: int) -> int:
        """Where a section's frame begins; it has packed bytes."""
        return self._buffers[self.buffer_of(index)].data_ptr()

    def view(self, index: int, part: Part, like: torch.Tensor) -> torch.Tensor:
        """A small tensor's place in its frame, with the dtype and shape of `like`."""
        place = self.frame(index)[part.start : part.start + part.nbytes]
        return place.view(like.dtype).view(like.shape)

    def write_digests(self, index: int, values: list[int]) -> None:
        """Put the section's digests behind its packed bytes."""
        tail = self.frame(index)[self.sections[index].packed_nbytes :]
        raw = b"".join(value.to_bytes(_WORD, "little") for value in values)
        tail.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    def read_digests(self, index: int) -> list[int]:
        """The digests behind a section's packed bytes."""
        raw = bytes(self.frame(index)[self.sections[index].packed_nbytes :].numpy())
        starts = range(0, len(raw), _WORD)
        return [int.from_bytes(raw[start : start + _WORD], "little") for start in starts]
