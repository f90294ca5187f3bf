"""What both sides of backend ``nccl`` share: infos with vLLM's names, the plan, the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from aiosync.config import TrainerInitInfo, WeightTransferInitInfo, check_count
from aiosync.engines.streamed import Seconds, StreamUpdateInfo
from aiosync.errors import Validation
from aiosync.metadata import meta_nbytes
from transports.cuda import cuda_device
from transports.device_memory import uuid_of
from transports.nccl_rendezvous import decode_unique_id
from transports.planning import EACH, GRADED, NCCL_PACKED, plan_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from aiosync.metadata import ParamMeta
    from transports.planning import Plan

BUFFER_NBYTES = 1 << 30
BUFFERS = 3
_VLLM_BUFFER_NBYTES, _VLLM_BUFFERS = 1 << 30, 2
_MOST_NBYTES, _MOST_BUFFERS = 1 << 46, 1 << 10
_MOST_RANKS = 1 << 16  # what a worker believes of a trainer before it has met it


@dataclass
class NCCLTrainerInitInfo(TrainerInitInfo):
    """Trainer side; positional arguments as vLLM's.

    Attributes:
        master_address: Address of this host that all workers reach: they find the group's id in a
            store there. None: the id travels with the init info, and nothing listens.
        master_port: Of the store; 0 lets the OS choose.
        world_size: This trainer and all worker ranks; None: the workers are asked.
        packed: Send chunks of many tensors; False: a broadcast for each tensor.
        packed_buffer_size_bytes: Of a chunk; vLLM's ends with the tensor that exceeds it.
        packed_num_buffers: Device memory for packed chunks, in buffers, on each side.
        graded: Where all workers are ours, small chunks at the beginning and at the end, whose
            packing and loading nothing hides; False: always vLLM's.
        device: CUDA device that sends; None: the current one.
        lease_s: Silence of this trainer that a worker's open round survives; None: the default.
        lineage: Name of this training run; None: random.
    """

    backend: ClassVar[str] = "nccl"
    master_address: str | None = None
    master_port: int = 0
    world_size: int | None = None
    packed: bool = True
    packed_buffer_size_bytes: int = BUFFER_NBYTES
    packed_num_buffers: int = BUFFERS
    graded: bool = field(default=True, kw_only=True)
    device: Any = field(default=None, kw_only=True)
    lease_s: float | None = field(default=None, kw_only=True)
    lineage: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_count("packed_buffer_size_bytes", self.packed_buffer_size_bytes, 1, _MOST_NBYTES)
        check_count("packed_num_buffers", self.packed_num_buffers, 1, _MOST_BUFFERS)
        if self.world_size is not None:
            check_count("world_size", self.world_size, 2, _MOST_RANKS)


class NCCLWeightTransferInitInfo(
    msgspec.Struct, WeightTransferInitInfo, kw_only=True, forbid_unknown_fields=True
):
    """Worker side; the fields up to `packed_num_buffers` are vLLM's, with its defaults.

    Attributes:
        master_address, master_port: Of the trainer's store; or else
        nccl_unique_id_b64: The group's id itself: base64 of 128 bytes.
        rank_offset: Rank of the first worker behind this server.
        world_size: Ranks of the group, the trainer among them.
        graded: How chunks are cut, and
        digest: how they are verified; only trainers of ours say so.
        join_s: Longest wait for the other ranks.
        sender_gpu: UUID of the trainer's device.
    """

    master_address: str | None = None
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    rank_offset: Annotated[int, msgspec.Meta(ge=1, le=_MOST_RANKS - 1)]
    world_size: Annotated[int, msgspec.Meta(ge=2, le=_MOST_RANKS)]
    nccl_unique_id_b64: str | None = None
    packed: bool = False
    packed_buffer_size_bytes: Annotated[int, msgspec.Meta(ge=1, le=_MOST_NBYTES)] = (
        _VLLM_BUFFER_NBYTES
    )
    packed_num_buffers: Annotated[int, msgspec.Meta(ge=1, le=_MOST_BUFFERS)] = _VLLM_BUFFERS
    graded: bool = False
    digest: str | None = None
    join_s: Seconds | None = None
    sender_gpu: str | None = None

    def __post_init__(self) -> None:
        has_address = self.master_address is not None or self.master_port is not None
        if self.nccl_unique_id_b64 is not None:
            if has_address:
                raise ValueError(
                    "nccl_unique_id_b64 excludes master_address and master_port: give one way"
                )
            decode_unique_id(self.nccl_unique_id_b64)
        elif self.master_address is None or self.master_port is None:
            raise ValueError("give master_address and master_port, or nccl_unique_id_b64")

    def __repr__(self) -> str:  # the id, which keeps strangers out, stays out of logs
        way = "nccl_unique_id_b64=..." if self.nccl_unique_id_b64 else f"{self.master_address!r}"
        return (
            f"NCCLWeightTransferInitInfo({way}, rank_offset={self.rank_offset},"
            f" world_size={self.world_size}, packed={self.packed})"
        )


class NCCLWeightTransferUpdateInfo(StreamUpdateInfo, kw_only=True, forbid_unknown_fields=True):
    """One round's announcement: vLLM's three lists, all empty for those of the last update.

    Trainers of ours add what `StreamUpdateInfo` has; from a stock one its digests are empty.
    """

    metadata_digest: str = ""
    plan_digest: str = ""


def nccl_plan(metadata: Sequence[ParamMeta], limit: int, *, packed: bool, graded: bool) -> Plan:
    """The chunks that vLLM cuts from the same metadata; `graded`: those that only ours cut."""
    return plan_chunks(
        [meta_nbytes(meta) for meta in metadata],
        [meta.dtype.itemsize for meta in metadata],
        limit=limit,
        rule=(GRADED if graded else NCCL_PACKED) if packed else EACH,
        names=[meta.name for meta in metadata],
    )


def gpu_of(device: torch.device) -> str | None:
    """The UUID by which trainer and workers know their devices."""
    return uuid_of(device) if device.type == "cuda" else None


def cuda_device_for(given: Any, who: str) -> torch.device:
    try:
        return cuda_device(given)
    except Validation as error:
        raise Validation(
            f'backend "nccl" needs a CUDA device, and {error.message}',
            phase="init",
            next_step=f'use backend "ipc" (one host) or "gloo" for {who} on the CPU',
        ) from error
