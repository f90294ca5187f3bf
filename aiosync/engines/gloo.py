"""Backend ``gloo``: one broadcast group over TCP for CPU tensors, of the trainer and all workers.

The trainer holds a store in which all ranks meet, under a new prefix each time, and sends as rank
0; the process's default group is never touched. Large tensors travel from and into their own
memory, small ones packed (`transports.sections`). A round that is given up ends the group, for a
collective cannot be left half way: the next round makes a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from aiosync.config import TrainerInitInfo, WeightTransferInitInfo, check_count
from aiosync.defaults import DEFAULTS
from aiosync.engines.joining import LATER_S, host_of, join, join_seconds, own_lane, rank_in_group
from aiosync.engines.streamed import (
    BUFFER_LIMITS,
    BufferSize,
    Seconds,
    StreamedTrainerEngine,
    StreamUpdateInfo,
)
from aiosync.engines.streamed_worker import StreamedWorkerEngine
from aiosync.members import readers_before
from transports.addresses import advertised
from transports.gloo_group import GlooGroup
from transports.gloo_stream import GlooReceiver, GlooSender
from transports.lane import Lane
from transports.rendezvous import Meeting, StoreHost

if TYPE_CHECKING:
    from aiosync.copy_order import CopyOrder
    from aiosync.members import MemberLink
    from transports.lane import LaneFactory
    from transports.stream import Receiver, Sender

__all__ = [
    "GlooTrainerInitInfo",
    "GlooTrainerWeightTransferEngine",
    "GlooWeightTransferEngine",
    "GlooWeightTransferInitInfo",
    "GlooWeightTransferUpdateInfo",
]

GlooWeightTransferUpdateInfo = StreamUpdateInfo

_MOST_RANKS = 1 << 16  # what a worker believes of a trainer before it has met it


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """Trainer side.

    Attributes:
        master_address: Address of this host that all workers reach; None: the one on the way to
            them. Nothing listens on any other.
        master_port: Of the store; 0 lets the OS choose.
        buffer_size_bytes: Size of one broadcast at most, at least 64.
        lease_s: Silence of this trainer that a worker's open round survives; None: the default.
        lineage: Name of this training run; None: random.
    """

    backend: ClassVar[str] = "gloo"
    master_address: str | None = None
    master_port: int = 0
    buffer_size_bytes: int = DEFAULTS.buffer_bytes
    lease_s: float | None = field(default=None, kw_only=True)
    lineage: str | None = field(default=None, kw_only=True)


class GlooWeightTransferInitInfo(
    msgspec.Struct, WeightTransferInitInfo, kw_only=True, forbid_unknown_fields=True
):
    """Worker side: where all ranks meet, as which rank, and what both sides must agree on."""

    master_address: str
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, msgspec.Meta(ge=1, le=_MOST_RANKS - 1)]
    world_size: Annotated[int, msgspec.Meta(ge=2, le=_MOST_RANKS)]
    prefix: str
    reader: str
    join_s: Seconds
    buffer_size_bytes: BufferSize
    digest: str | None = None

    def __repr__(self) -> str:  # the prefix, which keeps strangers out, stays out of logs
        where = f"master_address={self.master_address!r}, master_port={self.master_port}"
        return f"GlooWeightTransferInitInfo({where}, rank_offset={self.rank_offset})"


class GlooTrainerWeightTransferEngine(StreamedTrainerEngine[GlooTrainerInitInfo]):
    """Broadcasts to all workers as rank 0 of a group of its own."""

    init_info_cls = GlooTrainerInitInfo
    backend_name = "gloo"
    reusable_after_abort = False

    def __init__(
        self,
        *,
        client: Any,
        source: Any,
        master_address: str | None = None,
        master_port: int = 0,
        buffer_size_bytes: int = DEFAULTS.buffer_bytes,
        lane_factory: LaneFactory = Lane,
        **options: Any,
    ) -> None:
        check_count("buffer_size_bytes", buffer_size_bytes, *BUFFER_LIMITS)
        super().__init__(client=client, source=source, lane_factory=lane_factory, **options)
        self.master_address = master_address
        self.master_port = master_port
        self.buffer_nbytes = buffer_size_bytes
        self._host: StoreHost | None = None
        self._group: GlooGroup | None = None
        self._prefix = ""
        self._join_s = DEFAULTS.admit_s
        self._lane_factory = lane_factory

    def sibling(self, *, client: Any, source: Any) -> GlooTrainerWeightTransferEngine:
        return GlooTrainerWeightTransferEngine(
            client=client,
            source=source,
            master_address=self.master_address,
            buffer_size_bytes=self.buffer_nbytes,
            lane_factory=self._lane_factory,
            lease_s=self.lease_s,
            lineage=self.lineage,
            name=f"{self.name}-catch-up",
            recover="manual",
        ).checking(self.digest)

    async def host_rendezvous(self) -> None:
        if not self.is_sender:
            return
        self.dispose()  # of an earlier epoch, where a worker has restarted
        self._join_s = join_seconds()
        async with own_lane(self._lane_factory, f"{self.name}-host") as lane:
            self._host = host = await lane.run(self._open_host, discard=StoreHost.close)
        self._prefix = host.new_prefix()
        names = ["trainer", *(name for link in self.links for name in _names_of(link))]
        self._group = GlooGroup(
            Meeting(host.host, host.port, self._prefix, rank=0, size=len(names), names=names)
        )

    def _open_host(self) -> StoreHost:
        address = self.master_address
        if address is None:
            address = advertised(host_of(link) for link in self.links)
        return StoreHost(address, self.master_port)

    async def join(self) -> None:
        group = self._group
        if group is not None:
            await _join(group, self._join_s, self._lane_factory, self.name)

    def open_sender(self) -> Sender:
        assert self._group is not None  # `host_rendezvous` came first
        return GlooSender(self._group, digest=self.digest)

    def close_sender(self, sender: Sender) -> None:
        assert isinstance(sender, GlooSender)
        sender.release()

    def address_info(self, sender: Sender) -> dict[str, Any]:
        assert self._host is not None  # `host_rendezvous` came first
        return {
            "master_address": self._host.host,
            "master_port": self._host.port,
            "world_size": 1 + sum(link.readers for link in self.links),
            "prefix": self._prefix,
            "join_s": self._join_s + LATER_S,
        }

    def member_payload(self, link: MemberLink) -> dict[str, Any]:
        return {"rank_offset": 1 + readers_before(link, self.links), "reader": link.name}

    def dispose(self) -> None:
        super().dispose()
        group, self._group = self._group, None
        if group is not None:
            group.close()
        host, self._host = self._host, None
        if host is not None:
            host.close()


class GlooWeightTransferEngine(StreamedWorkerEngine[GlooWeightTransferInitInfo]):
    """Receives the trainer's broadcasts into the sink."""

    init_info_cls = GlooWeightTransferInitInfo
    reusable_after_abort = False
    sends_copies = True

    _group: GlooGroup | None = None

    async def init_transfer_engine(  # type: ignore[override] # a step may be either
        self, init_info: GlooWeightTransferInitInfo
    ) -> None:
        if self.follows:
            await self.lane.run(self.open_channel, init_info)
            return
        size = init_info.world_size
        rank = rank_in_group(self.parallel_config, init_info.rank_offset, size)
        names = [f"rank {other}" for other in range(size)]
        names[0] = "trainer"
        group = GlooGroup(
            Meeting(
                init_info.master_address,
                init_info.master_port,
                init_info.prefix,
                rank=rank,
                size=size,
                names=names,
            )
        )
        try:
            # On a lane of its own: a join that is stuck in gloo must not keep the next one out.
            await _join(group, init_info.join_s, self._lane_factory, self.name)
            self._group = group
            self.open_channel(init_info)
        except BaseException:
            self._group = None
            group.close()
            raise

    def sending_side(self, client: Any, order: CopyOrder) -> GlooTrainerWeightTransferEngine:
        engine = GlooTrainerWeightTransferEngine(
            client=client,
            source=self.held_source(order),
            buffer_size_bytes=order.buffer_size_bytes,
            lane_factory=self._lane_factory,
            lineage=order.version.lineage,
            name=f"{self.name}-copy",
            recover="manual",
        )
        return engine.checking(order.digest_kind)

    def open_receiver(self, init_info: GlooWeightTransferInitInfo) -> Receiver:
        assert self._group is not None  # joined right before
        return GlooReceiver(self._group, digest=init_info.digest)

    def close_receiver(self, receiver: Receiver) -> None:
        assert isinstance(receiver, GlooReceiver)
        receiver.release()
        self._group = None


async def _join(group: GlooGroup, seconds: float, lane_factory: LaneFactory, name: str) -> None:
    def enter(limit: float) -> None:
        group.join(timeout=limit)

    await join(enter, group.abort, seconds, lane_factory=lane_factory, name=name)


def _names_of(link: MemberLink) -> list[str]:
    """What errors call the ranks behind a server that take the bytes."""
    if link.readers == 1:
        return [link.name]
    return [f"{link.name}/{rank}" for rank in range(link.readers)]
