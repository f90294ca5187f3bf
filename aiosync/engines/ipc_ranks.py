"""Backend ``ipc`` towards a stock vLLM, from several trainer ranks.

Each worker maps the memory of its own GPU, so a rank on that GPU has to export every tensor. All
ranks iterate the source; one rank on each GPU exports what comes by. An update is made by all of
them together: they meet with their handles, rank 0 posts them under the GPUs' UUIDs, and they meet
again when the workers have loaded. Where several ranks share a GPU the last one's handles count, as
in vLLM's own merge; the others export nothing.

A rank that cannot go on keeps coming to the meetings, which are at the same tensors on all ranks,
until one of them ends the round: its peers may be inside one of the source's collectives.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, final

import msgspec

from aiosync.concurrency import collapse
from aiosync.errors import InvalidTransition, Validation
from aiosync.ranks import Word
from transports.star import FRAME_LIMIT
from transports.stream import StreamSummary
from transports.tuple_handle import MOST_NBYTES, TupleHandle, decode_handles, encode_handles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from aiosync.feed import SourceFeed
    from aiosync.metadata import ParamMeta
    from aiosync.ranks import TrainerRanks
    from transports.cuda import Mark
    from transports.planning import Chunk, Plan
    from transports.tuple_sender import TupleSender, Update


class Stand(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank is, and what it could export.

    Attributes:
        gpu: UUID of its GPU; None: it sees none.
        lacks: A tensor that it does not hold, if there is one.
    """

    gpu: str | None = None
    lacks: str | None = None


_STAND = msgspec.json.Decoder(Stand)


def find_exporters(
    ranks: TrainerRanks, feed: SourceFeed, gpu: str | None, settings: Mapping[str, object]
) -> dict[int, str]:
    """Which ranks export, and the UUID of each one's GPU; a meeting of all ranks.

    Args:
        settings: What must be the same on all of them.

    Raises:
        Validation: A setting differs, or a rank that is to export does not hold every tensor.
    """
    held = set(feed.owned)
    lacks = next((m.name for i, m in enumerate(feed.metadata) if i not in held), None)
    word = Word(
        at="export",
        facts={name: str(value) for name, value in settings.items()},
        payload=msgspec.json.encode(Stand(gpu=gpu, lacks=lacks)),
    )
    stands = [_stand_of(rank, word.payload) for rank, word in enumerate(ranks.meet(word))]
    last = {stand.gpu: rank for rank, stand in enumerate(stands) if stand.gpu is not None}
    for uuid, rank in last.items():
        name = stands[rank].lacks
        if name is not None:
            raise Validation(
                f"rank {rank} does not hold {name}: a stock vLLM's worker on GPU {uuid} takes every"
                " tensor from that GPU, and this rank is the last one on it",
                tensor=name,
                rank=rank,
                phase="admit",
                next_step="gather every tensor on all ranks, or use backend 'nccl'",
            )
    return {rank: uuid for uuid, rank in last.items()}


def _stand_of(rank: int, payload: bytes) -> Stand:
    try:
        return _STAND.decode(payload)
    except msgspec.DecodeError as error:
        raise Validation(f"rank {rank} says nothing of its GPU: {error}", rank=rank) from error


@final
class InStep:
    """A `TupleSender` whose updates are made together with those of the other ranks.

    Args:
        inner: Exports this rank's memory.
        packed: Its form.
    """

    def __init__(self, inner: TupleSender, ranks: TrainerRanks, *, packed: bool) -> None:
        self.progress = inner.progress
        self._inner = inner
        self._ranks = ranks
        self._packed = packed
        self._exporters: dict[int, str] = {}
        self._metadata: Sequence[ParamMeta] = ()
        self._send: Callable[[list[int], Update], object] | None = None
        self._plan: Plan | None = None
        self._due: deque[Chunk] = deque()
        self._failed = False

    @property
    def device(self) -> torch.device:
        """Where this rank exports from."""
        return self._inner.device

    @property
    def _exports(self) -> bool:
        return self._ranks.rank in self._exporters

    def share_out(self, exporters: dict[int, str], metadata: Sequence[ParamMeta]) -> None:
        """Who exports in the next round, and what."""
        self._exporters, self._metadata = exporters, metadata

    def connect(
        self, post: Callable[[list[int], Update], object], give_up: Callable[[], object]
    ) -> None:
        """On rank 0: how the next round's updates get to the workers; see `TupleSender`."""
        self._send = post
        self._inner.connect(self._post, give_up)

    def order_after(self, mark: Mark) -> None:
        """See `TupleSender.order_after`."""
        self._inner.order_after(mark)

    def open(self, plan: Plan, readers: int, *, round: int, stall: float) -> None:
        """See `transports.stream.Sender.open`; waits for nobody."""
        if self._ranks.rank == 0 and self._send is None:
            raise InvalidTransition("this sender is not connected", round=round)
        self._plan, self._failed = plan, False
        self._due = deque(chunk for chunk in plan.chunks if chunk.nbytes and self._packed)
        if self._ranks.rank:
            self._inner.connect(self._post, lambda: None)
        if self._exports:
            self._inner.open(plan, readers, round=round, stall=stall)
        else:
            self._inner.forget()

    def write(self, batch: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See `transports.stream.Sender.write`; what goes wrong is raised at the next meeting."""
        if self._exports and not self._failed:
            try:
                self._inner.write(batch)
            except Exception as error:
                if self._ranks.parted:
                    raise
                self._ranks.stop(collapse(error))
                self._failed = True
        last = batch[-1][0]
        while self._due and self._due[0].pieces[-1].tensor <= last:
            chunk = self._due[0]
            sizes = [piece.nbytes for piece in chunk.pieces]
            self._post([piece.tensor for piece in chunk.pieces], {"tensor_sizes": sizes})
            self.progress.step(chunk.nbytes)

    def finish(self) -> StreamSummary:
        """See `transports.stream.Sender.finish`."""
        plan = self._plan
        if plan is None:
            raise InvalidTransition("no round is open")
        if self._exports:
            return self._inner.finish()
        if not self._packed and plan.sizes:
            self._post(list(range(len(plan.sizes))), {})
            self.progress.step(plan.total_bytes)
        return StreamSummary(nbytes=plan.total_bytes, chunks=len(plan.chunks))

    def abort(self) -> None:
        """See `transports.stream.Sender.abort`."""
        self._inner.abort()

    def close(self) -> None:
        """The workers may use what was exported until they have finished: it is kept."""
        self._inner.close()
        self._plan = self._send = None

    def forget(self) -> None:
        """Nobody uses what was exported any more."""
        self._inner.forget()

    # -- one update ------------------------------------------------------------------------------

    def _post(self, indices: list[int], fields: Update) -> None:
        own: Any = fields.get("ipc_handles") or []
        if self._packed:
            what, count, own = f"update {self._due[0].index}", 1, [own] if own else []
        else:
            what, count = "update", len(indices)
        told = self._tell(what, own, count)
        if self._send is not None:
            try:
                handles = self._merged(told, count)
                merged = handles[0] if self._packed else handles
                self._send(indices, fields | {"ipc_handles": merged})
            except Exception as error:  # noqa: BLE001  raised by the meeting, on all ranks
                self._ranks.stop(collapse(error))
        self._ranks.meet(f"{what} is loaded")
        if self._packed:
            self._due.popleft()

    def _tell(self, what: str, own: Sequence[dict[str, Any]], count: int) -> list[list[bytes]]:
        """What each rank exported; as many handles at a time as a meeting can carry."""
        mine = [TupleHandle.of(args) for handles in own for args in handles.values()]
        # Base64 makes four bytes of three, and every rank hears them all.
        most = max(1, FRAME_LIMIT * 3 // 4 // MOST_NBYTES // self._ranks.size)
        told: list[list[bytes]] = [[] for _ in range(self._ranks.size)]
        for start in range(0, count, most):
            end = min(start + most, count)
            at = f"{what}, handle {end} of {count}"
            words = self._ranks.meet(Word(at=at, payload=encode_handles(mine[start:end])))
            for heard, word in zip(told, words, strict=True):
                heard.append(word.payload)
        return told

    def _merged(self, told: Sequence[Sequence[bytes]], count: int) -> list[dict[str, Any]]:
        """`count` handles of every rank that exports, by GPU."""
        found: list[dict[str, Any]] = [{} for _ in range(count)]
        for rank, uuid in self._exporters.items():
            try:
                handles = [handle for part in told[rank] for handle in decode_handles(part)]
                if len(handles) != count:
                    raise Validation(f"{len(handles)} handles, not {count}")
                for index, handle in enumerate(handles):
                    self._check(handle, index)
                    found[index][uuid] = handle.args()
            except Validation as error:
                raise Validation(
                    f"rank {rank} exported something else: {error.message}", rank=rank
                ) from error
        return found

    def _check(self, handle: TupleHandle, index: int) -> None:
        """Another rank's handle is of what was announced."""
        if self._packed:
            assert self._plan is not None  # a round is open
            biggest = max(chunk.nbytes for chunk in self._plan.chunks)
            if (handle.dtype, handle.shape) != ("uint8", [biggest]):
                raise Validation(f"{handle.dtype} of shape {handle.shape}, not {biggest} bytes")
            return
        meta = self._metadata[index]
        if (f"torch.{handle.dtype}", tuple(handle.shape)) != (str(meta.dtype), meta.shape):
            raise Validation(
                f"{handle.dtype} of shape {handle.shape} for {meta.name}", tensor=meta.name
            )
