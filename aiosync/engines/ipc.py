"""Backend ``ipc``: trainer and workers on one host, the bytes in memory that both sides map.

Where the workers' models are says which memory that is. For models on a GPU it is the trainer's own
device memory (`transports.device_sender`): parameters are exported once, mapped once, and copied by
the workers in each round; whatever else a source yields goes through buffers on the device.

For models on the CPU, and where the trainer sees no GPU, tensors travel through anonymous shared
memory (`transports.shared_memory`): every chunk is written once and read by all workers.
``packed=True`` streams through a ring of buffers; ``packed=False`` gives every tensor its own place
in one segment as large as the model. Tensors that live in memory made by `share_tensors` are read
in place in both forms. So are the parameters of a module wherever they live, if all workers may
read the trainer's memory (`transports.foreign_memory`): one copy instead of two, and no buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import torch

from aiosync.config import TrainerInitInfo, WeightTransferInitInfo, check_count
from aiosync.defaults import DEFAULTS
from aiosync.engines.ipc_device import check_devices, open_memory, own_device, own_gpu
from aiosync.engines.ipc_places import DirectPlaces, SharedPlaces, staying
from aiosync.engines.ipc_ranks import InStep
from aiosync.engines.ipc_stock import StockSide, are_stock, connect
from aiosync.engines.streamed import (
    BUFFER_LIMITS,
    BufferSize,
    StreamedTrainerEngine,
    StreamUpdateInfo,
)
from aiosync.engines.streamed_worker import StreamedWorkerEngine
from aiosync.errors import Refused, Validation
from aiosync.staging import shares
from transports.cuda import mark_current
from transports.device_receiver import DeviceReceiver
from transports.device_sender import DeviceSender
from transports.digest import WSUM64
from transports.shared_memory import ShmReceiver, ShmSender
from transports.sharing import SharedStorage, share_tensors
from transports.tuple_sender import TupleSender

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiosync.copy_order import CopyOrder
    from aiosync.feed import SourceFeed
    from aiosync.members import MemberLink
    from aiosync.messages import PeerState
    from aiosync.round import Round
    from aiosync.trainer import TrainerWeightTransferEngine
    from transports.device_memory import DeviceMemory
    from transports.planning import Plan
    from transports.stream import Receiver, Sender, StreamSummary

__all__ = [
    "IPCTrainerInitInfo",
    "IPCTrainerWeightTransferEngine",
    "IPCWeightTransferEngine",
    "IPCWeightTransferInitInfo",
    "IPCWeightTransferUpdateInfo",
    "share_tensors",
]

IPCWeightTransferUpdateInfo = StreamUpdateInfo


@dataclass
class IPCTrainerInitInfo(TrainerInitInfo):
    """Trainer side.

    Attributes:
        packed: Stream through a ring of buffers instead of one segment as large as the model.
        packed_buffer_size_bytes: Size of one buffer, at least 64.
        packed_num_buffers: Buffers in the ring; 2 overlap the two sides.
        shared: What `share_tensors` returned, for tensors the workers read in place.
        direct: Let workers copy a module's parameters from this process's memory where the kernel
            allows that; False: always through shared memory.
        device: Where the buffers for workers on GPUs are; None: the current CUDA device.
        lease_s: Silence of this trainer that a worker's open round survives; None: the default.
        lineage: Name of this training run; None: random.
    """

    backend: ClassVar[str] = "ipc"
    packed: bool = False
    packed_buffer_size_bytes: int = DEFAULTS.buffer_bytes
    packed_num_buffers: int = DEFAULTS.buffers
    shared: Sequence[SharedStorage] = field(default=(), kw_only=True)
    direct: bool = field(default=True, kw_only=True)
    device: Any = field(default=None, kw_only=True)
    lease_s: float | None = field(default=None, kw_only=True)
    lineage: str | None = field(default=None, kw_only=True)


class IPCWeightTransferInitInfo(
    msgspec.Struct, WeightTransferInitInfo, kw_only=True, forbid_unknown_fields=True
):
    """Worker side: where the trainer's doorbell is, and what both sides must agree on.

    `form` says whose memory is mapped: ``"shm"`` shared memory, ``"cuda"`` the trainer's GPU's.
    `mark` is where the token lies in the trainer's process, for workers that can read it there.
    """

    packed: bool = False
    form: Literal["shm", "cuda"] = "shm"
    address: str
    token: str
    mark: int | None = None
    reader: str
    buffer_size_bytes: BufferSize
    digest: str | None = None

    def __repr__(self) -> str:  # the token stays out of logs
        return f"IPCWeightTransferInitInfo(packed={self.packed}, address={self.address!r})"


class IPCTrainerWeightTransferEngine(StreamedTrainerEngine[IPCTrainerInitInfo]):
    """Writes each chunk once into shared memory that all workers of the host read."""

    init_info_cls = IPCTrainerInitInfo
    backend_name = "ipc"
    per_member = True

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
        direct: bool = True,
        device: Any = None,
        **options: Any,
    ) -> None:
        check_count("packed_buffer_size_bytes", packed_buffer_size_bytes, *BUFFER_LIMITS)
        check_count("packed_num_buffers", packed_num_buffers, 1, 1024)
        super().__init__(client=client, source=source, is_sender=is_sender, **options)
        self.packed = packed
        self.chunks_in_flight = packed_num_buffers if packed else None
        self.buffer_nbytes = packed_buffer_size_bytes
        self.packed_num_buffers = packed_num_buffers
        if not isinstance(shared, Iterable):
            raise Validation(
                f"shared must be a list of what share_tensors returned, not {shared!r}"
            )
        self.shared = tuple(shared)
        for storage in self.shared:
            if not isinstance(storage, SharedStorage):
                raise Validation(f"shared holds {storage!r}, which share_tensors did not return")
        self._places = SharedPlaces(self.shared)
        self._direct_places = DirectPlaces() if direct else None
        self._device = device
        self._on_gpus = False
        self._stock = StockSide(packed=packed, limit=packed_buffer_size_bytes)
        self._memory: DeviceMemory | None = None

    def sibling(self, *, client: Any, source: Any) -> TrainerWeightTransferEngine[Any]:
        if self._stock.in_use:
            return super().sibling(client=client, source=source)
        return IPCTrainerWeightTransferEngine(
            client=client,
            source=source,
            packed=True,
            packed_buffer_size_bytes=self.buffer_nbytes,
            device=self._device,
            direct=self._direct_places is not None,
            lease_s=self.lease_s,
            lineage=self.lineage,
            name=f"{self.name}-catch-up",
            recover="manual",
        ).checking(self.digest)

    def check_peers(self) -> None:
        self._stock.in_use = are_stock(self.links)
        if self._stock.in_use:
            self._on_gpus, self.digest = True, None
            return
        super().check_peers()
        self._on_gpus = check_devices(self.links)

    @property
    def looks_late(self) -> bool:  # type: ignore[override]
        """So that workers look at their models at the same time, or copy already."""
        keeps = self.fleet is not None and self.fleet.keeper is not None
        return not self._stock.in_use and not keeps

    @property
    def starts_with_update(self) -> bool:  # type: ignore[override]
        """Where the bytes take about as long as a call."""
        return isinstance(self.sender, DeviceSender)

    async def host_rendezvous(self) -> None:
        self.per_member = not self._on_gpus
        if not self._on_gpus:
            return
        if self._memory is None:
            here = own_gpu(self._device)  # not on the lane, whose current device is the first one
            self._memory = await self.source_lane.run(self._find_memory, here)
        if self._memory is None:
            self._on_gpus = False  # bytes go through the host's memory, and the workers' own copy
        elif not self._stock.in_use:
            offered = all(link.peer and WSUM64 in link.peer.digests for link in self.links)
            self.digest = WSUM64 if offered else None
        self.per_member = not self._on_gpus  # there all readers are waited for

    def _find_memory(self, device: Any) -> DeviceMemory | None:
        if device is None and not self._stock.in_use and not torch.cuda.is_available():
            return None
        return open_memory(device, self.links[0].name)

    def open_sender(self) -> Sender:
        if self._stock.in_use:
            assert self._memory is not None  # `host_rendezvous` came first
            return self._stock.open(self._memory.device, self.ranks)
        if self._on_gpus:
            assert self._memory is not None
            return DeviceSender(self._memory, buffers=self.packed_num_buffers, digest=self.digest)
        return ShmSender(
            buffer_nbytes=self.buffer_nbytes,
            buffers=self.packed_num_buffers,
            packed=self.packed,
            digest=self.digest,
            shared=self.shared,
        )

    def close_sender(self, sender: Sender) -> None:
        if isinstance(sender, TupleSender | InStep):
            sender.forget()
            return
        assert isinstance(sender, ShmSender | DeviceSender)
        sender.release()

    def address_info(self, sender: Sender) -> dict[str, Any]:
        if isinstance(sender, TupleSender | InStep):
            return {}
        assert isinstance(sender, ShmSender | DeviceSender)
        form = "cuda" if isinstance(sender, DeviceSender) else "shm"
        where: dict[str, Any] = {"address": sender.address, "token": sender.token}
        if isinstance(sender, ShmSender) and self._direct_places is not None:
            where["mark"] = sender.mark
        return {"packed": self.packed, "form": form, **where}

    def member_payload(self, link: MemberLink) -> dict[str, Any]:
        if self._stock.in_use:
            return {}
        return {"reader": link.name}  # so that the data plane names members as reports do

    def before_transmit(self, sender: Sender, feed: SourceFeed) -> None:
        if isinstance(sender, TupleSender | InStep):
            return
        if isinstance(sender, DeviceSender):
            if feed.looking is not None and feed.addresses and sender.knows(feed.addresses):
                sender.set_unseen(feed.addresses, feed.looking.goes_on)
                return
            feed.look_to_the_end()
            sender.set_tensors(staying(feed), feed.addresses)
            return
        assert isinstance(sender, ShmSender)
        feed.look_to_the_end()  # the workers look at their models now, and come afterwards
        sender.set_resident(self._places.of(feed))
        if self._direct_places is not None:
            sender.set_direct(self._direct_places.of(feed))

    async def transmit(self, round: Round) -> StreamSummary:
        sender = self.sender
        if isinstance(sender, DeviceSender) and self._memory is not None:
            # Here, on the caller's thread: its current stream is the one that trained.
            sender.order_after(mark_current(self._memory.device))
        if isinstance(sender, TupleSender | InStep):
            feed, _ = round.validated()
            self._stock.prepare(sender, feed)
            connect(sender, round, feed)
        return await super().transmit(round)

    # -- a stock vLLM ----------------------------------------------------------------------------

    def get_worker_init_payload(self) -> dict[str, Any]:
        payload = super().get_worker_init_payload()
        return {"packed": self.packed} if self._stock.in_use else payload

    def make_plan(self, feed: SourceFeed) -> Plan:
        if not self._stock.in_use:
            return super().make_plan(feed)
        _ = feed.wire_digest  # computed here, on the lane
        return self._stock.plan(feed)

    def update_payload(self, round: Round) -> dict[str, Any] | None:
        return None if self._stock.in_use else super().update_payload(round)

    def for_ranks(self) -> bytes:
        return self._stock.for_ranks(self._memory.device if self._memory else own_gpu(self._device))

    def agreed(self, round: Round, told: Sequence[bytes]) -> None:
        self._stock.agreed(self, round, told[0])

    def co_sender(self, round: Round) -> Sender | None:
        sender = self.sender
        if not isinstance(sender, InStep):
            return None
        self._stock.prepare(sender, round.validated()[0])
        return sender

    def committed(self, round: Round) -> None:
        super().committed(round)
        if isinstance(self.sender, TupleSender | InStep):
            self.sender.forget()  # the workers have finished with it


class IPCWeightTransferEngine(StreamedWorkerEngine[IPCWeightTransferInitInfo]):
    """Reads the trainer's memory into the sink."""

    init_info_cls = IPCWeightTransferInitInfo

    def __init__(
        self, config: Any, vllm_config: Any, device: Any, model: Any, **options: Any
    ) -> None:
        device, self.gpu = own_device(device)
        if shares(config):
            self.gpu = None  # the host's memory, which the ranks share, comes in between
        super().__init__(config, vllm_config, device, model, **options)

    @property
    def sends_copies(self) -> bool:  # type: ignore[override]
        """Models on GPUs stay where they are."""
        return self.gpu is None

    def sending_side(self, client: Any, order: CopyOrder) -> IPCTrainerWeightTransferEngine:
        if self.gpu is not None:
            raise Refused(f"{self.name} has its model on a GPU", replica=self.name)
        engine = IPCTrainerWeightTransferEngine(
            client=client,
            source=self.held_source(order),
            packed=True,
            packed_buffer_size_bytes=order.buffer_size_bytes,
            lineage=order.version.lineage,
            name=f"{self.name}-copy",
            recover="manual",
        )
        return engine.checking(order.digest_kind)

    def peer_state(self) -> PeerState:
        state = super().peer_state()
        if self.gpu is None:
            return state
        state.detail["gpu"] = self.gpu
        session = self.cycle.session
        # One call less for the trainer, where a call is a tenth of a round.
        if session is not None and session.number and session.number == self.verified_round:
            state.detail["verified"] = session.number
        return state

    def open_receiver(self, init_info: IPCWeightTransferInitInfo) -> Receiver:
        where = (init_info.address, init_info.token, init_info.reader)
        if init_info.form == "cuda" and self.gpu is None:
            raise Validation(
                "init_info.form is 'cuda', this worker's model is on the CPU", phase="init"
            )
        self._land("cpu" if init_info.form == "shm" else None)
        if init_info.form == "shm":
            return ShmReceiver(address=where[0], token=where[1], name=where[2], mark=init_info.mark)
        memory = open_memory(self.device, self.name)
        return DeviceReceiver(
            memory,
            address=where[0],
            token=where[1],
            name=where[2],
            batch_nbytes=init_info.buffer_size_bytes,
        )

    def _land(self, device: str | None) -> None:
        """Where this trainer's bytes arrive; a sink that was made for another place is not used."""
        if device != self.landing_device:
            self.landing_device = device
            self.drop_sinks()

    def close_receiver(self, receiver: Receiver) -> None:
        assert isinstance(receiver, ShmReceiver | DeviceReceiver)
        receiver.release()
