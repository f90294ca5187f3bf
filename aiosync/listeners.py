"""Listening sockets. All of it blocks; the server runs it on a lane."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from aiosync.errors import Refused, Validation
from transports.socket_place import LONGEST

_BACKLOG = 128


def bind_tcp(host: str, port: int) -> socket.socket:
    """Listen on the first address of `host` that can be bound.

    Raises:
        OSError: None can; names host and port.
    """
    failure: OSError | None = None
    try:
        found = socket.getaddrinfo(
            host or None,
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV,
        )
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}: {error.strerror}") from error
    for family, kind, proto, _, address in found:
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            failure = error
            continue
        sock.setblocking(False)
        return sock
    code = errno.EADDRNOTAVAIL if failure is None else failure.errno
    reason = "no address" if failure is None else failure.strerror
    raise OSError(code, f"cannot listen on {host}:{port}: {reason}") from failure


def bind_unix(path: str) -> socket.socket:
    """Listen on a Unix socket that only this user can connect to (mode 0600).

    A socket file that nobody listens on any more is replaced.

    Raises:
        Refused: Another server listens there.
        Validation: The path is too long, or names something that is no socket.
        OSError: The folder is missing, or may not be written to.
    """
    if len(os.fsencode(path)) > LONGEST:
        raise Validation(
            f"Unix socket path {path!r} is longer than {LONGEST} bytes",
            next_step="give a shorter path=, or none",
        )
    _clear(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Before bind, which takes the mode from here: the file is never open to others.
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(path)
        Path(path).chmod(0o600)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:  # whatever it is: the descriptor must not leak
        sock.close()
        raise
    return sock


def _clear(path: str) -> None:
    try:
        mode = Path(path).stat(follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise Validation(f"{path} exists and is no socket; it is left alone")
    if _is_live(path):
        raise Refused(f"another server listens on {path}")
    with suppress(FileNotFoundError):  # its owner may remove it at the same moment
        Path(path).unlink()


def _is_live(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # its queue is full: somebody listens, only slowly
        return True


def identity(path: str) -> tuple[int, int]:
    """Which file `path` is now; a successor's socket of the same name is another one."""
    found = Path(path).stat(follow_symlinks=False)
    return found.st_dev, found.st_ino


def remove_unix(path: str, expected: tuple[int, int]) -> None:
    """Remove the socket file if it is still the one that was made."""
    with suppress(OSError):  # it is gone already
        if identity(path) == expected:
            Path(path).unlink()
