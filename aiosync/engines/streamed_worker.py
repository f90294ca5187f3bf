"""The worker's half of what every backend with a sender and a receiver has in common."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeVar

from torch import nn

from aiosync.defaults import DEFAULTS
from aiosync.engines.streamed import StreamUpdateInfo, plan_of
from aiosync.errors import Refused, Validation
from aiosync.few_collections import few_collections
from aiosync.foresight import Foresight, is_announced
from aiosync.held_source import ByName, HeldSource
from aiosync.metadata import from_wire, metadata_digest
from aiosync.overrides import at_once, instant
from aiosync.short_turns import short_turns
from aiosync.sinks import StagedSink
from aiosync.staging import receiver_at
from aiosync.streaming import stream_in
from aiosync.weight_targets import MODEL
from aiosync.worker import WeightTransferEngine
from transports.staging import FollowReceiver, LeadReceiver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiosync.copy_order import CopyOrder
    from aiosync.metadata import ParamMeta
    from aiosync.sinks import Sink
    from transports.planning import Plan
    from transports.stream import Receiver

Init = TypeVar("Init")


class StreamedWorkerEngine(WeightTransferEngine[Init, StreamUpdateInfo]):
    """Checks the announcement and streams into the sink; a backend makes the receiver."""

    update_info_cls: ClassVar[type] = StreamUpdateInfo
    reusable_after_abort = True
    one_update = True
    uses_sink = True
    shares_staging = True
    landing_device: str | None = "cpu"

    receiver: Receiver | None = None
    _limit = DEFAULTS.buffer_bytes
    _bytes_before = 0
    _known: tuple[str, tuple[ParamMeta, ...], Plan] | None = None
    _foreseen: tuple[str, Foresight, Plan] | None = None
    _taken: tuple[str, tuple[ParamMeta, ...], dict[str, str]] | None = None

    foresees: ClassVar[bool] = True
    """Whether it looks at its model as soon as it is initialised."""
    verifies_early = True
    """Whether a round is verified as soon as its bytes are there, not only when it is prepared."""

    @abstractmethod
    def open_receiver(self, init_info: Init) -> Receiver:
        """Make the receiver; connects when a round is received."""

    @abstractmethod
    def close_receiver(self, receiver: Receiver) -> None:
        """Free the receiver for good."""

    def init_transfer_engine(self, init_info: Init) -> None:
        self.open_channel(init_info)

    def open_channel(self, init_info: Init) -> None:
        """What init comes to, once a backend's group is joined; may block for a moment."""
        self._known = self._foreseen = None
        self._limit = init_info.buffer_size_bytes  # type: ignore[attr-defined] # in all of them
        self.receiver = receiver_at(self.staging, partial(self.open_receiver, init_info))

    def channel_opened(self) -> None:
        """Get ready for a first round while the trainer does."""
        is_ours = isinstance(getattr(self.config, "sink", "staged"), str)
        if self.foresees and is_ours and isinstance(self.model, nn.Module):
            # A loop that is closed before the task was over never lets go of it.
            look = partial(_call, weakref.WeakMethod(self._foresee))
            looking = self.lane.run(look, grace=DEFAULTS.cleanup_s / 2)
            self.cycle.supervisor.start(looking, name=f"{self.name}-foresight")

    def _foresee(self) -> None:
        """What is wrong is found again, and told, by a round."""
        if self._known is not None or self.has_sink:
            return  # a round was quicker, or another trainer's has found it all
        with short_turns, few_collections:
            foresight = Foresight.of(self.model)
            if foresight is not None:
                plan = plan_of(foresight.metadata, self._limit)
                self._foreseen = (metadata_digest(foresight.metadata), foresight, plan)

    @property
    def follows(self) -> bool:
        """Whether another rank of the group receives for this one."""
        return self.staging is not None and self.staging.rank > 0

    @instant
    async def start_weight_update(self) -> None:
        self.verified_round = None

    @at_once
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
        if self.cycle.aim == MODEL:
            self._taken = (update_info.metadata_digest, metadata, dict(update_info.aliases))
        if self.verifies_early:
            self.verified_round = self.cycle.ownership.last_round

    def held_source(self, order: CopyOrder) -> HeldSource:
        """The model's tensors as they were announced when they came.

        Raises:
            Refused: They were announced otherwise, or nothing has come.
        """
        taken = self._taken
        if taken is None or taken[0] != order.wire_digest:
            text = "what it took last was announced otherwise than what the fleet has"
            raise Refused(f"{self.name}: {text}", replica=self.name)
        _, metadata, aliases = taken
        return HeldSource(metadata, ByName(self.model, aliases), aliases=aliases)

    def begin_sink(
        self, sink: Sink, metadata: Sequence[ParamMeta], plan: Plan, info: StreamUpdateInfo
    ) -> None:
        """Open the sink for what was announced; on the lane, right before `receiver` is used."""
        receiver = self.receiver
        if isinstance(receiver, LeadReceiver | FollowReceiver) and isinstance(sink, StagedSink):
            layout = info.metadata_digest
            sink.share(partial(receiver.map, layout=layout, round=info.round, stall=info.stall_s))
        sink.looks_late = bool(getattr(receiver, "asks_late", False))
        sink.begin(metadata, aliases=info.aliases)

    def _get_ready(self, info: StreamUpdateInfo) -> tuple[tuple[ParamMeta, ...], Plan]:
        foreseen = self._foreseen
        checked = self._check_announced(info)
        if isinstance(getattr(self.config, "sink", "staged"), str):
            is_new = not self.has_sink
            sink = self.know_sink()  # not on the loop: it may walk the whole model
            # Not made before: until now the model may still have got a loader.
            if is_new and foreseen is not None:
                sink.take_over(foreseen[1])
        return checked

    def _check_announced(self, info: StreamUpdateInfo) -> tuple[tuple[ParamMeta, ...], Plan]:
        known = self._known
        if known is None or known[0] != info.metadata_digest:
            known = self._known = self._as_foreseen(info)
        if known is None:
            metadata = tuple(from_wire(info.names, info.dtype_names, info.shapes))
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

    def _as_foreseen(
        self, info: StreamUpdateInfo
    ) -> tuple[str, tuple[ParamMeta, ...], Plan] | None:
        """What was found out before, if just that is announced; forgotten in any case."""
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is None or foreseen[0] != info.metadata_digest:
            return None
        digest, foresight, plan = foreseen
        metadata = foresight.metadata
        is_same = is_announced(metadata, info.names, info.dtype_names, info.shapes)
        return (digest, metadata, plan) if is_same and plan.digest == info.plan_digest else None

    @instant
    async def finish_weight_update(self) -> None:
        return

    def shutdown(self) -> None:
        receiver, self.receiver = self.receiver, None
        self._bytes_before = 0
        self._known = self._foreseen = None
        if isinstance(receiver, LeadReceiver | FollowReceiver):
            receiver.release()
            receiver = receiver.inner
        if receiver is not None:
            self.close_receiver(receiver)

    def abort_receive(self) -> None:
        if self.receiver is not None:
            self.receiver.abort()

    def received_bytes(self) -> int:
        return self.receiver.progress.nbytes - self._bytes_before if self.receiver else 0

    def progress_at(self) -> float:
        return self.receiver.progress.at if self.receiver is not None else super().progress_at()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call the method of an object that is still there."""
    if (here := method()) is not None:
        here()
