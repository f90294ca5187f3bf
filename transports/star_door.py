"""Where the ranks of a star find each other, the first time and again.

Rank 0's listening socket stays open as long as its engine lives. Whenever a star has ended the
others connect to it again; rank 0 waits until all have come, and then welcomes them all under the
next epoch. A rank that gave up waiting and comes again takes the place of its older connection.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, final

import msgspec

from statemachines.errors import Validation
from transports.errors import PeerLost, PhaseTimeout, TransportAborted
from transports.forked import keep_from_children
from transports.star import (
    ALIVE,
    PHASE,
    Frame,
    Star,
    any_readable,
    receive,
    receive_frame,
    send,
    wait,
)

if TYPE_CHECKING:
    from transports.waker import Waker

_STRANGER_S = 5.0
_LAST_WORD_S = 0.2


class _Hello(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    rank: int
    size: int


_HELLO = msgspec.msgpack.Decoder(_Hello)


@final
class StarHub:
    """Rank 0's listening socket: where the others find it. Hand `address` and `token` to them."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self._socket.setblocking(False)
        self.address = f"{host}|{self._socket.getsockname()[1]}"
        self.token = secrets.token_hex(16)
        self.epoch = 0
        keep_from_children(self)

    def descriptors(self) -> list[int]:
        return [self._socket.fileno()]

    def accept(self, size: int, *, waker: Waker, deadline: float) -> Star:
        """Wait for the other ``size - 1`` ranks; connections without the token are dropped.

        Raises:
            PhaseTimeout: Names the ranks that did not come; those that came are told.
            TransportAborted: `waker` was woken.
        """
        found: dict[int, socket.socket] = {}
        epoch = self.epoch + 1
        try:
            self._gather(size, found, waker, deadline)
            self.epoch = epoch
            welcome = msgspec.msgpack.encode(Frame(seq=epoch))
            for rank, sock in found.items():
                send(sock, str(rank), welcome, waker, deadline)
        except BaseException as error:
            _turn_away(found, error, waker)
            raise
        return Star(0, size, found, waker, epoch=epoch)

    def _gather(
        self, size: int, found: dict[int, socket.socket], waker: Waker, deadline: float
    ) -> None:
        while True:
            missing = [str(rank) for rank in range(1, size) if rank not in found]
            names = {self._socket: ", ".join(missing), **dict.fromkeys(found.values(), "")}
            if not missing and not any_readable(names):
                return
            ready = wait(names, waker, deadline)
            # Nobody speaks before the welcome: who can be read has gone again.
            for rank in [rank for rank, sock in found.items() if sock in ready]:
                found.pop(rank).close()
            if self._socket in ready:
                with suppress(BlockingIOError, ConnectionAbortedError):
                    self._admit(self._socket.accept()[0], size, found, waker, deadline)

    def _admit(
        self,
        sock: socket.socket,
        size: int,
        found: dict[int, socket.socket],
        waker: Waker,
        deadline: float,
    ) -> None:
        sock.setblocking(False)
        is_ours = False
        try:
            limit = min(deadline, time.monotonic() + _STRANGER_S)  # it does not hold the door
            hello = _HELLO.decode(receive(sock, "?", waker, limit))
            knows = hmac.compare_digest(hello.token.encode(), self.token.encode())
            if is_ours := knows and hello.size == size and 0 < hello.rank < size:
                if hello.rank in found:
                    found[hello.rank].close()
                found[hello.rank] = sock
        except (PeerLost, PhaseTimeout, Validation, msgspec.DecodeError):
            pass  # not one of ours: the door stays open for those who are
        finally:
            if not is_ours:
                sock.close()

    def close(self) -> None:
        self._socket.close()


def _turn_away(found: dict[int, socket.socket], error: BaseException, waker: Waker) -> None:
    news: PeerLost | PhaseTimeout = PeerLost("trainer rank 0 stopped waiting", rank=0)
    if isinstance(error, PeerLost | PhaseTimeout):
        news = error
    news.detail.setdefault(ALIVE, True)
    frame = msgspec.msgpack.encode(Frame.of(0, news))
    for rank, sock in found.items():
        with suppress(PeerLost, PhaseTimeout, TransportAborted):
            send(sock, str(rank), frame, waker, time.monotonic() + _LAST_WORD_S)
        sock.close()


def join_star(
    address: str, token: str, *, rank: int, size: int, waker: Waker, deadline: float
) -> Star:
    """Connect this rank to rank 0 and wait until all ranks have come.

    Raises:
        PeerLost: Nobody listens there, or the token is wrong.
        PhaseTimeout: Not all came before the deadline; those missing are named if rank 0 came.
    """
    host, _, port = address.rpartition("|")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setblocking(False)
        with suppress(BlockingIOError):
            sock.connect((host, int(port)))
        wait({sock: "0"}, waker, deadline, write=True)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise PeerLost(f"rank 0 cannot be reached at {host}:{port}", rank=0, phase=PHASE)
        hello = msgspec.msgpack.encode(_Hello(token=token, rank=rank, size=size))
        send(sock, "0", hello, waker, deadline)
        welcome = receive_frame(sock, 0, waker, deadline)
        welcome.check(0, 0)
    except BaseException:
        sock.close()
        raise
    return Star(rank, size, {0: sock}, waker, epoch=welcome.seq)
