"""Ends the waits of another thread."""

from __future__ import annotations

import os
from typing import final

from transports.errors import TransportAborted


@final
class Waker:
    """Ends every wait it takes part in, from any thread, until it is reset."""

    __slots__ = ("_read_fd", "_write_fd", "woken")

    def __init__(self) -> None:
        self.woken = False
        if hasattr(os, "eventfd"):
            self._read_fd = self._write_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:
            self._read_fd, self._write_fd = os.pipe()
            os.set_blocking(self._read_fd, False)
            os.set_blocking(self._write_fd, False)

    def __repr__(self) -> str:
        return f"<Waker {'woken' if self.woken else 'quiet'}>"

    def fileno(self) -> int:
        return self._read_fd

    def wake(self) -> None:
        """Make every present and future wait raise `TransportAborted`."""
        self.woken = True
        try:
            os.write(self._write_fd, (1).to_bytes(8, "little"))
        except (BlockingIOError, OSError):
            pass  # full means woken already; closed means that nobody waits any more

    def reset(self) -> None:
        """Let waits wait again."""
        self.woken = False
        try:
            while os.read(self._read_fd, 4096):
                pass
        except (BlockingIOError, OSError):
            pass

    def check(self) -> None:
        if self.woken:
            raise TransportAborted("told to stop")

    def close(self) -> None:
        fds = {self._read_fd, self._write_fd} - {-1}
        self._read_fd = self._write_fd = -1
        for fd in fds:
            os.close(fd)
