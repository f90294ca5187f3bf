"""Programs that end badly: engines dropped, blocks never left, a source that never comes back.

Each scene is played by a fork of the program, which then ends as any interpreter does; a JSON line
says how. Argument: the URL of a replica.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import torch
from paced import Paced

import aiosync
import aiosync.blocking

logging.getLogger("asyncio").setLevel(logging.ERROR)
torch.set_num_threads(1)


def say(*words: Any) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def never(index: int) -> None:
    if index == 2:
        say("stuck")
        time.sleep(1000)


async def open_engine(source: Any, url: str) -> Any:
    info = aiosync.IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=4096)
    client = aiosync.HTTPVLLMWeightSyncClient(url)
    return await aiosync.WeightTransferTrainerFactory.trainer_init(
        info, client=client, source=source
    )


def open_files() -> set[str]:
    return {str(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}


async def one_round(model: torch.nn.Module, url: str) -> Any:
    engine = await open_engine(model, url)
    report = await engine.send_weights()
    return engine, report.outcome


def dropped(url: str) -> None:
    model = models.make("small", 7)
    asyncio.run(asyncio.sleep(0))
    before, threads = open_files(), set(threading.enumerate())
    trainer, outcome = asyncio.run(one_round(model, url))
    say(outcome)
    worker = aiosync.WeightTransferEngineFactory.create_engine(
        aiosync.WeightTransferConfig("ipc"), model=models.make("small", 2)
    )
    asyncio.run(served_once(worker, model))
    del trainer, worker
    for _ in range(50):  # lanes end by themselves, and soon
        gc.collect()
        left = set(threading.enumerate()) - threads
        if not left:
            break
        time.sleep(0.05)
    say("descriptors", sorted(open_files() - before))
    say("threads", sorted(thread.name for thread in left))
    trainer, outcome = asyncio.run(one_round(model, url))
    say("trainer next", outcome)
    asyncio.run(trainer.aclose())
    say("end")


async def served_once(worker: Any, model: torch.nn.Module) -> None:
    async with (
        aiosync.serve(worker) as server,
        aiosync.connect(model, workers=[server.url]) as sync,
    ):
        await sync.send_weights()
        await asyncio.sleep(0)
        # The trainer leaves without a word, so that the worker still is in touch with one.
        sync.links.clear()


def stuck(url: str) -> None:
    async def main() -> None:
        engine = await open_engine(Paced(models.make("small", 7), never), url)
        engine.begin_update()
        await asyncio.sleep(0.5)
        say("end")  # the loop ends with the round in it

    asyncio.run(main())


def blocking(url: str) -> None:
    connection = aiosync.blocking.connect(models.make("small", 7), workers=[url])
    KEPT.append(connection)
    say(connection.__enter__().send_weights().outcome)
    say("end")


def blocking_stuck(url: str) -> None:
    source = Paced(models.make("small", 7), never)
    connection = aiosync.blocking.connect(source, workers=[url])
    KEPT.append((connection, connection.__enter__().begin_update()))
    time.sleep(0.5)
    say("end")


def played(scene: Callable[[str], None]) -> bool:
    """Fork; True in the child, once it has played the scene. The parent tells of its end."""
    (out, child_out), (err, child_err) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(child_out, 1)
        os.dup2(child_err, 2)
        os.closerange(3, max(child_out, child_err) + 1)
        scene(sys.argv[1])
        return True
    os.close(child_out)
    os.close(child_err)
    with os.fdopen(out) as pipe:
        lines = list(iter(lambda: pipe.readline().strip(), "end"))
        began = time.monotonic()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    facts = {"lines": lines, "code": code, "seconds": time.monotonic() - began}
    with os.fdopen(err) as pipe:
        say(json.dumps(facts | {"scene": scene.__name__, "err": pipe.read()}))
    return False


KEPT: list[Any] = []
any(played(scene) for scene in (dropped, stuck, blocking, blocking_stuck))  # a child stops here
