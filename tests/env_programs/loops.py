"""The same rounds under asyncio and under uvloop; prints what each engine saw, one JSON line each.

Arguments: for each loop the URL of a replica of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import models
import msgspec
import torch
import uvloop
from paced import Hold, Paced

import aiosync

# Development mode reports slow steps, which a busy machine has; what counts are errors.
logging.getLogger("asyncio").setLevel(logging.ERROR)
torch.set_num_threads(1)
FACTS = ("trigger", "source", "dest", "phase", "round", "version", "weights", "error")


class Story:
    """What one engine went through, without what a clock has a part in."""

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any], url: str) -> None:
        self.run = run
        self.url = url
        self.model = models.make("odd", 1)
        self.source = Paced(self.model)
        self.told: list[Any] = []
        self.events: list[list[Any]] = []

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dtype.is_floating_point:
                    parameter.add_(1)

    def note(self, report: aiosync.Report | None) -> None:
        assert report is not None
        facts = msgspec.to_builtins(report)
        facts["seconds"] = sorted(facts["seconds"])
        del facts["pause_seconds"]
        for member in facts["members"]:
            del member["seconds"], member["pause_seconds"]
        if report.outcome != "committed":
            del facts["nbytes"]  # how far it got
        self.told.append(facts)

    async def open(self) -> Any:
        info = aiosync.IPCTrainerInitInfo(
            rank=0, packed=True, packed_buffer_size_bytes=4096, lineage="run"
        )
        members = [aiosync.Member("worker", aiosync.HTTPVLLMWeightSyncClient(self.url))]
        return await aiosync.WeightTransferTrainerFactory.trainer_init(
            info, client=aiosync.FleetClient(members), source=self.source
        )

    async def commit(self, engine: Any) -> None:
        self.change()
        self.note(await engine.send_weights())

    async def cancel(self, engine: Any) -> None:
        hold = self.source.before = Hold(3)
        update = engine.begin_update()
        while not hold.reached.is_set():
            await asyncio.sleep(0.005)
        update.cancel()
        hold.released.set()
        try:
            await update
        except aiosync.RoundCancelled as error:
            self.told.append(error.message)
            self.note(error.report)
        self.source.before = lambda _: None

    async def fail(self, engine: Any) -> None:
        def broken(index: int) -> None:
            if index == 4:
                raise ValueError("no such expert")

        self.source.before = broken
        try:
            await engine.send_weights()
        except ValueError as error:
            self.told.append(repr(error))
            self.note(error.report)  # type: ignore[attr-defined]
        self.source.before = lambda _: None

    async def refuse(self, engine: Any) -> None:
        try:
            await engine.send_weights(version=1)
        except aiosync.AiosyncError as error:
            self.told.append(f"{type(error).__name__}: {error.message}")
            self.note(error.report)

    def play(self) -> dict[str, Any]:
        engine = self.run(self.open())
        engine.on_transition(lambda t: self.events.append([getattr(t, name) for name in FACTS]))
        for scene in (self.commit, self.cancel, self.commit, self.fail, self.refuse, self.commit):
            self.run(scene(engine))
        state = str(engine)
        self.run(engine.aclose())
        return {
            "told": self.told,
            "events": self.events,
            "engine": state,
            "prints": models.fingerprint(self.model),
        }


def main() -> None:
    for run, url in zip((asyncio.run, uvloop.run), sys.argv[1:], strict=True):
        told = json.dumps(Story(run, url).play())
        sys.stdout.write(told.replace(url, "the replica") + "\n")  # they are two


main()
