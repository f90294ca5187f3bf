"""Where the links of this host come in."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, final

from transports.errors import PhaseTimeout
from transports.forked import keep_from_children
from transports.links import Link, native_address
from transports.socket_place import socket_place
from transports.waker import wait_ready

if TYPE_CHECKING:
    from transports.waker import Waker


def new_address() -> str:
    """An abstract address that nobody else has; Linux only."""
    return f"@aiosync-{secrets.token_hex(16)}"


@final
class Listener:
    """Where readers connect: an abstract socket on Linux, so no file is ever left behind.

    Args:
        address: An abstract one (`new_address`), where somebody else has to know it before.

    Attributes:
        address: What `Link.connect` takes: ``@name`` (abstract) or a path.
    """

    def __init__(self, address: str | None = None) -> None:
        self._directory: Path | None = None
        if address is not None or os.uname().sysname == "Linux":
            self.address = new_address() if address is None else address
        else:
            place = socket_place("aiosync-01234567/link")
            self._directory = Path(tempfile.mkdtemp(prefix="aiosync-", dir=place))
            self.address = str(self._directory / "link")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.setblocking(False)
            self._sock.bind(native_address(self.address))
            self._sock.listen(128)
        except BaseException:  # not handed out yet
            self.close()
            raise
        keep_from_children(self)

    def __repr__(self) -> str:
        state = "closed" if self._sock.fileno() < 0 else "open"
        return f"<Listener {self.address} {state}>"

    def fileno(self) -> int:
        return self._sock.fileno()

    def descriptors(self) -> list[int]:
        return [self._sock.fileno()]

    def accept_nowait(self, waker: Waker) -> Link | None:
        """The next connection, or None.

        Raises:
            Validation: Its peer is another user's process; it has been closed.
        """
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        return Link(sock, waker, peer="reader")

    def accept(self, waker: Waker, *, deadline: float) -> Link:
        """Like `accept_nowait`, but waits.

        Raises:
            PhaseTimeout: Nobody came.
            TransportAborted: The waker was woken.
        """
        while True:
            link = self.accept_nowait(waker)
            if link is not None:
                return link
            wait_ready((), waker, deadline=deadline, listener=self)
            if time.monotonic() >= deadline:
                raise PhaseTimeout("nobody connected in time")

    def close(self) -> None:
        self._sock.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
