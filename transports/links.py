"""Small messages and descriptors between two processes of one host.

A `Link` is a Unix stream socket that carries length-prefixed frames and, with SCM_RIGHTS, open
descriptors. Nothing here ever waits without a deadline: each wait is one `poll` over the sockets
and a `Waker`, so another thread can end it at once.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Self, final

from statemachines.errors import Validation
from transports.errors import PeerLost, PhaseTimeout, TransportAborted
from transports.forked import keep_from_children
from transports.waker import wait_ready

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transports.waker import Waker

FRAME_LIMIT = 1 << 20
FDS_LIMIT = 64
_HEADER = struct.Struct("!I")
# Plain numbers: arithmetic with the enumerations they come from takes longer than the system call.
_NO_SIGNAL = int(getattr(socket, "MSG_NOSIGNAL", 0))
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_TRUNCATED = int(socket.MSG_CTRUNC)
_CREDENTIALS = struct.Struct("3i")


@final
class Link:
    """One connected peer; driven by one thread, `shutdown` by any.

    Attributes:
        peer: What errors call the other side (`replica`); set it once its name is known.
        pid, uid: The peer's, as the kernel tells; None where it does not.
    """

    def __init__(self, sock: socket.socket, waker: Waker, *, peer: str) -> None:
        self._sock = sock
        self._waker = waker
        self._lock = threading.Lock()
        self._pidfd = -1
        self._head = bytearray()
        self._body: bytearray | None = None
        self._filled = 0
        self._fds: list[int] = []
        self._outbox: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self.peer = peer
        self.pid: int | None = None
        self.uid: int | None = None
        sock.setblocking(False)
        try:
            self._identify()
        except BaseException:  # the caller never gets this object, so nobody else can close it
            self.close()
            raise
        keep_from_children(self)

    @classmethod
    def connect(cls, address: str, *, waker: Waker, deadline: float, peer: str = "peer") -> Self:
        """Connect to a `Listener`.

        Raises:
            PeerLost: Nobody listens there.
            PhaseTimeout: The listener's queue stayed full until the deadline.
            Validation: It belongs to another user.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            while not _connect_nowait(sock, address, peer=peer, deadline=deadline):
                # A full queue of a Unix socket cannot be polled for.
                wait_ready((), waker, deadline=min(deadline, time.monotonic() + 0.01))
        except BaseException:  # not handed out yet
            sock.close()
            raise
        return cls(sock, waker, peer=peer)

    def __repr__(self) -> str:
        state = "closed" if self._sock.fileno() < 0 else "open"
        return f"<Link to {self.peer} pid={self.pid} {state}>"

    def _identify(self) -> None:
        if not hasattr(socket, "SO_PEERCRED"):
            return  # there the socket's directory is closed to other users
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, self.uid, _gid = _CREDENTIALS.unpack(raw)
        if self.uid != os.geteuid():
            raise Validation(
                f"peer runs as user {self.uid}, this process as user {os.geteuid()}",
                replica=self.peer,
            )
        self.pid = pid or None
        if pid > 0 and pid != os.getpid() and hasattr(os, "pidfd_open"):
            # A forked child of a dead peer keeps the socket open; its process handle does not lie.
            try:
                self._pidfd = os.pidfd_open(pid)
            except OSError:
                self._pidfd = -1

    def fileno(self) -> int:
        return self._sock.fileno()

    def watched(self) -> list[int]:
        """Descriptors whose readability means news of the peer."""
        return [fd for fd in (self._sock.fileno(), self._pidfd) if fd >= 0]

    descriptors = watched

    @property
    def unsent(self) -> bool:
        return bool(self._outbox)

    def post(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame and send what goes without waiting; the rest leaves in later waits.

        `fds` must stay open until `unsent` is False.
        """
        if len(payload) > FRAME_LIMIT:
            raise Validation(f"frame of {len(payload)} bytes; the limit is {FRAME_LIMIT}")
        if len(fds) > FDS_LIMIT:
            raise Validation(f"{len(fds)} descriptors in one frame; the limit is {FDS_LIMIT}")
        self._outbox.append((memoryview(_HEADER.pack(len(payload)) + payload), tuple(fds)))
        self.flush_nowait()

    def send(self, payload: bytes, fds: Sequence[int] = (), *, deadline: float) -> None:
        """Send a frame whole.

        Raises:
            PeerLost, PhaseTimeout, TransportAborted: It could not be; the link is of no more use.
        """
        self.post(payload, fds)
        self.flush(deadline=deadline)

    def flush(self, *, deadline: float) -> None:
        """Wait until all queued frames have left."""
        while self._outbox:
            self._wait(select.POLLOUT, deadline)
            self.flush_nowait()

    def flush_nowait(self) -> None:
        while self._outbox:
            data, fds = self._outbox[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([data], rights, _NO_SIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                raise self._lost(error) from error
            if sent == len(data):
                self._outbox.popleft()
            else:
                self._outbox[0] = (data[sent:], ())  # descriptors travel with the first byte

    def recv(self, *, deadline: float, max_fds: int = 0) -> tuple[bytes, list[int]]:
        """The next frame and its descriptors, which are the caller's to close.

        Raises:
            PeerLost: The connection ended.
            PhaseTimeout: No whole frame came before the deadline.
            Validation: The frame is too long or brings other descriptors than allowed (they are
                closed).
            TransportAborted: The waker was woken.
        """
        while True:
            self._waker.check()
            frame = self.recv_nowait(max_fds=max_fds)
            if frame is not None:
                return frame
            self._wait(select.POLLIN, deadline)

    def recv_nowait(self, *, max_fds: int = 0) -> tuple[bytes, list[int]] | None:
        """Like `recv`, but None when no whole frame is there yet."""
        exited = False
        while True:
            if self._body is None:
                chunk = self._read(_HEADER.size - len(self._head), max_fds)
                if chunk is not None:
                    self._head += chunk
                    if len(self._head) == _HEADER.size:
                        self._begin_body()
            else:
                chunk = self._read(len(self._body) - self._filled, max_fds)
                if chunk is not None:
                    self._body[self._filled : self._filled + len(chunk)] = chunk
                    self._filled += len(chunk)
            if self._body is not None and self._filled == len(self._body):
                payload, fds = bytes(self._body), self._fds
                self._body, self._fds = None, []
                return payload, fds
            if chunk is None:
                if exited:
                    raise self._lost(None)
                # Looked at before the last read, so that what it sent before it died still counts.
                exited = self._peer_exited()
                if not exited:
                    return None

    def _begin_body(self) -> None:
        (size,) = _HEADER.unpack(self._head)
        self._head.clear()
        if size > FRAME_LIMIT:
            raise Validation(f"peer announces a frame of {size} bytes", replica=self.peer)
        self._body, self._filled = bytearray(size), 0

    def _read(self, size: int, max_fds: int) -> bytes | None:
        # With no room for rights the kernel installs no descriptor at all and says so.
        space = socket.CMSG_SPACE(max_fds * 4) if max_fds else 0
        if size == 0:
            return b""
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(size, space, _CLOSE_ON_EXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._lost(error) from error
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
                self._fds.extend(fds)
        if flags & _TRUNCATED or len(self._fds) > max_fds:
            self._drop_fds()
            raise Validation(
                f"unexpected or truncated descriptors from the peer (at most {max_fds} allowed; "
                "or this process is out of descriptors)",
                replica=self.peer,
            )
        if not data:
            raise self._lost(None)
        return data

    def _wait(self, events: int, deadline: float) -> None:
        poller = select.poll()
        poller.register(self._waker.fileno(), select.POLLIN)
        for fd in self.watched():
            poller.register(fd, events if fd == self._sock.fileno() else select.POLLIN)
        happened = self._waker.poll(poller, deadline)
        self._waker.check()
        if not happened and time.monotonic() >= deadline:
            raise PhaseTimeout(f"nothing from {self.peer} in time", replica=self.peer)
        if events == select.POLLOUT and self._peer_exited():
            raise self._lost(None)

    def _peer_exited(self) -> bool:
        if self._pidfd < 0:
            return False
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def _lost(self, error: OSError | None) -> PeerLost | TransportAborted:
        if self._waker.woken:
            return TransportAborted("told to stop")
        why = f": {error}" if error is not None else ""
        return PeerLost(f"{self.peer} closed its connection or died{why}", replica=self.peer)

    def _drop_fds(self) -> None:
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)

    def shutdown(self) -> None:
        """End the connection for both sides at once; from any thread."""
        with self._lock:  # never on a descriptor number that was closed and given out again
            if self._sock.fileno() >= 0:
                try:
                    self._sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def close(self) -> None:
        with self._lock:
            self._sock.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1
        self._outbox.clear()
        self._drop_fds()


def native_address(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address


def _connect_nowait(sock: socket.socket, address: str, *, peer: str, deadline: float) -> bool:
    try:
        sock.connect(native_address(address))
    except BlockingIOError:
        if time.monotonic() >= deadline:
            raise PhaseTimeout(f"{address} takes no connections", replica=peer) from None
        return False
    except OSError as error:
        raise PeerLost(f"cannot connect to {address}: {error}", replica=peer) from error
    return True
