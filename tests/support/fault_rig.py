"""What the tests of known faults share: replicas of either backend, and what must hold after."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import models
import torch
from limits import PATIENT, SLACK
from paced import Paced
from processes import replica

import aiosync
from aiosync import State

BACKENDS = ["ipc", "gloo"]
BUDGET = PATIENT


def wired(backend):
    """Options of `aiosync.connect` that cut even a small model into several chunks."""
    size = "buffer_size_bytes" if backend == "gloo" else "packed_buffer_size_bytes"
    return {"backend": backend, size: 4096}


def paced(before=lambda _: None, kind="small"):
    return Paced(models.make(kind, seed=1), before)


async def until(event, seconds=20.0):
    """Wait for a threading.Event without blocking the loop."""
    async with asyncio.timeout(seconds):
        while not event.is_set():
            await asyncio.sleep(0.005)


async def at_once():
    return


@contextmanager
def bounded(seconds=6.0):
    """The block ends within `seconds`, as far as this machine is not busy with other things."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds + SLACK


@asynccontextmanager
async def replicas(count, backend, **options):
    """Worker processes of one backend, no two alike."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(replica(backend=backend, seed=2 + n, **options))
            for n in range(count)
        ]


async def assert_old(worker, old):
    facts = await worker.wait_state("initialized", "failed", "idle")
    assert facts["prints"] == old["prints"]
    assert facts["version"] == old["version"]
    assert facts["weights"] == "intact"


async def assert_round_works(sync, source, workers, version):
    """One more round: every worker process holds the source's bits and version."""
    source.before = lambda _: None
    with torch.no_grad():
        for parameter in source.module.parameters():
            if parameter.dtype.is_floating_point:
                parameter.add_(1)
    report = await sync.send_weights(version=version, timeout=20)
    assert report.outcome == "committed"
    for worker in workers:
        facts = await worker.facts()
        assert facts["prints"] == models.fingerprint(source.module)
        assert (facts["version"], facts["weights"]) == (version, "intact")
    assert sync.state is State.INITIALIZED


async def assert_new_trainer_works(workers, backend, version=1):
    source = paced()
    urls = [worker.url for worker in workers]
    async with aiosync.connect(source, workers=urls, **wired(backend)) as sync:
        await assert_round_works(sync, source, workers, version)
