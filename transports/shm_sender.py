"""The trainer's half of the shared-memory stream."""

from __future__ import annotations

import hmac
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, final

from statemachines.errors import InvalidTransition, Validation
from transports import shm_messages as wire
from transports.chunk_copy import CopyQueue
from transports.digest import available, chain
from transports.listener import Listener
from transports.piece_digest import bytes_of
from transports.segments import ALIGNMENT
from transports.sender_memory import SenderMemory
from transports.shm_readers import Readers, check_stall
from transports.stream import Progress, StreamSummary
from transports.turn import Turn
from transports.waker import Waker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from transports.chunk_copy import ChunkViews, PieceViews, Run
    from transports.piece_digest import Hashable
    from transports.planning import Plan
    from transports.segments import Segment
    from transports.sharing import SharedStorage


@final
class ShmSender:
    """Writes each chunk once, into memory that all readers of the host map.

    What outlives rounds: the address, the token, the buffers, and the views of them for as long
    as the plan stays the same. Connections are per round.

    Attributes:
        address, token: What a `ShmReceiver` needs. The token is a secret.
        progress: Bytes so far, for other threads to read.
    """

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
        self.token = secrets.token_hex(16)
        self.progress = Progress()
        self._memory = SenderMemory(slot_nbytes=buffer_nbytes, buffers=buffers if packed else None)
        self._kind = digest
        self._shared = tuple(shared)
        self._waker = Waker()
        self._turn = Turn(self._waker)
        self._released = False
        self._listener = Listener()
        self.address = self._listener.address
        self._rounds = 0
        self._copied = 0
        self._in_place = 0
        self._readers: Readers | None = None
        self._round = 0
        self._queue = CopyQueue(self._waker, self.progress, digest=None)
        self._chunk = self._piece = 0
        self._digests: list[int] = []
        self._sizes: tuple[int, ...] = ()
        self._split: torch.Tensor | None = None

    def __repr__(self) -> str:
        state = "idle" if self._readers is None else f"round {self._round}, chunk {self._chunk}"
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
        self._memory.set_resident(mapping)

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
            self._memory.prepare(plan)
            self._round, self._sizes = round, plan.sizes
            self._queue = CopyQueue(self._waker, self.progress, digest=self._kind)
            self._chunk = self._piece = 0
            self._digests = []
            self._readers = Readers(self._waker, stall=stall)
            greet = partial(self._memory.greet, plan=plan, digest=self._kind)
            self._readers.admit(self._listener, readers, self._judge, greet)
            self.progress.step(0)

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
            readers = self._connected()
            done = 0
            while done < len(batch):
                done = self._fill(readers, batch, done)
            self._queue.flush()
            readers.keep_alive()

    def _fill(self, readers: Readers, batch: Sequence[tuple[int, torch.Tensor]], done: int) -> int:
        """Put into the current chunk what belongs there; returns how far the batch is done."""
        if self._chunk == len(self._memory.chunks):
            raise Validation(f"tensor {batch[done][0]} comes after the plan's last")
        chunk = self._memory.chunks[self._chunk]
        pieces, at, queue = chunk.pieces, self._piece, self._queue
        if at == 0 and chunk.copied and self._memory.buffers is not None:
            readers.wait_acked(self._chunk - self._memory.buffers + 1)
        if chunk.run is not None:
            count = self._fill_run(chunk, chunk.run, batch[done : done + len(pieces) - at])
            at += count
            done += count
        while done < len(batch) and at < len(pieces):
            index, tensor = batch[done]
            piece = pieces[at]
            if piece.tensor != index or tensor.nbytes != self._sizes[index]:
                raise _unplanned(piece, index, tensor)
            if queue.digest is not None:
                queue.add_bytes(piece.shared_bytes(queue.digest))
            if piece.resident:
                self._check_resident(piece, tensor)
            elif piece.whole and piece.nbytes:
                queue.add(piece.view_like(tensor), tensor, piece.nbytes)
            elif piece.nbytes:
                queue.add(piece.view_like(tensor), self._part(piece, tensor), piece.nbytes)
            at += 1
            done += piece.final
        self._piece = at
        if at == len(pieces):
            if chunk.run is None:
                chunk.learn()
            self._end_chunk(readers, chunk)
        return done

    def _fill_run(
        self, chunk: ChunkViews, run: Run, part: Sequence[tuple[int, torch.Tensor]]
    ) -> int:
        """The same for a chunk that looks as it did in the last round; returns how many went."""
        at, queue = self._piece, self._queue
        tensors = [tensor for _, tensor in part]
        end = at + len(tensors)
        if [index for index, _ in part] != run.indices[at:end] or not run.fits(at, tensors):
            chunk.run = None
            return 0
        raws: list[Hashable] = []
        if queue.digest is not None:
            raws = [piece.shared_bytes(queue.digest) for piece in chunk.pieces[at:end]]
        queue.add_run(run, at, run.views[at:end], tensors, raws)
        return len(tensors)

    def _part(self, piece: PieceViews, tensor: torch.Tensor) -> torch.Tensor:
        # A tensor that is split over chunks and is not contiguous is made so once, not per piece.
        if self._split is None or piece.start == 0:
            self._split = bytes_of(tensor.resolve_conj().resolve_neg().contiguous())
        part = self._split.narrow(0, piece.start, piece.nbytes)
        if piece.final:
            self._split = None
        return part

    def _check_resident(self, piece: PieceViews, tensor: torch.Tensor) -> None:
        segment, offset = self._memory.resident[piece.tensor]
        if segment.locate(tensor) != offset and tensor.nbytes:
            raise Validation(
                f"tensor {piece.tensor} is not where the readers look for it: it was moved or "
                "replaced since set_resident",
                tensor=str(piece.tensor),
            )
        self._in_place += piece.nbytes

    def _end_chunk(self, readers: Readers, chunk: ChunkViews) -> None:
        value = self._queue.end_chunk()
        if value is not None:
            self._digests.append(value)
        where = 0 if chunk.copied else -1  # our own segment comes first
        readers.announce(
            wire.Ready(chunk=chunk.index, segment=where, offset=chunk.base, digest=value)
        )
        self._chunk += 1
        self._piece = 0

    def finish(self) -> StreamSummary:
        """See `transports.stream.Sender.finish`.

        Raises:
            Validation: Not every tensor of the plan was written.
            DigestMismatch: A reader arrived at other bytes.
        """
        with self._turn.call("finish", self._round, failed=self._failed):
            readers = self._connected()
            if self._chunk < len(self._memory.chunks):
                missing = self._memory.chunks[self._chunk].pieces[self._piece].tensor
                raise Validation(
                    f"tensor {missing} and later ones were not written", tensor=str(missing)
                )
            digest = None if self._kind is None else chain(self._digests)
            nbytes = sum(self._sizes)
            readers.finish(wire.Done(chunks=self._chunk, nbytes=nbytes, digest=digest))
            self._rounds += 1
            self._end_round()
            return StreamSummary(nbytes=nbytes, chunks=self._chunk, digest=digest)

    def _failed(self, error: BaseException, aborted: bool) -> None:
        # Half a round is of no use to anybody: readers are told, and connections dropped.
        if self._readers is not None and not aborted:
            self._readers.fail(error)
        self._end_round()

    def _connected(self) -> Readers:
        self._waker.check()
        if self._readers is None:
            raise InvalidTransition("no round is open")
        return self._readers

    def _end_round(self) -> None:
        readers, self._readers = self._readers, None
        self._split = None
        self._copied += self._queue.copied
        self._queue = CopyQueue(self._waker, self.progress, digest=None)
        if readers is not None:
            readers.close()

    def abort(self) -> None:
        """See `transports.stream.Sender.abort`.

        Holds until the round's blocking call has raised, or until `close`: also for a call that
        is only about to begin.
        """
        self._waker.wake()
        readers = self._readers
        if readers is not None:
            readers.shutdown()

    def close(self) -> None:
        """Drop this round's connections and a pending `abort`; the next `open` works.

        From any thread; a call that is still running is aborted, and closes when it ends.
        """
        self._turn.now_or_afterwards(self._drop, self.abort)

    def _drop(self) -> None:
        self._end_round()
        self._waker.reset()

    def release(self) -> None:
        """End for good: no address, no memory, no descriptors.

        From any thread; a call that is still running is aborted, and releases when it ends.
        """
        self._turn.now_or_afterwards(self._dispose, self.abort)

    def _dispose(self) -> None:
        self._released = True
        self._end_round()
        self._listener.close()
        self._waker.close()
        self._shared = ()
        self._memory.release()

    def statistics(self) -> dict[str, Any]:
        """Rounds, bytes copied and found in place, and the memory held."""
        segment = self._memory.segment
        return {
            "rounds": self._rounds,
            "bytes_copied": self._copied + self._queue.copied,
            "bytes_in_place": self._in_place,
            "buffer_nbytes": 0 if segment is None else segment.nbytes,
            "round": self._round if self._readers is not None else None,
        }


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise Validation(f"{name} must be an int in {low}..{high}, not {value!r}")


def _unplanned(piece: PieceViews, index: int, tensor: torch.Tensor) -> Validation:
    if piece.tensor != index:
        text = f"tensor {index} was written where the plan has {piece.tensor}"
    else:
        text = f"tensor {index} has {tensor.nbytes} bytes, not as many as planned"
    return Validation(text, tensor=str(index))
