"""One process per listening socket: a round's calls must not be dealt out among several.

Servers with several API processes (``uvicorn --workers 2``, gunicorn) share one listening socket
among them. Each process would have an engine and a model of its own, and the kernel would hand
``start`` to one and ``update`` to another. A process therefore claims the sockets it has inherited
(an abstract Unix socket with the socket's number as its name); the second one finds them taken.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import sys
from pathlib import Path

from aiosync.errors import Refused
from transports.lane import Lane

_FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)


async def claim_listeners() -> list[socket.socket]:
    """Claim every bound stream socket of this process; closing the claims gives them back.

    Raises:
        Refused: Another process of this user has claimed one; names its address.
    """
    if sys.platform != "linux":
        return []
    async with Lane("aiosync-claim") as lane:
        return await lane.run(_claim_all)


def _claim_all() -> list[socket.socket]:
    claims: list[socket.socket] = []
    try:
        for number, address in _listeners():
            claim = _claim(number, address)
            if claim is not None:
                claims.append(claim)
    except BaseException:  # whatever it is: those that were had are given back
        for claim in claims:
            claim.close()
        raise
    return claims


def _listeners() -> list[tuple[int, str]]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            descriptor = int(entry.name)
            status = os.fstat(descriptor)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                if sock.family in _FAMILIES and _is_listener(sock):
                    found.append((status.st_ino, _shown(sock.getsockname())))
        except OSError:
            continue  # closed meanwhile
    return found


def _is_listener(sock: socket.socket) -> bool:
    """Bound, of the stream kind, and without a peer; it may not listen yet."""
    name = sock.getsockname()
    if sock.type != socket.SOCK_STREAM or not (name if isinstance(name, str) else name[1:2]):
        return False
    if isinstance(name, tuple) and name[1] == 0:
        return False
    try:
        sock.getpeername()
    except OSError as error:
        return error.errno == errno.ENOTCONN
    return False


def _shown(name: object) -> str:
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)


def _claim(number: int, address: str) -> socket.socket | None:
    name = f"\0aiosync-api-{number}"
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(name)
        claim.listen()
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            raise
        holder, user = _holder(name)
        if holder == os.getpid() or user != os.geteuid():
            return None  # another service of this process; or somebody else's prank
        raise Refused(
            f"process {holder} serves {address} as well: a weight update would reach only one of"
            " the two",
            next_step="run one API process per replica (uvicorn --workers 1)",
            detail={"address": address, "pid": holder},
        ) from None
    return claim


def _holder(name: str) -> tuple[int, int]:
    """Process and user behind a claim; zeros where it is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(name)
            raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return 0, os.geteuid()
    pid, user, _ = struct.unpack("3i", raw)
    return pid, user
