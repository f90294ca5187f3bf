"""Faults of memory and descriptors that live too short or too long (docs/faults.md)."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import models
import pytest
import torch
from carried import ALL, carried
from fault_rig import (
    BACKENDS,
    BUDGET,
    assert_new_trainer_works,
    assert_old,
    assert_round_works,
    bounded,
    paced,
    replicas,
    until,
    wired,
)
from paced import Hold
from processes import program, replica

import aiosync
from aiosync import share_tensors

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [0, 1], ids=["first", "last"])
async def test_a_lifetime_1_a_slow_reader_gets_every_chunk(number, backend):
    """Its ring is full long before it reads on; what it has not read is not overwritten."""
    hold = Hold(1)
    source = paced(hold)
    async with replicas(2, backend) as workers:
        urls = [worker.url for worker in workers]
        async with aiosync.connect(source, workers=urls, **wired(backend)) as sync:
            round_ = asyncio.create_task(sync.send_weights(version=1, timeout=20))
            await until(hold.reached)
            workers[number].signal(signal.SIGSTOP)
            hold.released.set()
            await asyncio.sleep(0.3)
            workers[number].signal(signal.SIGCONT)
            await round_
            for worker in workers:
                assert (await worker.facts())["prints"] == models.fingerprint(source.module)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("sink", ["staged", "in_place", "layerwise"])
async def test_a_lifetime_1_what_arrived_is_the_workers_own(sink, backend):
    sent, model = {"w": torch.ones(50)}, {"w": torch.zeros(50)}
    async with carried(sent, model, backend, sink=sink) as (sync, _):
        await sync.send_weights(timeout=20)
        sent["w"].add_(1)
        assert model["w"].unique().tolist() == [1]
        model["w"].add_(5)
        assert sent["w"].unique().tolist() == [2]
        await sync.send_weights(timeout=20)
        assert model["w"].unique().tolist() == [2]


async def test_a_lifetime_1_memory_that_is_read_in_place_is_not_aliased_either():
    module = torch.nn.Linear(20, 5)
    storage = await asyncio.to_thread(share_tensors, module)
    worker = aiosync.WeightTransferEngineFactory.create_engine(
        aiosync.WeightTransferConfig("ipc"), model=(copy := torch.nn.Linear(20, 5))
    )
    async with worker:
        clients = [aiosync.testing.DirectClient(worker)]
        async with aiosync.connect(module, workers=clients, shared=[storage]) as sync:
            await sync.send_weights(timeout=20)
            before = module.weight.detach().clone()
            with torch.no_grad():
                module.weight.add_(1)
            assert torch.equal(copy.weight, before)


async def test_a_lifetime_2_a_reader_that_ends_takes_nothing_along(free_shm):
    source = paced()
    async with replica(seed=3) as stays:
        async with replica(seed=2) as goes:
            async with aiosync.connect(source, workers=[goes.url], **wired("ipc")) as sync:
                await assert_round_works(sync, source, [goes], 1)
            urls = [goes.url, stays.url]
            async with aiosync.connect(source, workers=urls, **wired("ipc")) as sync:
                await assert_round_works(sync, source, [goes, stays], 2)
        async with aiosync.connect(source, workers=[stays.url], **wired("ipc")) as sync:
            await assert_round_works(sync, source, [stays], 3)


def names_in_shm():
    return set(Path("/dev/shm").iterdir())


def memory_of(pid):
    """The memory files a process has open or mapped."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(str(link.readlink()))
        except OSError:
            continue
    maps = Path(f"/proc/{pid}/maps").read_text().split()
    return {name for name in found | set(maps) if "memfd:" in name}


@pytest.mark.parametrize("dead", ["trainer", "worker"])
async def test_a_lifetime_2_nothing_is_left_of_the_killed(dead):
    before = names_in_shm()
    async with replica(seed=2, lease=5) as worker:
        async with program("trainer.py", worker.url, "--hold", "3") as trainer:
            for word in (b"connected\n", b"holding\n"):
                async with asyncio.timeout(30):
                    assert await trainer.stdout.readline() == word
            await (trainer if dead == "trainer" else worker).kill()
            if dead == "trainer":
                await worker.wait_state("initialized", "failed")
                await assert_new_trainer_works([worker], "ipc")
                pid = worker.process.pid
                async with asyncio.timeout(5):
                    while memory_of(pid):
                        await asyncio.sleep(0.02)
    assert names_in_shm() <= before


@contextmanager
def few_descriptors(pid, limit):
    """This process and `pid` may have no more than `limit` descriptors."""
    own = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, own[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, own[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, own)


def descriptors(pid="self"):
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.parametrize(
    ("backend", "options"),
    [("ipc", {"packed": True}), ("ipc", {"packed": False}), ("gloo", {})],
    ids=["ipc-packed", "ipc", "gloo"],
)
async def test_a_lifetime_3_three_hundred_tensors_under_a_low_limit(backend, options):
    source = paced(kind="many")
    assert len(source.metadata) == 300
    async with replica(backend=backend, kind="many", seed=2) as worker:
        pid = worker.process.pid
        with few_descriptors(pid, 256):
            options = wired(backend) | options
            async with aiosync.connect(source, workers=[worker.url], **options) as sync:
                for _ in range(2):
                    await sync.send_weights(timeout=20)
                before = descriptors(), descriptors(pid)
                for _ in range(48):
                    await sync.send_weights(timeout=20)
                assert descriptors() <= before[0] + 1  # a connection may be open or not
                assert descriptors(pid) <= before[1] + 1
                assert (await worker.facts())["prints"] == models.fingerprint(source.module)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("how", ["cancelled", "dropped"])
async def test_a_lifetime_5_memory_outlives_a_caller_that_does_not_wait(how, packed):
    """The worker is stopped before it maps anything; what it maps then is still there, or known."""
    hold = Hold(1)
    source = paced(hold)
    async with replica(seed=2) as worker:
        old = await worker.facts()
        options = wired("ipc") | {"packed": packed}
        async with aiosync.connect(source, workers=[worker.url], **options) as sync:
            update = sync.begin_update(version=1, budget=BUDGET)
            await until(hold.reached)
            worker.signal(signal.SIGSTOP)
            hold.released.set()
            await asyncio.sleep(0.05)
            if how == "cancelled":
                update.cancel()
                with bounded(), pytest.raises(aiosync.RoundCancelled):
                    await update
            else:
                del update
            gc.collect()
            worker.signal(signal.SIGCONT)
            if how == "cancelled":
                await assert_old(worker, old)
            else:
                async with asyncio.timeout(10):
                    await sync.wait_version(1)
                assert (await worker.facts())["prints"] == models.fingerprint(source.module)
            await assert_round_works(sync, source, [worker], 2)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("sink", ["staged", "in_place", "layerwise"])
async def test_a_lifetime_7_addresses_and_old_views_stay(sink, backend):
    source, model = torch.nn.Linear(30, 4), torch.nn.Linear(30, 4)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    views = [parameter.detach().view(-1)[:3] for parameter in model.parameters()]
    objects = list(model.parameters())
    async with carried(source, model, backend, sink=sink) as (sync, _):
        for value in (1.0, 2.0, 3.0):
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.fill_(value)
            await sync.send_weights(timeout=20)
            assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
            assert all(view.tolist() == [value] * 3 for view in views)
            assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))


@pytest.mark.parametrize("packed", [True, False])
async def test_a_lifetime_8_memory_that_is_not_there_is_refused_with_numbers(
    packed, monkeypatch, free_shm
):
    source = paced()
    async with replica(seed=2) as worker:
        old = await worker.facts()
        options = wired("ipc") | {"packed": packed}
        async with aiosync.connect(source, workers=[worker.url], **options) as sync:
            with monkeypatch.context() as patch:
                patch.setattr("transports.segments.available_memory", lambda: 1000)
                with bounded(), pytest.raises(aiosync.OutOfSharedMemory) as caught:
                    await sync.send_weights(version=1, budget=BUDGET)
            assert "1000" in str(caught.value)
            await assert_old(worker, old)
            await assert_round_works(sync, source, [worker], 1)
