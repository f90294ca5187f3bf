"""What the two sides of a `transports.loopback.LoopbackLink` share: rounds, parcels, waiting."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, final

from statemachines.errors import Validation
from transports.digest import ChunkDigest
from transports.errors import PeerLost, PhaseTimeout, TransportAborted
from transports.stream import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from transports.planning import Piece, Plan

FaultKind = Literal["delay", "raises", "hang_until_aborted", "hang_for_ever", "drop", "corrupt"]


@final
@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong on one side when it comes to a chunk; happens once.

    Make it with a class method. `round` ties it to one round; without it, the first round that
    reaches the chunk has it.
    """

    kind: FaultKind
    chunk: int
    seconds: float = 0.0
    error: BaseException | None = None
    round: int | None = None

    @classmethod
    def delay(cls, chunk: int, seconds: float, *, round: int | None = None) -> Fault:
        """Wait before the chunk is handled; `abort` ends the wait."""
        return cls("delay", chunk, seconds=seconds, round=round)

    @classmethod
    def raises(cls, chunk: int, error: BaseException, *, round: int | None = None) -> Fault:
        """Raise `error` instead of handling the chunk."""
        return cls("raises", chunk, error=error, round=round)

    @classmethod
    def hang_until_aborted(cls, chunk: int, *, round: int | None = None) -> Fault:
        """Block until `abort` is called: a peer that is gone, and a library that can be woken."""
        return cls("hang_until_aborted", chunk, round=round)

    @classmethod
    def hang_for_ever(cls, chunk: int, *, round: int | None = None) -> Fault:
        """Block whatever is called, until the test calls `LoopbackLink.release`."""
        return cls("hang_for_ever", chunk, round=round)

    @classmethod
    def drop(cls, chunk: int, *, round: int | None = None) -> Fault:
        """Announce the chunk without its bytes (sender), or do not write them (receiver)."""
        return cls("drop", chunk, round=round)

    @classmethod
    def corrupt(cls, chunk: int, *, round: int | None = None) -> Fault:
        """Change one byte of the chunk; one without bytes stays as it is."""
        return cls("corrupt", chunk, round=round)


class Parcel(NamedTuple):
    """A chunk on its way; no payload: it was dropped."""

    payload: torch.Tensor | None
    digest: int | None


@final
class Seat:
    """One reader's place in a round."""

    def __init__(self) -> None:
        self.parcels: deque[Parcel] = deque()
        self.has_joined = False
        self.left: str | None = None
        self.acknowledged = 0
        self.at = time.monotonic()  # its last sign of life


@final
class Round:
    """One round's meeting point; all fields are guarded by the link's condition."""

    def __init__(self, number: int, readers: int) -> None:
        self.number = number
        self.seats = [Seat() for _ in range(readers)]
        self.plan: Plan | None = None  # the sender's, which has joined then
        self.is_open = False
        self.left: str | None = None  # why the sender is gone
        self.at = time.monotonic()

    @property
    def is_over(self) -> bool:
        return self.left is not None or any(seat.left is not None for seat in self.seats)

    @property
    def is_deserted(self) -> bool:
        sender_is_out = self.plan is None or self.left is not None
        return sender_is_out and all(s.left is not None or not s.has_joined for s in self.seats)


@final
class Hall:
    """Where the sides of a link find each other's rounds."""

    def __init__(self, readers: int) -> None:
        self.changed = threading.Condition()
        self.released = threading.Event()
        self.readers = readers
        self.rounds: dict[int, Round] = {}

    def enter(self, number: int, is_taken: Callable[[Round], bool]) -> Round:
        """The live round of that number with the caller's place still free, or a new one."""
        for old in [n for n, found in self.rounds.items() if found.is_deserted]:
            del self.rounds[old]
        found = self.rounds.get(number)
        if found is None or found.is_over or is_taken(found):
            found = self.rounds[number] = Round(number, self.readers)
        return found


class Half(ABC):
    """What a sender and a receiver have in common."""

    def __init__(self, hall: Hall, name: str, faults: Sequence[Fault]) -> None:
        self.progress = Progress()
        self.name = name
        self._hall = hall
        self._faults = list(faults)
        self._is_aborted = False
        self._was_seen = False  # a call has raised because of the abort

    def abort(self) -> None:
        """Make the call that is blocked, or else the next one of this round, raise.

        From any thread, any number of times; returns at once. `close` forgets it. The other side
        sees a lost connection.
        """
        with self._hall.changed:
            self._is_aborted = True
            self._leave("was aborted")
            self._hall.changed.notify_all()

    def close(self) -> None:
        """End this side's part of the round; idempotent. The link can carry the next one."""
        with self._hall.changed:
            self._leave("left")
            self._is_aborted = self._was_seen = False
            self._hall.changed.notify_all()

    @abstractmethod
    def _leave(self, reason: str) -> None:
        """Mark this side's place as left, unless it is already; under the condition."""

    def _begin(self, phase: str, number: int, stall: float) -> None:
        if isinstance(stall, bool) or not 0 < stall < math.inf:
            raise Validation(f"stall must be a finite number of seconds above 0, not {stall!r}")
        if self._was_seen:  # by a round that nobody closed
            self._is_aborted = self._was_seen = False
        self._check(phase, number)
        self._leave("began another round")

    def _check(self, phase: str, number: int | None = None) -> None:
        if self._is_aborted:
            self._was_seen = True
            raise TransportAborted(f"{self.name} was aborted", phase=phase, round=number)

    def _wait(
        self,
        is_ready: Callable[[], object],
        why_left: Callable[[], str | None],
        last_sign: Callable[[], float],
        *,
        peer: str,
        stall: float,
        phase: str,
        number: int,
    ) -> None:
        """Wait for a peer, holding the hall's condition; it must show signs of life."""
        began = time.monotonic()
        while True:
            self._check(phase, number)
            if is_ready():
                return
            reason = why_left()
            if reason is not None:
                raise PeerLost(f"{peer} {reason}", replica=peer, phase=phase, round=number)
            remaining = max(began, last_sign()) + stall - time.monotonic()
            if remaining <= 0:
                message = f"no sign of {peer} for {stall:g} s"
                raise PhaseTimeout(message, replica=peer, phase=phase, round=number)
            self._hall.changed.wait(remaining)

    def _meet_faults(self, chunk: int, number: int, phase: str) -> set[FaultKind]:
        """Live through the faults of a chunk; what is left to the caller is returned."""
        met = [f for f in self._faults if f.chunk == chunk and f.round in (None, number)]
        for fault in met:
            self._faults.remove(fault)
            if fault.kind == "raises" and fault.error is not None:
                raise fault.error
            if fault.kind == "hang_for_ever":
                self._hall.released.wait()
                raise TransportAborted(f"{self.name} was released", phase=phase, round=number)
            if fault.kind in ("delay", "hang_until_aborted"):
                self._pause(fault.seconds if fault.kind == "delay" else math.inf, phase)
        return {fault.kind for fault in met}

    def _pause(self, seconds: float, phase: str) -> None:
        until = time.monotonic() + seconds
        with self._hall.changed:
            while time.monotonic() < until and not self._hall.released.is_set():
                self._check(phase)
                remaining = until - time.monotonic()
                self._hall.changed.wait(None if remaining == math.inf else remaining)
            self._check(phase)


def part_of(data: torch.Tensor, start: int, piece: Piece) -> torch.Tensor:
    return data[start : start + piece.nbytes]


def digest_of(kind: str | None, parts: list[torch.Tensor]) -> int | None:
    if kind is None:
        return None
    digest = ChunkDigest(kind)
    for part in parts:
        digest.update(part)
    return digest.value()


def corrupt(parts: list[torch.Tensor]) -> None:
    for part in parts:
        if part.numel():
            part[0] ^= 1
            return
