"""What a shared-memory receiver keeps between rounds: mapped segments, handles, places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from statemachines.errors import Validation
from transports.chunk_copy import place_chunks
from transports.foreign_memory import ForeignMemory
from transports.segments import Segment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transports import shm_messages as wire
    from transports.chunk_copy import Home, PlacedChunk
    from transports.planning import Plan

_SENDER = "trainer"


@final
class ReceiverMemory:
    """Believes nothing that the sender says about places and sizes.

    Attributes:
        chunks: The plan's, after `prepare`; each gets its place when it is announced.
        resident_name: The table of handles that is known; empty when there is none.
    """

    def __init__(self) -> None:
        self.chunks: list[PlacedChunk] = []
        self.resident_name = ""
        self._resident: dict[int, tuple[Home, int]] = {}
        self._process: ForeignMemory | None = None
        self._segments: dict[str, Segment] = {}
        self._order: list[Segment] = []
        self._prepared = ("", "")

    def set_process(self, pid: int | None) -> None:
        """Say whose memory the sender's is, for this round on; None: it cannot be read."""
        if (None if self._process is None else self._process.pid) == pid:
            return
        if any(home is self._process for home, _ in self._resident.values()):
            self.chunks, self._prepared = [], ("", "")
            self._resident, self.resident_name = {}, ""
        self._process = None if pid is None else ForeignMemory(pid, _SENDER)

    def keys(self) -> tuple[str, ...]:
        """The segments that need not be sent."""
        return tuple(self._segments)

    def map(self, welcome: wire.Welcome, fds: list[int]) -> None:
        """Have this round's segments and no others; takes what it uses out of `fds`.

        Raises:
            Validation: A segment is not there, or not what it is said to be.
        """
        if sum(info.attached for info in welcome.segments) != len(fds):
            raise Validation(f"{len(fds)} descriptors came with {welcome.segments}")
        kept: dict[str, Segment] = {}
        for info in welcome.segments:
            if info.attached:
                kept[info.key] = Segment.attach(fds.pop(0), nbytes=info.nbytes, key=info.key)
            elif info.key in self._segments:
                kept[info.key] = self._segments[info.key]
            else:
                raise Validation(f"segment {info.key} was not sent")
        if len(kept) != len(welcome.segments):
            raise Validation(f"a segment is named twice in {welcome.segments}")
        for key, segment in self._segments.items():
            if kept.get(key) is not segment:
                # Addresses in it mean nothing any more. The table stays: its segments are still in
                # use, or a new table follows.
                self.chunks, self._prepared = [], ("", "")
                segment.close()
        self._segments, self._order = kept, list(kept.values())

    def prepare(
        self, plan: Plan, welcome: wire.Welcome, handles: Iterator[tuple[int, int, int]]
    ) -> None:
        """Take the handles that follow the welcome, if any do, and have places for the plan.

        Raises:
            Validation: A handle points outside of its segment, or the tables differ.
        """
        if welcome.handles is not None:
            self._resident, self.resident_name = {}, ""
            if welcome.direct and self._process is None:
                raise Validation(f"the memory of {_SENDER} cannot be read", replica=_SENDER)
            homes = [self._process] if welcome.direct and self._process else self._order
            table: dict[int, tuple[Home, int]] = {}
            while len(table) < welcome.handles:
                index, number, offset = next(handles)
                if index >= len(plan.sizes) or number >= len(homes) or index in table:
                    raise Validation(f"handle of tensor {index} in segment {number} is impossible")
                homes[number].check(offset, plan.sizes[index])
                table[index] = (homes[number], offset)
            self._resident, self.resident_name = table, welcome.resident
        elif welcome.resident != self.resident_name:
            raise Validation(f"the trainer's table of handles is {welcome.resident!r}, not ours")
        wanted = (plan.digest, self.resident_name)
        if self._prepared != wanted:
            for home in {id(home): home for home, _ in self._resident.values()}.values():
                if isinstance(home, Segment):
                    home.view(0, 0)  # raises where it was closed: it is not in use any more
            self.chunks = place_chunks(plan, self._resident)
            self._prepared = wanted

    def place(self, chunk: PlacedChunk, ready: wire.Ready) -> None:
        """Note where an announced chunk lies.

        Raises:
            Validation: Outside of every segment.
        """
        if not chunk.copied:
            return
        if not 0 <= ready.segment < len(self._order):
            raise Validation(f"chunk {chunk.index} is said to be in segment {ready.segment}")
        segment = self._order[ready.segment]
        segment.check(ready.offset, chunk.room)
        chunk.settle(segment, ready.offset)

    def statistics(self) -> dict[str, Any]:
        """How much is mapped."""
        return {
            "segments": len(self._segments),
            "mapped_nbytes": sum(segment.nbytes for segment in self._order),
        }

    def release(self) -> None:
        """Unmap everything."""
        self.chunks, self._prepared = [], ("", "")
        self._resident, self.resident_name, self._process = {}, "", None
        for segment in self._order:
            segment.close()
        self._segments, self._order = {}, []
