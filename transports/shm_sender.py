"""The trainer's half of the shared-memory stream."""

from __future__ import annotations

import hmac
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, final

from statemachines.errors import InvalidTransition, Validation
from transports import shm_messages as wire
from transports.chunk_copy import CopyQueue
from transports.chunk_writer import ChunkWriter
from transports.digest import available, chain
from transports.foreign_memory import OwnMemory
from transports.many_links import ManyLinks
from transports.segments import ALIGNMENT
from transports.sender_memory import SenderMemory
from transports.shm_readers import Readers, check_stall
from transports.stream import Progress, StreamSummary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from transports.chunk_copy import Home
    from transports.planning import Plan
    from transports.segments import Segment
    from transports.sharing import SharedStorage
    from transports.stream import Roll


@final
class ShmSender(ManyLinks):
    """Writes each chunk once, into memory that all readers of the host map.

    What outlives rounds: the address, the token, the buffers, and where in them things go for as
    long as the plan stays the same. Connections are per round.

    Attributes:
        address, token: What a `ShmReceiver` needs. The token is a secret.
        progress: Bytes so far, for other threads to read.
        roll: See `transports.stream.PerReader`.
    """

    takes_parameters = True

    def __init__(
        self,
        *,
        buffer_nbytes: int = 64 << 20,
        buffers: int = 2,
        packed: bool = True,
        digest: str | None = "xxh3_64",
        shared: Sequence[SharedStorage] = (),
    ) -> None:
        """Make a sender; memory is reserved by the first `open` that needs it.

        Args:
            buffer_nbytes: Size of one ring slot; a plan's limit must not exceed it.
            buffers: Ring slots: how many chunks the slowest reader may be behind.
            packed: Use the ring. Else one segment holds all that is sent, so that writing never
                waits for readers.
            digest: How chunks are verified (`transports.digest`); None counts only.
            shared: Storages of tensors that `locate` looks into.

        Raises:
            Validation: A size that cannot be right, or a digest that is not available.
        """
        _check_int("buffer_nbytes", buffer_nbytes, ALIGNMENT, 2**46)
        _check_int("buffers", buffers, 1, 1024)
        if digest is not None and digest not in available():
            raise Validation(f"digest {digest!r} is not one of {', '.join(available())}")
        super().__init__()
        self.token = secrets.token_hex(16)
        self.progress = Progress()
        self.roll: Roll | None = None
        self._memory = SenderMemory(slot_nbytes=buffer_nbytes, buffers=buffers if packed else None)
        self._kind = digest
        self._shared = tuple(shared)
        self._resident: Mapping[int, tuple[Home, int]] = {}
        self._own = OwnMemory(self.token.encode())
        self._direct: tuple[Sequence[int], Mapping[int, tuple[Home, int]]] = ((), {})
        self._released = False
        self.address = self._listener.address
        self._rounds = 0
        self._copied = 0
        self._in_place = 0
        self._round = 0
        self._writer: ChunkWriter | None = None
        self._nbytes = 0

    def __repr__(self) -> str:
        writer = self._writer
        state = "idle" if writer is None else f"round {self._round}, chunk {writer.chunk}"
        return f"<ShmSender {self.address} {state}>"

    def locate(self, tensor: torch.Tensor) -> tuple[Segment, int] | None:
        """Where a tensor lies in the shared storages, if it does: a handle for `set_resident`."""
        for storage in self._shared:
            found = storage.locate(tensor)
            if found is not None:
                return found
        return None

    def set_resident(self, mapping: Mapping[int, tuple[Segment, int]]) -> None:
        """Say which tensors readers find in place, from the next `open` on.

        Args:
            mapping: Index in the plan to the segment and the offset where the tensor lies.
        """
        self._resident = dict(mapping)

    @property
    def mark(self) -> int:
        """Where the token lies in this process, for a `ShmReceiver` that copies from its memory."""
        return self._own.mark

    def set_direct(self, addresses: Sequence[int]) -> None:
        """Say where all tensors are in this process, from the next `open` on.

        Readers copy from there, if all of them can, nothing is resident, and it is memory that
        other processes may read; they stay until the round is over.

        Args:
            addresses: Of contiguous CPU tensors, one for each of the plan; empty: through buffers.
                The same list again means the same addresses.
        """
        if self._direct[0] is not addresses and self._direct[0] != addresses:
            home, some = self._own, addresses if self._own.lends(addresses) else ()
            self._direct = (addresses, {i: (home, at) for i, at in enumerate(some)})

    def open(self, plan: Plan, readers: int, *, round: int, stall: float) -> None:
        """See `transports.stream.Sender.open`.

        Raises:
            Validation: The plan does not fit this sender or the resident tensors.
            OutOfSharedMemory: There is no room for the buffers.
        """
        if self._released:
            raise InvalidTransition("this sender is released")
        if self._readers is not None:
            raise InvalidTransition(f"round {self._round} is still open", round=self._round)
        check_stall(stall)
        _check_int("readers", readers, 1, 1 << 16)
        with self._turn.call("open", round, failed=self._failed):
            self._waker.check()
            self._round, self._nbytes = round, sum(plan.sizes)
            self._memory.check(plan)
            depends = bool(self._direct[1]) and not self._resident
            if not depends:
                self._place(plan, self._resident)
            self._readers = found = Readers(self._waker, stall=stall, roll=self.roll)
            found.admit(self._listener, readers, self._judge)
            if depends:
                can_read = all(reader.hello.reads for reader in found.readers)
                self._place(plan, self._direct[1] if can_read else {})
            queue = CopyQueue(self._waker, self.progress, digest=self._kind)
            self._writer = ChunkWriter(self._memory, found, queue)
            found.greet_all(partial(self._memory.greet, plan=plan, digest=self._kind))
            self.progress.step(0)

    def _place(self, plan: Plan, resident: Mapping[int, tuple[Home, int]]) -> None:
        self._memory.set_resident(resident)
        self._memory.prepare(plan, check=self._check)

    def _check(self) -> None:
        self._waker.check()
        if self._readers is not None:
            self._readers.keep_alive()

    def _judge(self, hello: wire.Hello) -> str | None:
        # The token first: a stranger learns nothing else.
        if not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            return "wrong token"
        if hello.round != self._round:
            return f"round {hello.round} is not open; the open one is {self._round}"
        return None

    def write(self, batch: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See `transports.stream.Sender.write`; tensors of any strides are sent by value.

        Raises:
            Validation: Out of order, of another size than planned, or not where `set_resident`
                said; names the index.
        """
        with self._turn.call("write", self._round, failed=self._failed):
            self._connected()[1].write(batch)

    def finish(self) -> StreamSummary:
        """See `transports.stream.Sender.finish`.

        Raises:
            Validation: Not every tensor of the plan was written.
                Or one that readers copied from this process's memory is not where it was.
            DigestMismatch: A reader arrived at other bytes.
        """
        with self._turn.call("finish", self._round, failed=self._failed):
            readers, writer = self._connected()
            missing = writer.missing()
            if missing is not None:
                raise Validation(
                    f"tensor {missing} and later ones were not written", tensor=str(missing)
                )
            digest = None if self._kind is None else chain(writer.digests)
            done = wire.Done(chunks=writer.chunk, nbytes=self._nbytes, digest=digest)
            readers.finish(done)
            writer.check_lent()
            self._rounds += 1
            self._end_round()
            return StreamSummary(nbytes=done.nbytes, chunks=done.chunks, digest=digest)

    def _connected(self) -> tuple[Readers, ChunkWriter]:
        self._waker.check()
        if self._readers is None or self._writer is None:
            raise InvalidTransition("no round is open")
        return self._readers, self._writer

    def _end_round(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            self._copied += writer.copied
            self._in_place += writer.in_place
        super()._end_round()

    def nudge(self) -> None:
        """See `transports.stream.PerReader.nudge`."""
        self._waker.nudge()

    def _dispose(self) -> None:
        self._released = True
        super()._dispose()
        self._shared, self._resident, self._direct = (), {}, ((), {})
        self._memory.release()

    def statistics(self) -> dict[str, Any]:
        """Rounds, bytes copied and found in place, and the memory held."""
        segment, writer = self._memory.segment, self._writer
        return {
            "rounds": self._rounds,
            "bytes_copied": self._copied + (0 if writer is None else writer.copied),
            "bytes_in_place": self._in_place + (0 if writer is None else writer.in_place),
            "buffer_nbytes": 0 if segment is None else segment.nbytes,
            "round": self._round if self._readers is not None else None,
        }


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise Validation(f"{name} must be an int in {low}..{high}, not {value!r}")
