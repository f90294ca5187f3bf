"""Which form of backend ``ipc`` a trainer and its workers use, and what a GPU is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from aiosync.errors import ProtocolMismatch, Validation
from transports.cuda import borrow_queue, cuda_device, return_queue
from transports.device_memory import CudaMemory, uuid_of
from transports.pointer_copy import pointer_copies
from transports.pointer_digest import pointer_digests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiosync.members import MemberLink
    from transports.device_memory import DeviceMemory


def own_device(device: Any) -> tuple[Any, str | None]:
    """A worker's device, with its index, and the GPU's UUID; None for one on the CPU."""
    if device is None or torch.device(device).type != "cuda":
        return device, None
    found = cuda_device(device)
    return found, gpu_of(found)


def own_gpu(given: Any) -> torch.device | None:
    """The CUDA device that a trainer means: the calling thread's current one, unless given.

    None in a process that has not used CUDA, if only to choose a device.
    """
    found = None if given is None else torch.device(given)
    if found is not None and (found.type != "cuda" or found.index is not None):
        return found
    is_initialized: Any = torch.cuda.is_initialized  # untyped
    if not is_initialized():
        return found
    return torch.device("cuda", torch.cuda.current_device())


def gpu_of(device: torch.device | None) -> str | None:
    """UUID of a CUDA device; None for anything else."""
    return uuid_of(device) if device is not None and device.type == "cuda" else None


def check_devices(links: Sequence[MemberLink]) -> bool:
    """Whether the workers' models are on GPUs: all of them or none.

    Raises:
        ProtocolMismatch: Some are and some are not; names one of each.
    """
    gpus = {
        link.name: link.peer.detail.get("gpu") if link.peer is not None else None for link in links
    }
    on_gpu = [name for name, gpu in gpus.items() if gpu]
    on_cpu = [name for name, gpu in gpus.items() if not gpu]
    if on_gpu and on_cpu:
        raise ProtocolMismatch(
            f"the model of {on_gpu[0]} is on GPU {gpus[on_gpu[0]]}, that of {on_cpu[0]} on the CPU:"
            " one trainer of backend 'ipc' sends to one kind",
            replica=on_cpu[0],
            phase="init",
            next_step="use a trainer engine for each kind",
        )
    return bool(on_gpu)


def open_memory(device: Any, who: str) -> DeviceMemory:
    """This process's view of its GPU, with the kernels that rounds use; blocks for a moment.

    Raises:
        Validation: There is no CUDA device here.
    """
    try:
        found = cuda_device(device)
    except Validation as error:
        raise Validation(
            f"the model of {who} is on a GPU, whose memory this trainer cannot share: "
            f"{error.message}",
            phase="init",
            next_step="give both the same GPU, or serve the model with device='cpu'",
        ) from error
    with torch.cuda.device(found):
        pointer_copies(found)
        pointer_digests(found)
        return_queue(borrow_queue(found))  # with a device's first queue torch makes dozens
    return CudaMemory(found)
