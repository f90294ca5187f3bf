"""What every backend with a sender and a receiver has in common.

Both sides cut the announced tensors into the same chunks (`transports.planning`); the update info
announces them once and is short afterwards. A backend adds its own sender, its receiver, and what
the workers need to know to find each other.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar, cast

import msgspec

from aiosync.config import WeightTransferUpdateInfo
from aiosync.defaults import DEFAULTS
from aiosync.errors import ProtocolMismatch, Validation
from aiosync.memory_plan import held_bytes, summarise
from aiosync.metadata import from_wire, metadata_digest, sizes_of, to_wire
from aiosync.source_pass import SourcePass
from aiosync.streaming import stream_in, stream_out
from aiosync.trainer import TrainerWeightTransferEngine
from aiosync.worker import WeightTransferEngine
from transports.digest import available as available_digests
from transports.planning import ALIGNED, plan_chunks
from transports.segments import available_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiosync.feed import SourceFeed
    from aiosync.members import MemberLink
    from aiosync.memory_plan import PlanSummary
    from aiosync.metadata import ParamMeta
    from aiosync.round import Round
    from aiosync.sinks import Sink
    from statemachines.hub import TransitionHub
    from transports.planning import Plan
    from transports.stream import PerReader, Receiver, Sender, StreamSummary

Init = TypeVar("Init")

BUFFER_LIMITS = (64, 1 << 46)
"""Smallest and largest size of one chunk."""
BufferSize = Annotated[int, msgspec.Meta(ge=BUFFER_LIMITS[0], le=BUFFER_LIMITS[1])]
LONGEST_S = 1e6
"""A limit that a peer asks for; longer than that is no limit."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=LONGEST_S)]


class StreamUpdateInfo(
    msgspec.Struct, WeightTransferUpdateInfo, kw_only=True, forbid_unknown_fields=True
):
    """One round's announcement. Three empty lists mean: the metadata of the last round.

    Attributes:
        names, dtype_names, shapes: As on vLLM's wire.
        metadata_digest: Of the metadata that is meant; guards the empty lists.
        plan_digest: Of the chunk plan; both sides cut the same bytes or refuse.
        aliases: Further names of tied tensors, each with the name that travels.
        stall_s: Longest silence of the sender.
        round: The trainer's number of the round.
        ipc_handles_pickled: vLLM's pickled CUDA handles: always refused.
    """

    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    metadata_digest: str
    plan_digest: str
    aliases: dict[str, str] = {}
    stall_s: Seconds = DEFAULTS.stall_s
    round: int = 0
    ipc_handles_pickled: str | None = None

    def __post_init__(self) -> None:
        if self.ipc_handles_pickled is not None:
            raise ValueError("pickled handles are never loaded")


def plan_of(metadata: Sequence[ParamMeta], limit: int) -> Plan:
    """The chunk plan both sides make from the same metadata and buffer size."""
    return plan_chunks(
        sizes_of(metadata),
        [meta.dtype.itemsize for meta in metadata],
        limit=limit,
        rule=ALIGNED,
        names=[meta.name for meta in metadata],
    )


class StreamedTrainerEngine(TrainerWeightTransferEngine[Init]):
    """Announces, plans and streams; a backend makes the sender."""

    reusable_after_abort = True
    buffer_nbytes: int = DEFAULTS.buffer_bytes
    """Size of one chunk at most; set by the backend's constructor."""
    chunks_in_flight: int | None = DEFAULTS.buffers
    """How many chunks are held at once; None: all of them."""

    def __init__(self, *, client: Any, source: Any, **options: Any) -> None:
        if source is None:
            raise Validation(
                f"{self.backend_name} needs a WeightSource (or a torch.nn.Module)", phase="init"
            )
        super().__init__(client=client, source=source, **options)
        self.digest: str | None = None
        """Digest kind that all members can check; None: completeness only."""
        self.sender: Sender | None = None
        self._announced: dict[str, str] = {}
        self._bytes_before = 0

    @classmethod
    def from_init_info(
        cls, init_info: Init, *, client: Any, source: Any, hub: TransitionHub | None
    ) -> Self:
        """Every field of the init info is a keyword of the constructor."""
        info: Any = init_info
        fields = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
        return cls(client=client, source=source, hub=hub, is_sender=info.is_sender, **fields)

    @abstractmethod
    def open_sender(self) -> Sender:
        """Make the sender; called once per channel, during init."""

    @abstractmethod
    def close_sender(self, sender: Sender) -> None:
        """Free the sender for good."""

    @abstractmethod
    def address_info(self, sender: Sender) -> dict[str, Any]:
        """What the workers' init info says about the sender."""

    async def plan(self) -> PlanSummary:
        """Bytes, chunks and memory of a round, without moving anything.

        Raises:
            Validation: The source's metadata cannot be right.
            Refused: The trainer's side of the channel would not fit into memory.
        """
        grace = DEFAULTS.cleanup_s / 2
        feed = await self.source_side.open_feed(grace=grace)
        plan = await self.source_side.open_plan(feed, self.make_plan, grace=grace)

        def add_up() -> PlanSummary:
            need, free = self.channel_memory(plan)
            return summarise(plan, need=need, free=free, links=self.links)

        return await self.source_lane.run(add_up, grace=grace)

    def channel_memory(self, plan: Plan) -> tuple[int, int | None]:
        """Bytes that this side of the channel holds, and how many are free; may block."""
        return held_bytes(plan, self.chunks_in_flight), available_memory()

    def count_readers(self, round: Round) -> int:
        """Worker ranks that take this round's bytes."""
        return sum(link.world_size for link in round.present)

    def before_transmit(self, sender: Sender, feed: SourceFeed) -> None:
        """Last preparation of a round; on the source lane, may block."""

    def check_peer(self, link: MemberLink) -> None:
        peer = link.peer
        if not link.speaks_ours or peer is None:
            raise ProtocolMismatch(
                f"backend {self.backend_name} needs aiosync workers; the peer is not one",
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

    def check_peers(self) -> None:
        super().check_peers()
        offered = set(available_digests())
        for link in self.links:
            offered &= set(link.peer.digests if link.peer is not None else ())
        # Best first; without a common one (or with verify="counts") completeness is checked.
        self.digest = next((kind for kind in available_digests() if kind in offered), None)

    def fits(self, link: MemberLink) -> bool:
        return self.digest is None or (link.peer is not None and self.digest in link.peer.digests)

    def nudge(self) -> None:
        if self.per_member and self.sender is not None:
            cast("PerReader", self.sender).nudge()

    def get_worker_init_payload(self) -> dict[str, Any]:
        if self.sender is None:
            self.sender = self.open_sender()
        self._announced.clear()
        common = {"buffer_size_bytes": self.buffer_nbytes, "digest": self.digest}
        return common | self.address_info(self.sender)

    def make_plan(self, feed: SourceFeed) -> Plan:
        _ = feed.wire_digest  # computed here, on the lane
        return plan_of(feed.metadata, self.buffer_nbytes)

    def update_payload(self, round: Round) -> dict[str, Any] | None:
        feed, plan = round.validated()
        digest = feed.wire_digest
        # Lists travel once per worker and metadata; afterwards the digest names them.
        known = all(self._announced.get(link.name) == digest for link in round.present)
        names, dtype_names, shapes = ([], [], []) if known else to_wire(feed.metadata)
        return {
            "names": names,
            "dtype_names": dtype_names,
            "shapes": shapes,
            "metadata_digest": digest,
            "plan_digest": plan.digest,
            "aliases": dict(getattr(feed.source, "aliases", None) or {}),
            "stall_s": min(round.budget.stall, LONGEST_S),
            "round": round.number,
        }

    async def transmit(self, round: Round) -> StreamSummary:
        feed, plan = round.validated()
        sender = self.sender
        assert sender is not None  # made by init
        self._bytes_before = sender.progress.nbytes
        attendance = round.attendance
        if self.per_member:
            cast("PerReader", sender).roll = attendance if attendance.tolerant else None
        summary = await stream_out(
            SourcePass(feed, self.ranks, sender, linger=round.budget.cleanup / 4),
            sender,
            plan=plan,
            readers=self.count_readers(round),
            round=round.number,
            stall=round.budget.stall,
            grace=round.source_grace,
            lane=self.source_lane,
            prepare=partial(self.before_transmit, sender, feed),
        )
        for link in round.present:
            self._announced[link.name] = feed.wire_digest
        return summary

    def dispose(self) -> None:
        sender, self.sender = self.sender, None
        self._bytes_before = 0
        self._announced.clear()
        if sender is not None:
            self.close_sender(sender)

    def sent_bytes(self) -> int:
        return self.sender.progress.nbytes - self._bytes_before if self.sender else 0

    def progress_at(self) -> float:
        return self.sender.progress.at if self.sender is not None else super().progress_at()


class StreamedWorkerEngine(WeightTransferEngine[Init, StreamUpdateInfo]):
    """Checks the announcement and streams into the sink; a backend makes the receiver."""

    update_info_cls: ClassVar[type] = StreamUpdateInfo
    reusable_after_abort = True
    one_update = True
    uses_sink = True
    landing_device: str | None = "cpu"

    receiver: Receiver | None = None
    _limit = DEFAULTS.buffer_bytes
    _bytes_before = 0
    _known: tuple[str, list[ParamMeta], Plan] | None = None
    verifies_early = False
    """Whether a round is verified as soon as its bytes are there, and the trainer told so."""

    @abstractmethod
    def open_receiver(self, init_info: Init) -> Receiver:
        """Make the receiver; connects when a round is received."""

    @abstractmethod
    def close_receiver(self, receiver: Receiver) -> None:
        """Free the receiver for good."""

    def init_transfer_engine(self, init_info: Init) -> None:
        self._known = None
        self._limit = init_info.buffer_size_bytes  # type: ignore[attr-defined] # in all of them
        self.receiver = self.open_receiver(init_info)

    async def start_weight_update(self) -> None:
        self.verified_round = None

    async def receive_weights(self, update_info: StreamUpdateInfo) -> None:
        receiver = self.receiver
        assert receiver is not None  # the machine is initialised
        self._bytes_before = receiver.progress.nbytes
        known = self._known
        if known is not None and known[0] == update_info.metadata_digest and self.has_sink:
            metadata, plan = self._check_announced(update_info)
        else:
            metadata, plan = await self.lane.run(self._get_ready, update_info)
        sink = self.sink
        summary = await stream_in(
            receiver,
            sink,
            plan=plan,
            round=update_info.round,
            stall=update_info.stall_s,
            grace=DEFAULTS.cleanup_s / 2,
            lane=self.lane,
            prepare=partial(self.begin_sink, sink, metadata, plan, update_info),
            verify=self.verifies_early,
        )
        self.received_digest = summary.digest
        if self.verifies_early:
            self.verified_round = self.cycle.ownership.last_round

    def begin_sink(
        self, sink: Sink, metadata: list[ParamMeta], plan: Plan, info: StreamUpdateInfo
    ) -> None:
        """Open the sink for what was announced; on the lane, right before `receiver` is used."""
        sink.begin(metadata, aliases=info.aliases)

    def _get_ready(self, info: StreamUpdateInfo) -> tuple[list[ParamMeta], Plan]:
        checked = self._check_announced(info)
        if isinstance(getattr(self.config, "sink", "staged"), str):
            self.know_sink()  # not on the loop: it may walk the whole model
        return checked

    def _check_announced(self, info: StreamUpdateInfo) -> tuple[list[ParamMeta], Plan]:
        known = self._known
        if known is None or known[0] != info.metadata_digest:
            metadata = from_wire(info.names, info.dtype_names, info.shapes)
            if metadata_digest(metadata) != info.metadata_digest:
                raise Validation(
                    "update_info.metadata_digest does not match names, dtype_names and shapes"
                    " (empty lists mean the metadata of the last round, which this worker lacks)",
                    phase="update",
                )
            plan = plan_of(metadata, self._limit)
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
        receiver, self.receiver = self.receiver, None
        self._bytes_before = 0
        self._known = None
        if receiver is not None:
            self.close_receiver(receiver)

    def abort_receive(self) -> None:
        if self.receiver is not None:
            self.receiver.abort()

    def received_bytes(self) -> int:
        return self.receiver.progress.nbytes - self._bytes_before if self.receiver else 0

    def progress_at(self) -> float:
        return self.receiver.progress.at if self.receiver is not None else super().progress_at()
