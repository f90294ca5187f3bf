"""Agreement among the ranks of one trainer: small messages over TCP, rank 0 in the middle.

Theory of operation. There is one operation, `exchange`: every rank gives some bytes and gets what
all ranks gave, in rank order. Rank 0 collects one frame from each rank and answers with the list,
so all ranks leave the same exchange with the same list, or none of the survivors counts it as
done. Frames carry a sequence number: ranks that disagree about where they are find out at once.

A collective library would do, but none lets a rank give up: a process that leaves a gloo
collective half way can take its peers down with it. Here every wait is a `poll` with a deadline,
`abort` ends it from another thread, and a dead rank is named.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Self, final

import msgspec

from statemachines.errors import Validation
from transports.errors import PeerLost, PhaseTimeout
from transports.forked import keep_from_children
from transports.waker import Waker, milliseconds_until

if TYPE_CHECKING:
    from collections.abc import Mapping

FRAME_LIMIT = 16 << 20
_HEADER = struct.Struct("!I")
_PHASE = "agree"


class _Hello(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    rank: int
    size: int


class _Frame(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    parts: list[bytes] = []
    failure: str | None = None  # rank 0's news for the others: this exchange, and the star, is over
    kind: str = ""
    lost: int | None = None


_KINDS: dict[str, type[PeerLost | PhaseTimeout | Validation]] = {
    kind.code: kind for kind in (PeerLost, PhaseTimeout, Validation)
}
_HELLO = msgspec.msgpack.Decoder(_Hello)
_FRAME = msgspec.msgpack.Decoder(_Frame)


@final
class StarHub:
    """Rank 0's listening socket: where the others find it. Hand `address` and `token` to them."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self._socket.setblocking(False)
        self.address = f"{host}|{self._socket.getsockname()[1]}"
        self.token = secrets.token_hex(16)

    def accept(self, size: int, *, waker: Waker, deadline: float) -> Star:
        """Wait for the other ``size - 1`` ranks; connections without the token are dropped.

        Raises:
            PhaseTimeout: Names the ranks that did not come.
        """
        found: dict[int, socket.socket] = {}
        try:
            while len(found) < size - 1:
                missing = [rank for rank in range(1, size) if rank not in found]
                _wait({self._socket: ", ".join(map(str, missing))}, waker, deadline)
                with suppress(BlockingIOError):
                    self._admit(self._socket.accept()[0], size, found, waker, deadline)
        except BaseException:
            for sock in found.values():
                sock.close()
            raise
        return Star(0, size, found, waker)

    def _admit(
        self,
        sock: socket.socket,
        size: int,
        found: dict[int, socket.socket],
        waker: Waker,
        deadline: float,
    ) -> None:
        sock.setblocking(False)
        try:
            limit = min(deadline, time.monotonic() + 5.0)  # a stranger does not hold the door
            hello = _HELLO.decode(_receive(sock, "?", waker, limit))
            fits = hello.size == size and 0 < hello.rank < size and hello.rank not in found
            if hmac.compare_digest(hello.token.encode(), self.token.encode()) and fits:
                found[hello.rank] = sock
                return
        except (PeerLost, PhaseTimeout, Validation, msgspec.DecodeError):
            pass  # not one of ours: the door stays open for those who are
        sock.close()

    def close(self) -> None:
        self._socket.close()


def join_star(
    address: str, token: str, *, rank: int, size: int, waker: Waker, deadline: float
) -> Star:
    """Connect this rank to rank 0.

    Raises:
        PeerLost: Nobody listens there.
        PhaseTimeout: No connection before the deadline.
    """
    host, _, port = address.rpartition("|")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setblocking(False)
        with suppress(BlockingIOError):
            sock.connect((host, int(port)))
        _wait({sock: "0"}, waker, deadline, write=True)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise PeerLost(f"rank 0 cannot be reached at {host}:{port}", rank=0, phase=_PHASE)
        hello = msgspec.msgpack.encode(_Hello(token=token, rank=rank, size=size))
        _send(sock, "0", hello, waker, deadline)
    except BaseException:
        sock.close()
        raise
    return Star(rank, size, {0: sock}, waker)


@final
class Star:
    """This rank's connections. Driven by one thread; `abort` from any.

    Attributes:
        rank, size: This rank, and how many there are.
    """

    def __init__(
        self, rank: int, size: int, peers: Mapping[int, socket.socket], waker: Waker
    ) -> None:
        self.rank = rank
        self.size = size
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
        self._waker.check()
        self._seq += 1
        if self.rank == 0:
            return self._collect(payload, deadline)
        frame = msgspec.msgpack.encode(_Frame(seq=self._seq, parts=[payload]))
        _send(self._peers[0], "0", frame, self._waker, deadline)
        return self._read(0, self.size, deadline)

    def _collect(self, payload: bytes, deadline: float) -> list[bytes]:
        try:
            return self._collect_all(payload, deadline)
        except (PeerLost, PhaseTimeout, Validation) as error:
            self._spread(error)
            raise

    def _spread(self, error: PeerLost | PhaseTimeout | Validation) -> None:
        """All ranks fail alike: the others learn who is missing, not just that rank 0 left."""
        news = _Frame(seq=self._seq, failure=error.message, kind=error.code, lost=error.rank)
        for rank, sock in self._peers.items():
            with suppress(PeerLost, PhaseTimeout):
                limit = time.monotonic() + 0.2
                _send(sock, str(rank), msgspec.msgpack.encode(news), self._waker, limit)

    def _collect_all(self, payload: bytes, deadline: float) -> list[bytes]:
        parts = [payload, *(b"" for _ in range(self.size - 1))]
        waiting = dict(sorted(self._peers.items()))
        while waiting:
            names = {sock: str(rank) for rank, sock in waiting.items()}
            ready = _wait(names, self._waker, deadline)
            for rank in [rank for rank, sock in waiting.items() if sock in ready]:
                (parts[rank],) = self._read(rank, 1, deadline)
                del waiting[rank]
        frame = msgspec.msgpack.encode(_Frame(seq=self._seq, parts=parts))
        for rank, sock in self._peers.items():
            _send(sock, str(rank), frame, self._waker, deadline)
        return parts

    def _read(self, rank: int, count: int, deadline: float) -> list[bytes]:
        data = _receive(self._peers[rank], str(rank), self._waker, deadline)
        try:
            frame = _FRAME.decode(data)
        except msgspec.DecodeError as error:
            raise Validation(f"rank {rank} sent no frame: {error}", rank=rank) from error
        if frame.failure is not None:
            kind = _KINDS.get(frame.kind, PeerLost)
            raise kind(frame.failure, rank=frame.lost, phase=_PHASE)
        if frame.seq != self._seq or len(frame.parts) != count:
            raise Validation(
                f"rank {rank} is at exchange {frame.seq}, rank {self.rank} at {self._seq}",
                rank=rank,
                phase=_PHASE,
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
        return f"<Star rank {self.rank} of {self.size}, {self._seq} exchanges>"


def _wait(
    names: Mapping[socket.socket, str], waker: Waker, deadline: float, *, write: bool = False
) -> set[socket.socket]:
    """Wait until one of the sockets is ready; `names` says which ranks are waited for."""
    waker.check()
    poller = select.poll()
    poller.register(waker.fileno(), select.POLLIN)
    by_fd = {sock.fileno(): sock for sock in names}
    for fd in by_fd:
        poller.register(fd, select.POLLOUT if write else select.POLLIN)
    ready = {by_fd[fd] for fd, _ in poller.poll(milliseconds_until(deadline)) if fd in by_fd}
    waker.check()
    if not ready and time.monotonic() >= deadline:
        late = ", ".join(names.values())
        single = int(late) if late.isdigit() else None
        raise PhaseTimeout(f"rank {late} did not come in time", rank=single, phase=_PHASE)
    return ready


def _send(sock: socket.socket, rank: str, payload: bytes, waker: Waker, deadline: float) -> None:
    data = memoryview(_HEADER.pack(len(payload)) + payload)
    while data:
        try:
            data = data[sock.send(data, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            _wait({sock: rank}, waker, deadline, write=True)
        except OSError as error:
            raise _lost(rank) from error


def _receive(sock: socket.socket, rank: str, waker: Waker, deadline: float) -> bytes:
    (length,) = _HEADER.unpack(_exactly(sock, rank, _HEADER.size, waker, deadline))
    if length > FRAME_LIMIT:
        raise Validation(f"rank {rank} announced a frame of {length} bytes", phase=_PHASE)
    return _exactly(sock, rank, length, waker, deadline)


def _exactly(sock: socket.socket, rank: str, count: int, waker: Waker, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        try:
            part = sock.recv(count - len(data))
        except BlockingIOError:
            _wait({sock: rank}, waker, deadline)
            continue
        except OSError as error:
            raise _lost(rank) from error
        if not part:
            raise _lost(rank)
        data += part
    return bytes(data)


def _lost(rank: str) -> PeerLost:
    number = int(rank) if rank.isdigit() else None
    return PeerLost(f"trainer rank {rank} closed its connection or died", rank=number, phase=_PHASE)
