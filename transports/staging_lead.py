"""The rank that receives into staging memory for all ranks of its host; see `staging`."""

from __future__ import annotations

import hmac
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, final

from statemachines.errors import InvalidTransition
from transports import shm_messages as wire
from transports.errors import DigestMismatch, PeerLost, PhaseTimeout
from transports.many_links import ManyLinks
from transports.shm_readers import Readers, check_stall
from transports.staging_memory import name_of, rank_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from transports.links import Link
    from transports.planning import Plan
    from transports.segments import Segment
    from transports.staging_memory import StagingMemory
    from transports.stream import Receiver, StreamSummary

_SOONER = 0.8  # a rank that does not come is found before the sender gives up on this one


@final
class LeadReceiver(ManyLinks):
    """Receives for all ranks; see `transports.stream.Receiver`.

    Args:
        inner: Where the bytes come from; it stays its owner's.
        address: Of a listener that does not exist yet (`transports.listener.new_address`).
        token: What the other ranks have to know.
        others: How many there are.
    """

    def __init__(self, inner: Receiver, *, address: str, token: str, others: int) -> None:
        super().__init__(address)
        self.inner = inner
        self.progress = inner.progress
        self._token = token
        self._others = others

    def __repr__(self) -> str:
        return f"<LeadReceiver for {self._others} others of {self.inner!r}>"

    def map(
        self, memory: StagingMemory, nbytes: int, *, layout: str, round: int, stall: float
    ) -> torch.Tensor:
        """Have a segment that every rank has mapped; its bytes.

        Args:
            memory: This rank's, of the model that is updated.
            nbytes: What is needed.
            layout: Names what will lie in it; the same on every rank.
            round: The sender's number.
            stall: Seconds to wait for a rank.

        Raises:
            PhaseTimeout: A rank did not come.
            PeerLost: One went away.
            OutOfSharedMemory: There is no room.
        """
        check_stall(stall)
        with self._turn.call("stage", round, failed=self._failed):
            self._waker.check()
            hellos: dict[str, wire.Hello] = {}
            readers = self._readers = Readers(self._waker, stall=stall * _SOONER)
            judge = partial(self._judge, layout=layout, round=round)
            with self._naming(hellos):
                readers.admit(self._listener, self._others, judge, partial(_note, hellos))
                segment = memory.segment
                if segment is None or not memory.fits(nbytes, list(hellos.values())):
                    memory.release()
                    # Before the new one: both may not fit.
                    readers.wait_acked(readers.announce(wire.Forget()))
                    check = partial(self._check, readers)
                    segment = memory.renew(nbytes, self._others, check=check)
                _show(readers, segment, hellos, layout, round)
            return segment.tensor

    def _judge(self, hello: wire.Hello, *, layout: str, round: int) -> str | None:
        # The token first: a stranger learns nothing else.
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return "wrong token"
        if hello.round != round:
            return f"round {hello.round} is not open; the open one is {round}"
        if hello.layout != layout:
            return f"{hello.reader} was told of other tensors: {hello.layout}, not {layout}"
        if hello.reader not in map(name_of, range(1, self._others + 1)):
            return f"there is no {hello.reader}"
        return None

    @contextmanager
    def _naming(self, hellos: dict[str, wire.Hello]) -> Iterator[None]:
        """Put the rank that an error is about into it."""
        try:
            yield
        except (PeerLost, PhaseTimeout, DigestMismatch) as error:
            if error.replica is None:  # somebody did not come
                names = map(name_of, range(1, self._others + 1))
                error.replica = next((name for name in names if name not in hellos), None)
            if error.replica is not None:
                error.locate(rank=rank_of(error.replica))
            raise

    def _check(self, readers: Readers) -> None:
        self._waker.check()
        readers.keep_alive()

    def receive(
        self,
        plan: Plan,
        destination: Callable[[int], torch.Tensor],
        landed: Callable[[Sequence[int]], None],
        *,
        round: int,
        stall: float,
    ) -> StreamSummary:
        """See `transports.stream.Receiver.receive`; `map` comes first."""
        with self._turn.call("receive", round, failed=self._failed):
            self._waker.check()
            readers = self._readers
            if readers is None:
                raise InvalidTransition("no staging memory was mapped for this round")
            summary = self.inner.receive(plan, destination, landed, round=round, stall=stall)
            done = wire.Done(chunks=summary.chunks, nbytes=summary.nbytes, digest=summary.digest)
            with self._naming({}):
                readers.finish(done)
            self._end_round()
            return summary

    def abort(self) -> None:
        """See `transports.stream.Receiver.abort`."""
        super().abort()
        self.inner.abort()

    def close(self) -> None:
        """See `transports.stream.Receiver.close`; from any thread."""
        self.inner.close()  # by itself: an abort that came after it would be the next round's
        super().close()


def _show(
    readers: Readers, segment: Segment, hellos: dict[str, wire.Hello], layout: str, round: int
) -> None:
    """Have every rank map the segment, whose descriptor goes to those who lack it."""
    for reader in tuple(readers.readers):
        known = segment.key in hellos[reader.name].segments
        info = wire.SegmentInfo(key=segment.key, nbytes=segment.nbytes, attached=not known)
        welcome = wire.Welcome(
            round=round, plan=layout, digest=None, segments=(info,), resident="", handles=None
        )
        reader.link.post(wire.encode(welcome), [] if known else [segment.fileno()])
    readers.wait_acked(readers.announce(wire.Ready(chunk=0, segment=0, offset=0)))


def _note(hellos: dict[str, wire.Hello], _: Link, hello: wire.Hello) -> None:
    hellos[hello.reader] = hello
