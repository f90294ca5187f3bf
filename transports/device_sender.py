"""The trainer's half of a stream through device memory that the readers have mapped.

Tensors that stay where they are (a module's parameters) are exported once and never copied by this
side: a later round says that they are ready, and waits until every reader has copied them. What a
source makes anew each time, tensors on the CPU, and strided ones go through buffers.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING, Any, final

import torch

from statemachines.errors import InvalidTransition, Validation
from transports import device_messages as device_wire
from transports import shm_messages as wire
from transports.cuda import REACHED, mark_current, poll
from transports.device_exports import DeviceExports
from transports.device_layout import DeviceLayout
from transports.device_ring import SenderRing
from transports.digest import WSUM64
from transports.many_links import ManyLinks
from transports.packing import pack_into
from transports.planning import ALIGNED
from transports.sender_digests import SenderDigests, first_word
from transports.shm_readers import Readers, check_stall
from transports.stream import Progress, StreamSummary, columns_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transports.cuda import Mark
    from transports.device_memory import DeviceMemory
    from transports.planning import Piece, Plan


@final
class DeviceSender(ManyLinks):
    """See `transports.stream.Sender`.

    What outlives rounds: the address, the token, the table of what is exported, the buffers.

    Args:
        memory: The device the buffers are taken on; tensors may be on others.
        buffers: How many chunks the slowest reader may be behind.
        digest: ``"wsum64"``, or None to count only.
    """

    takes_parameters = True

    def __init__(
        self, memory: DeviceMemory, *, buffers: int = 2, digest: str | None = WSUM64
    ) -> None:
        if digest not in (None, WSUM64):
            raise Validation(
                f"digest {digest!r}: device memory is verified by {WSUM64}, or counted"
            )
        if type(buffers) is not int or not 1 <= buffers <= 1024:
            raise Validation(f"buffers must be an int in 1..1024, not {buffers!r}")
        super().__init__()
        self.token = secrets.token_hex(16)
        self.progress = Progress()
        self._memory = memory
        self._buffers = buffers
        self._kind = digest
        self._exports = DeviceExports(memory)
        self._layout: tuple[tuple[str, str], DeviceLayout] | None = None
        self._digests = SenderDigests(memory)
        self._ring = SenderRing(memory, self._exports)
        self._tensors: Sequence[torch.Tensor | None] = ()
        self._addresses: list[int] | None = None
        self._late = False
        self._look: Callable[[], bool] | None = None
        self._training: Mark = REACHED
        self._released = False
        self.address = self._listener.address
        self._round = self._rounds = 0
        self._at = 0  # the tensor that is due
        self._streamed = 0  # how many of those that go through the buffers were written
        self._chunk = 0  # of the ring, which is being filled
        self._values = b""

    def __repr__(self) -> str:
        state = "idle" if self._readers is None else f"round {self._round}, tensor {self._at}"
        return f"<DeviceSender {self.address} {state}>"

    def set_tensors(
        self, tensors: Sequence[torch.Tensor | None], addresses: list[int] | None = None
    ) -> None:
        """What the next round's tensors are, where they stay until it is over; None: elsewhere.

        By index in the plan, contiguous; kept until the round ends. For `addresses` see
        `DeviceExports.update`.
        """
        self._tensors, self._addresses = tensors, addresses

    def knows(self, addresses: list[int] | None) -> bool:
        """Whether the last round's tensors all were at these very addresses, in memory still there.

        It is the same list then, and `set_unseen` can stand for `set_tensors`.
        """
        exports = self._exports
        return self._layout is not None and exports.has_all and exports.keeps(addresses)

    def set_unseen(self, addresses: list[int], look: Callable[[], bool] | None = None) -> None:
        """The next round's tensors seem to be where they were (`knows`), which nobody has seen yet.

        `write` gets each batch when it was looked at; no reader copies a tensor before that.

        Args:
            look: Looks at a few of them, while readers are waited for; False: all were looked at.
        """
        self._tensors, self._addresses, self._late = (), addresses, True
        self._look = look

    def order_after(self, mark: Mark) -> None:
        """The next round's readers begin after `mark`: after the step that wrote the tensors."""
        self._training = mark

    def open(self, plan: Plan, readers: int, *, round: int, stall: float) -> None:
        """See `transports.stream.Sender.open`; also tells them to copy what stays in place.

        Raises:
            Validation: Memory that cannot be exported, or a reader that cannot open it.
            OutOfSharedMemory: There is no room for the buffers.
        """
        if self._released:
            raise InvalidTransition("this sender is released")
        if self._readers is not None:
            raise InvalidTransition(f"round {self._round} is still open", round=self._round)
        check_stall(stall)
        if plan.rule != ALIGNED:
            raise Validation(f"device memory needs a plan by rule {ALIGNED!r}, not {plan.rule!r}")
        with self._turn.call("open", round, failed=self._failed):
            self._waker.check()
            layout = self._prepare(plan)
            self._round = round
            self._at = self._streamed = self._chunk = 0
            self._values = b""
            self._readers = Readers(self._waker, stall=stall)
            self._readers.admit(
                self._listener,
                readers,
                self._judge,
                lambda link, hello: self._greet(link, hello, plan),
                self._look,
            )
            self._wait(self._training)
            self._training = REACHED
            if self._kind is not None:
                self._digests.begin_resident(self._exports.addresses)
            if not self._late:
                self._release_resident(layout)
            self.progress.step(0)

    def _release_resident(self, layout: DeviceLayout) -> None:
        """The readers may copy all that is read in place; what they should arrive at."""
        assert self._readers is not None  # the round is open
        self._readers.announce(wire.Ready(chunk=0, segment=-1, offset=0))
        if self._kind is not None:
            self._send_values(layout)

    def _prepare(self, plan: Plan) -> DeviceLayout:
        if self._late:
            if self._layout is None or self._layout[0] != (plan.digest, self._exports.table):
                raise Validation("the tensors of another plan are not those that are known")
            return self._layout[1]
        tensors = self._tensors or [None] * len(plan.sizes)
        if len(tensors) != len(plan.sizes):
            raise Validation(f"{len(tensors)} tensors, {len(plan.sizes)} are planned")
        self._exports.update(plan, tensors, self._addresses)
        key = (plan.digest, self._exports.table)
        if self._layout is None or self._layout[0] != key:
            self._layout = None
            layout = DeviceLayout(plan, (index for index, _, _ in self._exports.places))
            self._ring.reserve(layout.slot_nbytes * min(self._buffers, len(layout.ring.chunks)))
            self._layout = ((plan.digest, self._exports.table), layout)
            if self._kind is not None:
                self._digests.prepare(layout, self._tensors)
        return self._layout[1]

    def _judge(self, hello: wire.Hello) -> str | None:
        # The token first: a stranger learns nothing else.
        if not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            return "wrong token"
        if hello.round != self._round:
            return f"round {hello.round} is not open; the open one is {self._round}"
        return self._exports.hidden_from(hello)

    def _greet(self, link: Any, hello: wire.Hello, plan: Plan) -> None:
        exports = self._exports
        is_known = hello.resident == exports.table
        welcome = device_wire.DeviceWelcome(
            round=hello.round,
            plan=plan.digest,
            digest=self._kind,
            table=exports.table,
            allocations=exports.count(),
            places=None if is_known else len(exports.places),
            ring=exports.ring,
        )
        link.post(wire.encode(welcome))
        exports.greet(link, hello.resident, hello.known)

    def _wait(self, mark: Mark) -> None:
        readers = self._readers

        def look() -> None:
            self._waker.check()
            if readers is not None:
                readers.keep_alive()
            self.progress.step(0)

        poll(mark, look)

    def _send_values(self, layout: DeviceLayout) -> None:
        """The digests of what is read in place, which were computed while the readers copy."""
        assert self._readers is not None  # the round is open
        self._values = raw = self._digests.of_resident(layout, self._wait)
        step = 8 * device_wire.VALUES_PER_FRAME
        for start in range(0, len(raw), step):
            part = device_wire.Values(first=start // 8, values=raw[start : start + step])
            self._readers.post(wire.encode(part))

    def write(self, batch: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See `transports.stream.Sender.write`.

        Raises:
            Validation: Out of order, of another size than planned, or not where `set_tensors`
                said; names the index.
        """
        with self._turn.call("write", self._round, failed=self._failed):
            _, layout = self._connected()
            if not batch:
                return
            columns = columns_of(batch)
            first, end = self._at, self._at + len(batch)
            if not columns.are_from(first) or end > len(layout.plan.sizes):
                raise Validation(f"tensor {columns.indices[0]} was written where {first} was due")
            addresses = self._exports.addresses[first:end]
            if self._late:
                self._confirm(layout, columns.addresses, first, end)
            elif (
                not layout.streamed
                and list(map(torch.Tensor.data_ptr, columns.tensors)) == addresses
            ):
                self._at = end
            else:
                self._write_each(layout, batch)
            self.progress.step(sum(layout.plan.sizes[first:end]))

    def _confirm(self, layout: DeviceLayout, seen: list[int] | None, first: int, end: int) -> None:
        """These were looked at a moment ago: the readers may copy them."""
        readers, _ = self._connected()
        assert self._addresses is not None  # `set_unseen` came first: those of the table
        if seen != self._addresses[first:end]:
            raise Validation(
                f"tensors {first} to {end - 1} are not where the readers look for them: one was "
                "moved or replaced since the round began",
                tensor=str(first),
            )
        self._at = end
        if end < len(layout.plan.sizes):
            readers.post(wire.encode(device_wire.Confirmed(count=end)))
        else:
            self._release_resident(layout)

    def _write_each(self, layout: DeviceLayout, batch: Sequence[tuple[int, torch.Tensor]]) -> None:
        fresh: dict[int, torch.Tensor] = {}
        for index, tensor in batch:
            size, address = layout.plan.sizes[index], self._exports.addresses[index]
            if tensor.nbytes != size:
                raise Validation(
                    f"tensor {index} has {tensor.nbytes} bytes, not {size} as planned",
                    tensor=str(index),
                )
            if size and address >= 0 and tensor.data_ptr() != address:
                raise Validation(
                    f"tensor {index} is not where the readers look for it: it was moved or "
                    "replaced since the round began",
                    tensor=str(index),
                )
            if size and address < 0:
                fresh[self._streamed + len(fresh)] = tensor.detach()
        if fresh:
            self._fill(layout, fresh)
        self._at += len(batch)

    def _fill(self, layout: DeviceLayout, fresh: dict[int, torch.Tensor]) -> None:
        """Copy tensors into the buffers, and announce each chunk that is complete."""
        end = self._streamed + len(fresh)
        chunks = layout.ring.chunks
        while self._chunk < len(chunks):
            chunk = chunks[self._chunk]
            pieces = [p for p in chunk.pieces if p.tensor in fresh]
            if not pieces:
                break
            if pieces[0] == chunk.pieces[0] and self._chunk >= self._buffers:
                self._connected()[0].wait_acked(self._chunk - self._buffers + 2)
            slot = self._ring.address + self._chunk % self._buffers * layout.slot_nbytes
            pack_into(self._memory.bytes_at(slot, chunk.nbytes), pieces, fresh)
            self._wait(mark_current(self._memory.device))
            if pieces[-1] != chunk.pieces[-1]:
                break
            self._announce(chunk.pieces, slot)
        self._streamed = end

    def _announce(self, pieces: Sequence[Piece], slot: int) -> None:
        value: int | None = None
        if self._kind is not None:
            raw = self._digests.of_pieces(pieces, slot, self._wait)
            self._values += raw
            value = first_word(raw)
        readers, _ = self._connected()
        self._chunk += 1
        ready = wire.Ready(
            chunk=self._chunk, segment=0, offset=slot - self._ring.address, digest=value
        )
        readers.announce(ready)

    def finish(self) -> StreamSummary:
        """See `transports.stream.Sender.finish`: then the tensors may change.

        Raises:
            Validation: Not every tensor of the plan was written.
            DigestMismatch: A reader arrived at other bytes.
        """
        with self._turn.call("finish", self._round, failed=self._failed):
            readers, layout = self._connected()
            if self._at < len(layout.plan.sizes):
                raise Validation(f"tensor {self._at} was not written", tensor=str(self._at))
            digest = None if self._kind is None else hashlib.sha256(self._values).hexdigest()
            nbytes = layout.plan.total_bytes
            done = wire.Done(chunks=layout.chunks, nbytes=nbytes, digest=digest)
            readers.finish(done)
            self._rounds += 1
            self._end_round()
            return StreamSummary(nbytes=nbytes, chunks=layout.chunks, digest=digest)

    def _connected(self) -> tuple[Readers, DeviceLayout]:
        self._waker.check()
        if self._readers is None or self._layout is None:
            raise InvalidTransition("no round is open")
        return self._readers, self._layout[1]

    def _end_round(self) -> None:
        self._tensors, self._addresses = (), None  # memory that the model gives up must be free
        self._late, self._look = False, None
        super()._end_round()

    def _dispose(self) -> None:
        if self._released:
            return
        self._released = True
        super()._dispose()
        self._exports.clear()
        self._layout = None
        self._digests.clear()
        self._ring.give()

    def statistics(self) -> dict[str, Any]:
        """Rounds, what is exported, and the memory held."""
        return {
            "rounds": self._rounds,
            "table": self._exports.table,
            "exported": self._exports.count(),
            "buffer_nbytes": self._ring.nbytes,
            "round": self._round if self._readers is not None else None,
        }
