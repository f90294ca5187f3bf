"""One process per address: a round's calls must not be dealt out among several.

Servers with several API processes share their address: by one listening socket that all of them
inherit (``uvicorn --workers 2``, gunicorn), or by a socket of each with ``SO_REUSEPORT``. Each
process would have an engine and a model of its own, and the kernel would hand ``start`` to one and
``update`` to another. A process therefore claims what it listens on (an abstract Unix socket named
after the socket's number, and after its address where that can be shared); the second one finds it
taken. Abstract names live as long as their process, in the same network namespace as its ports.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
import struct
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

from aiosync.errors import Refused
from transports.forked import keep_from_children
from transports.lane import Lane

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
_CLAIM = "\0aiosync-api-"  # what an abstract address begins with
_PROBE_S = 0.2
_ATTEMPTS = 3  # at a claim whose holder goes away at that moment


class _Holder(NamedTuple):
    pid: int
    user: int


@final
class Claims:
    """The claims of one service; they end with `release`, or with the object."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._holders: dict[str, _Holder] = {}
        """Others that were found: each look would fill their queue a bit more."""
        self._lock = threading.Lock()
        self._is_checked = False
        self._end = weakref.finalize(self, _close, self._held)
        keep_from_children(self)

    def descriptors(self) -> list[int]:
        """See `transports.forked.Owner`."""
        return list(self._held.values())

    async def check(self, *, again: bool = False) -> None:
        """`hold` where that has not succeeded since the service answers, or `again`.

        A host may begin to listen only after it has started what it hosts: the first request shows
        that it has.
        """
        if again or not self._is_checked:
            await self.hold()
            self._is_checked = True

    async def hold(self) -> None:
        """Claim every bound stream socket of this process, as far as that has not been done.

        Raises:
            Refused: Another process of this user has claimed one; names its address.
        """
        if sys.platform != "linux":
            return
        async with Lane("aiosync-claim") as lane:
            await lane.run(self._claim_all)

    def release(self) -> None:
        """Give them back; idempotent."""
        with self._lock:
            self._is_checked = False
            _close(self._held)

    def _claim_all(self) -> None:
        with self._lock:
            try:
                found = list(_listeners())
                there = {name for _, names in found for name in names}
                for name in self._held.keys() - there:  # what was listened on is closed
                    os.close(self._held.pop(name))
                for address, names in found:
                    for name in names:
                        if name not in self._held:
                            self._claim(name, address)
            except BaseException:  # whatever it is: two that have half each would both be refused
                _close(self._held)
                raise

    def _claim(self, name: str, address: str) -> None:
        for _ in range(_ATTEMPTS):
            claim = _bound(name)
            if claim is not None:
                self._held[name] = claim
                self._holders.pop(name, None)
                return
            holder = self._holders.get(name) or _holder(name)
            if holder is not None:
                self._holders[name] = holder
                _judge(holder, address)
                return


def _judge(holder: _Holder, address: str) -> None:
    """Refuse to share with another process of this user."""
    if holder.pid == os.getpid() or holder.user != os.geteuid():
        return  # another service of this process; or somebody else's prank
    # Its number may mean nothing here: each container counts its own.
    who = f"process {holder.pid}" if holder.pid else "another process"
    raise Refused(
        f"{who} serves {address} as well as this one, process {os.getpid()}: a weight update"
        " would reach only one of the two",
        next_step="run one API process per replica (uvicorn --workers 1)",
        detail={"address": address, "pid": holder.pid},
    )


def _close(held: dict[str, int]) -> None:
    while held:
        os.close(held.popitem()[1])


def _listeners() -> Iterator[tuple[str, list[str]]]:
    """Address and claims' names of each bound stream socket of this process."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found = _listener(int(entry.name))
        except OSError:
            continue  # closed meanwhile
        if found is not None:
            yield found


def _listener(descriptor: int) -> tuple[str, list[str]] | None:
    status = os.fstat(descriptor)
    if not stat.S_ISSOCK(status.st_mode):
        return None
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        if sock.family not in _FAMILIES or not _is_listener(sock):
            return None
        name = sock.getsockname()
        if isinstance(name, bytes) and name.startswith(_CLAIM.encode()):
            return None  # a claim is not claimed in turn
        return _shown(name), [str(status.st_ino), *_shared(sock, name)]


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


def _shared(sock: socket.socket, name: Any) -> Iterable[str]:
    """The address as a name, where another socket may have the same one."""
    if not isinstance(name, tuple) or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT):
        return ()
    address = ipaddress.ip_address(name[0].partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    scope = "".join(f"%{number}" for number in name[3:] if number)
    return (f"{address}{scope}:{name[1]}",)


def _shown(name: object) -> str:
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)


def _address(name: str) -> str:
    return f"{_CLAIM}{name}"


def _bound(name: str) -> int | None:
    """The claim's descriptor; None where it is taken."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(_address(name))
        claim.listen()
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return claim.detach()


def _holder(name: str) -> _Holder | None:
    """Process and user behind a claim; None where it is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(_address(name))
        except ConnectionRefusedError:
            return None
        except OSError:
            return _Holder(0, os.geteuid())  # it is there, and asked too often
        raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", raw)
    return _Holder(pid, user)
