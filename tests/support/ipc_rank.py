"""One of several trainer ranks that send to a stock vLLM over CUDA IPC; says what became of it.

``--gpu NAME`` pretends to be on that GPU (`fake_vllm`), ``--device cuda:0`` is on a real one. All
ranks hold the same model. A fault strikes the rank --me before it yields tensor --at of the first
round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import weakref
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import models
import torch
import torch.distributed as dist
from paced import Paced

import aiosync
from aiosync import Budget, ParamMeta
from aiosync.engines import ipc, ipc_ranks, ipc_stock
from transports import tuple_sender


def pretend(gpu: str, fault: Any, at: Any, freed: Any) -> None:
    """Have the engine use memory of this process as if it were the GPU's; no GPU: ``none``."""
    memory = SimpleNamespace(device=torch.device("cpu"))
    ipc.open_memory = lambda device, who: memory
    ipc_stock.gpu_of = lambda device: None if gpu == "none" else gpu

    def exported(tensor: torch.Tensor) -> dict[str, Any]:
        if fault("export"):
            raise RuntimeError("CUDA out of memory")
        weakref.finalize(tensor, freed)
        return fake_vllm.fake_handle(gpu, tensor)

    tuple_sender.exported = exported
    marked = tuple_sender.mark_current

    def mark_current(device: torch.device) -> Any:
        if at() and fault("settle"):
            raise RuntimeError("CUDA out of memory")
        return marked(device)

    tuple_sender.mark_current = mark_current


class Lacking(Paced):
    """Holds all but the first tensor."""

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        first, *others = Paced.metadata.func(self)
        return [ParamMeta(first.name, first.dtype, first.shape, owners=(0,)), *others]


def say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--kind", default="ranks")
    parser.add_argument("--gpu")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--limit", type=int, default=1 << 20)
    parser.add_argument("--handle", type=int, help="bytes that an encoded handle may take")
    parser.add_argument("--collective", action="store_true", help="a gather before each tensor")
    parser.add_argument("--fault", default="")
    parser.add_argument("--me", type=int, default=-1)
    parser.add_argument("--at", type=int, default=-1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--total", type=float, default=15.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    mine = options.rank == options.me
    left = [options.fault] if mine else []

    where = [-1]

    def freed() -> None:
        """What was exported is kept no more."""
        with Path(f"{options.store}-freed").open("a") as log:
            log.write(f"{options.rank}\n")

    def fault(name: str) -> bool:
        return name in left

    if options.gpu is not None:
        pretend(options.gpu, fault, lambda: where[-1] == options.at, freed)
    if options.handle:
        ipc_ranks.MOST_NBYTES = options.handle
    store = dist.FileStore(options.store, options.size)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.size)
    model = models.make(options.kind, 11, options.device)
    loop = asyncio.get_running_loop()
    sending: list[asyncio.Future[Any]] = []

    def before(index: int) -> None:
        where.append(index)
        if options.collective:
            dist.all_reduce(torch.zeros(1))
        if index != options.at:
            return
        if fault("raise"):
            raise ValueError("gather failed")
        if fault("die"):
            os._exit(9)
        if fault("cancel"):
            loop.call_soon_threadsafe(sending[-1].cancel)
            while engine.ranks._reason is None:
                time.sleep(0.001)

    source = (Lacking if options.fault == "lacks" else Paced)(model, before)
    info = aiosync.IPCTrainerInitInfo(
        rank=options.rank,
        packed=options.packed,
        packed_buffer_size_bytes=options.limit * (2 if mine and options.fault == "limit" else 1),
        device=None if options.device == "cpu" else options.device,
    )
    client = aiosync.HTTPVLLMWeightSyncClient(options.url, allow_pickled_handles=True)
    engine = await aiosync.WeightTransferTrainerFactory.trainer_init(
        info, client=client, source=source
    )
    say(pid=os.getpid(), prints=models.fingerprint(model))
    async with engine:
        for version in range(1, options.rounds + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dtype is not torch.bool:
                        parameter.add_(version)
            budget = Budget(total=options.total, stall=3.0, cleanup=1.0)
            began = time.monotonic()
            sending.append(
                asyncio.ensure_future(engine.send_weights(version=version, budget=budget))
            )
            word: dict[str, Any] = {"outcome": None, "kind": None, "error": None}
            try:
                word["outcome"] = (await sending[-1]).outcome
            except asyncio.CancelledError:
                word["kind"] = "CancelledError"
            except Exception as caught:
                word["kind"] = type(caught).__name__
                word["error"] = getattr(caught, "message", str(caught))
            kept = getattr(getattr(engine.sender, "_inner", engine.sender), "_kept", [])
            word |= {"kept": len(kept), "seconds": time.monotonic() - began}
            say(**word, state=engine.state.value, prints=models.fingerprint(model))
            left.clear()
    if options.fault != "die":
        dist.destroy_process_group()


asyncio.run(main())
