"""What users of the blocking API write: a source, clients, and a pair of engines over files.

`SpoolTrainerEngine` differs from what they have by `async` and `await` alone;
`PlainSpoolTrainerEngine` by nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from aiosync import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    materialize_full_tensor,
)


class StageSource(WeightSource):
    def __init__(self, stage_module, whole_layout, ranks_of_stage):
        self.stage_module = stage_module
        self.whole_layout = whole_layout
        self.ranks_of_stage = ranks_of_stage

    @cached_property
    def metadata(self):
        return [
            ParamMeta(name, dtype, shape, owners=self.ranks_of_stage[stage])
            for name, dtype, shape, stage in self.whole_layout
        ]

    def iter_full(self):
        mine = dict(self.stage_module.named_parameters())
        yield from (
            (m.name, materialize_full_tensor(mine[m.name])) for m in self.metadata if m.name in mine
        )


class Pool:
    """Stands for the actors of an RL stack: `call_all` blocks, `acall_all` is awaited."""

    _NAMES = {"init_weight_transfer_engine": "init_transfer_engine"}

    def __init__(self, *engines):
        self.engines = engines
        self.loop = asyncio.get_running_loop()
        self.calls: list[str] = []
        self.version: str | None = None

    def call_all(self, method, *args, **options):
        future = asyncio.run_coroutine_threadsafe(
            self.acall_all(method, *args, **options), self.loop
        )
        future.result(20)

    async def acall_all(self, method, *args, **options):
        self.calls.append(method)
        if method == "update_weight_version":
            self.version = args[0]
            return
        for engine in self.engines:
            await getattr(engine, self._NAMES.get(method, method))(*args, **options)


class PoolClient:
    def __init__(self, pool):
        self.pool = pool

    def init_weight_transfer_engine(self, init_info):
        self.pool.call_all("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self):
        self.pool.call_all("start_weight_update")

    def update_weights(self, update_info):
        self.pool.call_all("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version=None):
        self.pool.call_all("finish_weight_update")
        if weight_version is not None:
            self.pool.call_all("update_weight_version", weight_version)


class AsyncPoolClient:
    def __init__(self, pool):
        self.pool = pool

    async def init_weight_transfer_engine(self, init_info):
        await self.pool.acall_all("init_weight_transfer_engine", init_info=init_info)

    async def start_weight_update(self):
        await self.pool.acall_all("start_weight_update")

    async def update_weights(self, update_info):
        await self.pool.acall_all("update_weights", update_info=update_info)

    async def finish_weight_update(self, weight_version=None):
        await self.pool.acall_all("finish_weight_update")
        if weight_version is not None:
            await self.pool.acall_all("update_weight_version", weight_version)


@dataclass
class SpoolTrainerInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = "spool"
    folder: str
    piece_bytes: int = 64 << 20


@dataclass
class PlainSpoolTrainerInitInfo(SpoolTrainerInitInfo):
    backend: ClassVar[str] = "plain_spool"


class SpoolTrainerEngine(TrainerWeightTransferEngine[SpoolTrainerInitInfo]):
    init_info_cls = SpoolTrainerInitInfo

    def __init__(self, *, client, source, is_sender=True, folder="", piece_bytes=0):
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.folder, self.piece_bytes = folder, piece_bytes

    @classmethod
    async def trainer_init(cls, init_info, *, client, source=None):
        if source is None:
            raise ValueError("spool needs a WeightSource")
        engine = cls(
            client=client,
            source=source,
            is_sender=init_info.is_sender,
            folder=init_info.folder,
            piece_bytes=init_info.piece_bytes,
        )
        if engine.is_sender:
            await client.init_weight_transfer_engine(
                {"folder": init_info.folder, "piece_bytes": init_info.piece_bytes}
            )
        return engine

    async def send_weights(self):
        declared = self.source.metadata
        if not self.is_sender:
            for _ in self.source.iter_full():
                pass
            return
        await self.client.start_weight_update()
        for i, (_name, tensor) in enumerate(self.source.iter_full()):
            torch.save(tensor.detach().cpu(), f"{self.folder}/{i}.pt")
        await self.client.update_weights(
            {
                "names": [m.name for m in declared],
                "dtype_names": [str(m.dtype).removeprefix("torch.") for m in declared],
                "shapes": [list(m.shape) for m in declared],
            }
        )
        await self.client.finish_weight_update()


class PlainSpoolTrainerEngine(TrainerWeightTransferEngine[SpoolTrainerInitInfo]):
    init_info_cls = PlainSpoolTrainerInitInfo

    def __init__(self, *, client, source, is_sender=True, folder="", piece_bytes=0):
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.folder, self.piece_bytes = folder, piece_bytes

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        if source is None:
            raise ValueError("spool needs a WeightSource")
        engine = cls(
            client=client,
            source=source,
            is_sender=init_info.is_sender,
            folder=init_info.folder,
            piece_bytes=init_info.piece_bytes,
        )
        if engine.is_sender:
            client.init_weight_transfer_engine(
                {"folder": init_info.folder, "piece_bytes": init_info.piece_bytes}
            )
        return engine

    def send_weights(self):
        declared = self.source.metadata
        if not self.is_sender:
            for _ in self.source.iter_full():
                pass
            return
        self.client.start_weight_update()
        for i, (_name, tensor) in enumerate(self.source.iter_full()):
            torch.save(tensor.detach().cpu(), f"{self.folder}/{i}.pt")
        self.client.update_weights(
            {
                "names": [m.name for m in declared],
                "dtype_names": [str(m.dtype).removeprefix("torch.") for m in declared],
                "shapes": [list(m.shape) for m in declared],
            }
        )
        self.client.finish_weight_update()


@dataclass
class SpoolInitInfo(WeightTransferInitInfo):
    folder: str
    piece_bytes: int = 64 << 20


@dataclass
class SpoolUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class SpoolEngine(WeightTransferEngine[SpoolInitInfo, SpoolUpdateInfo]):
    init_info_cls = SpoolInitInfo
    update_info_cls = SpoolUpdateInfo

    def init_transfer_engine(self, init_info: SpoolInitInfo) -> None:
        self.folder, self.piece_bytes = init_info.folder, init_info.piece_bytes

    def start_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: SpoolUpdateInfo) -> None:
        def arrived() -> Iterator[tuple[str, torch.Tensor]]:
            for i, name in enumerate(update_info.names):
                yield name, torch.load(f"{self.folder}/{i}.pt")

        self.model.load_weights(arrived())

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class AsyncSpoolEngine(SpoolEngine):
    """The same with every step async."""

    async def init_transfer_engine(self, init_info: SpoolInitInfo) -> None:
        super().init_transfer_engine(init_info)

    async def start_weight_update(self) -> None:
        super().start_weight_update()

    async def receive_weights(self, update_info: SpoolUpdateInfo) -> None:
        names = update_info.names
        paths = [f"{self.folder}/{i}.pt" for i in range(len(names))]
        tensors = await self.lane.run(lambda: [torch.load(path) for path in paths])
        self.model.load_weights(zip(names, tensors, strict=True))

    async def finish_weight_update(self) -> None:
        super().finish_weight_update()

    async def shutdown(self) -> None:
        super().shutdown()


class Loadable(torch.nn.Sequential):
    """A model as inference servers have it."""

    def load_weights(self, weights):
        mine = dict(self.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                mine[name].copy_(tensor)
