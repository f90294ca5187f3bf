"""A trainer and its workers in one process, joined by a loopback link."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import models
import torch
from limits import PATIENT
from torch import nn

import aiosync
from aiosync import State
from aiosync.testing import DirectClient
from statemachines.tables import is_legal_pair
from transports.loopback import Fault, LoopbackLink

BUDGET = PATIENT
BUFFER = 4096


@dataclass
class Looped:
    """One trainer engine, its workers, and what their machines did."""

    trainer: Any
    workers: list[Any]
    model: nn.Module
    copies: list[nn.Module]
    link: LoopbackLink
    calls: list[tuple[str, str]]
    illegal: list[tuple[str, str]] = field(default_factory=list)
    path: list[str] = field(default_factory=list)

    @property
    def worker(self) -> Any:
        return self.workers[0]

    def watch(self) -> None:
        """Judge the pair of states after every transition of either side."""

        def judge(_: Any) -> None:
            for worker in self.workers:
                pair = (self.trainer.state, worker.state)
                if not is_legal_pair(*pair):
                    self.illegal.append(pair)

        self.trainer.on_transition(judge)
        self.trainer.on_transition(lambda t: self.path.append(t.trigger))
        for worker in self.workers:
            worker.on_transition(judge)

    def chunks(self) -> int:
        """How many chunks a round has."""
        return len(self.trainer.make_plan(aiosync.feed.SourceFeed(self.trainer.source)).chunks)

    def is_equal(self, index: int = 0) -> bool:
        return models.fingerprint(self.copies[index]) == models.fingerprint(self.model)

    async def assert_next_round_works(self, version: Any = None) -> Any:
        change(self.model)
        options = {} if version is None else {"version": version}
        report = await self.trainer.send_weights(budget=BUDGET, **options)
        assert report.outcome == "committed"
        for index, worker in enumerate(self.workers):
            assert self.is_equal(index)
            assert worker.state is State.INITIALIZED
            assert worker.weights == "intact"
            assert worker.version == self.trainer.version == report.version
        assert self.trainer.state is State.INITIALIZED
        assert self.illegal == []
        return report


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


@asynccontextmanager
async def looped(
    *,
    workers: int = 1,
    script: Mapping[str, Sequence[Fault]] | None = None,
    kind: str = "small",
    source: Callable[[nn.Module], Any] = lambda model: model,
    sink: str = "staged",
    verify: str = "digest",
    before: Callable[[str, str], Any] | None = None,
    after: Callable[[str, str], Any] | None = None,
    initialized: bool = True,
    **options: Any,
):
    """`options` are the trainer engine's; `before` and `after` get (member, method)."""
    model = models.make(kind, 1)
    calls: list[tuple[str, str]] = []

    def client(engine: Any, name: str) -> DirectClient:
        async def called(method: str) -> None:
            calls.append((name, method))
            if before is not None:
                await before(name, method)

        async def answered(method: str) -> None:
            if after is not None:
                await after(name, method)

        return DirectClient(engine, name=name, before=called, after=answered)

    async with AsyncExitStack() as stack:
        link = stack.enter_context(LoopbackLink(readers=workers, script=script))
        config = aiosync.WeightTransferConfig("loopback", sink=sink, verify=verify)
        copies = [models.make(kind, 2 + n) for n in range(workers)]
        engines = [
            aiosync.WeightTransferEngineFactory.create_engine(
                config, None, torch.device("cpu"), copy, name=f"w{n}"
            )
            for n, copy in enumerate(copies)
        ]
        for engine in engines:
            await stack.enter_async_context(engine)
        members = [aiosync.Member(e.name, client(e, e.name)) for e in engines]
        trainer = aiosync.LoopbackTrainerWeightTransferEngine(
            client=aiosync.FleetClient(members),
            source=source(model),
            link=link,
            buffer_size_bytes=BUFFER,
            **options,
        )
        await stack.enter_async_context(trainer)
        result = Looped(trainer, engines, model, copies, link, calls)
        result.watch()
        if initialized:
            await trainer.initialize()
        yield result
        link.release()
