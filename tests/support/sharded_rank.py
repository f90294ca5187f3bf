"""One trainer rank that sends from differently sharded sources, one engine after the other."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from functools import cached_property
from itertools import pairwise
from typing import Any

import aiohttp
import models
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import aiosync
from aiosync import Budget, IteratorSource, LegacySource, ModuleSource, ParamMeta, WeightSource
from aiosync.metadata import materialize_full_tensor

BUDGET = Budget(total=20.0, stall=5.0, cleanup=1.0)
SEED = 10


class Counted(ModuleSource):
    """Counts how often a pass is resumed."""

    resumes = 0

    def iter_groups(self) -> Any:
        return _Counting(self, super().iter_groups())


class _Counting:
    def __init__(self, source: Counted, passed: Any) -> None:
        self.source, self.passed = source, passed

    def __iter__(self) -> _Counting:
        return self

    def __next__(self) -> Any:
        self.source.resumes += 1
        return next(self.passed)

    def close(self) -> None:
        self.passed.close()


class Pairs(Counted):
    """Two layers at a time; all else in one group before and one after."""

    def groups(self) -> list[list[str]]:
        names = [meta.name for meta in self.metadata]
        cuts = [0, *(names.index(f"layers.{n}.up.weight") for n in (0, 2)), len(names)]
        cuts.insert(-1, names.index("norm.weight"))
        return [names[a:b] for a, b in pairwise(cuts)]


class Stage(WeightSource):
    """Every rank knows the whole layout, and yields what it owns."""

    def __init__(self, module: nn.Module, rank: int, owners: dict[str, tuple[int, ...]]) -> None:
        self.module, self.rank, self.owners = module, rank, owners

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(n, p.dtype, tuple(p.shape), owners=self.owners.get(n))
            for n, p in self.module.named_parameters()
        ]

    def iter_full(self) -> Any:
        mine = dict(self.module.named_parameters())
        yield from (
            (m.name, mine[m.name])
            for m in self.metadata
            if m.owners is None or self.rank in m.owners
        )


class Exporting:
    """Of the earlier generation."""

    def __init__(self, module: nn.Module, mine: set[str] | None) -> None:
        self.module, self.mine = module, mine

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, p.dtype, tuple(p.shape)) for n, p in self.module.named_parameters()]

    def held_names(self) -> set[str] | None:
        return self.mine

    def __iter__(self) -> Any:
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach() if self.mine is None or name in self.mine else None


def by_hand(model: nn.Module, mesh: DeviceMesh, dim: int) -> nn.Module:
    """Matrices split along `dim`, vectors along 0: as tensor parallelism leaves them."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            shard = Shard(dim if parameter.ndim > 1 else 0)
            split = distribute_tensor(parameter.detach(), mesh, [shard])
            setattr(module, name, nn.Parameter(split))
    return model


def shard_layers(model: Any, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Rank:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, self.size, self.kind = options.rank, options.size, options.kind

    def mesh(self, *names: str) -> DeviceMesh:
        """All ranks in a row, or in a square with these names."""
        shape = (2, self.size // 2) if names else (self.size,)
        return init_device_mesh("cpu", shape, mesh_dim_names=names or None)

    def source(self, what: str, model: nn.Module) -> Any:
        names = [name for name, _ in model.named_parameters()]
        later = dict.fromkeys(names[len(names) // 2 :], (1,))
        if what in ("fsdp", "session"):
            return Counted(shard_layers(model, self.mesh()))
        if what == "hsdp":
            return Counted(shard_layers(model, self.mesh("replicate", "shard")))
        if what in ("rows", "columns"):
            return Counted(by_hand(model, self.mesh(), int(what == "columns")))
        if what == "fsdp+tp":
            mesh = self.mesh("dp", "tp")
            return Counted(shard_layers(by_hand(model, mesh["tp"], 0), mesh["dp"]))
        if what == "pairs":
            return Pairs(shard_layers(model, self.mesh()))
        if what == "iterator":
            whole = ModuleSource(model).metadata
            model = shard_layers(model, self.mesh())
            source = IteratorSource(names, [m.dtype for m in whole], [m.shape for m in whole])
            source.set((n, materialize_full_tensor(p)) for n, p in model.named_parameters())
            return source
        if what == "stages":
            return Stage(model, self.rank, later)
        if what == "stages on 0":
            return Stage(model, self.rank, dict.fromkeys(later, (0, 1)))
        if what == "no such owner":
            return Stage(model, self.rank, {names[3]: (self.size,)})
        held = {
            "legacy": (set(names), set(names[:2])),
            "legacy orphan": (set(names[3:]), {*names[:2], names[3]}),
            "legacy elsewhere": (set(names[3:]), set(names[:3])),
        }[what]
        return LegacySource(Exporting(model, held[min(self.rank, 1)]))

    async def scenario(self, number: int, what: str) -> None:
        source = self.source(what, models.make(self.kind, SEED + number))
        client = aiosync.HTTPVLLMWeightSyncClient(self.options.url)
        engine = await aiosync.WeightTransferTrainerFactory.trainer_init(
            aiosync.IPCTrainerInitInfo(rank=self.rank, packed=True), client=client, source=source
        )
        said: dict[str, Any] = {"what": what, "kind": None, "error": None, "outcome": None}
        async with engine:
            try:
                if what == "session":
                    report = await self.push(engine, source)
                else:
                    report = await engine.send_weights(version=1, budget=BUDGET)
                said["outcome"] = report.outcome
            except Exception as error:
                said |= {
                    "kind": type(error).__name__,
                    "error": getattr(error, "message", str(error)),
                }
            said |= {"state": engine.state.value, "equal": await self.is_equal(SEED + number)}
            if isinstance(source, Counted):
                said |= {"resumes": source.resumes, "groups": len(source.groups())}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()

    async def push(self, engine: Any, source: ModuleSource) -> Any:
        live = dict(source.module.named_parameters())
        async with engine.session(1, budget=BUDGET) as session:
            for meta in source.metadata:
                if self.rank == 1:
                    await asyncio.sleep(0.01)  # ranks are not in step by themselves
                full = await engine.source_lane.run(
                    materialize_full_tensor, live[meta.name].detach()
                )
                await session.send(meta.name, full)
                full.zero_()
        return session.report

    async def is_equal(self, seed: int) -> bool | None:
        if self.rank:
            return None
        timeout = aiohttp.ClientTimeout(total=10)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{self.options.facts}/fingerprint") as reply,
        ):
            prints = (await reply.json())["prints"]
        return bool(prints == models.fingerprint(models.make(self.kind, seed)))


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--facts", required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--do", required=True, help="scenarios, separated by commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = dist.FileStore(options.store, options.size)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.size)
    rank = Rank(options)
    for number, what in enumerate(options.do.split(",")):
        await rank.scenario(number, what)
    dist.destroy_process_group()


asyncio.run(main())
