"""Waits for several peers at once, which another thread can end."""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING, final

from transports.errors import PeerLost, TransportAborted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transports.links import Link
    from transports.listener import Listener

_READ = select.POLLIN | select.POLLHUP | select.POLLERR | select.POLLNVAL
# Long enough never to matter, short enough for poll's C int of milliseconds.
_LONGEST_POLL = 3600.0
_LOOK_S = 50e-6
"""How long a wait looks again and again before its thread sleeps."""
_SOON_S = 300e-6
"""A wait that slept no longer than this makes the next one look first."""


@final
class Waker:
    """Ends every wait it takes part in, from any thread, until it is reset."""

    __slots__ = ("_looks", "_nudged", "_read_fd", "_write_fd", "woken")

    def __init__(self) -> None:
        self.woken = False
        self._nudged = False
        self._looks = False
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
        self._write()

    def nudge(self) -> None:
        """End the present wait without an error: its caller looks at the world again."""
        self._write()
        self._nudged = True  # after the write: whoever sees it finds something to drain

    def _write(self) -> None:
        try:
            os.write(self._write_fd, (1).to_bytes(8, "little"))
        except (BlockingIOError, OSError):
            pass  # full means woken already; closed means that nobody waits any more

    def reset(self) -> None:
        """Let waits wait again."""
        self.woken = False
        self._drain()

    def _drain(self) -> None:
        self._nudged = False
        try:
            while os.read(self._read_fd, 4096):
                pass
        except (BlockingIOError, OSError):
            pass

    def check(self) -> None:
        if self.woken:
            raise TransportAborted("told to stop")
        if self._nudged:
            self._drain()
            if self.woken:  # meanwhile: what was drained was its sign
                raise TransportAborted("told to stop")

    def poll(self, poller: select.poll, deadline: float) -> list[tuple[int, int]]:
        """``poller.poll`` until `deadline` (`time.monotonic`).

        Two sides that answer each other at once do so in a few microseconds, but waking a thread
        that sleeps takes several times as long. So while answers come soon a wait looks for a
        moment before it sleeps; once that was for nothing, as while bytes are copied, no more.
        """
        if self._looks:
            until = min(time.monotonic() + _LOOK_S, deadline)
            while True:
                happened = poller.poll(0)
                now = time.monotonic()
                if happened or now >= until:
                    break
                _let_others_run()
            if happened or now >= deadline:
                return happened
        began = time.monotonic()
        happened = poller.poll(milliseconds_until(deadline))
        self._looks = bool(happened) and time.monotonic() - began < _SOON_S
        return happened

    def close(self) -> None:
        fds = {self._read_fd, self._write_fd} - {-1}
        self._read_fd = self._write_fd = -1
        for fd in fds:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_write_fd"):
            self.close()


def wait_ready(
    links: Iterable[Link], waker: Waker, *, deadline: float, listener: Listener | None = None
) -> tuple[list[Link], bool]:
    """Wait until a link has something to read (or its peer is gone), or somebody connects.

    Links with unsent frames are flushed meanwhile. Returns the links to look at, and whether the
    listener has a connection; both empty when the deadline (`time.monotonic`) has passed or when
    frames were flushed, so callers loop.

    Raises:
        TransportAborted: `waker` was woken.
    """
    waker.check()
    poller = select.poll()
    poller.register(waker.fileno(), select.POLLIN)
    by_fd: dict[int, Link] = {}
    if listener is not None:
        poller.register(listener.fileno(), select.POLLIN)
    for link in links:
        events = select.POLLIN | (select.POLLOUT if link.unsent else 0)
        for fd in link.watched():
            by_fd[fd] = link
            poller.register(fd, events if fd == link.fileno() else select.POLLIN)
    connected = False
    ready: dict[Link, None] = {}
    for fd, events in waker.poll(poller, deadline):
        link_of_fd = by_fd.get(fd)
        if link_of_fd is None:
            connected = connected or fd != waker.fileno()
            continue
        if events & select.POLLOUT:
            try:
                link_of_fd.flush_nowait()
            except PeerLost:
                ready[link_of_fd] = None  # its last words may still be there to read
        if events & _READ:
            ready[link_of_fd] = None
    waker.check()
    return list(ready), connected


_let_others_run = getattr(os, "sched_yield", lambda: None)


def milliseconds_until(deadline: float) -> float:
    """What `poll` takes for a `time.monotonic` deadline."""
    return min(max(0.0, deadline - time.monotonic()), _LONGEST_POLL) * 1000.0
