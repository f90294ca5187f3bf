"""The worker's half of a stream through the trainer's device memory; see `device_sender`."""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, final

from statemachines.errors import InvalidTransition, Validation
from transports import device_messages as device_wire
from transports import shm_messages as wire
from transports.device_copier import DeviceCopier
from transports.device_layout import DeviceLayout
from transports.device_mappings import DeviceMappings, Watch
from transports.digest import WSUM64
from transports.errors import DigestMismatch, PeerLost, PhaseTimeout
from transports.links import Link
from transports.one_link import OneLink
from transports.planning import ALIGNED
from transports.shm_readers import check_stall
from transports.stream import Progress, StreamSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from transports.device_memory import DeviceMemory
    from transports.planning import Plan

_SENDER = "trainer"
T = TypeVar("T", bound=wire.Message)
U = TypeVar("U", bound=wire.Message)


@final
class DeviceReceiver(OneLink):
    """See `transports.stream.Receiver`; verified when all of what is read in place has landed.

    Destinations are asked for right before they are written to.

    Mappings and copy tables are kept between rounds; connections are not.

    Args:
        memory: The device that copies; destinations are on it.
        batch_nbytes: How much of what is read in place is asked destinations for at once, where
            those are made for it; destinations that are there anyway come in larger batches.
    """

    asks_late = True

    def __init__(
        self, memory: DeviceMemory, *, address: str, token: str, name: str, batch_nbytes: int
    ) -> None:
        super().__init__()
        self.name = name
        self.progress = Progress()
        self._memory = memory
        self._address = address
        self._token = token
        self._released = False
        self._mappings = DeviceMappings(memory)
        self._watch: Watch | None = None
        self._copier = DeviceCopier(memory, self._waker, self.progress, small=batch_nbytes)
        self._layout: tuple[tuple[str, str], DeviceLayout] | None = None
        self._rounds = 0

    def __repr__(self) -> str:
        return f"<DeviceReceiver {self.name} {'idle' if self._link is None else 'receiving'}>"

    def receive(
        self,
        plan: Plan,
        destination: Callable[[int], torch.Tensor],
        landed: Callable[[Sequence[int]], None],
        *,
        round: int,
        stall: float,
    ) -> StreamSummary:
        """See `transports.stream.Receiver.receive`.

        Raises:
            Validation: The sender refuses this reader, or says what cannot be right; or a
                destination does not fit its tensor.
        """
        if self._released:
            raise InvalidTransition("this receiver is released")
        check_stall(stall)
        if plan.rule != ALIGNED:
            raise Validation(f"device memory needs a plan by rule {ALIGNED!r}, not {plan.rule!r}")
        with self._turn.call("receive", round, failed=self._failed):
            self._waker.check()
            link = self._link = Link.connect(
                self._address,
                waker=self._waker,
                deadline=time.monotonic() + stall,
                peer=_SENDER,
            )
            kind = self._enter(link, plan, round, stall)
            with self._copier.active():  # what a sink queues is in order with the copies
                summary = self._run(link, plan, kind, destination, landed, stall)
            self._end_round()
            self._rounds += 1
            return summary

    def _enter(self, link: Link, plan: Plan, round: int, stall: float) -> str | None:
        memory, mappings = self._memory, self._mappings
        hello = wire.Hello(
            token=self._token,
            round=round,
            reader=self.name,
            resident=mappings.table,
            device=memory.uuid,
            visible=memory.visible,
            known=mappings.known,
        )
        link.send(wire.encode(hello), deadline=time.monotonic() + stall)
        message = self._next(link, stall)
        if isinstance(message, wire.Refusal):
            raise Validation.remote(f"the trainer refuses: {message.reason}", replica=_SENDER)
        if not isinstance(message, device_wire.DeviceWelcome) or message.round != round:
            raise Validation(f"expected a welcome to round {round}, got {message}")
        if message.plan != plan.digest:
            raise Validation(f"the trainer's plan is {message.plan}, ours {plan.digest}")
        if message.digest not in (None, WSUM64):
            raise Validation(f"digest {message.digest!r} is not available here")
        self._look_after(link)
        mappings.take(
            message, plan, lambda: self._next(link, stall), is_own=link.pid == os.getpid()
        )
        key = (plan.digest, mappings.table)
        if self._layout is None or self._layout[0] != key:
            self._layout = (key, DeviceLayout(plan, mappings.resident))
        return message.digest

    def _look_after(self, link: Link) -> None:
        """Mappings are closed when the trainer's process ends: its memory is free then."""
        pid = link.pid
        if pid is None or pid == os.getpid() or not hasattr(os, "pidfd_open"):
            return
        if self._watch is None or self._watch.pid != pid:
            if self._watch is not None:
                self._watch.close()
            with suppress(OSError):  # it has ended: the link will say so
                self._watch = Watch(pid, self._forget)

    def _forget(self) -> None:
        """The trainer is gone; between rounds, or after the one that is failing."""
        self._turn.now_or_afterwards(self._unmap, lambda: None)

    def _unmap(self) -> None:
        self._layout = None
        self._copier.clear()
        self._mappings.clear()

    def _run(
        self,
        link: Link,
        plan: Plan,
        kind: str | None,
        destination: Callable[[int], torch.Tensor],
        landed: Callable[[Sequence[int]], None],
        stall: float,
    ) -> StreamSummary:
        assert self._layout is not None  # just made
        layout = self._layout[1]
        verifies = kind is not None
        addresses = self._mappings.addresses
        confirmed = -1  # not even that there is nothing

        def await_ready(count: int) -> None:
            nonlocal confirmed
            while confirmed < count:
                confirmed = self._await_more(link, confirmed, len(plan.sizes), stall)

        values = self._copier.take_resident(
            layout, addresses, destination, landed, verifies=verifies, await_ready=await_ready
        )
        await_ready(len(plan.sizes))  # where nothing is in place, nobody has waited for it yet
        if verifies:
            self._compare(link, layout, values, stall)
        self._send(link, wire.Ack(chunk=0), stall)
        for chunk in layout.ring.chunks:
            ready = self._await_ready(link, chunk.index + 1, stall)
            base = self._mappings.in_ring(ready.offset, chunk.nbytes)
            if (ready.digest is not None) != verifies:
                raise Validation(f"chunk {ready.chunk} came with digest {ready.digest}")
            values += self._copier.take_chunk(
                layout, chunk.index, base, destination, sent=ready.digest
            )
            self._send(link, wire.Ack(chunk=chunk.index + 1), stall)
            done = [p.tensor for p in chunk.pieces if _is_last(layout, p)]
            if done:
                landed([layout.streamed[at] for at in done])
        done_message = self._await(link, wire.Done, stall)
        digest = hashlib.sha256(values).hexdigest() if verifies else None
        expected = wire.Done(chunks=layout.chunks, nbytes=plan.total_bytes, digest=digest)
        if done_message != expected:
            raise DigestMismatch(
                f"the trainer ended with {done_message}, this side with {expected}"
            )
        self._send(link, wire.Complete(chunks=layout.chunks, digest=digest), stall)
        return StreamSummary(nbytes=plan.total_bytes, chunks=layout.chunks, digest=digest)

    def _compare(self, link: Link, layout: DeviceLayout, found: bytes, stall: float) -> None:
        sent = b""
        while len(sent) < 8 * len(layout.resident):
            part = self._await(link, device_wire.Values, stall)
            if part.first != len(sent) // 8 or not part.values or len(part.values) % 8:
                raise Validation(f"digests from {part.first} on came where others were due")
            sent += part.values
        if sent == found:
            return
        pairs = zip(_words(sent), _words(found), strict=False)
        at = next((i for i, (one, two) in enumerate(pairs) if one != two), 0)
        index = layout.resident[at]
        raise DigestMismatch(
            f"tensor {index} arrived with other bytes than it was sent with",
            tensor=str(index),
            detail={"tensor": index},
        )

    def _await_more(self, link: Link, known: int, all_: int, stall: float) -> int:
        """How many tensors of the plan may be read now."""
        news = self._await(link, (device_wire.Confirmed, wire.Ready), stall)
        if not isinstance(news, wire.Ready):
            if not known < news.count <= all_:
                raise Validation(f"{news.count} of {all_} tensors are confirmed, {known} were")
            return news.count
        if news.chunk != 0:
            raise Validation(f"chunk {news.chunk} came where 0 was due")
        return all_

    def _await_ready(self, link: Link, chunk: int, stall: float) -> wire.Ready:
        ready = self._await(link, wire.Ready, stall)
        if ready.chunk != chunk:
            raise Validation(f"chunk {ready.chunk} came where {chunk} was due")
        return ready

    def _await(self, link: Link, kind: type[T] | tuple[type[T], type[U]], stall: float) -> T | U:
        while True:
            message = self._next(link, stall)
            if isinstance(message, kind):
                return message
            if not isinstance(message, wire.Alive):
                kinds = kind if isinstance(kind, tuple) else (kind,)
                names = " or ".join(each.__name__ for each in kinds)
                raise Validation(f"expected {names}, got {message}", replica=_SENDER)

    def _next(self, link: Link, stall: float) -> device_wire.ToReader:
        try:
            payload, _ = link.recv(deadline=time.monotonic() + stall)
        except PhaseTimeout as error:
            raise PhaseTimeout(
                f"nothing from the trainer for {stall} s", replica=_SENDER
            ) from error
        self.progress.step(0)
        message = device_wire.decode_to_reader(payload, peer=_SENDER)
        if isinstance(message, wire.Failed):
            raise PeerLost.remote(f"the trainer gave up: {message.text}", replica=_SENDER)
        return message

    def _send(self, link: Link, message: wire.Message, stall: float) -> None:
        try:
            link.send(wire.encode(message), deadline=time.monotonic() + stall)
        except PeerLost:
            while True:  # why the sender left is often still in the socket; ends by raising
                self._next(link, stall)

    def release(self) -> None:
        """End for good: no mapping, no descriptors, no thread."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        super().release()

    def _dispose(self) -> None:
        if self._released:
            return
        self._released = True
        super()._dispose()
        self._unmap()

    def statistics(self) -> dict[str, Any]:
        """Rounds, and what is mapped."""
        return {
            "rounds": self._rounds,
            "mapped": self._mappings.count(),
            "table": self._mappings.table,
        }


def _is_last(layout: DeviceLayout, piece: Any) -> bool:
    size = layout.plan.sizes[layout.streamed[piece.tensor]]
    return bool(piece.start + piece.nbytes == size)


def _words(raw: bytes) -> array[int]:
    return array("q", raw)
