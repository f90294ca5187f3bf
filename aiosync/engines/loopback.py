"""Backend ``loopback``: both sides in one process, over a link with scripted faults. For tests.

The link (`transports.loopback.LoopbackLink`) copies bytes through queues; give the trainer the
link, and drive the worker engine through `aiosync.testing.DirectClient`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from aiosync.config import TrainerInitInfo, WeightTransferInitInfo, check_count
from aiosync.engines.streamed import (
    BUFFER_LIMITS,
    BufferSize,
    StreamedTrainerEngine,
    StreamUpdateInfo,
)
from aiosync.engines.streamed_worker import StreamedWorkerEngine
from aiosync.errors import Validation
from aiosync.members import readers_before
from transports.loopback import LoopbackLink

if TYPE_CHECKING:
    from aiosync.members import MemberLink
    from transports.stream import Receiver, Sender

LoopbackWeightTransferUpdateInfo = StreamUpdateInfo

_LINKS: weakref.WeakValueDictionary[str, LoopbackLink] = weakref.WeakValueDictionary()
"""Links of this process by name: what an init info can carry. Dropped links leave by themselves."""


@dataclass
class LoopbackTrainerInitInfo(TrainerInitInfo):
    """Trainer side.

    Attributes:
        link: One reader per worker.
        buffer_size_bytes: Size of one chunk at most.
        lease_s, lineage: As for every backend.
    """

    backend: ClassVar[str] = "loopback"
    link: LoopbackLink = field(default_factory=LoopbackLink)
    buffer_size_bytes: int = 1 << 16
    lease_s: float | None = field(default=None, kw_only=True)
    lineage: str | None = field(default=None, kw_only=True)


class LoopbackWeightTransferInitInfo(
    msgspec.Struct, WeightTransferInitInfo, kw_only=True, forbid_unknown_fields=True
):
    """Worker side: which link of this process, and which of its readers."""

    link: str
    reader: int
    buffer_size_bytes: BufferSize
    digest: str | None = None


class LoopbackTrainerWeightTransferEngine(StreamedTrainerEngine[LoopbackTrainerInitInfo]):
    """Sends over the link's sender half."""

    init_info_cls = LoopbackTrainerInitInfo
    backend_name = "loopback"

    def __init__(
        self,
        *,
        client: Any,
        source: Any,
        link: LoopbackLink,
        buffer_size_bytes: int = 1 << 16,
        **options: Any,
    ) -> None:
        check_count("buffer_size_bytes", buffer_size_bytes, *BUFFER_LIMITS)
        given: object = link
        if not isinstance(given, LoopbackLink):
            raise Validation(f"link must be a LoopbackLink, not {given!r}")
        super().__init__(client=client, source=source, **options)
        self.link = link
        self.buffer_nbytes = buffer_size_bytes

    def open_sender(self) -> Sender:
        needed = sum(link.readers for link in self.links)
        if needed != len(self.link.receivers):
            raise Validation(
                f"the link has {len(self.link.receivers)} reader(s) for {needed} worker(s)"
            )
        sender = self.link.sender
        sender.names = [link.name for link in self.links for _ in range(link.readers)]
        return sender

    def close_sender(self, sender: Sender) -> None:
        sender.close()

    def address_info(self, sender: Sender) -> dict[str, Any]:
        name = f"link-{id(self.link)}"
        _LINKS[name] = self.link
        return {"link": name}

    def member_payload(self, link: MemberLink) -> dict[str, Any]:
        return {"reader": readers_before(link, self.links)}


class LoopbackWeightTransferEngine(StreamedWorkerEngine[LoopbackWeightTransferInitInfo]):
    """Receives from one of the link's reader halves."""

    init_info_cls = LoopbackWeightTransferInitInfo

    def open_receiver(self, init_info: LoopbackWeightTransferInitInfo) -> Receiver:
        link = _LINKS.get(init_info.link)
        if link is None:
            raise Validation(f"init_info.link: this process has no link {init_info.link!r}")
        if not 0 <= init_info.reader < len(link.receivers):
            raise Validation(f"init_info.reader: the link has no reader {init_info.reader}")
        return link.receivers[init_info.reader]

    def close_receiver(self, receiver: Receiver) -> None:
        receiver.close()


__all__ = [
    "LoopbackTrainerInitInfo",
    "LoopbackTrainerWeightTransferEngine",
    "LoopbackWeightTransferEngine",
    "LoopbackWeightTransferInitInfo",
]
