"""One rank of a sharded trainer: FSDP2 over gloo, rounds as told, a training step at the end."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import aiosync
from aiosync import Budget, ModuleSource


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Four layers, so that there are groups to stop between."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(4)])
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def build() -> Model:
    torch.manual_seed(11)
    return Model()


class Sharded(ModuleSource):
    """The module's groups, with something happening before one of them on one rank."""

    fault: str | None = None
    at: int = -1
    me: int = -1
    rank: int = 0
    on_hold = None

    def iter_groups(self):  # type: ignore[no-untyped-def]
        for number, group in enumerate(super().iter_groups()):
            if number == self.at and self.rank == self.me:
                if self.fault == "raise":
                    raise ValueError("gather failed")
                if self.fault == "hold" and self.on_hold is not None:
                    self.on_hold()
                if self.fault == "die":
                    os._exit(9)
            yield group


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    torch.manual_seed(3 + dist.get_rank())
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


async def a_ticket(engine, options) -> str:  # type: ignore[no-untyped-def]
    """Rank 0 issues it, the others read it; --ticket says which rank gets another one."""
    card = Path(f"{options.store}-ticket-{options.version}")
    if options.rank == 0 and not card.exists():
        issued = engine.make_ticket(version=options.version, timeout=options.total)
        card.with_suffix(".new").write_text(issued.encode())
        card.with_suffix(".new").rename(card)
    while not card.exists():
        await asyncio.sleep(0.01)
    word = card.read_text()
    if options.rank == options.me and options.version == 1:
        ticket = aiosync.RoundTicket.decode(word)
        if options.ticket == "other":
            return msgspec.structs.replace(ticket, id="another").encode()
        if options.ticket == "stale":
            return msgspec.structs.replace(ticket, issued_at=ticket.issued_at - 900).encode()
        if options.ticket == "garbled":
            return word[:-2] + "!!"
    return word


async def leave_meeting(engine, options, sending) -> None:  # type: ignore[no-untyped-def]
    """Cancel the rank --me while it waits at a meeting, for peers that a gate holds back."""
    gone = Path(f"{options.store}-gone")

    async def held(context) -> None:  # type: ignore[no-untyped-def]
        while not gone.exists():
            await asyncio.sleep(0.01)

    if options.rank != options.me:
        remove = engine.gate("start" if options.fault == "admit" else "complete", held)
        await asyncio.wait([sending])
        remove()
        return
    where = []
    exchange = engine.ranks._exchange
    engine.ranks._exchange = lambda word, *args: (where.append(word.at), exchange(word, *args))[1]
    while options.fault not in where and not sending.done():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)  # into the wait itself
    sending.cancel()
    await asyncio.wait([sending])
    del engine.ranks._exchange
    gone.touch()


async def one_round(engine, source, options, loop) -> None:  # type: ignore[no-untyped-def]
    budget = Budget(total=options.total, stall=3.0, cleanup=1.0)
    began = time.monotonic()
    what = {} if options.next else {"version": options.version}
    if options.ticket:
        what = {"ticket": await a_ticket(engine, options)}
        if options.ticket == "contradicted" and options.rank == options.me and options.version == 1:
            what["version"] = 99
    if options.odd == "source" and options.rank == options.me:
        what["source"] = ModuleSource(source.module)
    sending = asyncio.ensure_future(engine.send_weights(**what, budget=budget))
    if options.fault == "cancel" and source.rank == source.me:
        source.on_hold = lambda: (loop.call_soon_threadsafe(sending.cancel), time.sleep(0.05))
        source.fault = "hold"
    leaving = None
    if options.fault in ("admit", "end"):
        leaving = asyncio.ensure_future(leave_meeting(engine, options, sending))
    error = kind = None
    report = None
    try:
        report = await sending
    except asyncio.CancelledError:
        kind = "CancelledError"
    except BaseException as caught:
        kind, error = type(caught).__name__, getattr(caught, "message", str(caught))
    say(
        outcome=report.outcome if report else None,
        version=report.version.label if report else None,
        kind=kind,
        error=error,
        state=engine.state.value,
        notes=report.notes if report else [],
        round=report.round if report else None,
        seconds=time.monotonic() - began,
    )
    if leaving is not None:
        await leaving


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--fault")
    parser.add_argument("--me", type=int, default=-1)
    parser.add_argument("--at", type=int, default=-1)
    parser.add_argument("--odd", help="what differs on the rank --me: dtype or source")
    parser.add_argument("--next", help="leave the version out")
    parser.add_argument("--again", help="give the ticket of the first round again")
    parser.add_argument("--ticket", help="same; or what rank --me gets: other, stale, garbled")
    parser.add_argument("--total", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    options.version = 1
    torch.set_num_threads(1)
    store = dist.FileStore(options.store, options.size)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.size)
    mesh = init_device_mesh("cpu", (options.size,))
    model = build()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    dtype = torch.bfloat16 if options.odd == "dtype" and options.rank == options.me else None
    source = Sharded(model, dtype=dtype)
    source.fault, source.at, source.me = options.fault, options.at, options.me
    source.rank = options.rank
    client = aiosync.HTTPVLLMWeightSyncClient(options.url)
    loop = asyncio.get_running_loop()
    engine = await aiosync.WeightTransferTrainerFactory.trainer_init(
        aiosync.IPCTrainerInitInfo(rank=options.rank, packed=True), client=client, source=source
    )
    async with engine:
        for number in range(options.rounds):
            await one_round(engine, source, options, loop)
            options.version += 0 if options.again else 1
            if number == 0:
                source.fault = options.fault = None
        say(loss=await engine.source_lane.run(step, model, optimizer))
    if options.fault != "die":
        dist.destroy_process_group()


asyncio.run(main())
