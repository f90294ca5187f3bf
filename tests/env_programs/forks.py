"""A trainer that has child processes of every kind between rounds and during one.

Arguments: the URL of its replica, and of another one that a child syncs by itself.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import sys
from typing import Any

import models
import torch
from paced import Hold, Paced
from torch.utils.data import DataLoader, Dataset

import aiosync
import aiosync.blocking

logging.getLogger("asyncio").setLevel(logging.ERROR)
torch.set_num_threads(1)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def say(*words: Any) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def batches() -> list[list[int]]:
    # Workers that stay, so that they are there when a round begins and when it ends.
    loader = DataLoader(
        Numbers(),
        batch_size=4,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    LOADERS.append(loader)
    return [batch.tolist() for batch in loader]


LOADERS: list[Any] = []


def sync_alone(url: str, version: int) -> None:
    """In a child: an engine of its own works, whatever it inherited."""
    torch.set_num_threads(1)
    with aiosync.blocking.connect(models.make("small", 3), workers=[url]) as sync:
        outcome = sync.send_weights(version=version).outcome
    if outcome != "committed":
        sys.exit(3)


def child(method: str, url: str, version: int) -> int | None:
    process = multiprocessing.get_context(method).Process(target=sync_alone, args=(url, version))
    process.start()
    process.join(30)
    return process.exitcode


def inherited(engine: Any) -> str:
    """What a forked child gets that uses its parent's engine."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(engine.send_weights())
            answer = "nothing"
        except BaseException as error:
            answer = type(error).__name__
        os.write(writable, answer.encode())
        os._exit(0)
    os.close(writable)
    os.waitpid(pid, 0)
    with os.fdopen(readable) as pipe:
        return pipe.read()


async def main(url: str, other: str) -> None:
    hold = Hold(3)
    source = Paced(models.make("small", 7))
    async with aiosync.connect(source, workers=[url], packed_buffer_size_bytes=4096) as sync:
        say("first", (await sync.send_weights()).outcome)
        say("loader", batches())
        say("second", (await sync.send_weights()).outcome)
        source.before = hold
        update = sync.begin_update()
        while not hold.reached.is_set():
            await asyncio.sleep(0.005)
        say("loader", batches())
        say("inherited", inherited(sync))
        for version, method in enumerate(METHODS, start=1):
            # Not from an executor's thread: a child forked there cannot join itself at its exit.
            say(method, child(method, other, version))
        hold.released.set()
        say("third", (await update).outcome)
        say("fourth", (await sync.send_weights()).outcome)
    say("closed")


METHODS = ("fork", "spawn", "forkserver")
if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
