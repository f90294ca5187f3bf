"""Backend ``ipc``: trainer and workers on one host, the bytes in shared memory.

CPU tensors travel through anonymous shared memory (`transports.shared_memory`): every chunk is
written once and read by all workers. ``packed=True`` streams through a ring of buffers;
``packed=False`` gives every tensor a place of its own in one segment as large as the model. Tensors
that live in memory made by `share_tensors` are read in place in both forms.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from aiosync.config import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo
from aiosync.defaults import DEFAULTS
from aiosync.errors import ProtocolMismatch, Validation
from aiosync.metadata import from_wire, meta_nbytes, metadata_digest, to_wire
from aiosync.streaming import stream_in, stream_out
from aiosync.trainer import TrainerWeightTransferEngine
from aiosync.worker import WeightTransferEngine
from transports.digest import available as available_digests
from transports.planning import ALIGNED, plan_chunks
from transports.shared_memory import ShmReceiver, ShmSender
from transports.sharing import share_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from aiosync.feed import SourceFeed
    from aiosync.members import MemberLink
    from aiosync.metadata import ParamMeta
    from aiosync.round import Round
    from statemachines.hub import TransitionHub
    from transports.planning import Plan
    from transports.sharing import SharedStorage
    from transports.stream import StreamSummary

__all__ = [
    "IPCTrainerInitInfo",
    "IPCTrainerWeightTransferEngine",
    "IPCWeightTransferEngine",
    "IPCWeightTransferInitInfo",
    "IPCWeightTransferUpdateInfo",
    "share_tensors",
]


@dataclass
class IPCTrainerInitInfo(TrainerInitInfo):
    """Trainer side.

    Attributes:
        packed: Stream through a ring of buffers instead of one segment as large as the model.
        packed_buffer_size_bytes: Size of one buffer, at least 64.
        packed_num_buffers: Buffers in the ring, at least 2 to overlap both sides.
        shared: What `share_tensors` returned, for tensors the workers read in place.
        lease_s: Silence of this trainer that a worker's open round survives; None: the default.
        lineage: Name of this training run; None: random.
    """

    backend: ClassVar[str] = "ipc"
    packed: bool = False
    packed_buffer_size_bytes: int = DEFAULTS.buffer_bytes
    packed_num_buffers: int = DEFAULTS.buffers
    shared: Sequence[SharedStorage] = field(default=(), kw_only=True)
    lease_s: float | None = field(default=None, kw_only=True)
    lineage: str | None = field(default=None, kw_only=True)


class IPCWeightTransferInitInfo(
    msgspec.Struct, WeightTransferInitInfo, kw_only=True, forbid_unknown_fields=True
):
    """Worker side: where the trainer's doorbell is, and what both sides must agree on."""

    packed: bool = False
    address: str
    token: str
    reader: str
    buffer_size_bytes: int
    digest: str | None = None

    def __repr__(self) -> str:  # the token stays out of logs
        return f"IPCWeightTransferInitInfo(packed={self.packed}, address={self.address!r})"


class IPCWeightTransferUpdateInfo(
    msgspec.Struct, WeightTransferUpdateInfo, kw_only=True, forbid_unknown_fields=True
):
    """One round's announcement. Three empty lists mean: the metadata of the last round.

    Attributes:
        names, dtype_names, shapes: As on vLLM's wire.
        metadata_digest: Of the metadata that is meant; guards the empty lists.
        plan_digest: Of the chunk plan; both sides cut the same bytes or refuse.
        aliases: Further names of tied tensors, each with the name that travels.
        stall_s: Longest silence of the sender.
        ipc_handles_pickled: vLLM's pickled CUDA handles: always refused.
    """

    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    metadata_digest: str
    plan_digest: str
    aliases: dict[str, str] = {}
    stall_s: float = DEFAULTS.stall_s
    round: int = 0
    ipc_handles_pickled: str | None = None

    def __post_init__(self) -> None:
        if self.ipc_handles_pickled is not None:
            raise ValueError("pickled handles are never loaded; use a worker and trainer of ours")


def plan_of(metadata: Sequence[ParamMeta], limit: int) -> Plan:
    """The chunk plan both sides make from the same metadata and buffer size."""
    return plan_chunks(
        [meta_nbytes(meta) for meta in metadata],
        [meta.dtype.itemsize for meta in metadata],
        limit=limit,
        rule=ALIGNED,
        names=[meta.name for meta in metadata],
    )


class IPCTrainerWeightTransferEngine(TrainerWeightTransferEngine[IPCTrainerInitInfo]):
    """Writes each chunk once into shared memory that all workers of the host read."""

    init_info_cls = IPCTrainerInitInfo
    reusable_after_abort = True
    backend_name = "ipc"

    def __init__(
        self,
        *,
        client: Any,
        source: Any,
        is_sender: bool = True,
        packed: bool = False,
        packed_buffer_size_bytes: int = DEFAULTS.buffer_bytes,
        packed_num_buffers: int = DEFAULTS.buffers,
        shared: Sequence[SharedStorage] = (),
        **options: Any,
    ) -> None:
        if source is None:
            raise Validation("ipc needs a WeightSource (or a torch.nn.Module)", phase="init")
        super().__init__(client=client, source=source, is_sender=is_sender, **options)
        self.packed = packed
        self.packed_buffer_size_bytes = packed_buffer_size_bytes
        self.packed_num_buffers = packed_num_buffers
        self.shared = tuple(shared)
        self._digest: str | None = None
        self._sender: ShmSender | None = None
        self._announced: dict[str, str] = {}
        self._bytes_before = 0
        self._metadata_digest: tuple[SourceFeed, str] | None = None

    @classmethod
    def from_init_info(
        cls, init_info: IPCTrainerInitInfo, *, client: Any, source: Any, hub: TransitionHub | None
    ) -> Self:
        return cls(
            client=client,
            source=source,
            is_sender=init_info.is_sender,
            rank=init_info.rank,
            hub=hub,
            packed=init_info.packed,
            packed_buffer_size_bytes=init_info.packed_buffer_size_bytes,
            packed_num_buffers=init_info.packed_num_buffers,
            shared=init_info.shared,
            lease_s=init_info.lease_s,
            lineage=init_info.lineage,
        )

    def check_peers(self) -> None:
        offered: set[str] = set(available_digests())
        for link in self.links:
            peer = link.peer
            if not link.speaks_ours or peer is None:
                raise ProtocolMismatch(
                    "this backend moves CPU tensors between aiosync workers; the peer is not one",
                    replica=link.name,
                    phase="init",
                    next_step="serve the model with an aiosync worker, or use another backend",
                )
            theirs = peer.detail.get("backend")
            if theirs != self.backend_name:
                raise ProtocolMismatch(
                    f"the worker's backend is {theirs!r}, the trainer's is {self.backend_name!r}",
                    replica=link.name,
                    phase="init",
                )
            offered &= set(peer.digests)
        # Best first; without a common one (or with verify="counts") completeness is checked.
        self._digest = next((kind for kind in available_digests() if kind in offered), None)

    def get_worker_init_payload(self) -> dict[str, Any]:
        sender = self._sender
        if sender is None:
            sender = self._sender = ShmSender(
                buffer_nbytes=self.packed_buffer_size_bytes,
                buffers=self.packed_num_buffers,
                packed=self.packed,
                digest=self._digest,
                shared=self.shared,
            )
        self._announced.clear()
        return {
            "packed": self.packed,
            "address": sender.address,
            "token": sender.token,
            "buffer_size_bytes": self.packed_buffer_size_bytes,
            "digest": self._digest,
        }

    def member_payload(self, link: MemberLink) -> dict[str, Any]:
        return {"reader": link.name}  # so that the data plane names members as reports do

    def make_plan(self, feed: SourceFeed) -> Plan:
        wire = from_wire(*to_wire(feed.metadata))  # owners and meshes are the trainer's own
        self._metadata_digest = (feed, metadata_digest(wire))
        return plan_of(feed.metadata, self.packed_buffer_size_bytes)

    def update_payload(self, round: Round) -> dict[str, Any]:
        feed, plan = round.validated()
        digest = self._metadata_digest
        assert digest is not None  # made with the plan
        # Lists travel once per worker and metadata; afterwards the digest names them.
        known = all(self._announced.get(link.name) == digest[1] for link in round.links)
        names, dtype_names, shapes = ([], [], []) if known else to_wire(feed.metadata)
        return {
            "names": names,
            "dtype_names": dtype_names,
            "shapes": shapes,
            "metadata_digest": digest[1],
            "plan_digest": plan.digest,
            "aliases": dict(getattr(self.source, "aliases", None) or {}),
            "stall_s": round.budget.stall,
            "round": round.number,
        }

    async def transmit(self, round: Round) -> StreamSummary:
        feed, plan = round.validated()
        sender = self._sender
        assert sender is not None  # made by init
        self._bytes_before = sender.progress.nbytes
        sender.set_resident(self._resident(feed))
        summary = await stream_out(
            feed,
            sender,
            plan=plan,
            readers=len(round.links),
            round=round.number,
            stall=round.budget.stall,
            grace=round.budget.cleanup / 2,
            lane=self.source_lane,
        )
        if self._metadata_digest is not None:
            for link in round.links:
                self._announced[link.name] = self._metadata_digest[1]
        return summary

    def _resident(self, feed: SourceFeed) -> dict[int, tuple[Any, int]]:
        """Handles of the tensors that workers can read where they are."""
        resident = getattr(self.source, "resident", None)
        if not self.shared or resident is None:
            return {}
        live: dict[str, torch.Tensor] = resident()
        found: dict[int, tuple[Any, int]] = {}
        for index, meta in enumerate(feed.metadata):
            if meta.name not in live:
                continue
            for storage in self.shared:
                place = storage.locate(live[meta.name])
                if place is not None:
                    found[index] = place
        return found

    def dispose(self) -> None:
        sender, self._sender = self._sender, None
        self._bytes_before = 0
        self._announced.clear()
        if sender is not None:
            sender.release()

    def sent_bytes(self) -> int:
        return self._sender.progress.nbytes - self._bytes_before if self._sender else 0

    def progress_at(self) -> float:
        return self._sender.progress.at if self._sender is not None else super().progress_at()


class IPCWeightTransferEngine(
    WeightTransferEngine[IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo]
):
    """Reads the trainer's shared memory into the sink."""

    init_info_cls = IPCWeightTransferInitInfo
    update_info_cls = IPCWeightTransferUpdateInfo
    supports_draft_weight_update = False
    reusable_after_abort = True
    uses_sink = True

    _receiver: ShmReceiver | None = None
    _info: IPCWeightTransferInitInfo | None = None
    _bytes_before = 0
    _known: tuple[str, list[ParamMeta], Plan] | None = None

    def init_transfer_engine(self, init_info: IPCWeightTransferInitInfo) -> None:
        self._info = init_info
        self._known = None
        self._receiver = ShmReceiver(
            address=init_info.address, token=init_info.token, name=init_info.reader
        )

    async def start_weight_update(self) -> None:
        return

    async def receive_weights(self, update_info: IPCWeightTransferUpdateInfo) -> None:
        receiver = self._receiver
        assert receiver is not None  # the machine is initialised
        metadata, plan = self._announced(update_info)
        self._bytes_before = receiver.progress.nbytes
        sink = self.sink
        aliases = update_info.aliases
        await stream_in(
            receiver,
            sink,
            plan=plan,
            round=update_info.round,
            stall=update_info.stall_s,
            grace=DEFAULTS.cleanup_s / 2,
            lane=self.lane,
            prepare=lambda: sink.begin(metadata, aliases=aliases),
        )

    def _announced(self, info: IPCWeightTransferUpdateInfo) -> tuple[list[ParamMeta], Plan]:
        assert self._info is not None  # the machine is initialised
        known = self._known
        if known is None or known[0] != info.metadata_digest:
            metadata = from_wire(info.names, info.dtype_names, info.shapes)
            if metadata_digest(metadata) != info.metadata_digest:
                raise Validation(
                    "update_info.metadata_digest does not match names, dtype_names and shapes"
                    " (empty lists mean the metadata of the last round, which this worker lacks)",
                    phase="update",
                )
            plan = plan_of(metadata, self._info.buffer_size_bytes)
            known = self._known = (info.metadata_digest, metadata, plan)
        _, metadata, plan = known
        if plan.digest != info.plan_digest:
            raise Validation(
                f"update_info.plan_digest: the trainer cuts {info.plan_digest}, this worker"
                f" {plan.digest}: both sides must agree before a byte moves",
                phase="update",
            )
        return metadata, plan

    async def finish_weight_update(self) -> None:
        return

    def shutdown(self) -> None:
        receiver, self._receiver = self._receiver, None
        self._bytes_before = 0
        self._known = None
        if receiver is not None:
            receiver.release()

    def abort_receive(self) -> None:
        if self._receiver is not None:
            self._receiver.abort()

    def received_bytes(self) -> int:
        return self._receiver.progress.nbytes - self._bytes_before if self._receiver else 0

    def progress_at(self) -> float:
        return self._receiver.progress.at if self._receiver is not None else time.monotonic()
