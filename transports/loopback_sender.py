"""The sending side of a `transports.loopback.LoopbackLink`."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from statemachines.errors import InvalidTransition, Validation
from transports.digest import chain
from transports.loopback_rounds import Half, Parcel, corrupt, digest_of, part_of
from transports.packing import bytes_of, settled
from transports.stream import StreamSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transports.loopback_rounds import Fault, Hall, Round, Seat
    from transports.planning import Chunk, Plan


@final
class LoopbackSender(Half):
    """The trainer's half; see `transports.stream.Sender`."""

    def __init__(
        self, hall: Hall, faults: Sequence[Fault], *, depth: int, digest: str | None
    ) -> None:
        super().__init__(hall, "sender", faults)
        self._depth = depth
        self._kind = digest
        self._stall = 0.0
        self._round: Round | None = None
        self._chunk = self._piece = 0  # what comes next
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._digests: list[int] = []
        self.names: list[str] = []
        """What errors call the readers, in their order."""

    def open(self, plan: Plan, readers: int, *, round: int, stall: float) -> None:
        """Wait until all readers of this round are connected.

        Raises:
            Validation: The link has another number of readers.
            PeerLost, PhaseTimeout, TransportAborted: As in the protocol.
        """
        if readers != self._hall.readers:
            message = f"{readers} readers on a link of {self._hall.readers}"
            raise Validation(message, phase="open", round=round)
        with self._hall.changed:
            self._begin("open", round, stall)
            record = self._hall.enter(round, lambda found: found.plan is not None)
            record.plan = plan
            self._round, self._stall = record, stall
            self._chunk = self._piece = 0
            self._digests = []
            self.progress.step(0)
            self._hall.changed.notify_all()
            self._wait_for(record, "open", lambda seat: seat.has_joined)
            record.is_open = True
            self._say_alive(record)

    def write(self, batch: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copy tensors out, in plan order; waits while a reader is too many chunks behind.

        Raises:
            Validation: A tensor out of order, or of another size than planned.
            PeerLost, PhaseTimeout, TransportAborted: As in the protocol.
        """
        record, plan = self._current("write")
        for index, tensor in batch:
            data = bytes_of(settled(tensor).cpu())
            self._check_next(plan, index, data.numel())
            while self._next_tensor(plan) == index:
                chunk = plan.chunks[self._chunk]
                piece = chunk.pieces[self._piece]
                if self._piece == 0:
                    self._buffer = torch.zeros(chunk.nbytes, dtype=torch.uint8)
                part_of(self._buffer, piece.offset, piece).copy_(part_of(data, piece.start, piece))
                self._piece += 1
                if self._piece == len(chunk.pieces):
                    self._send(record, chunk)
                    self._chunk, self._piece = self._chunk + 1, 0

    def finish(self) -> StreamSummary:
        """Return when every reader has acknowledged every chunk.

        Raises:
            Validation: Not all of the plan has been written.
            PeerLost, PhaseTimeout, TransportAborted: As in the protocol.
        """
        record, plan = self._current("finish")
        missing = self._next_tensor(plan)
        if missing is not None:
            name = f"tensor {missing}"
            raise Validation(f"{name} was not written", tensor=name, phase="finish")
        total = len(plan.chunks)
        with self._hall.changed:
            self._wait_for(record, "finish", lambda seat: seat.acknowledged == total)
        digest = None if self._kind is None else chain(self._digests)
        return StreamSummary(nbytes=plan.total_bytes, chunks=total, digest=digest)

    def _send(self, record: Round, chunk: Chunk) -> None:
        parts = [part_of(self._buffer, piece.offset, piece) for piece in chunk.pieces]
        digest = digest_of(self._kind, parts)
        if digest is not None:
            self._digests.append(digest)
        met = self._meet_faults(chunk.index, record.number, "write")
        if "corrupt" in met:
            corrupt(parts)
        parcel = Parcel(None if "drop" in met else self._buffer, digest)
        with self._hall.changed:
            for index in range(len(record.seats)):
                self._wait_for(record, "write", lambda s: len(s.parcels) < self._depth, index)
                record.seats[index].parcels.append(parcel)
                self._say_alive(record)
        self.progress.step(sum(piece.nbytes for piece in chunk.pieces))

    def _wait_for(
        self,
        record: Round,
        phase: str,
        is_ready: Callable[[Seat], bool],
        reader: int | None = None,
    ) -> None:
        """Wait for all readers, or one; each must show a sign of life within the stall."""
        for index, seat in enumerate(record.seats):
            if reader in (None, index):
                self._wait_seat(record, phase, is_ready, index, seat)

    def _wait_seat(
        self,
        record: Round,
        phase: str,
        is_ready: Callable[[Seat], bool],
        index: int,
        seat: Seat,
    ) -> None:
        self._wait(
            lambda: is_ready(seat),
            lambda: seat.left,
            lambda: seat.at,
            peer=self.names[index] if self.names else f"reader {index}",
            stall=self._stall,
            phase=phase,
            number=record.number,
        )

    def _current(self, phase: str) -> tuple[Round, Plan]:
        with self._hall.changed:
            record = self._round
            self._check(phase)
            if record is None or record.plan is None or not record.is_open:
                detail = {"allowed": ["open"]}
                raise InvalidTransition("the sender has no open round", phase=phase, detail=detail)
            return record, record.plan

    def _check_next(self, plan: Plan, index: int, nbytes: int) -> None:
        expected = self._next_tensor(plan)
        name = f"tensor {index}"
        if index != expected:
            due = "nothing" if expected is None else f"tensor {expected}"
            raise Validation(f"{name} was written, {due} is next", tensor=name, phase="write")
        if nbytes != plan.sizes[index]:
            message = f"{name} has {nbytes} bytes, planned were {plan.sizes[index]}"
            raise Validation(message, tensor=name, phase="write")

    def _next_tensor(self, plan: Plan) -> int | None:
        if self._chunk == len(plan.chunks):
            return None
        return plan.chunks[self._chunk].pieces[self._piece].tensor

    def _say_alive(self, record: Round) -> None:
        self.progress.step(0)
        record.at = self.progress.at
        self._hall.changed.notify_all()

    def _leave(self, reason: str) -> None:
        if self._round is not None and self._round.left is None:
            self._round.left = reason
