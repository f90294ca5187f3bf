"""A backend of your own: tensors spooled through a folder. Two info classes, two engines.

python examples/custom_backend.py
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

import aiosync
from aiosync.testing import DirectClient


@dataclass
class SpoolInit(aiosync.TrainerInitInfo):
    backend: ClassVar[str] = "spool"
    folder: str = ""


class SpoolTrainer(aiosync.TrainerWeightTransferEngine[SpoolInit]):
    init_info_cls = SpoolInit

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(**options)
        self.folder = Path(folder)

    @classmethod
    async def trainer_init(
        cls, init_info: SpoolInit, *, client: Any, source: Any = None
    ) -> SpoolTrainer:
        engine = cls(init_info.folder, client=client, source=source)
        await engine.client.init_weight_transfer_engine({"folder": init_info.folder})
        return engine

    async def send_weights(self) -> None:
        await self.client.start_weight_update()
        names: list[str] = []
        for name, tensor in self.source.iter_full():
            torch.save(tensor.detach(), self.folder / f"{len(names)}.pt")
            names.append(name)
        await self.client.update_weights({"names": names})
        await self.client.finish_weight_update()


@dataclass
class SpoolWorkerInit(aiosync.WeightTransferInitInfo):
    folder: str


@dataclass
class SpoolUpdate(aiosync.WeightTransferUpdateInfo):
    names: list[str]


class SpoolWorker(aiosync.WeightTransferEngine[SpoolWorkerInit, SpoolUpdate]):
    init_info_cls = SpoolWorkerInit
    update_info_cls = SpoolUpdate

    def init_transfer_engine(self, init_info: SpoolWorkerInit) -> None:
        self.folder = Path(init_info.folder)

    def start_weight_update(self) -> None: ...

    def receive_weights(self, update_info: SpoolUpdate) -> None:  # plain def: runs on a lane
        tensors = {n: torch.load(self.folder / f"{i}.pt") for i, n in enumerate(update_info.names)}
        self.model.load_state_dict(tensors)

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...


async def main() -> None:
    aiosync.WeightTransferTrainerFactory.register_engine("spool", SpoolTrainer)
    aiosync.WeightTransferEngineFactory.register_engine("spool", SpoolWorker)
    model, served = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    config = aiosync.WeightTransferConfig("spool")
    worker = aiosync.WeightTransferEngineFactory.create_engine(config, model=served)
    with tempfile.TemporaryDirectory() as folder:
        trainer = await aiosync.WeightTransferTrainerFactory.trainer_init(
            SpoolInit(rank=0, folder=folder), client=DirectClient(worker), source=model
        )
        async with worker, trainer:
            print(await trainer.send_weights(version=1))
    assert torch.equal(model.weight, served.weight)


if __name__ == "__main__":
    asyncio.run(main())
