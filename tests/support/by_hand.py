"""Worker engines that a test drives by hand, without a client or a server."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch

import aiosync
from aiosync import ParamMeta, RoundHeader, Version
from aiosync.worker import WeightTransferEngine

LINEAGE = "run"
TENSORS = 50


@dataclass
class Init:
    address: str = "here"


@dataclass
class Update:
    value: float
    batch: int = TENSORS
    fail_at: int | None = None


class ByHand(WeightTransferEngine[Init, Update]):
    """Fills every tensor of its sink with the payload's value; each step can wait or raise."""

    init_info_cls = Init
    update_info_cls = Update
    reusable_after_abort = True
    uses_sink = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_open = False
        self.steps: list[str] = []
        self.holds: dict[str, asyncio.Event] = {}
        self.errors: dict[str, Exception] = {}
        self.reached: dict[str, asyncio.Event] = {}

    def hold(self, step: str) -> asyncio.Event:
        """The step waits until the event is set."""
        self.reached[step] = asyncio.Event()
        self.holds[step] = asyncio.Event()
        return self.holds[step]

    async def _meet(self, step: str) -> None:
        self.steps.append(step)
        if step in self.reached:
            self.reached[step].set()
            await self.holds[step].wait()
        error = self.errors.pop(step, None)
        if error is not None:
            raise error

    async def init_transfer_engine(self, init_info: Init) -> None:
        await self._meet("init")
        self.is_open = True

    async def start_weight_update(self) -> None:
        await self._meet("start")

    async def receive_weights(self, update_info: Update) -> None:
        await self._meet("update")
        if self.uses_sink:
            await self.lane.run(self._fill, update_info)

    async def drain_pending(self) -> None:
        await self._meet("drain")

    async def finish_weight_update(self) -> None:
        await self._meet("finish")

    async def shutdown(self) -> None:
        await self._meet("shutdown")
        self.is_open = False

    def _fill(self, info: Update) -> None:
        sink = self.sink
        sink.begin([ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.model.items()])
        for first in range(0, len(self.model), info.batch):
            indices = list(range(first, min(first + info.batch, len(self.model))))
            for index in indices:
                if index == info.fail_at:
                    raise OSError(f"cannot read tensor {index}")
                sink.destination(index).fill_(info.value)
            sink.landed(indices)


class WithoutSink(ByHand):
    """Loads by itself, so that nobody else knows what the model holds."""

    reusable_after_abort = False
    uses_sink = False


def tensors(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {f"t{n:02}": torch.full((16,), value) for n in range(TENSORS)}


def values(model: dict[str, torch.Tensor]) -> set[float]:
    return {float(v) for tensor in model.values() for v in tensor.unique()}


@asynccontextmanager
async def by_hand(cls: type[ByHand] = ByHand, *, sink: str = "staged", **options: Any):
    config = aiosync.WeightTransferConfig("by_hand", sink=sink, **options)
    engine = cls(config, None, "cpu", tensors(), name="worker")
    async with engine:
        yield engine
        for event in engine.holds.values():
            event.set()


def version(order: int, lineage: str = LINEAGE) -> Version:
    return Version(order, lineage, order)


def header(engine: ByHand, round: int, order: int | None = None, **options: Any) -> RoundHeader:
    """The header of the engine's present owner."""
    ownership = engine.cycle.ownership
    options.setdefault("owner", ownership.owner)
    options.setdefault("epoch", ownership.epoch)
    target = None if order is None else version(order)
    return RoundHeader(round=round, **{"version": target, **options})


async def owned(engine: ByHand, owner: str = "trainer") -> None:
    """Initialise as a trainer of ours does."""
    await engine.init_transfer_engine({"address": "here"}, header=RoundHeader(owner=owner))


async def whole_round(engine: ByHand, number: int, order: int, **payload: Any) -> None:
    """One round as a trainer of ours drives it."""
    this = header(engine, number, order)
    await engine.start_weight_update(header=this)
    await engine.update_weights({"value": float(order), **payload}, header=this)
    await engine.prepare_weight_update(header=this)
    await engine.finish_weight_update(str(order), header=this)
