"""The worker's half of the shared-memory stream."""

from __future__ import annotations

import os
import time
import traceback
from typing import TYPE_CHECKING, Any, TypeVar, final

from statemachines.errors import InvalidTransition, Validation
from transports import shm_messages as wire
from transports.chunk_copy import CopyQueue
from transports.digest import available, chain
from transports.errors import DigestMismatch, PeerLost, PhaseTimeout
from transports.foreign_memory import readable
from transports.links import FDS_LIMIT, Link
from transports.one_link import OneLink
from transports.packing import bytes_of
from transports.plain_memory import addresses_of
from transports.planning import ALIGNED
from transports.receiver_memory import ReceiverMemory
from transports.shm_readers import check_stall
from transports.stream import Progress, StreamSummary, known_of, meanwhile_of, targets_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from transports.chunk_copy import PlacedChunk
    from transports.copy_batches import Copies
    from transports.planning import Plan

_SENDER = "trainer"
_TOGETHER = 8  # chunks that are copied at once
T = TypeVar("T", bound=wire.Message)


@final
class ShmReceiver(OneLink):
    """Copies a round's tensors out of memory that a `ShmSender` of the same host shares.

    Mapped segments are kept between rounds; connections are not.

    Attributes:
        name: What the sender calls this reader in errors.
        progress: Bytes so far, for other threads to read.
    """

    def __init__(self, *, address: str, token: str, name: str, mark: int | None = None) -> None:
        """Nothing is connected before `receive`.

        Args:
            address, token: The sender's.
            name: What the sender calls this reader.
            mark: Where in the sender's memory the token lies; None: that memory is not read.
        """
        super().__init__()
        self.name = name
        self.progress = Progress()
        self._address = address
        self._token = token
        self._mark = mark
        self._released = False
        self._memory = ReceiverMemory()
        self._rounds = 0
        self._copied = 0
        self._early: wire.ToReader | None = None  # heard, and not taken yet

    def __repr__(self) -> str:
        return f"<ShmReceiver {self.name} {'idle' if self._link is None else 'receiving'}>"

    def receive(
        self,
        plan: Plan,
        destination: Callable[[int], torch.Tensor],
        landed: Callable[[list[int]], None],
        *,
        round: int,
        stall: float,
    ) -> StreamSummary:
        """See `transports.stream.Receiver.receive`.

        `landed` runs after the chunk was acknowledged: the trainer goes on meanwhile. Whatever
        it or `destination` raises reaches the trainer as text.

        Raises:
            Validation: The sender refuses this reader, or says what cannot be right; or a
                destination does not fit its tensor.
        """
        if self._released:
            raise InvalidTransition("this receiver is released")
        check_stall(stall)
        if plan.rule != ALIGNED:
            raise Validation(f"shared memory needs a plan by rule {ALIGNED!r}, not {plan.rule!r}")
        with self._turn.call("receive", round, failed=self._failed):
            self._waker.check()
            deadline, self._early = time.monotonic() + stall, None
            link = self._link = Link.connect(
                self._address, waker=self._waker, deadline=deadline, peer=_SENDER
            )
            kind = self._enter(link, plan, round, stall)
            summary = self._run(link, plan, kind, destination, landed, stall)
            self._end_round()
            self._rounds += 1
            return summary

    def _enter(self, link: Link, plan: Plan, round: int, stall: float) -> str | None:
        reads = self._mark is not None and readable(link.pid, self._mark, self._token.encode())
        self._memory.set_process(link.pid if reads else None)
        hello = wire.Hello(
            token=self._token,
            round=round,
            reader=self.name,
            segments=self._memory.keys(),
            resident=self._memory.resident_name,
            reads=reads,
        )
        link.send(wire.encode(hello), deadline=time.monotonic() + stall)
        message, fds = self._next(link, stall, max_fds=FDS_LIMIT)
        while isinstance(message, wire.Alive) and not fds:  # others are waited for
            message, fds = self._next(link, stall, max_fds=FDS_LIMIT)
        try:
            if isinstance(message, wire.Refusal):
                raise Validation.remote(f"the trainer refuses: {message.reason}", replica=_SENDER)
            if not isinstance(message, wire.Welcome) or message.round != round:
                raise Validation(f"expected a welcome to round {round}, got {message}")
            if message.plan != plan.digest:
                raise Validation(f"the trainer's plan is {message.plan}, ours {plan.digest}")
            if message.digest is not None and message.digest not in available():
                raise Validation(f"digest {message.digest!r} is not available here")
            self._memory.map(message, fds)
        finally:
            _close_all(fds)  # what was attached has been taken out of the list
        self._memory.prepare(plan, message, self._handles(link, stall))
        return message.digest

    def _handles(self, link: Link, stall: float) -> Iterator[tuple[int, int, int]]:
        while True:
            message, _ = self._next(link, stall)
            if not isinstance(message, wire.Handles) or not message.handles:
                raise Validation(f"expected handles, got {message}", replica=_SENDER)
            yield from message.handles

    def _run(
        self,
        link: Link,
        plan: Plan,
        kind: str | None,
        destination: Callable[[int], torch.Tensor],
        landed: Callable[[list[int]], None],
        stall: float,
    ) -> StreamSummary:
        queue = CopyQueue(self._waker, self.progress, digest=kind)
        digests: list[int] = []
        counted = 0
        taken: list[tuple[PlacedChunk, wire.Ready]] = []
        copies: list[Copies] = []  # out of memory that nobody has to write to again
        held: list[torch.Tensor] = []  # what they write to
        most = _TOGETHER if getattr(destination, "takes_all", False) else 1
        last, meanwhile = len(self._memory.chunks) - 1, meanwhile_of(destination)
        for chunk in self._memory.chunks:
            ready = self._await(link, wire.Ready, stall)
            if ready.chunk != chunk.index:
                raise Validation(f"chunk {ready.chunk} came where {chunk.index} was due")
            self._memory.place(chunk, ready)
            targets = targets_of(destination, chunk.tensors)
            copies += self._take(queue, chunk, targets, known_of(destination, chunk.tensors))
            held += targets
            taken.append((chunk, ready))
            if copies and len(taken) < most and chunk.index < last and self._has_ready(link):
                continue  # the fewer times all cores wait for the last of them, the better
            if chunk.index == last and copies:
                queue.move_together(copies, beside=lambda: meanwhile(None))
            else:
                queue.move_together(copies)
            for done_with, as_sent in taken:
                value = queue.end_chunk()
                self._copied, counted = self._copied + queue.copied - counted, queue.copied
                if value != as_sent.digest:
                    raise _mismatch(done_with, as_sent.digest, value)
                if value is not None:
                    digests.append(value)
                self._send(link, wire.Ack(chunk=done_with.index), stall)
                if done_with.complete:
                    landed(done_with.complete.copy())
            taken, copies, held = [], [], []
        done = self._await(link, wire.Done, stall)
        digest = None if kind is None else chain(digests)
        nbytes = sum(plan.sizes)
        if (done.chunks, done.nbytes, done.digest) != (len(self._memory.chunks), nbytes, digest):
            raise DigestMismatch(f"the trainer ended with {done}, this side with {digest}")
        self._send(link, wire.Complete(chunks=done.chunks, digest=digest), stall)
        return StreamSummary(nbytes=nbytes, chunks=done.chunks, digest=digest)

    def _take(
        self,
        queue: CopyQueue,
        chunk: PlacedChunk,
        targets: list[torch.Tensor],
        known: list[int] | None,
    ) -> Sequence[Copies]:
        """Copy a chunk; or return the copies, where they may be made later, together with others.

        Then nothing of it is hashed, and `targets` have to be held until they are made.
        """
        found = addresses_of(targets, chunk.wholes, known)
        if found is not None:
            if start := chunk.start(0):  # a list of one's own: that of a sink stays as it is
                found = [found[0] + start, *found[1:]]
            ready = chunk.batches(0)(found, chunk.addresses, chunk.nbytes)
            if chunk.copied:
                queue.move(ready, found, chunk.nbytes)
            elif queue.digest is None:
                return ready
            else:
                queue.move_together(ready)
                queue.hash(found, chunk.nbytes)
            return ()
        for at, target in enumerate(targets):
            whole = chunk.wholes[at]
            if target.nbytes != whole or not target.is_contiguous() or not target.is_cpu:
                index = chunk.tensors[at]
                raise Validation(
                    f"the destination of tensor {index} has {target.nbytes} bytes on "
                    f"{target.device} (contiguous: {target.is_contiguous()}), the plan {whole}",
                    tensor=str(index),
                )
            start, nbytes = chunk.start(at), chunk.nbytes[at]
            address = target.data_ptr() + start
            if not nbytes:
                queue.hash([address], [0])
            elif nbytes == whole:
                queue.copy(target, chunk.view_like(at, target), address)
            else:
                part = bytes_of(target).narrow(0, start, nbytes)
                queue.copy(part, chunk.view_like(at, target), address)
        return ()

    def _has_ready(self, link: Link) -> bool:
        """Whether the next chunk was announced already; does not wait.

        Anything else may mean that the sender waits for those that were taken.
        """
        if self._early is None:
            frame = link.recv_nowait()
            self._early = None if frame is None else self._heard(frame[0])
        return isinstance(self._early, wire.Ready)

    def _await(self, link: Link, kind: type[T], stall: float) -> T:
        while True:
            message, _ = self._next(link, stall)
            if isinstance(message, kind):
                return message
            if not isinstance(message, wire.Alive):
                raise Validation(f"expected {kind.__name__}, got {message}", replica=_SENDER)

    def _next(
        self, link: Link, stall: float, *, max_fds: int = 0
    ) -> tuple[wire.ToReader, list[int]]:
        early, self._early = self._early, None
        if early is not None:
            return early, []
        try:
            payload, fds = link.recv(deadline=time.monotonic() + stall, max_fds=max_fds)
        except PhaseTimeout as error:
            raise PhaseTimeout(
                f"nothing from the trainer for {stall} s", replica=_SENDER
            ) from error
        try:
            return self._heard(payload), fds
        except BaseException:
            _close_all(fds)  # nobody else knows them
            raise

    def _heard(self, payload: bytes) -> wire.ToReader:
        self.progress.step(0)
        message = wire.decode_to_reader(payload, peer=_SENDER)
        if isinstance(message, wire.Failed):
            raise PeerLost.remote(f"the trainer gave up: {message.text}", replica=_SENDER)
        return message

    def _send(self, link: Link, message: wire.Message, stall: float) -> None:
        try:
            link.send(wire.encode(message), deadline=time.monotonic() + stall)
        except PeerLost:
            while True:  # why the sender left is often still in the socket; ends by raising
                self._next(link, stall)

    def _failed(self, error: BaseException, aborted: bool) -> None:
        # Whoever keeps the error would keep, through its frames, views that keep memory mapped.
        traceback.clear_frames(error.__traceback__)
        super()._failed(error, aborted)

    def _dispose(self) -> None:
        self._released = True
        super()._dispose()
        self._memory.release()

    def statistics(self) -> dict[str, Any]:
        """Rounds, bytes copied, and what is mapped."""
        return {
            "rounds": self._rounds,
            "bytes_copied": self._copied,
        } | self._memory.statistics()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _mismatch(chunk: PlacedChunk, sent: int | None, arrived: int | None) -> DigestMismatch:
    first, last = chunk.tensors[0], chunk.tensors[-1]
    return DigestMismatch(
        f"chunk {chunk.index} (tensors {first}..{last}) arrived with digest {arrived}, "
        f"it was sent with {sent}",
        tensor=str(first),
        detail={"chunk": chunk.index, "tensor": first, "sent": sent, "arrived": arrived},
    )
