"""A trainer with two workers as its children, held in a round until a signal comes.

Argument: ``handled`` (the trainer cancels its task on SIGTERM) or ``default``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable

import models
import torch
from paced import Hold, Paced

import aiosync

logging.getLogger("asyncio").setLevel(logging.ERROR)
torch.set_num_threads(1)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def work(index: int, tell: int) -> None:
    config = aiosync.WeightTransferConfig("ipc")
    model = models.make("small", 2)
    engine = aiosync.WeightTransferEngineFactory.create_engine(config, model=model)
    async with engine:
        async with aiosync.serve(engine) as server:
            os.write(tell, (json.dumps(server.url) + "\n").encode())
            number = await server.until_signal()
        say(f"worker {index}: {number.name}", engine.state, engine.weights)


def forked(body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except SystemExit as stop:
            os._exit(stop.code if isinstance(stop.code, int) else 1)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


async def train(urls: list[str], hold: Hold) -> None:
    source = Paced(models.make("small", 7), hold)
    async with aiosync.connect(source, workers=urls, packed_buffer_size_bytes=4096) as sync:
        update = sync.begin_update(version=1)
        while not hold.reached.is_set():
            await asyncio.sleep(0.005)
        say("holding")
        try:
            await update
        finally:
            hold.released.set()


async def until_terminated(urls: list[str]) -> None:
    hold = Hold(3)
    task = asyncio.ensure_future(train(urls, hold))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await asyncio.wait([task])
    say("trainer:", "cancelled" if task.cancelled() else repr(task.exception()))


def main(how: str) -> None:
    readable, writable = os.pipe()
    pids = [forked(lambda n=n: asyncio.run(work(n, writable))) for n in range(2)]
    with os.fdopen(readable) as pipe:
        urls = [json.loads(pipe.readline()) for _ in pids]
    if how == "default":
        asyncio.run(train(urls, Hold(3)))
    asyncio.run(until_terminated(urls))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    say("workers ended with", *codes)
    sys.exit(128 + signal.SIGTERM)


main(sys.argv[1])
