"""A rank that reads staging memory which another rank of its host fills; see `staging`."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from statemachines.errors import AiosyncError, InvalidTransition, Validation
from transports import shm_messages as wire
from transports.errors import PeerLost, PhaseTimeout
from transports.links import Link
from transports.one_link import OneLink
from transports.segments import Segment
from transports.shm_readers import check_stall
from transports.staging_memory import name_of
from transports.stream import Progress, StreamSummary, targets_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from transports.planning import Plan
    from transports.staging_memory import StagingMemory
    from transports.stream import Receiver

LEAD = name_of(0)


@final
class FollowReceiver(OneLink):
    """Takes part in a round that another rank receives; see `transports.stream.Receiver`.

    Args:
        rank: This rank's number, from 1 on.
        address, token: Of the lead.
    """

    inner: Receiver | None = None

    def __init__(self, rank: int, *, address: str, token: str) -> None:
        super().__init__()
        self.progress = Progress()
        self._name = name_of(rank)
        self._address = address
        self._token = token

    def __repr__(self) -> str:
        return f"<FollowReceiver {self._name}>"

    def meet(self, *, seconds: float) -> None:
        """Find out whether the lead can be reached at all.

        Raises:
            PeerLost: Nobody listens there, on this host.
            Validation: It is another user's.
        """
        deadline = time.monotonic() + seconds
        Link.connect(self._address, waker=self._waker, deadline=deadline, peer=LEAD).close()

    def map(
        self, memory: StagingMemory, nbytes: int, *, layout: str, round: int, stall: float
    ) -> torch.Tensor:
        """Map what the lead maps; see `LeadReceiver.map`. What is written here stays here."""
        check_stall(stall)
        with self._turn.call("stage", round, failed=self._failed), _naming_lead():
            self._waker.check()
            deadline = time.monotonic() + stall
            link = self._link = Link.connect(
                self._address, waker=self._waker, deadline=deadline, peer=LEAD
            )
            held = () if memory.segment is None else (memory.segment.key,)
            hello = wire.Hello(
                token=self._token, round=round, reader=self._name, segments=held, layout=layout
            )
            link.send(wire.encode(hello), deadline=deadline)
            segment = self._map(link, memory, layout, stall)
            if segment.nbytes < nbytes:
                raise Validation(f"{segment} is too small for {nbytes} bytes", replica=LEAD)
            return memory.private()

    def _map(self, link: Link, memory: StagingMemory, layout: str, stall: float) -> Segment:
        acked = 0
        while True:
            message, fds = self._next(link, stall, max_fds=1)
            try:
                if isinstance(message, wire.Refusal):
                    raise Validation.remote(f"refused: {message.reason}", replica=LEAD)
                if isinstance(message, wire.Welcome):
                    _take(memory, message, fds, layout)
                elif isinstance(message, wire.Forget):
                    memory.release()
                elif not isinstance(message, wire.Ready | wire.Alive):
                    raise Validation(f"unexpected {message}", replica=LEAD)
            finally:
                for fd in fds:
                    os.close(fd)  # what was attached has been taken out of the list
            segment = memory.segment
            if isinstance(message, wire.Ready) and segment is None:
                raise Validation("no segment came", replica=LEAD)
            if isinstance(message, wire.Forget | wire.Ready):
                link.send(wire.encode(wire.Ack(chunk=acked)), deadline=time.monotonic() + stall)
                acked += 1
            if isinstance(message, wire.Ready) and segment is not None:
                return segment

    def receive(
        self,
        plan: Plan,
        destination: Callable[[int], torch.Tensor],
        landed: Callable[[list[int]], None],
        *,
        round: int,
        stall: float,
    ) -> StreamSummary:
        """Wait until everything is there.

        The wait has no limit of its own: whoever receives has one, and hears that its sender is
        busy, as nobody does here. The round's owner ends the call with `abort`.
        """
        with self._turn.call("receive", round, failed=self._failed), _naming_lead():
            self._waker.check()
            link = self._link
            if link is None:
                raise InvalidTransition("no staging memory was mapped for this round")
            done, _ = self._next(link, float("inf"))
            while isinstance(done, wire.Alive):
                done, _ = self._next(link, float("inf"))
            if not isinstance(done, wire.Done) or done.nbytes != sum(plan.sizes):
                raise Validation(f"unexpected {done}", replica=LEAD)
            indices = list(range(len(plan.sizes)))
            targets_of(destination, indices)  # views of what is there already
            landed(indices)
            complete = wire.Complete(chunks=done.chunks, digest=done.digest)
            link.send(wire.encode(complete), deadline=time.monotonic() + stall)
            self._end_round()
            return StreamSummary(nbytes=done.nbytes, chunks=done.chunks, digest=done.digest)

    def _next(
        self, link: Link, stall: float, *, max_fds: int = 0
    ) -> tuple[wire.ToReader, list[int]]:
        payload, fds = link.recv(deadline=time.monotonic() + stall, max_fds=max_fds)
        try:
            message = wire.decode_to_reader(payload, peer=LEAD)
            if isinstance(message, wire.Failed):
                text = f"{LEAD}, which receives for this one, gave up: {message.text}"
                raise PeerLost.remote(text, replica=LEAD)
        except AiosyncError:
            for fd in fds:
                os.close(fd)  # nobody else knows them
            raise
        self.progress.step(0)
        return message, fds


def _take(memory: StagingMemory, welcome: wire.Welcome, fds: list[int], layout: str) -> None:
    """Use the segment that a welcome names; takes its descriptor out of the list."""
    if welcome.plan != layout or len(welcome.segments) != 1:
        raise Validation(f"unexpected {welcome}", replica=LEAD)
    info = welcome.segments[0]
    if info.attached:
        if not fds:
            raise Validation(f"segment {info.key} was not sent", replica=LEAD)
        memory.take(Segment.attach(fds.pop(), nbytes=info.nbytes, key=info.key))
    elif memory.segment is None or memory.segment.key != info.key:
        raise Validation(f"segment {info.key} is not known here", replica=LEAD)


@contextmanager
def _naming_lead() -> Iterator[None]:
    """Put the rank that an error is about into it."""
    try:
        yield
    except (PeerLost, PhaseTimeout) as error:
        error.locate(rank=0)
        raise
