"""One engine in the hands of several tasks, and of several threads.

Arguments: the URL of a replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator
from typing import Any

import models
import threads
import torch
from paced import Hold, Paced

import aiosync

logging.getLogger("asyncio").setLevel(logging.ERROR)
torch.set_num_threads(1)


def say(*words: Any) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Tasks:
    def __init__(self, url: str) -> None:
        self.url = url
        self.source = Paced(models.make("small", 7))

    async def open(self) -> Any:
        info = aiosync.IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=4096)
        client = aiosync.HTTPVLLMWeightSyncClient(self.url)
        return await aiosync.WeightTransferTrainerFactory.trainer_init(
            info, client=client, source=self.source
        )

    async def hold(self) -> Hold:
        hold = self.source.before = Hold(3)
        return hold

    async def reached(self, hold: Hold) -> None:
        while not hold.reached.is_set():
            await asyncio.sleep(0.005)

    def let_go(self, hold: Hold) -> None:
        hold.released.set()
        self.source.before = lambda _: None

    async def opened_and_closed_elsewhere(self) -> None:
        engine = await asyncio.create_task(self.open())
        say((await asyncio.create_task(engine.send_weights())).outcome)
        await asyncio.create_task(engine.aclose())
        say(engine.state)

    async def closed_while_awaited(self) -> None:
        engine = await self.open()
        hold = await self.hold()
        update = engine.begin_update()
        waiters = [asyncio.create_task(update.wait()) for _ in range(2)]
        sending = asyncio.create_task(engine.send_weights(on_busy="wait"))
        await self.reached(hold)
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0)
        self.let_go(hold)
        ends = await asyncio.gather(*waiters, sending, return_exceptions=True)
        await closing
        say(*(type(end).__name__ for end in ends), engine.state)

    async def in_a_task_group(self) -> None:
        engine = await self.open()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(engine.send_weights(on_busy="wait"))
            second = group.create_task(engine.send_weights(on_busy="wait"))
        say(first.result().outcome, second.result().outcome)
        hold = await self.hold()
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(engine.send_weights())
                await self.reached(hold)
                group.create_task(self.fail(hold))
        except* ValueError:
            say("sibling failed", sending.cancelled(), engine.last_report.outcome)
        say((await engine.send_weights()).outcome)
        await engine.aclose()

    async def fail(self, hold: Hold) -> None:
        self.let_go(hold)
        raise ValueError

    async def steps(self, count: int) -> AsyncIterator[Any]:
        """A trainer as an async generator that holds its engine."""
        async with aiosync.connect(self.source, workers=[self.url]) as sync:
            for _ in range(count):
                yield await sync.send_weights()
            self.last = sync

    async def in_a_generator(self) -> None:
        steps = self.steps(2)
        say(*[report.outcome async for report in steps], self.last.state)
        async with contextlib.aclosing(self.steps(5)) as steps:
            async for report in steps:
                say(report.outcome)
                break
        dropped = self.steps(5)
        say((await anext(dropped)).outcome)
        self.dropped = dropped  # the loop closes it at its end, in a task of its own

    async def main(self) -> None:
        for scene in (
            self.opened_and_closed_elsewhere,
            self.closed_while_awaited,
            self.in_a_task_group,
            self.in_a_generator,
        ):
            say(f"-- {scene.__name__}")
            await scene()


asyncio.run(Tasks(sys.argv[1]).main())
threads.main(sys.argv[1])
say("over")
