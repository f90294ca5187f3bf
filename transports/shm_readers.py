"""The sender's side of the doorbell: the readers of one round, and what they have acknowledged."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, final

from statemachines.errors import AiosyncError, Validation
from transports import shm_messages as wire
from transports.errors import DigestMismatch, PeerLost, PhaseTimeout
from transports.waker import wait_ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from transports.links import Link
    from transports.listener import Listener
    from transports.waker import Waker

_PENDING_LIMIT = 64


def check_stall(stall: float) -> None:
    """Raise `Validation` unless `stall` is a finite, positive number of seconds."""
    if isinstance(stall, bool) or not isinstance(stall, (int, float)):
        raise Validation(f"stall must be seconds, not {stall!r}")
    if not 0 < stall < float("inf"):
        raise Validation(f"stall must be positive and finite, not {stall!r}")


@final
class Reader:
    """One connected reader.

    Attributes:
        acked: Chunks it has acknowledged, counted from the first.
        heard: When it last said anything (`time.monotonic`).
        owes: Since when it owes us an answer; None when it does not.
        complete: Its last word.
    """

    __slots__ = ("acked", "complete", "heard", "link", "name", "owes")

    def __init__(self, link: Link, name: str) -> None:
        self.link = link
        self.name = link.peer = name
        self.acked = 0
        self.heard = time.monotonic()
        self.owes: float | None = None
        self.complete: wire.Complete | None = None


@final
class Readers:
    """All readers of a round; driven by the lane's thread, `shutdown` by any."""

    def __init__(self, waker: Waker, *, stall: float) -> None:
        self._waker = waker
        self._stall = stall
        self._beat = stall / 3
        self._said = time.monotonic()
        self._announced = 0
        self._done = False
        self._pending: list[Link] = []
        self._refused = ""
        self.readers: list[Reader] = []

    def admit(
        self,
        listener: Listener,
        count: int,
        judge: Callable[[wire.Hello], str | None],
        greet: Callable[[Link, wire.Hello], None],
    ) -> None:
        """Take connections until `count` readers have introduced themselves properly.

        Raises:
            PhaseTimeout: They did not all come within the allowance.
            PeerLost: One that had come went away again.
        """
        deadline = time.monotonic() + self._stall
        while len(self.readers) < count:
            links = [*self._pending, *(reader.link for reader in self.readers)]
            until = min(deadline, self._said + self._beat)
            ready, connected = wait_ready(links, self._waker, deadline=until, listener=listener)
            if connected:
                self._accept(listener)
            for link in ready:
                if link in self._pending:
                    self._introduce(link, judge, greet, full=len(self.readers) >= count)
            self._hear(ready)
            if not ready and time.monotonic() >= deadline:
                raise self._nobody(count)
            self.keep_alive()
        self._drop_pending()

    def _accept(self, listener: Listener) -> None:
        try:
            link = listener.accept_nowait(self._waker)
        except Validation as error:
            self._refused = error.message
            return
        if link is not None:
            self._pending.append(link)
            if len(self._pending) > _PENDING_LIMIT:
                self._pending.pop(0).close()

    def _introduce(
        self,
        link: Link,
        judge: Callable[[wire.Hello], str | None],
        greet: Callable[[Link, wire.Hello], None],
        *,
        full: bool,
    ) -> None:
        try:
            frame = link.recv_nowait()
            if frame is None:
                return
            hello = wire.decode_to_sender(frame[0], peer=link.peer)
            if isinstance(hello, wire.Hello):
                reason = judge(hello)
                if reason is None and any(r.name == hello.reader for r in self.readers):
                    reason = f"reader {hello.reader!r} is connected already"
                if reason is None and full:
                    reason = "all readers of this round are connected"
            else:
                reason = "a connection begins with hello"
        except PeerLost:
            self._discard(link)
            return
        except Validation as error:
            hello, reason = None, error.message
        if reason is not None or not isinstance(hello, wire.Hello):
            self._refused = reason or ""
            self._try_post(link, wire.encode(wire.Refusal(reason=self._refused)))
            self._discard(link)
            return
        self._pending.remove(link)
        self.readers.append(Reader(link, hello.reader))
        greet(link, hello)

    def _nobody(self, count: int) -> PhaseTimeout:
        names = ", ".join(reader.name for reader in self.readers) or "nobody"
        refused = f"; last refusal: {self._refused}" if self._refused else ""
        return PhaseTimeout(
            f"{len(self.readers)} of {count} readers connected within {self._stall} s "
            f"({names}){refused}"
        )

    def announce(self, ready: wire.Ready) -> None:
        """Tell all readers of a chunk; does not wait."""
        self._announced += 1
        self.post(wire.encode(ready))
        now = time.monotonic()
        for reader in self.readers:
            reader.owes = reader.owes or now
        # Failures and acknowledgements are taken as they come, not only when they are waited for.
        self._poll(now)

    def wait_acked(self, chunks: int) -> None:
        """Wait until every reader has acknowledged the first `chunks` chunks."""
        while any(reader.acked < chunks for reader in self.readers):
            self._wait([reader for reader in self.readers if reader.acked < chunks])

    def finish(self, done: wire.Done) -> None:
        """Wait until every reader has confirmed the round.

        Raises:
            DigestMismatch: One of them counts or hashes differently.
        """
        self._done = True
        self.post(wire.encode(done))
        now = time.monotonic()
        for reader in self.readers:
            reader.owes = reader.owes or now
        while any(reader.complete is None for reader in self.readers):
            self._wait([reader for reader in self.readers if reader.complete is None])
        for reader in self.readers:
            said = reader.complete
            if said is None or (said.chunks, said.digest) != (done.chunks, done.digest):
                raise DigestMismatch(
                    f"{reader.name} ended with {said}, the trainer with {done}", replica=reader.name
                )

    def keep_alive(self) -> None:
        """Let readers know that the trainer is at work, if it has been silent for long."""
        if time.monotonic() >= self._said + self._beat:
            self.post(wire.encode(wire.Alive()))

    def _wait(self, behind: list[Reader]) -> None:
        deadlines = {r: max(r.heard, r.owes or r.heard) + self._stall for r in behind}
        first = min(behind, key=deadlines.__getitem__)
        self.keep_alive()
        if not self._poll(min(deadlines[first], self._said + self._beat)) and (
            time.monotonic() >= deadlines[first]
        ):
            raise PhaseTimeout(
                f"{first.name} made no progress for {self._stall} s "
                f"({first.acked} of {self._announced} chunks acknowledged)",
                replica=first.name,
            )

    def _poll(self, deadline: float) -> bool:
        links = [reader.link for reader in self.readers if reader.complete is None]
        ready, _ = wait_ready(links, self._waker, deadline=deadline)
        self._hear(ready)
        return bool(ready)

    def _hear(self, ready: list[Link]) -> None:
        for reader in self.readers:
            if reader.link in ready:
                while reader.complete is None:
                    frame = reader.link.recv_nowait()
                    if frame is None:
                        break
                    self._take(reader, wire.decode_to_sender(frame[0], peer=reader.name))

    def _take(self, reader: Reader, message: wire.ToSender) -> None:
        reader.heard = time.monotonic()
        match message:
            case wire.Ack() if message.chunk == reader.acked < self._announced:
                reader.acked += 1
                if reader.acked == self._announced:
                    reader.owes = None
            case wire.Complete() if self._done and reader.acked == self._announced:
                reader.complete = message
            case wire.Failed():
                raise PeerLost.remote(f"{reader.name} gave up: {message.text}", replica=reader.name)
            case _:
                raise Validation(f"unexpected {message} from {reader.name}", replica=reader.name)

    def post(self, payload: bytes) -> None:
        """Send all readers a message; does not wait."""
        self._said = time.monotonic()
        for reader in self.readers:
            if reader.complete is None:
                try:
                    reader.link.post(payload)
                except PeerLost:
                    self._hear([reader.link])  # why it left is often still in the socket
                    raise

    def _try_post(self, link: Link, payload: bytes) -> None:
        try:
            link.post(payload)
        except AiosyncError:
            pass  # it is about to be closed anyway

    def fail(self, error: BaseException) -> None:
        """Tell every reader why the round ends, as far as that goes without waiting."""
        payload = wire.failed(error)
        for reader in self.readers:
            if reader.complete is None:
                self._try_post(reader.link, payload)

    def shutdown(self) -> None:
        """Cut all connections; from any thread."""
        for link in [*self._pending, *(reader.link for reader in tuple(self.readers))]:
            link.shutdown()

    def _discard(self, link: Link) -> None:
        self._pending.remove(link)
        link.close()

    def _drop_pending(self) -> None:
        for link in tuple(self._pending):
            self._try_post(link, wire.encode(wire.Refusal(reason="this round's readers are here")))
            self._discard(link)

    def close(self) -> None:
        """Close all connections."""
        self._drop_pending()
        for reader in self.readers:
            reader.link.close()
