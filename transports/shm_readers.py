"""The sender's side of the doorbell: the readers of one round, and what they have acknowledged."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, final

from statemachines.errors import AiosyncError, Validation
from transports import shm_messages as wire
from transports.errors import DigestMismatch, PeerLost, PhaseTimeout
from transports.laggards import Laggards
from transports.waker import wait_ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from transports.links import Link
    from transports.listener import Listener
    from transports.stream import Roll
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
        hello: How it introduced itself.
        acked: Chunks it has acknowledged, counted from the first.
        heard: When it last said anything (`time.monotonic`).
        owes: Since when it owes us an answer; None when it does not.
        complete: Its last word.
        lag: Seconds that the others waited for it.
    """

    __slots__ = ("acked", "complete", "heard", "hello", "lag", "link", "name", "owes")

    def __init__(self, link: Link, hello: wire.Hello) -> None:
        self.link = link
        self.hello = hello
        self.name = link.peer = hello.reader
        self.acked = 0
        self.heard = time.monotonic()
        self.owes: float | None = None
        self.complete: wire.Complete | None = None
        self.lag = 0.0


@final
class Readers:
    """All readers of a round; driven by the lane's thread, `shutdown` by any."""

    def __init__(self, waker: Waker, *, stall: float, roll: Roll | None = None) -> None:
        self._waker = waker
        self._roll = roll
        self._laggards = None if roll is None else Laggards(roll)
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
        greet: Callable[[Link, wire.Hello], None] | None = None,
        meanwhile: Callable[[], bool] | None = None,
    ) -> None:
        """Take connections until `count` readers have introduced themselves properly.

        Args:
            greet: Answers each at once; None: `greet_all` will.
            meanwhile: Does a little of what else is to be done; False: no more is.

        Raises:
            PhaseTimeout: They did not all come within the allowance.
            PeerLost: One that had come went away again.
        """
        deadline = time.monotonic() + self._stall
        while self._lacks(count):
            links = [*self._pending, *(reader.link for reader in self.readers)]
            until = min(deadline, self._said + self._beat)
            if self._laggards is not None:
                until = min(until, time.monotonic() + self._laggards.tick)
            if meanwhile is not None:
                if meanwhile():
                    until = 0.0  # who has come is let in between two steps
                else:
                    meanwhile = None
            ready, connected = wait_ready(links, self._waker, deadline=until, listener=listener)
            new = self._accept(listener) if connected else []
            for link in [*ready, *new]:  # who connects says hello at once
                if link in self._pending:
                    self._introduce(link, judge, greet, full=not self._lacks(count))
            self._hear(ready)
            if not ready and time.monotonic() >= deadline:
                self._give_up_on_missing(count)
            if self._laggards is not None:
                self._laggards.note_missing([reader.name for reader in self.readers])
            self.keep_alive()
        self._drop_pending()

    def _lacks(self, count: int) -> bool:
        if self._roll is None:
            return len(self.readers) < count
        self._strike_those_out()
        return bool(self._roll.missing([reader.name for reader in self.readers]))

    def _give_up_on_missing(self, count: int) -> None:
        error = self._nobody(count)
        if self._roll is None:
            raise error
        for name in self._roll.missing([reader.name for reader in self.readers]):
            error.replica = name
            if not self._roll.lose(name, error):
                raise error

    def _accept(self, listener: Listener) -> list[Link]:
        try:
            link = listener.accept_nowait(self._waker)
        except Validation as error:
            self._refused = error.message
            return []
        if link is None:
            return []
        self._pending.append(link)
        if len(self._pending) > _PENDING_LIMIT:
            self._pending.pop(0).close()
        return [link]

    def _introduce(
        self,
        link: Link,
        judge: Callable[[wire.Hello], str | None],
        greet: Callable[[Link, wire.Hello], None] | None,
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
                if reason is None and self._roll is not None and self._roll.is_out(hello.reader):
                    reason = f"this round goes on without {hello.reader!r}"
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
        reader = Reader(link, hello)
        self.readers.append(reader)
        if greet is not None:
            self._greet(reader, greet)

    def greet_all(self, greet: Callable[[Link, wire.Hello], None]) -> None:
        """Answer those that were admitted.

        Raises:
            PeerLost: One of them went away again.
        """
        for reader in tuple(self.readers):
            self._greet(reader, greet)

    def _greet(self, reader: Reader, greet: Callable[[Link, wire.Hello], None]) -> None:
        try:
            greet(reader.link, reader.hello)
        except PeerLost as error:
            self._lose(reader, error)

    def _nobody(self, count: int) -> PhaseTimeout:
        names = ", ".join(reader.name for reader in self.readers) or "nobody"
        refused = f"; last refusal: {self._refused}" if self._refused else ""
        return PhaseTimeout(
            f"{len(self.readers)} of {count} readers connected within {self._stall} s "
            f"({names}){refused}"
        )

    def announce(self, news: wire.Ready | wire.Forget) -> int:
        """Tell all readers of a chunk, or whatever else they acknowledge; does not wait.

        Returns:
            How many announcements that makes.
        """
        self._announced += 1
        self.post(wire.encode(news))
        now = time.monotonic()
        for reader in self.readers:
            reader.owes = reader.owes or now
        # Failures and acknowledgements are taken as they come, not only when they are waited for.
        self._poll(now)
        return self._announced

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
        for reader in tuple(self.readers):
            said = reader.complete
            if said is None or (said.chunks, said.digest) != (done.chunks, done.digest):
                text = f"{reader.name} ended with {said}, this side with {done}"
                self._lose(reader, DigestMismatch(text, replica=reader.name))

    def keep_alive(self) -> None:
        """Let readers know that the trainer is at work, if it has been silent for long."""
        if time.monotonic() >= self._said + self._beat:
            self.post(wire.encode(wire.Alive()))

    def _wait(self, behind: list[Reader]) -> None:
        deadlines = {r: max(r.heard, r.owes or r.heard) + self._stall for r in behind}
        first = min(behind, key=deadlines.__getitem__)
        self.keep_alive()
        until, laggards = min(deadlines[first], self._said + self._beat), self._laggards
        began = time.monotonic()
        if laggards is not None:
            until = min(until, began + laggards.tick)
        happened = self._poll(until)
        if not happened and time.monotonic() >= deadlines[first]:
            text = (
                f"{first.name} made no progress for {self._stall} s "
                f"({first.acked} of {self._announced} chunks acknowledged)"
            )
            self._lose(first, PhaseTimeout(text, replica=first.name))
        if laggards is not None:
            self._strike_those_out()
            for reader, slow in laggards.judge(behind, self.readers, time.monotonic() - began):
                self._strike(reader, slow)

    def _lose(self, reader: Reader, error: Exception) -> None:
        """Go on without a reader, where that is allowed; else raise `error`."""
        if reader not in self.readers:
            return
        if self._roll is None or not self._roll.lose(reader.name, error):
            raise error
        self._strike(reader, error)

    def _strike(self, reader: Reader, why: Exception) -> None:
        self._try_post(reader.link, wire.failed(why))
        reader.link.close()
        if reader in self.readers:
            self.readers.remove(reader)

    def _strike_those_out(self) -> None:
        roll = self._roll
        if roll is not None:
            for reader in [reader for reader in self.readers if roll.is_out(reader.name)]:
                text = f"this round goes on without {reader.name}"
                self._strike(reader, PeerLost(text, replica=reader.name))

    def _poll(self, deadline: float) -> bool:
        links = [reader.link for reader in self.readers if reader.complete is None]
        ready, _ = wait_ready(links, self._waker, deadline=deadline)
        self._hear(ready)
        return bool(ready)

    def _hear(self, ready: list[Link]) -> None:
        for reader in tuple(self.readers):
            if reader.link in ready:
                try:
                    self._read(reader)
                except (PeerLost, Validation) as error:
                    self._lose(reader, error)

    def _read(self, reader: Reader) -> None:
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
        for reader in tuple(self.readers):
            if reader.complete is None:
                try:
                    reader.link.post(payload)
                except PeerLost as error:
                    self._hear([reader.link])  # why it left is often still in the socket
                    self._lose(reader, error)

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
