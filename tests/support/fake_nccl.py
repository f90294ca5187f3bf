"""NCCL groups among threads of one process: CPU tensors, and a record of the wire."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any

import torch

from statemachines.errors import AiosyncError
from transports.errors import PhaseTimeout, TransportAborted

CPU = torch.device("cpu")
_NAP_S = 0.001


class Hub:
    """What the ranks of one id share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.joined: dict[int, FakeGroup] = {}
        self.queues: dict[int, deque[torch.Tensor]] = {}
        self.wire: list[tuple[torch.dtype, bytes]] = []


HUBS: dict[bytes, Hub] = {}


def new_unique_id() -> bytes:
    unique_id = os.urandom(128)
    HUBS[unique_id] = Hub()
    return unique_id


class FakeGroup:
    """`transports.nccl_group.NcclGroup` without NCCL.

    Class attributes are knobs of a test: `spoil` changes bytes on their way, `aborts` counts.
    """

    spoil: Any = None
    aborts = 0
    made: list[FakeGroup] = []

    def __init__(
        self, rank: int, size: int, *, device: torch.device = CPU, names: Any = ()
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.names = tuple(names) or ("trainer", *(f"rank {n}" for n in range(1, size)))
        self.hub: Hub = Hub()
        self.is_aborted = False
        self.alive = False
        FakeGroup.made.append(self)

    def join(self, unique_id: bytes, *, timeout: float) -> None:
        self.hub = hub = HUBS[unique_id]
        with hub.lock:
            assert self.rank not in hub.joined, "a rank came twice"
            hub.joined[self.rank] = self
            hub.queues[self.rank] = deque()
        deadline = time.monotonic() + timeout
        while len(hub.joined) < self.size:
            if time.monotonic() > deadline:
                error: AiosyncError = PhaseTimeout("could not join in time", phase="init")
                self.abort()
                raise error
            self.check()
            time.sleep(_NAP_S)
        self.alive = True

    def broadcast(self, data: torch.Tensor, queue: Any, *, timeout: float) -> None:
        self.check()
        raw = data.view(-1).view(torch.uint8)
        if self.rank == 0:
            sent = raw.clone()
            self.hub.wire.append((data.dtype, bytes(sent.numpy())))
            if FakeGroup.spoil is not None:
                sent = FakeGroup.spoil(len(self.hub.wire) - 1, sent)
            for rank, waiting in self.hub.queues.items():
                if rank:
                    waiting.append(sent)
            return
        mine = self.hub.queues[self.rank]
        deadline = time.monotonic() + timeout
        while not mine:
            if time.monotonic() > deadline:
                raise PhaseTimeout("no broadcast came")
            self.check()
            time.sleep(_NAP_S)
        sent = mine.popleft()
        assert len(sent) == len(raw), f"{len(sent)} bytes were sent, {len(raw)} are expected"
        raw.copy_(sent)

    def check(self) -> None:
        if self.is_aborted:
            raise TransportAborted("the group was aborted")

    look = check

    def abort(self) -> None:
        if not self.is_aborted:
            FakeGroup.aborts += 1
        self.is_aborted, self.alive = True, False

    def close(self, afterwards: Any = lambda: None) -> None:
        self.abort()
        afterwards()


def install(monkeypatch: Any) -> None:
    """Have the engines use these groups, and take the CPU for their device."""
    from aiosync.engines import nccl_common, nccl_trainer, nccl_worker

    FakeGroup.made, FakeGroup.aborts = [], 0
    monkeypatch.setattr(FakeGroup, "spoil", None)
    monkeypatch.setattr(nccl_common, "cuda_device", lambda device: CPU)
    for module in (nccl_trainer, nccl_worker):
        monkeypatch.setattr(module, "NcclGroup", FakeGroup)
    monkeypatch.setattr(nccl_trainer, "new_unique_id", new_unique_id)
