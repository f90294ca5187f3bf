"""The trainer's side of backend ``nccl``; see `nccl`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import torch

from aiosync.concurrency import run_legs
from aiosync.defaults import DEFAULTS
from aiosync.engines.joining import LATER_S, host_of, join, join_seconds, own_lane
from aiosync.engines.nccl_common import (
    BUFFER_NBYTES,
    BUFFERS,
    NCCLTrainerInitInfo,
    cuda_device_for,
    gpu_of,
    nccl_plan,
)
from aiosync.engines.streamed import StreamedTrainerEngine
from aiosync.errors import ProtocolMismatch, Validation
from aiosync.sources import ModuleSource
from aiosync.spare import free_memory
from transports.addresses import advertised
from transports.cuda import mark_current
from transports.digest import WSUM64
from transports.lane import Lane
from transports.nccl_group import NcclGroup, new_unique_id
from transports.nccl_half import nccl_knows, warm_up
from transports.nccl_rendezvous import encode_unique_id, publish_unique_id
from transports.nccl_sender import NcclSender
from transports.planning import check_alignment
from transports.ring import blocks_of
from transports.store_host import StoreHost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiosync.feed import SourceFeed
    from aiosync.members import MemberLink
    from aiosync.metadata import ParamMeta
    from aiosync.round import Round
    from aiosync.streaming import OutStream
    from transports.lane import LaneFactory
    from transports.planning import Plan
    from transports.stream import Sender

_STOCK_FIELDS = ("names", "dtype_names", "shapes")


class NCCLTrainerWeightTransferEngine(StreamedTrainerEngine[NCCLTrainerInitInfo]):
    """Broadcasts to all workers as rank 0 of a group of its own."""

    init_info_cls = NCCLTrainerInitInfo
    backend_name = "nccl"
    reusable_after_abort = False

    def __init__(
        self,
        *,
        client: Any,
        source: Any,
        master_address: str | None = None,
        master_port: int = 0,
        world_size: int | None = None,
        packed: bool = True,
        packed_buffer_size_bytes: int = BUFFER_NBYTES,
        packed_num_buffers: int = BUFFERS,
        graded: bool = True,
        device: Any = None,
        is_sender: bool = True,
        lane_factory: LaneFactory = Lane,
        **options: Any,
    ) -> None:
        # Before anything that would have to be closed; other ranks need no device.
        self.device = cuda_device_for(device, "a trainer") if is_sender else torch.device("cpu")
        super().__init__(
            client=client,
            source=source,
            is_sender=is_sender,
            lane_factory=lane_factory,
            **options,
        )
        self.master_address, self.master_port = master_address, master_port
        self.world_size = world_size
        self.packed = packed
        self.graded = graded
        self.buffer_nbytes = packed_buffer_size_bytes
        self.chunks_in_flight = packed_num_buffers
        self._lane_factory = lane_factory
        self._host: StoreHost | None = None
        self._group: NcclGroup | None = None
        self._unique_id = b""
        self._join_s = DEFAULTS.admit_s
        self._ranks_of: dict[str, int] = {}

    # -- init ------------------------------------------------------------------------------------

    def check_peers(self) -> None:
        offered = {WSUM64}
        for link in self.links:
            peer = link.peer
            if not link.speaks_ours or peer is None:
                offered.clear()  # a stock vLLM: no digest, and the few fields it knows
                continue
            theirs = peer.detail.get("backend")
            if theirs != self.backend_name:
                raise ProtocolMismatch(
                    f"the worker's backend is {theirs!r}, the trainer's is {self.backend_name!r}",
                    replica=link.name,
                    phase="init",
                )
            offered &= set(peer.digests)
        self.digest = next(iter(offered), None)

    @property
    def _all_ours(self) -> bool:
        return all(link.speaks_ours for link in self.links)

    @property
    def _grades(self) -> bool:
        return self.graded and self._all_ours

    async def host_rendezvous(self) -> None:
        if not self.is_sender:
            return
        self.dispose()  # of an earlier epoch, where a worker has restarted
        self._join_s = join_seconds()
        self._ranks_of = {link.name: await self._ranks_behind(link) for link in self.links}
        size = 1 + sum(self._ranks_of.values())
        if self.world_size not in (None, size):
            raise Validation(
                f"world_size is {self.world_size}, but this trainer and its workers are {size}",
                phase="init",
                detail={"ranks": self._ranks_of},
            )
        async with own_lane(self._lane_factory, f"{self.name}-host") as lane:
            self._unique_id = await lane.run(new_unique_id)
            if self.master_address is not None:
                self._host = await lane.run(self._open_host, discard=StoreHost.close)
        names = ["trainer"]
        for link in self.links:
            names += [link.name] * self._ranks_of[link.name]
        self._group = NcclGroup(0, size, device=self.device, names=names)

    def _open_host(self) -> StoreHost:
        address = self.master_address or advertised(host_of(link) for link in self.links)
        host = StoreHost(address, self.master_port)
        publish_unique_id(host, self._unique_id)
        return host

    async def _ranks_behind(self, link: MemberLink) -> int:
        if link.speaks_ours:
            return link.world_size
        if self.world_size is not None and len(self.links) == 1:
            return self.world_size - 1
        ask = getattr(link.client, "get_world_size", None)
        if ask is None:
            return 1
        reply = await ask()
        found = reply.get("world_size") if isinstance(reply, dict) else reply
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise ProtocolMismatch(
                f"get_world_size answered {found!r}", replica=link.name, phase="init"
            )
        return found

    async def join(self) -> None:
        group, unique_id = self._group, self._unique_id
        if group is None:
            return

        def enter(limit: float) -> None:
            group.join(unique_id, timeout=limit)
            warm_up(group.device)

        await join(
            enter, group.abort, self._join_s, lane_factory=self._lane_factory, name=self.name
        )

    def get_worker_init_payload(self) -> dict[str, Any]:
        if self.sender is None:
            self.sender = self.open_sender()
        self._announced.clear()
        return self.address_info(self.sender)

    def address_info(self, sender: Sender) -> dict[str, Any]:
        where: dict[str, Any] = {"nccl_unique_id_b64": encode_unique_id(self._unique_id)}
        if self._host is not None:
            where = {"master_address": self._host.host, "master_port": self._host.port}
        return where | {
            "world_size": 1 + sum(self._ranks_of.values()),
            "packed": self.packed,
            "packed_buffer_size_bytes": self.buffer_nbytes,
            "packed_num_buffers": self.chunks_in_flight,
        }

    def member_payload(self, link: MemberLink) -> dict[str, Any]:
        before = self.links[: self.links.index(link)]
        rank = 1 + sum(self._ranks_of[other.name] for other in before)
        if not link.speaks_ours:
            return {"rank_offset": rank}
        gpu = gpu_of(self.device)
        ours = {"graded": self._grades, "digest": self.digest, "join_s": self._join_s + LATER_S}
        return {"rank_offset": rank, "sender_gpu": gpu} | ours

    def open_sender(self) -> Sender:
        assert self._group is not None  # `host_rendezvous` came first
        return NcclSender(
            self._group,
            digest=self.digest,
            ring_nbytes=self.buffer_nbytes * (self.chunks_in_flight or 1),
        )

    def close_sender(self, sender: Sender) -> None:
        assert isinstance(sender, NcclSender)
        sender.release()

    def dispose(self) -> None:
        super().dispose()
        group, self._group = self._group, None
        if group is not None:
            group.close()
        host, self._host = self._host, None
        if host is not None:
            host.close()

    # -- rounds ----------------------------------------------------------------------------------

    def make_plan(self, feed: SourceFeed) -> Plan:
        _ = feed.wire_digest  # computed here, on the lane
        plan = nccl_plan(feed.metadata, self.buffer_nbytes, packed=self.packed, graded=self._grades)
        if not self._all_ours:
            self._check_for_stock(feed.metadata, plan)
        return plan

    def channel_memory(self, plan: Plan) -> tuple[int, int | None]:
        _, need = blocks_of(plan, self.buffer_nbytes * (self.chunks_in_flight or 1))
        return need, free_memory(self.device)

    def _check_for_stock(self, metadata: Sequence[ParamMeta], plan: Plan) -> None:
        """What a stock vLLM would refuse in the middle of a round."""
        names = [meta.name for meta in metadata]
        check_alignment(plan, [meta.dtype.itemsize for meta in metadata], names)
        unknown = [] if self.packed else [m for m in metadata if not nccl_knows(m.dtype)]
        if unknown:
            raise Validation(
                f"{unknown[0].name}: vLLM's unpacked wire has no {unknown[0].dtype}",
                tensor=unknown[0].name,
                phase="admit",
                next_step="use packed=True",
            )

    def update_payload(self, round: Round) -> dict[str, Any] | None:
        payload = super().update_payload(round) or {}
        if self._all_ours:
            return payload
        return {name: payload[name] for name in _STOCK_FIELDS}

    def count_readers(self, round: Round) -> int:
        return sum(self._ranks_of.values())

    def before_transmit(self, sender: Sender, feed: SourceFeed) -> None:
        assert isinstance(sender, NcclSender)
        sender.describe(feed.metadata)
        sender.lean_on(stays=_stays(feed))

    async def beside_start(self, round: Round, start: Callable[[], Awaitable[None]]) -> None:
        feed, _ = round.validated()
        alone = self.ranks.size == 1 and self.keeper(round) is None
        is_ours = type(self).transmit is StreamedTrainerEngine.transmit  # it takes the stream
        if not (alone and is_ours and _stays(feed)):
            await start()
            return
        stream = self.out_stream(round)

        async def begin() -> None:
            await start()
            # The members have answered in time: what is not ready yet has that of an update.
            limit = anyio.current_time() + round.budget.stall
            round.limit.deadline = max(round.limit.deadline, limit)

        try:
            await run_legs(begin, stream.get_ahead, linger=0.0)
        except BaseException:
            stream.close()
            raise
        round.ahead = stream

    def out_stream(self, round: Round) -> OutStream:
        sender = self.sender
        assert isinstance(sender, NcclSender)  # made by init
        # Here, on the caller's thread: its current stream is the one that trained.
        sender.order_after(mark_current(self.device))
        return super().out_stream(round)


def _stays(feed: SourceFeed) -> bool:
    """Whether what a pass yields is the module's own memory, or new memory for each tensor."""
    source = feed.source
    return (
        isinstance(source, ModuleSource)
        and type(source).iter_full is ModuleSource.iter_full
        and type(source).iter_groups is ModuleSource.iter_groups
        and source.session is None
        and source.dtype is None  # a cast, or a gather below, would be held for too long
        and not feed.has_owners
    )
