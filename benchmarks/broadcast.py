"""The raw primitive of gloo: one group of two processes, one broadcast after the other."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed import (  # type: ignore[attr-defined] # torch lists no names
    BroadcastOptions,
    ProcessGroupGloo,
    TCPStore,
)

if TYPE_CHECKING:
    from typing import Any

PIECE_NBYTES = 64 << 20
_HOST = "127.0.0.1"
_PATIENCE = timedelta(seconds=60)


def free_port() -> int:
    """A port that the store may listen on."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class Group:
    """One end; rank 0 sends. Making it waits for the other."""

    def __init__(self, port: int, rank: int) -> None:
        self._store = TCPStore(_HOST, port, 2, rank == 0, timeout=_PATIENCE)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined] # noqa: SLF001
        options._devices = [ProcessGroupGloo.create_device(hostname=_HOST)]  # noqa: SLF001
        options._timeout = _PATIENCE  # noqa: SLF001
        self._group: Any = ProcessGroupGloo(self._store, rank, 2, options)

    def meet(self) -> None:
        """Wait for the other: what follows begins on both ends at once."""
        self._broadcast(torch.zeros(1))

    def move(self, flat: torch.Tensor) -> float:
        """Broadcast everything, piece after piece; seconds until the reader has all of it."""
        self.meet()
        began = time.perf_counter()
        for piece in torch.split(flat, PIECE_NBYTES):
            self._broadcast(piece)
        self._group.barrier().wait()
        return time.perf_counter() - began

    def _broadcast(self, data: torch.Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([data], options).wait()
