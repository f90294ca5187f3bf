"""The worker's side of backend ``nccl``; see `nccl`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from aiosync.defaults import DEFAULTS
from aiosync.engines.joining import LATER_S, join, rank_in_group
from aiosync.engines.nccl_common import (
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
    cuda_device_for,
    gpu_of,
    nccl_plan,
)
from aiosync.engines.streamed_worker import StreamedWorkerEngine
from aiosync.errors import AiosyncError, Validation
from aiosync.metadata import from_wire, metadata_digest
from transports.nccl_group import NcclGroup
from transports.nccl_half import warm_up
from transports.nccl_receiver import NcclReceiver
from transports.nccl_rendezvous import IdMeeting, decode_unique_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiosync.engines.streamed import StreamUpdateInfo
    from aiosync.messages import RoundHeader
    from aiosync.metadata import ParamMeta
    from aiosync.session import Session
    from aiosync.sinks import Sink
    from transports.planning import Plan
    from transports.stream import Receiver


class NCCLWeightTransferEngine(StreamedWorkerEngine[NCCLWeightTransferInitInfo]):
    """Receives the trainer's broadcasts into the sink."""

    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo
    reusable_after_abort = False
    shares_staging = False
    foresees = False  # it has other plans, and its own rules for what is announced
    landing_device = None  # NCCL writes into the engine's own device, also without a buffer

    _group: NcclGroup | None = None
    _packed, _graded = True, False
    _begun: str | None = None  # digest of the metadata that the sink took last
    _stall_s = DEFAULTS.stall_s  # the last round's
    _posts_ahead = True
    """Whether the device may wait for bytes before there are any: its waiting would take the
    trainer's time where both are on one."""

    def __init__(
        self, config: Any, vllm_config: Any, device: Any, model: Any, **options: Any
    ) -> None:
        device = cuda_device_for(device, "a worker")
        super().__init__(config, vllm_config, device, model, **options)

    async def init_transfer_engine(  # type: ignore[override] # a step may be either
        self, init_info: NCCLWeightTransferInitInfo
    ) -> None:
        assert isinstance(self.device, torch.device)  # made so by the constructor
        size = init_info.world_size
        rank = rank_in_group(self.parallel_config, init_info.rank_offset, size)
        group = NcclGroup(rank, size, device=self.device)
        meeting: IdMeeting | None = None
        if init_info.nccl_unique_id_b64 is None:
            assert init_info.master_address is not None  # checked by the init info
            assert init_info.master_port is not None
            where = (init_info.master_address, init_info.master_port)
            meeting = IdMeeting(*where, rank=rank, size=size)

        def enter(limit: float) -> None:
            if meeting is None:
                unique_id = decode_unique_id(init_info.nccl_unique_id_b64 or "")
            else:
                unique_id = meeting.fetch(timeout=limit)
            group.join(unique_id, timeout=limit)
            warm_up(group.device)

        def abort() -> None:
            if meeting is not None:
                meeting.abort()
            group.abort()

        seconds = init_info.join_s or DEFAULTS.admit_s - LATER_S
        try:
            await join(enter, abort, seconds, lane_factory=self._lane_factory, name=self.name)
            gpu = gpu_of(self.device)
            self._posts_ahead = gpu is None or gpu != init_info.sender_gpu
            self.receiver = NcclReceiver(
                group,
                digest=init_info.digest,
                ring_nbytes=init_info.packed_buffer_size_bytes * init_info.packed_num_buffers,
                early=self._posts_ahead,
            )
        except BaseException:
            group.close()
            raise
        self._group = group
        self._known = self._begun = None
        self._limit, self._packed = init_info.packed_buffer_size_bytes, init_info.packed
        self._graded = init_info.graded

    def open_receiver(self, init_info: NCCLWeightTransferInitInfo) -> Receiver:
        raise NotImplementedError("init_transfer_engine makes it, once the group is joined")

    def close_receiver(self, receiver: Receiver) -> None:
        assert isinstance(receiver, NcclReceiver)
        receiver.release()
        self._group = None

    def _check_announced(self, info: StreamUpdateInfo) -> tuple[tuple[ParamMeta, ...], Plan]:
        known = self._known
        if info.names or info.dtype_names or info.shapes or known is None:
            if not info.names:
                raise Validation(
                    "update_info announces nothing: empty lists mean the metadata of the last"
                    " update, and there was none",
                    phase="update",
                )
            metadata = tuple(from_wire(info.names, info.dtype_names, info.shapes))
            digest = metadata_digest(metadata)
            if known is None or known[0] != digest:
                plan = nccl_plan(metadata, self._limit, packed=self._packed, graded=self._graded)
                known = self._known = (digest, metadata, plan)
        digest, metadata, plan = known
        # What a trainer of ours says beside it; a stock one does not.
        if info.metadata_digest not in ("", digest) or info.plan_digest not in ("", plan.digest):
            raise Validation(
                f"update_info: metadata {info.metadata_digest} and plan {info.plan_digest} are"
                f" not this worker's {digest} and {plan.digest}",
                phase="update",
            )
        return metadata, plan

    def round_began(self, header: RoundHeader | None) -> None:
        known, session = self._known, self.cycle.session
        if header is None or known is None or session is None:
            return
        # A trainer of ours sends as soon as all have begun. Who drives it may wait with that, and
        # a device should not be busy with waiting.
        if header.digest == known[2].digest and header.ticket is None:
            name = f"{self.name}-ahead-{header.round}"
            self.cycle.supervisor.start(self._get_ahead(session, *known[1:]), name=name)

    async def _get_ahead(self, session: Session, metadata: Sequence[ParamMeta], plan: Plan) -> None:
        """Be ready for the bytes of a round like the last one before it is announced."""
        receiver = self.receiver
        assert isinstance(receiver, NcclReceiver)  # a round has just begun

        def post() -> None:
            # Behind an update that came sooner it would wait for bytes that have come.
            if not session.over and not session.was_asked("update"):
                receiver.describe(metadata)
                receiver.prefetch(
                    plan, round=session.number, stall=self._stall_s, posts=self._posts_ahead
                )

        try:
            with suppress(AiosyncError):  # what is wrong is found again by the update
                await self.lane.run(post, abort=self.abort_receive, grace=DEFAULTS.cleanup_s / 2)
        finally:
            if session.over and self.cycle.session in (None, session):
                receiver.close()  # `leave_round` may have come too early

    async def leave_round(self, error: BaseException) -> None:
        if self.receiver is not None:
            self.receiver.close()  # it may wait for bytes that nobody will send
        await super().leave_round(error)

    def begin_sink(
        self, sink: Sink, metadata: Sequence[ParamMeta], plan: Plan, info: StreamUpdateInfo
    ) -> None:
        receiver = self.receiver
        assert isinstance(receiver, NcclReceiver)  # the machine is initialised
        assert self._known is not None  # just checked
        receiver.describe(metadata)
        if self._begun == self._known[0]:
            # As last time: bytes may come while the sink gets ready.
            receiver.prefetch(plan, round=info.round, stall=info.stall_s)
        self._begun, self._stall_s = None, info.stall_s
        super().begin_sink(sink, metadata, plan, info)
        self._begun = self._known[0]

    def shutdown(self) -> None:
        super().shutdown()
        self._begun = None
