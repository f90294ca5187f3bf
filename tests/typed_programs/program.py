"""What a user writes: a backend, sources, a client, and a loop that trains, syncs and watches.

It runs, and both type checkers accept it in their strict mode, against the installed package.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

import aiosync
import aiosync.blocking
from aiosync.testing import DirectClient


class HalfSource(aiosync.WeightSource):
    """A plain generator: every tensor in half precision."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @cached_property
    def metadata(self) -> list[aiosync.ParamMeta]:
        named = self.module.named_parameters()
        return [aiosync.ParamMeta(name, torch.float16, tuple(p.shape)) for name, p in named]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach().half()


class StreamedSource(aiosync.WeightSource):
    """An async generator over another source."""

    def __init__(self, inner: HalfSource) -> None:
        self.inner = inner

    @cached_property
    def metadata(self) -> list[aiosync.ParamMeta]:
        return self.inner.metadata

    async def iter_full(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        for pair in self.inner.iter_full():
            await asyncio.sleep(0)
            yield pair


class PoolClient:
    """The four calls, forwarded to every replica."""

    def __init__(self, *replicas: aiosync.VLLMWeightSyncClient) -> None:
        self.replicas = replicas

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        await asyncio.gather(*(r.init_weight_transfer_engine(init_info) for r in self.replicas))

    async def start_weight_update(self) -> None:
        await asyncio.gather(*(r.start_weight_update() for r in self.replicas))

    async def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        await asyncio.gather(*(r.update_weights(update_info) for r in self.replicas))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await asyncio.gather(*(r.finish_weight_update(weight_version) for r in self.replicas))


@dataclass
class SpoolTrainerInit(aiosync.TrainerInitInfo):
    backend: ClassVar[str] = "spool"
    folder: str = ""


class SpoolTrainer(aiosync.TrainerWeightTransferEngine[SpoolTrainerInit]):
    init_info_cls = SpoolTrainerInit
    folder: Path

    @classmethod
    async def trainer_init(
        cls, init_info: SpoolTrainerInit, *, client: Any, source: Any = None
    ) -> SpoolTrainer:
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine.folder = Path(init_info.folder)
        await engine.client.init_weight_transfer_engine({"folder": init_info.folder})
        return engine

    async def send_weights(self) -> None:  # as vLLM declares it
        names: list[str] = []
        await self.client.start_weight_update()
        for name, tensor in self.source.iter_full():
            torch.save(tensor, self.folder / f"{len(names)}.pt")
            names.append(name)
        await self.client.update_weights({"names": names})
        await self.client.finish_weight_update()


@dataclass
class SpoolInit(aiosync.WeightTransferInitInfo):
    folder: str


@dataclass
class SpoolUpdate(aiosync.WeightTransferUpdateInfo):
    names: list[str]


class SpoolWorker(aiosync.WeightTransferEngine[SpoolInit, SpoolUpdate]):
    init_info_cls = SpoolInit
    update_info_cls = SpoolUpdate
    folder: Path

    def init_transfer_engine(self, init_info: SpoolInit) -> None:
        self.folder = Path(init_info.folder)

    async def start_weight_update(self) -> None: ...

    def receive_weights(self, update_info: SpoolUpdate) -> None:
        files = [self.folder / f"{i}.pt" for i in range(len(update_info.names))]
        pairs = zip(update_info.names, map(torch.load, files), strict=True)
        self.model.load_state_dict(dict(pairs))

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...


def served(backend: str) -> aiosync.WeightTransferEngine:
    config = aiosync.WeightTransferConfig(backend, verify="digest")
    return aiosync.WeightTransferEngineFactory.create_engine(config, model=nn.Linear(4, 2).half())


async def own_backend() -> None:
    aiosync.WeightTransferTrainerFactory.register_engine("spool", SpoolTrainer)
    aiosync.WeightTransferEngineFactory.register_engine("spool", SpoolWorker)
    worker = served("spool")
    source = HalfSource(nn.Linear(4, 2))
    with tempfile.TemporaryDirectory() as folder:
        trainer = await aiosync.WeightTransferTrainerFactory.trainer_init(
            SpoolTrainerInit(rank=0, folder=folder),
            client=PoolClient(DirectClient(worker)),
            source=source,
        )
        async with worker, trainer:
            report = await trainer.send_weights(version="first", timeout=30)
            print(report.outcome, report.metrics("sync"))


async def watch(events: aiosync.Subscription) -> int:
    async for transition in events:
        if transition.trigger == aiosync.Trigger.COMPLETE:
            return transition.nbytes
    return 0


async def sync_and_watch(url: str, worker: aiosync.WeightTransferEngine) -> None:
    budget = aiosync.Budget(total=30, stall=10)
    client = aiosync.HTTPVLLMWeightSyncClient(url)
    fleet = aiosync.FleetClient([aiosync.Member("only", client)], policy="all")
    model = aiosync.ModuleSource(nn.Linear(4, 2), dtype=torch.float16)
    async with aiosync.connect(model, workers=[fleet.members[0]]) as sync:
        sync.on_transition(lambda event: print(event.engine, event.source, event.dest))
        remove = sync.gate("start", lambda context: context.version != "13")
        watching = asyncio.create_task(watch(sync.subscribe(since=0)))
        report: aiosync.Report = await sync.send_weights(version=1, budget=budget)
        print(await watching, [member.outcome for member in report.members])
        try:
            await sync.send_weights(version=13)
        except aiosync.GateRejected as error:
            print(error.retryable, error.next_step)
        remove()
        async with sync.begin_update(version=14, budget=budget) as update:
            async for progress in update:
                print(progress.phase, progress.nbytes, progress.total_bytes)
            await update.released
            report = await update
        version: aiosync.Version | None = sync.version
        assert version is not None
        assert (version, version.order) == (report.version, 14)
        async with worker.generation.request():
            print(worker.weights is aiosync.Weights.INTACT, sync.state is aiosync.State.INITIALIZED)
    async with aiosync.connect(StreamedSource(HalfSource(nn.Linear(4, 2))), workers=url) as sync:
        print(await sync.send_weights())


def sync_blocking(url: str) -> None:
    with aiosync.blocking.connect(nn.Linear(4, 2).half(), workers=[url]) as sync:
        report = sync.send_weights(version=1)
        update = sync.begin_update(version=2)
        print(report.outcome, update.wait_released(timeout=10), update.wait(timeout=10))


async def main() -> None:
    await own_backend()
    worker = served("ipc")
    async with worker, aiosync.serve(worker) as server:
        await sync_and_watch(server.url, worker)
        await asyncio.to_thread(sync_blocking, server.url)


if __name__ == "__main__":
    asyncio.run(main())
