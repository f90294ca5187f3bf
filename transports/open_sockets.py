"""The sockets that a native library opened in this process, found by their addresses.

gloo and torch's store wait inside native code on sockets they never show. A duplicate of such a
descriptor reaches the same connection: shutting it down ends the wait, at once, and looking at it
tells whether the peer is there. A listening socket must never be shut down: gloo then ends the
whole process.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import threading
from typing import TYPE_CHECKING

from transports.addresses import numeric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Address = tuple[str, int]
SETUP = threading.Lock()
"""Held for the moment in which a socket is opened and found; never while a peer is waited for."""

_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


def connected(
    belongs: Callable[[Address, Address], bool], *, skip: Iterable[int] = ()
) -> dict[int, socket.socket]:
    """Duplicates of the connected IP sockets whose (local, remote) addresses belong, by descriptor.

    The caller closes them. A duplicate keeps the connection open until it is shut down or closed.
    """
    found = {}
    skipped = frozenset(skip)
    for fd, sock in _sockets():
        try:
            remote = numeric(sock.getpeername())
            local = numeric(sock.getsockname())
        except OSError:  # listening, or never connected
            sock.close()
            continue
        if fd not in skipped and belongs(local, remote):
            found[fd] = sock
        else:
            sock.close()
    return found


def listening() -> set[tuple[int, Address]]:
    """Descriptor and address of every listening IP socket."""
    found = set()
    for fd, sock in _sockets():
        with sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add((fd, numeric(sock.getsockname())))
    return found


def shut(sockets: Iterable[socket.socket]) -> None:
    """End both directions of these connections: whoever waits on them wakes, on both sides."""
    for sock in sockets:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is down already


def hung_up(sockets: Iterable[socket.socket]) -> list[socket.socket]:
    """Those whose peer has closed, or whose connection broke; nothing is read."""
    poller = select.poll()
    by_fd = {}
    for sock in sockets:
        if sock.fileno() >= 0:
            poller.register(sock.fileno(), _GONE)
            by_fd[sock.fileno()] = sock
    return [by_fd[fd] for fd, _ in poller.poll(0)]


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    # All are looked at before one is duplicated: a duplicate may get a number of the listing.
    for fd in [int(name) for name in os.listdir("/dev/fd") if _is_socket(int(name))]:  # noqa: PTH208
        try:
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:  # closed meanwhile
            continue
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
            yield fd, sock
        else:
            sock.close()


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:  # closed meanwhile, or the descriptor of the listing itself
        return False
