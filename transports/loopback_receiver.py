"""The receiving side of a `transports.loopback.LoopbackLink`."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from statemachines.errors import Validation
from transports.digest import chain
from transports.errors import DigestMismatch
from transports.loopback_rounds import Half, corrupt, digest_of, part_of
from transports.packing import bytes_of
from transports.stream import StreamSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from transports.loopback_rounds import Fault, FaultKind, Hall, Parcel, Round, Seat
    from transports.planning import Chunk, Plan


@final
class LoopbackReceiver(Half):
    """The worker's half; see `transports.stream.Receiver`."""

    def __init__(
        self, hall: Hall, index: int, faults: Sequence[Fault], *, digest: str | None
    ) -> None:
        super().__init__(hall, f"reader {index}", faults)
        self._index = index
        self._kind = digest
        self._seat: Seat | None = None

    def receive(
        self,
        plan: Plan,
        destination: Callable[[int], torch.Tensor],
        landed: Callable[[list[int]], None],
        *,
        round: int,
        stall: float,
    ) -> StreamSummary:
        """Fill ``destination(i)`` for every tensor; leaves the round if it raises.

        Digests are taken of what the destinations hold in the end.

        Raises:
            Validation: The sender has another plan, or a destination another size.
            PeerLost, PhaseTimeout, DigestMismatch, TransportAborted: As in the protocol.
        """
        with self._hall.changed:
            self._begin("connect", round, stall)
            record = self._hall.enter(round, lambda found: found.seats[self._index].has_joined)
            seat = self._seat = record.seats[self._index]
            seat.has_joined = True
            self._say_alive(seat)
        try:
            return self._receive(record, seat, plan, destination, landed, stall)
        except BaseException as exc:
            with self._hall.changed:
                seat.left = seat.left or f"failed with {type(exc).__name__}"
                self._hall.changed.notify_all()
            raise

    def _receive(
        self,
        record: Round,
        seat: Seat,
        plan: Plan,
        destination: Callable[[int], torch.Tensor],
        landed: Callable[[list[int]], None],
        stall: float,
    ) -> StreamSummary:
        def wait(is_ready: Callable[[], object], phase: str) -> None:
            self._wait(
                is_ready,
                lambda: record.left,
                lambda: record.at,
                peer="sender",
                stall=stall,
                phase=phase,
                number=record.number,
            )

        with self._hall.changed:
            wait(lambda: record.is_open, "connect")
        if record.plan is None or record.plan.digest != plan.digest:
            raise Validation("sender and reader have different plans", phase="connect")
        open_tensors: dict[int, torch.Tensor] = {}
        digests: list[int] = []
        for chunk in plan.chunks:
            with self._hall.changed:
                wait(lambda: seat.parcels, "receive")
                parcel = seat.parcels.popleft()
                self._say_alive(seat)
            met = self._meet_faults(chunk.index, record.number, "receive")
            parts = _open(chunk, plan, destination, open_tensors)
            self._fill(chunk, parts, parcel, met)
            if parcel.digest is not None:
                digests.append(parcel.digest)
            complete = [
                p.tensor for p in chunk.pieces if p.start + p.nbytes == plan.sizes[p.tensor]
            ]
            for tensor in complete:
                del open_tensors[tensor]
            if complete:
                landed(complete)
            with self._hall.changed:
                self._check("receive")
                seat.acknowledged += 1
                self._say_alive(seat, sum(piece.nbytes for piece in chunk.pieces))
        digest = None if self._kind is None else chain(digests)
        return StreamSummary(nbytes=plan.total_bytes, chunks=len(plan.chunks), digest=digest)

    def _fill(
        self, chunk: Chunk, parts: list[torch.Tensor], parcel: Parcel, met: set[FaultKind]
    ) -> None:
        size = sum(piece.nbytes for piece in chunk.pieces)
        name = f"chunk {chunk.index}"
        if parcel.payload is None and size:
            raise DigestMismatch(f"{name}: 0 of {size} bytes arrived", phase="receive")
        if parcel.payload is not None and "drop" not in met:
            for piece, part in zip(chunk.pieces, parts, strict=True):
                part.copy_(part_of(parcel.payload, piece.offset, piece))
        if "corrupt" in met:
            corrupt(parts)
        found = digest_of(self._kind, parts)
        if found != parcel.digest:
            detail = {"sent": parcel.digest, "found": found, "chunk": chunk.index}
            raise DigestMismatch(
                f"{name} differs from what was sent", phase="receive", detail=detail
            )

    def _say_alive(self, seat: Seat, nbytes: int = 0) -> None:
        self.progress.step(nbytes)
        seat.at = self.progress.at
        self._hall.changed.notify_all()

    def _leave(self, reason: str) -> None:
        if self._seat is not None and self._seat.left is None:
            self._seat.left = reason


def _open(
    chunk: Chunk,
    plan: Plan,
    destination: Callable[[int], torch.Tensor],
    open_tensors: dict[int, torch.Tensor],
) -> list[torch.Tensor]:
    """The bytes in the destinations where the pieces of a chunk belong."""
    parts = []
    for piece in chunk.pieces:
        if piece.tensor not in open_tensors:
            data = bytes_of(destination(piece.tensor))
            if data.numel() != plan.sizes[piece.tensor]:
                name = f"tensor {piece.tensor}"
                message = f"{name}: {plan.sizes[piece.tensor]} bytes into {data.numel()}"
                raise Validation(message, tensor=name, phase="receive")
            open_tensors[piece.tensor] = data
        parts.append(part_of(open_tensors[piece.tensor], piece.start, piece))
    return parts
