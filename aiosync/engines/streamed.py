"""What every backend with a sender and a receiver has in common.

Both sides cut the announced tensors into the same chunks (`transports.planning`); the update info
announces them once and is short afterwards. A backend adds its own sender, its receiver, and what
the workers need to know to find each other.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, cast

import anyio.lowlevel
import msgspec

from aiosync.config import WeightTransferUpdateInfo
from aiosync.defaults import DEFAULTS
from aiosync.errors import AiosyncError, DigestMismatch, ProtocolMismatch, Validation
from aiosync.memory_plan import held_bytes, summarise
from aiosync.metadata import sizes_of, to_wire
from aiosync.source_pass import SourcePass
from aiosync.streaming import OutStream
from aiosync.trainer import TrainerWeightTransferEngine
from aiosync.weight_targets import MODEL
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
    from aiosync.snapshots import Keeper
    from statemachines.hub import TransitionHub
    from transports.planning import Plan
    from transports.stream import PerReader, Sender, StreamSummary

Init = TypeVar("Init")

BUFFER_LIMITS = (64, 1 << 46)
"""Smallest and largest size of one chunk."""
BufferSize = Annotated[int, msgspec.Meta(ge=BUFFER_LIMITS[0], le=BUFFER_LIMITS[1])]
_OTHER_BYTES = DigestMismatch.code
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
    shapes: list[tuple[int, ...]] = []  # no lists: the garbage collector looks at each
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
        self.digests = available_digests()
        """The kinds to choose from, best first."""
        self.sender: Sender | None = None
        self._stream: OutStream | None = None  # of the round that is under way
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
        try:
            feed = await self.source_side.open_feed(grace=grace)
            plan = await self.source_side.open_plan(feed, self.make_plan, grace=grace)
        finally:
            self.source_side.look_again()  # no round follows that would let the tensors go

        def add_up() -> PlanSummary:
            need, free = self.channel_memory(plan)
            return summarise(plan, need=need, free=free, links=self.links)

        return await self.source_lane.run(add_up, grace=grace)

    def channel_memory(self, plan: Plan) -> tuple[int, int | None]:
        """Bytes that this side of the channel holds, and how many are free; may block."""
        return held_bytes(plan, self.chunks_in_flight), available_memory()

    def count_readers(self, round: Round) -> int:
        """How many take this round's bytes."""
        return sum(link.readers for link in round.present)

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
        offered = set(self.digests)
        for link in self.links:
            offered &= set(link.peer.digests if link.peer is not None else ())
        # Best first; without a common one (or with verify="counts") completeness is checked.
        self.digest = next((kind for kind in self.digests if kind in offered), None)

    def checking(self, digest: str | None) -> Self:
        """This engine, with digests of that kind alone, or with none."""
        self.digests = () if digest is None else (digest,)
        return self

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
        # First the request to the workers goes out: a busy lane would keep the interpreter from it.
        await anyio.lowlevel.checkpoint()
        ahead, round.ahead = round.ahead, None
        self._stream = ahead or self.out_stream(round)
        summary = await self._stream.run()
        self._stream = None
        feed, _ = round.validated()
        for link in round.present:
            self._announced[link.name] = feed.wire_digest
        return summary

    def explained(self, error: BaseException) -> BaseException:
        """Where workers read the tensors themselves, a step meanwhile gives them other bytes."""
        stream, self._stream = self._stream, None
        if stream is not None and isinstance(error, AiosyncError) and error.code == _OTHER_BYTES:
            try:
                stream.check_unwritten()
            except Validation as cause:
                cause.__cause__ = error
                return cause.with_traceback(None)  # which would keep the tensors
        return error

    def out_stream(self, round: Round) -> OutStream:
        """This round's stream, through the sender that there is."""
        feed, plan = round.validated()
        sender = self.sender
        assert sender is not None  # made by init
        self._bytes_before = sender.progress.nbytes
        attendance = round.attendance
        if self.per_member:
            cast("PerReader", sender).roll = attendance if attendance.spares_readers else None
        return OutStream(
            SourcePass(
                feed, self.ranks, sender, linger=round.budget.cleanup / 4, keeper=self.keeper(round)
            ),
            sender,
            plan=plan,
            readers=self.count_readers(round),
            round=round.number,
            stall=round.budget.stall,
            grace=round.source_grace,
            lane=round.source_side.lane,
            prepare=partial(self.before_transmit, sender, feed),
        )

    def keeper(self, round: Round) -> Keeper | None:
        """Who takes a copy of what this round sends."""
        return self.fleet.keeper if self.fleet is not None and round.target == MODEL else None

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
