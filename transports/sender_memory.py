"""What a shared-memory sender keeps between rounds: buffers, handles, and where chunks lie."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, final

from statemachines.errors import Validation
from transports import shm_messages as wire
from transports.chunk_copy import place_chunks
from transports.links import FDS_LIMIT
from transports.planning import ALIGNED
from transports.segments import ALIGNMENT, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transports.chunk_copy import Home, PlacedChunk
    from transports.links import Link
    from transports.planning import Plan


@final
class SenderMemory:
    """Places each chunk of a plan in a ring of slots, or all of them side by side.

    Attributes:
        chunks: The plan's, each with its place, after `prepare`.
        buffers: Ring slots; None when every chunk has a place of its own.
        segment: The ring or the flat buffer; None while nothing needs one.
        resident: Tensors that readers find where they live: in segments, or all in this process.
    """

    def __init__(self, *, slot_nbytes: int, buffers: int | None) -> None:
        self.buffers = buffers
        self.chunks: list[PlacedChunk] = []
        self.segment: Segment | None = None
        self.resident: Mapping[int, tuple[Home, int]] = {}
        self._slot_nbytes = -(-slot_nbytes // ALIGNMENT) * ALIGNMENT
        self._resident_name = ""
        self._prepared = ("", "")
        self._bases: list[int] = []
        self._homes: dict[str, Segment] = {}  # of the resident tensors

    def set_resident(self, table: Mapping[int, tuple[Home, int]]) -> None:
        """What is `resident` from now on; the same table again, unchanged, costs nothing."""
        if table is not self.resident and table != self.resident:
            homes = [home for home, _ in table.values() if isinstance(home, Segment)]
            self._homes = {segment.key: segment for segment in homes}
            self._resident_name = secrets.token_hex(8) if table else ""
        self.resident = table

    def check(self, plan: Plan) -> None:
        """Refuse a plan that `prepare` has no place for.

        Raises:
            Validation: It has another rule, or larger chunks.
        """
        if plan.rule != ALIGNED:
            raise Validation(f"shared memory needs a plan by rule {ALIGNED!r}, not {plan.rule!r}")
        if self.buffers is not None and plan.limit > self._slot_nbytes:
            raise Validation(f"chunks of {plan.limit} bytes, buffers of {self._slot_nbytes}")

    def prepare(self, plan: Plan, *, check: Callable[[], None]) -> None:
        """Have memory for the plan; what is there from the last round is kept.

        Args:
            plan: This round's.
            check: Called now and then while memory is reserved; may raise.

        Raises:
            Validation: The plan, or a resident tensor, does not fit.
            OutOfSharedMemory: There is no room.
        """
        if len(self._segments()) > FDS_LIMIT:
            raise Validation(f"{len(self._segments())} segments; the limit is {FDS_LIMIT}")
        for segment in self._homes.values():
            segment.view(0, 0)  # raises where it has been closed
        wanted = (plan.digest, self._resident_name)
        if self._prepared == wanted:
            return
        self._prepared = ("", "")
        for index, (home, offset) in self.resident.items():
            if not 0 <= index < len(plan.sizes):
                raise Validation(f"resident tensor {index} is not in the plan", tensor=str(index))
            home.check(offset, plan.sizes[index])
        self.chunks = place_chunks(plan, self.resident)
        self._reserve(self._lay_out(), check)
        for chunk, base in zip(self.chunks, self._bases, strict=True):
            chunk.settle(self.segment if chunk.copied else None, base)
        self._prepared = wanted

    def _lay_out(self) -> int:
        if self.buffers is not None:
            # No more than the plan needs: every page of it has to be made.
            largest = max((chunk.room for chunk in self.chunks if chunk.copied), default=0)
            slot = min(-(-largest // ALIGNMENT) * ALIGNMENT, self._slot_nbytes)
            self._bases = [k % self.buffers * slot for k in range(len(self.chunks))]
            return slot * min(self.buffers, len(self.chunks))
        self._bases, total = [], 0
        for chunk in self.chunks:
            self._bases.append(total)
            if chunk.copied:
                total += -(-chunk.room // ALIGNMENT) * ALIGNMENT
        return total

    def _reserve(self, nbytes: int, check: Callable[[], None] = lambda: None) -> None:
        if self.segment is not None and self.segment.nbytes >= nbytes > 0:
            return
        if self.segment is not None:
            # Before the new one: both at once may not fit.
            self.segment.close()
            self.segment = None
        if nbytes:
            self.segment = Segment.create(nbytes, check=check)

    def _segments(self) -> list[Segment]:
        own = {} if self.segment is None else {self.segment.key: self.segment}
        return list((own | self._homes).values())

    def greet(self, link: Link, hello: wire.Hello, *, plan: Plan, digest: str | None) -> None:
        """Post the welcome, with the descriptors and handles that the reader lacks."""
        segments = self._segments()
        missing = [segment for segment in segments if segment.key not in hello.segments]
        known = hello.resident == self._resident_name
        direct = bool(self.resident) and not self._homes
        infos = tuple(
            wire.SegmentInfo(key=s.key, nbytes=s.nbytes, attached=s in missing) for s in segments
        )
        welcome = wire.Welcome(
            round=hello.round,
            plan=plan.digest,
            digest=digest,
            segments=infos,
            resident=self._resident_name,
            handles=None if known else len(self.resident),
            direct=direct,
        )
        link.post(wire.encode(welcome), [segment.fileno() for segment in missing])
        if known:
            return
        order = {id(segment): i for i, segment in enumerate(segments)}
        table = [(i, order.get(id(s), 0), offset) for i, (s, offset) in self.resident.items()]
        for start in range(0, len(table), wire.HANDLES_PER_FRAME):
            part = tuple(table[start : start + wire.HANDLES_PER_FRAME])
            link.post(wire.encode(wire.Handles(handles=part)))

    def release(self) -> None:
        """Give all memory back; the resident tensors' is not ours."""
        self.chunks, self._prepared = [], ("", "")
        self.resident, self._homes = {}, {}
        self._reserve(0)
