"""Agreement among the ranks of one trainer: small messages over TCP, rank 0 in the middle.

Theory of operation. There is one operation, `exchange`: every rank gives some bytes and gets what
all ranks gave, in rank order. Rank 0 collects one frame from each rank and answers with the list,
so all ranks leave the same exchange with the same list, or none of the survivors counts it as
done. Frames carry a sequence number: ranks that disagree about where they are find out at once.

A collective library would do, but none lets a rank give up: a process that leaves a gloo
collective half way can take its peers down with it. Here every wait is a `poll` with a deadline,
`abort` ends it from another thread, and a dead rank is named.

An exchange that fails ends the star: whoever leaves says so and hangs up, so that nobody waits for
it. A connection that ends without a word means that the rank died. Ranks that are alive get a new
star where they got this one (`transports.star_door`); frames of an old one cannot reach it, since
its connections are new.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Self, final

import msgspec

from statemachines.errors import Validation
from transports.errors import PeerLost, PhaseTimeout, TransportAborted
from transports.forked import keep_from_children
from transports.waker import Waker, milliseconds_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from statemachines.errors import AiosyncError

FRAME_LIMIT = 16 << 20
_HEADER = struct.Struct("!I")
PHASE = "agree"
ALIVE = "alive"
_LAST_WORD_S = 0.2


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """What goes over a connection.

    Attributes:
        seq: Which exchange this belongs to; the epoch in the frame that welcomes a rank.
        failure: This exchange, and the star, is over, and why; `kind` and `lost` say more.
        alive: Nobody died, and nobody leaves whatever the ranks are doing now: the star ended
            before, and they can go on once they have met again.
    """

    seq: int
    parts: list[bytes] = []
    failure: str | None = None
    kind: str = ""
    lost: int | None = None
    alive: bool = False

    def check(self, sender: int, seq: int) -> None:
        """Raise what the sender ended the star with, as seen from exchange `seq`."""
        if self.failure is None:
            return
        # A rank that speaks for itself may have left in this very exchange.
        alive = self.alive and (self.lost != sender or self.seq < seq)
        kind = _KINDS.get(self.kind, PeerLost)
        raise kind(self.failure, rank=self.lost, phase=PHASE, detail={ALIVE: alive})

    @classmethod
    def of(cls, seq: int, error: AiosyncError) -> Self:
        """The news of `error`."""
        alive = bool(error.detail.get(ALIVE))
        return cls(seq=seq, failure=error.message, kind=error.code, lost=error.rank, alive=alive)


_KINDS: dict[str, type[PeerLost | PhaseTimeout | Validation]] = {
    kind.code: kind for kind in (PeerLost, PhaseTimeout, Validation)
}
_FRAME = msgspec.msgpack.Decoder(Frame)


@final
class Star:
    """This rank's connections. Driven by one thread; `abort` from any.

    Attributes:
        rank, size: This rank, and how many there are.
        epoch: How many stars rank 0 has been the middle of, this one included.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        peers: Mapping[int, socket.socket],
        waker: Waker,
        *,
        epoch: int = 0,
    ) -> None:
        self.rank = rank
        self.size = size
        self.epoch = epoch
        self._peers = dict(peers)
        self._waker = waker
        self._seq = 0
        for sock in self._peers.values():
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_from_children(self)

    def descriptors(self) -> list[int]:
        return [sock.fileno() for sock in self._peers.values()]

    @classmethod
    def alone(cls) -> Self:
        """The star of a single rank: agrees with itself."""
        return cls(0, 1, {}, Waker())

    def exchange(self, payload: bytes, *, deadline: float) -> list[bytes]:
        """Give `payload`, get what every rank gave, by rank.

        Args:
            deadline: Of `time.monotonic`.

        Raises:
            PeerLost: A rank is gone (named); the star is of no more use.
            PhaseTimeout: A rank did not come to this exchange before the deadline (named).
            TransportAborted: `abort` was called.
            Validation: A rank is at another exchange.
        """
        if self.size > 1 and not self._peers:
            raise PeerLost("this star has ended", phase=PHASE, detail={ALIVE: True})
        self._seq += 1
        try:
            self._waker.check()
            if self.rank == 0:
                return self._collect_all(payload, deadline)
            frame = msgspec.msgpack.encode(Frame(seq=self._seq, parts=[payload]))
            self._send_to(0, self.size, frame, deadline)
            return self._read(0, self.size, deadline)
        except (PeerLost, PhaseTimeout, TransportAborted, Validation) as error:
            self._hang_up(error)
            raise

    def _hang_up(self, error: AiosyncError) -> None:
        """Leave for good, with a last word: all ranks fail alike, and none waits for this one."""
        if isinstance(error, TransportAborted) or self.rank:
            why = "was cancelled" if isinstance(error, TransportAborted) else error.message
            text = f"trainer rank {self.rank} left a meeting: {why}"
            error = PeerLost(text, rank=self.rank, detail={ALIVE: True})
        last = msgspec.msgpack.encode(Frame.of(self._seq, error))
        for rank, sock in self._peers.items():
            with suppress(PeerLost, PhaseTimeout, TransportAborted):
                send(sock, str(rank), last, self._waker, time.monotonic() + _LAST_WORD_S)
            sock.close()
        self._peers.clear()

    def _collect_all(self, payload: bytes, deadline: float) -> list[bytes]:
        parts = [payload, *(b"" for _ in range(self.size - 1))]
        waiting = dict(sorted(self._peers.items()))
        while waiting:
            names = {sock: str(rank) for rank, sock in waiting.items()}
            ready = wait(names, self._waker, deadline)
            for rank in [rank for rank, sock in waiting.items() if sock in ready]:
                (parts[rank],) = self._read(rank, 1, deadline)
                del waiting[rank]
        frame = msgspec.msgpack.encode(Frame(seq=self._seq, parts=parts))
        for rank in self._peers:
            self._send_to(rank, 1, frame, deadline)
        return parts

    def _send_to(self, rank: int, count: int, frame: bytes, deadline: float) -> None:
        try:
            send(self._peers[rank], str(rank), frame, self._waker, deadline)
        except PeerLost:
            self._read(rank, count, deadline)  # raises what it left as its last word, if anything
            raise

    def _read(self, rank: int, count: int, deadline: float) -> list[bytes]:
        frame = receive_frame(self._peers[rank], rank, self._waker, deadline)
        frame.check(rank, self._seq)
        if frame.seq != self._seq or len(frame.parts) != count:
            raise Validation(
                f"rank {rank} is at exchange {frame.seq}, rank {self.rank} at {self._seq}",
                rank=rank,
                phase=PHASE,
            )
        return frame.parts

    def abort(self) -> None:
        """End a blocked `exchange`, and every later one."""
        self._waker.wake()

    def close(self) -> None:
        """Leave; the others notice at their next exchange."""
        for sock in self._peers.values():
            sock.close()
        self._peers.clear()
        self._waker.close()

    def __repr__(self) -> str:
        return f"<Star {self.epoch}, rank {self.rank} of {self.size}, {self._seq} exchanges>"


def receive_frame(sock: socket.socket, rank: int, waker: Waker, deadline: float) -> Frame:
    """The next frame of `rank`.

    Raises:
        Validation: It is none.
        PeerLost, PhaseTimeout, TransportAborted: It did not come.
    """
    data = receive(sock, str(rank), waker, deadline)
    try:
        return _FRAME.decode(data)
    except msgspec.DecodeError as error:
        raise Validation(f"rank {rank} sent no frame: {error}", rank=rank) from error


def wait(
    names: Mapping[socket.socket, str], waker: Waker, deadline: float, *, write: bool = False
) -> set[socket.socket]:
    """Wait until one of the sockets is ready; `names` says which ranks are waited for.

    Raises:
        PhaseTimeout: None was before the deadline; those that are waited for are named.
        TransportAborted: `waker` was woken.
    """
    waker.check()
    poller = select.poll()
    poller.register(waker.fileno(), select.POLLIN)
    by_fd = {sock.fileno(): sock for sock in names}
    for fd in by_fd:
        poller.register(fd, select.POLLOUT if write else select.POLLIN)
    ready = {by_fd[fd] for fd, _ in poller.poll(milliseconds_until(deadline)) if fd in by_fd}
    waker.check()
    if not ready and time.monotonic() >= deadline:
        late = ", ".join(name for name in names.values() if name)
        single = int(late) if late.isdigit() else None
        raise PhaseTimeout(f"rank {late} did not come in time", rank=single, phase=PHASE)
    return ready


def any_readable(sockets: Iterable[socket.socket]) -> bool:
    """Whether one of them has something to read right now, if only its end."""
    poller = select.poll()
    for sock in sockets:
        poller.register(sock.fileno(), select.POLLIN)
    return bool(poller.poll(0))


def send(sock: socket.socket, rank: str, payload: bytes, waker: Waker, deadline: float) -> None:
    data = memoryview(_HEADER.pack(len(payload)) + payload)
    while data:
        try:
            data = data[sock.send(data, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            wait({sock: rank}, waker, deadline, write=True)
        except OSError as error:
            raise _lost(rank) from error


def receive(sock: socket.socket, rank: str, waker: Waker, deadline: float) -> bytes:
    (length,) = _HEADER.unpack(_exactly(sock, rank, _HEADER.size, waker, deadline))
    if length > FRAME_LIMIT:
        raise Validation(f"rank {rank} announced a frame of {length} bytes", phase=PHASE)
    return _exactly(sock, rank, length, waker, deadline)


def _exactly(sock: socket.socket, rank: str, count: int, waker: Waker, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        try:
            part = sock.recv(count - len(data))
        except BlockingIOError:
            wait({sock: rank}, waker, deadline)
            continue
        except OSError as error:
            raise _lost(rank) from error
        if not part:
            raise _lost(rank)
        data += part
    return bytes(data)


def _lost(rank: str) -> PeerLost:
    number = int(rank) if rank.isdigit() else None
    return PeerLost(f"trainer rank {rank} closed its connection or died", rank=number, phase=PHASE)
