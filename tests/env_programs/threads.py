"""An engine on a loop in a thread, and blocking calls from four threads: part of ``tasks.py``."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import models

import aiosync
import aiosync.blocking


@contextlib.contextmanager
def loop_in_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def say(*words: Any) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main(url: str) -> None:
    model = models.make("small", 7)
    client = aiosync.HTTPVLLMWeightSyncClient(url)
    info = aiosync.IPCTrainerInitInfo(rank=0, packed=True)
    opening = aiosync.WeightTransferTrainerFactory.trainer_init(info, client=client, source=model)
    with loop_in_a_thread() as loop:

        def call(coroutine: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

        engine = call(opening)
        say("in a thread", call(engine.send_weights()).outcome)
        with ThreadPoolExecutor(4) as pool:
            sends = [pool.submit(call, engine.send_weights(on_busy="wait")) for _ in range(4)]
        say("from four threads", *(send.result().outcome for send in sends))
    say("in another loop", asyncio.run(engine.send_weights()).outcome)
    asyncio.run(engine.aclose())

    with aiosync.blocking.connect(model, workers=[url]) as sync:
        with ThreadPoolExecutor(4) as pool:
            sends = [pool.submit(sync.send_weights, on_busy="wait") for _ in range(4)]
        say("blocking", *(send.result().outcome for send in sends))
        say("orders", *sorted(send.result().version.order for send in sends))
