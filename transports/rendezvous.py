"""Where the ranks of a group meet: a store that the trainer holds, a fresh prefix per meeting.

The trainer's `StoreHost` keeps its own listening socket, so a port that the OS chose stays taken
from then on. Every rank goes through a `Meeting`: it says what the others need to know
(`announce`) and waits for what they say (`gather`). A wait ends at its deadline with the names of
those who did not come, or at once when another thread calls `abort`.

torch's store enforces no deadline of ours: a connect that fails takes longer than its own
timeout, and a reply of a stopped server never comes. So the way to the store is tried with a plain
socket first, waits are short questions, and `abort` shuts the store's connections down.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import threading
import time
import weakref
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, final

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch lists no names

from statemachines.errors import AiosyncError, Validation
from transports.addresses import bare_host, numeric, resolve
from transports.errors import PeerLost, PhaseTimeout, TransportAborted
from transports.name_servers import hurried_lookups
from transports.open_sockets import SETUP, connected, shut
from transports.store_host import StoreHost
from transports.waker import Waker, milliseconds_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Meeting", "StoreHost"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.01
_OPEN_SECONDS = (0.3, 2.4)  # torch's own limit for one attempt to connect, abort or not
_AGAIN_SECONDS = 0.1
_ANNOUNCE_SECONDS = 5.0  # one message to the store, which answers nothing
_LAST_WORDS_SECONDS = 0.3  # what a rank said before it left comes over another connection
_REPLY_SECONDS = 1.0  # after the deadline, to ask who is missing
_LAST_CHANCE_SECONDS = 0.3  # the same, when this machine stood still beyond the limit


_UNSETTLED: weakref.WeakSet[Meeting] = weakref.WeakSet()
"""Meetings that still search for their connections; guarded by `SETUP`."""


@final
class Meeting:
    """One rank's way into one group.

    Args:
        host, port: Of the `StoreHost`.
        prefix: Of this meeting; the same for all ranks, never used twice.
        rank, size: Among the ranks that meet.
        names: Of all ranks, for errors.
        is_counted: Be one of those a server waits for that counts its ranks (not `StoreHost`).

    Attributes:
        local: Address of this host on the way to the store; set by `connect`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        prefix: str,
        *,
        rank: int,
        size: int,
        names: Sequence[str] = (),
        is_counted: bool = False,
    ) -> None:
        if not 0 <= rank < size:
            raise Validation(f"rank {rank} of a group of {size}", rank=rank, phase="init")
        self.prefix, self.rank, self.size = prefix, rank, size
        self.names = tuple(names) or tuple(f"rank {other}" for other in range(size))
        self.local = ""
        self._host, self._port = bare_host(host), port
        self._is_counted = is_counted
        self._where = f"the store at {self._host} port {port}"
        self._waker = Waker()
        self._store: TCPStore | None = None
        self._find: Callable[[], dict[int, socket.socket]] | None = None
        self._sockets: list[socket.socket] = []
        self._opening = False
        self._lock = threading.Lock()  # of `_sockets` and `_find`
        self.aborted = False

    @property
    def store(self) -> TCPStore:
        """The connected store, for a group's own set-up; its keys belong under `prefix`."""
        if self._store is None:
            raise PeerLost(f"not connected to {self._where}", phase="init")
        return self._store

    def connect(self, *, deadline: float) -> None:
        """Reach the store by `deadline` (`time.monotonic`).

        Raises:
            PeerLost: Nobody listens there; names address and port.
            Validation: There is no such host.
            PhaseTimeout, TransportAborted: No answer in time, or `abort` was called.
        """
        with self.limited(f"reach {self._where}", deadline=deadline):
            with self._set_up(deadline):
                pass
            with self._reach(deadline) as way:
                self.local = numeric(way.getsockname())[0]
                remote = numeric(way.getpeername())
            with self._set_up(deadline):
                known = connected(lambda _, there: there == remote)
                for sock in known.values():
                    sock.close()
                self._find = lambda: connected(lambda _, there: there == remote, skip=known)
                _UNSETTLED.add(self)
                self._opening = True
                try:
                    self._store = self._open(remote, deadline)
                finally:
                    self._opening = False

    def claim(self) -> None:
        """Be this rank, for the whole meeting; unguarded as `put`.

        Raises:
            Validation: Somebody else is it already.
        """
        if self.store.add(self._key("claim", self.rank), 1) > 1:
            raise Validation(
                f"rank {self.rank} of {self.size} is claimed twice: somebody counts ranks wrongly",
                rank=self.rank,
                phase="init",
            )

    def announce(self, stage: str, value: bytes) -> None:
        """Tell the others `value`; a stage is announced once by each rank."""
        with self.limited(f"announce {stage}", deadline=time.monotonic() + _ANNOUNCE_SECONDS):
            self.put(stage, value)

    def put(self, stage: str, value: bytes) -> None:
        """Like `announce`, any number of times and unguarded: torch's errors come as they are."""
        self.store.set(self._key(stage, self.rank), value)  # type: ignore[arg-type] # bytes too

    def peek(self, stage: str, rank: int) -> bytes | None:
        """What a rank announced or put last, None if nothing; unguarded as `put`."""
        key = self._key(stage, rank)
        return bytes(self.store.get(key)) if self.store.check([key]) else None

    def gather(
        self,
        stage: str,
        *,
        deadline: float,
        ranks: Sequence[int] | None = None,
        is_broken: Callable[[], bool] = lambda: False,
    ) -> list[bytes]:
        """What each of `ranks` (all of them by default) announced, in their order.

        Args:
            stage: Of `announce`.
            deadline: Of `time.monotonic`.
            is_broken: Asked again and again meanwhile; once it is true, only what is on its way
                already is waited for.

        Raises:
            PhaseTimeout: Names the ranks that have not come.
            PeerLost: The store is gone, or it `is_broken`.
            TransportAborted: `abort` was called.
        """
        wanted = range(self.size) if ranks is None else ranks
        keys = [self._key(stage, rank) for rank in wanted]
        pause, until = _FIRST_PAUSE, math.inf
        with self.limited(f"wait for {stage}", deadline=deadline + _REPLY_SECONDS):
            while not self.store.check(keys):
                if until == math.inf and is_broken():
                    until = time.monotonic() + _LAST_WORDS_SECONDS
                if time.monotonic() >= until:
                    raise PeerLost(f"{stage}: a rank is gone")
                if time.monotonic() >= deadline:
                    pairs = zip(wanted, keys, strict=True)
                    missing = [rank for rank, key in pairs if not self.store.check([key])]
                    if missing:
                        raise self.absent(stage, missing)
                self._pause(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            return [bytes(value) for value in self.store.multi_get(keys)]

    def forget(self, stage: str, ranks: Sequence[int]) -> None:
        """Delete a stage's keys, once nobody else will ask for it."""
        with self.limited(f"forget {stage}", deadline=time.monotonic() + _ANNOUNCE_SECONDS):
            for rank in ranks:
                self.store.delete_key(self._key(stage, rank))

    def sweep(self, *stages: str) -> None:
        """Delete all keys of these stages: when no rank will ask for any of them again."""
        gone = tuple(f"{self.prefix}/{stage}/" for stage in stages)
        with self.limited("sweep", deadline=time.monotonic() + _ANNOUNCE_SECONDS):
            for key in self.store.list_keys():
                if key.startswith(gone):
                    self.store.delete_key(key)

    def settle(self) -> None:
        """The set-up is over: `abort` need not search for connections any more."""
        _UNSETTLED.discard(self)
        with self._lock:
            find, self._find = self._find, None
            if find is not None:
                self._sockets = list(find().values())

    def abort(self) -> None:
        """Make a call that waits, and every later one, raise; from any thread, at once.

        Until `settle` it looks through the process's descriptors: not on an event loop.
        """
        self.aborted = True
        self._interrupt()

    def close(self) -> None:
        """Leave the store; idempotent. A call that still waits is aborted."""
        self.abort()
        _UNSETTLED.discard(self)
        with self._lock:
            sockets, self._sockets = self._sockets, []
            self._store = self._find = None
        for sock in sockets:
            sock.close()
        self._waker.close()

    @contextmanager
    def limited(
        self, what: str, *, deadline: float, interrupt: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Blocking native calls of a set-up: ended at the deadline whatever they think of it.

        Args:
            what: Completes "could not ...".
            deadline: Of `time.monotonic`.
            interrupt: Wakes calls that do not wait for the store; from another thread.
        """
        is_over, left = False, threading.Event()

        def expire() -> None:
            nonlocal is_over
            if time.monotonic() > deadline + _LAST_CHANCE_SECONDS:
                left.wait(_LAST_CHANCE_SECONDS)  # who waits can name the missing ones
            if not self.aborted and not left.is_set():
                is_over = True
                self._interrupt()
                interrupt()

        timer = _start_timer(max(0.0, deadline - time.monotonic()), expire)
        try:
            self._waker.check()
            yield
        except (RuntimeError, OSError, TransportAborted) as error:  # torch's errors are of the 1st
            text = f"could not {what}"
            if self.aborted:
                raise TransportAborted(f"{text}: told to stop") from error
            if is_over:
                raise PhaseTimeout(f"{text} in time") from error
            if isinstance(error, AiosyncError):
                raise
            raise PeerLost(f"{text}: {_short(error)}") from error
        finally:
            left.set()
            timer.cancel()

    def __repr__(self) -> str:
        state = "aborted" if self.aborted else "connected" if self._store else "apart"
        return f"<Meeting rank {self.rank} of {self.size}, {self._where}, {state}>"

    @contextmanager
    def _set_up(self, deadline: float) -> Iterator[None]:
        """Alone with the process's sockets; others keep to those they have from here on."""
        if not SETUP.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PhaseTimeout("another set-up of this process is stuck")
        try:
            for other in list(_UNSETTLED):
                # A join that is stuck, or a rank beside this one.
                if other._port == self._port:  # noqa: SLF001 - of this class
                    other.settle()
            yield
        finally:
            SETUP.release()

    def _open(self, remote: tuple[str, int], deadline: float) -> TCPStore:
        seconds, longest = _OPEN_SECONDS
        while True:
            # A server that does not answer is called again and again, whatever is shut: so shortly.
            limit = timedelta(seconds=min(seconds, max(0.01, deadline - time.monotonic())))
            seconds = min(2 * seconds, longest)  # one that is far away needs longer
            try:
                with hurried_lookups():
                    store = TCPStore(
                        *remote,
                        self.size if self._is_counted else None,
                        is_master=False,
                        wait_for_workers=self._is_counted,
                        timeout=limit,
                    )
            except RuntimeError:
                self._waker.check()
                if time.monotonic() >= deadline:
                    raise
                self._reach(deadline).close()  # raises if the store has gone meanwhile
            else:
                store.set_timeout(_left(deadline))
                return store

    def _reach(self, deadline: float) -> socket.socket:
        """A connection to the store's port by a plain socket; the first address that answers."""
        problem: Exception = PeerLost(f"nobody listens at {self._where}", phase="init")
        for family, address in resolve(self._host, self._port):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                code = sock.connect_ex(address)
                if code == errno.EINPROGRESS:
                    self._await(sock, deadline)
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code == 0:
                    return sock
                reason = os.strerror(code)
                problem = PeerLost(f"cannot connect to {self._where}: {reason}", phase="init")
            except BaseException:
                sock.close()
                raise
            sock.close()
        raise problem

    def _await(self, sock: socket.socket, deadline: float) -> None:
        poller = select.poll()
        poller.register(self._waker.fileno(), select.POLLIN)
        poller.register(sock.fileno(), select.POLLOUT)
        ready = poller.poll(milliseconds_until(deadline))
        self._waker.check()
        if not ready:
            raise PhaseTimeout(f"{self._where} does not answer", phase="init")

    def _pause(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._waker.fileno(), select.POLLIN)
        poller.poll(seconds * 1000.0)
        self._waker.check()

    def _interrupt(self) -> None:
        self._waker.wake()
        with self._lock:
            shut(self._sockets)
            # Not those alone that are known: a group's set-up opens connections of its own.
            fresh = [] if self._find is None else list(self._find().values())
            shut(fresh)
        for sock in fresh:
            sock.close()
        if self._opening:  # torch connects again by itself, and then waits for ever
            _start_timer(_AGAIN_SECONDS, self._interrupt)

    def absent(self, stage: str, missing: Sequence[int]) -> PhaseTimeout:
        names = ", ".join(f"{self.names[rank]} (rank {rank})" for rank in missing)
        return PhaseTimeout(
            f"{stage}: still waiting for {names}",
            replica=self.names[missing[0]],
            rank=missing[0],
            detail={"replicas": [self.names[rank] for rank in missing]},
        )

    def _key(self, stage: str, rank: int) -> str:
        return f"{self.prefix}/{stage}/{rank}"


def _start_timer(seconds: float, function: Callable[[], None]) -> threading.Timer:
    # Not a lane's work: it only ends what blocks on one.
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return timer


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


def _short(error: BaseException) -> str:
    """The first sentence of one of torch's long texts."""
    return str(error).strip().partition("\n")[0].partition("Exception raised from")[0][:300]
