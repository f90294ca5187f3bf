"""Backend ``ipc``: trainer and workers on one host, the bytes in shared memory.

CPU tensors travel through anonymous shared memory (`transports.shared_memory`): every chunk is
written once and read by all workers. ``packed=True`` streams through a ring of buffers;
``packed=False`` gives every tensor a place of its own in one segment as large as the model. Tensors
that live in memory made by `share_tensors` are read in place in both forms.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from aiosync.config import TrainerInitInfo, WeightTransferInitInfo, check_count
from aiosync.defaults import DEFAULTS
from aiosync.engines.streamed import (
    BUFFER_LIMITS,
    BufferSize,
    StreamedTrainerEngine,
    StreamedWorkerEngine,
    StreamUpdateInfo,
)
from aiosync.errors import Validation
from transports.shared_memory import ShmReceiver, ShmSender
from transports.sharing import SharedStorage, share_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from aiosync.feed import SourceFeed
    from aiosync.members import MemberLink
    from transports.stream import Receiver, Sender

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
    buffer_size_bytes: BufferSize
    digest: str | None = None

    def __repr__(self) -> str:  # the token stays out of logs
        return f"IPCWeightTransferInitInfo(packed={self.packed}, address={self.address!r})"


class IPCTrainerWeightTransferEngine(StreamedTrainerEngine[IPCTrainerInitInfo]):
    """Writes each chunk once into shared memory that all workers of the host read."""

    init_info_cls = IPCTrainerInitInfo
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
        self._places: tuple[SourceFeed, list[int], dict[int, tuple[Any, int]]] | None = None

    def open_sender(self) -> Sender:
        return ShmSender(
            buffer_nbytes=self.buffer_nbytes,
            buffers=self.packed_num_buffers,
            packed=self.packed,
            digest=self.digest,
            shared=self.shared,
        )

    def close_sender(self, sender: Sender) -> None:
        assert isinstance(sender, ShmSender)
        sender.release()

    def address_info(self, sender: Sender) -> dict[str, Any]:
        assert isinstance(sender, ShmSender)
        return {"packed": self.packed, "address": sender.address, "token": sender.token}

    def member_payload(self, link: MemberLink) -> dict[str, Any]:
        return {"reader": link.name}  # so that the data plane names members as reports do

    def before_transmit(self, sender: Sender, feed: SourceFeed) -> None:
        assert isinstance(sender, ShmSender)
        sender.set_resident(self._resident(feed))

    def _resident(self, feed: SourceFeed) -> dict[int, tuple[Any, int]]:
        """Handles of the tensors that workers can read where they are."""
        if not self.shared:
            return {}
        tensors: list[torch.Tensor | None]
        if feed.plain is not None:
            tensors = [*feed.plain]
        else:
            resident = getattr(feed.source, "resident", None)
            live: dict[str, torch.Tensor] = {} if resident is None else resident()
            tensors = [live.get(meta.name) for meta in feed.metadata]
        # Contiguous tensors of the announced sizes: they are told apart by their addresses.
        addresses = [-1 if tensor is None else tensor.data_ptr() for tensor in tensors]
        addresses += [storage.segment.fileno() for storage in self.shared]  # -1 once closed
        known = self._places
        if known is not None and known[0] is feed and known[1] == addresses:
            return known[2]
        found: dict[int, tuple[Any, int]] = {}
        for index, tensor in enumerate(tensors):
            if tensor is None:
                continue
            for storage in self.shared:
                place = storage.locate(tensor)
                if place is not None:
                    found[index] = place
        self._places = (feed, addresses, found)
        return found


class IPCWeightTransferEngine(StreamedWorkerEngine[IPCWeightTransferInitInfo]):
    """Reads the trainer's shared memory into the sink."""

    init_info_cls = IPCWeightTransferInitInfo

    def open_receiver(self, init_info: IPCWeightTransferInitInfo) -> Receiver:
        return ShmReceiver(address=init_info.address, token=init_info.token, name=init_info.reader)

    def close_receiver(self, receiver: Receiver) -> None:
        assert isinstance(receiver, ShmReceiver)
        receiver.release()
