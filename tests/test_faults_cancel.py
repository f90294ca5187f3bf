"""Faults of cancellation, threads and the event loop (docs/faults.md)."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import anyio
import by_hand
import models
import pytest
import torch
from carried import ALL, carried
from fault_rig import (
    BACKENDS,
    BUDGET,
    assert_round_works,
    bounded,
    paced,
    replicas,
    until,
    wired,
)
from looped import looped
from paced import Hold
from processes import replica

import aiosync
from aiosync import IteratorSource, ParamMeta, State

pytestmark = pytest.mark.asyncio
SUPPORT = Path(__file__).parent / "support"


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_cancel_1_cancelled_at_random_moments(backend):
    moments = random.Random(7)
    source = paced()
    async with replicas(2, backend) as workers:
        urls = [worker.url for worker in workers]
        async with aiosync.connect(source, workers=urls, **wired(backend)) as sync:
            for number in range(6):
                round_ = asyncio.create_task(sync.send_weights(budget=BUDGET))
                await asyncio.sleep(moments.uniform(0, 0.03))
                round_.cancel()
                with suppress(asyncio.CancelledError):
                    await round_
                assert sync.state in (State.INITIALIZED, State.FAILED)
                await assert_round_works(sync, source, workers, 100 * (number + 1))


async def by_move_on_after(send):
    with anyio.move_on_after(0.2) as scope:
        await send()
    assert scope.cancelled_caught
    raise TimeoutError


async def by_task_cancel(send):
    task = asyncio.create_task(send())
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    raise TimeoutError


async def by_timeout(send):
    async with asyncio.timeout(0.2):
        await send()


async def by_wait_for(send):
    await asyncio.wait_for(send(), 0.2)


@pytest.mark.parametrize("how", [by_move_on_after, by_task_cancel, by_timeout, by_wait_for])
@pytest.mark.parametrize("where", ["start_weight_update", "update_weights", "finish_weight_update"])
async def test_a_cancel_2_code_after_the_await_never_runs(where, how):
    held = asyncio.Event()

    async def hold(_, method):
        if method == where and not held.is_set():
            await held.wait()

    async with looped(before=hold) as pair:
        after = []

        async def send():
            await pair.trainer.send_weights(version=1, budget=BUDGET)
            after.append("went on")

        with bounded(0.2 + BUDGET.cleanup), pytest.raises(TimeoutError):
            await how(send)
        assert after == []
        held.set()
        assert pair.trainer.state in (State.INITIALIZED, State.FAILED)
        await pair.assert_next_round_works(2)


async def test_a_cancel_3_each_caller_gets_its_own_outcome():
    async with by_hand.by_hand() as engine:
        await by_hand.owned(engine)
        header = by_hand.header(engine, 1, 1)
        go = engine.hold("update")
        await engine.start_weight_update(header=header)
        slow = asyncio.create_task(engine.update_weights({"value": 1.0}, header=header))
        await engine.reached["update"].wait()
        engine.errors["drain"] = ValueError("of the second caller")
        raising = asyncio.create_task(engine.prepare_weight_update(header=header))
        wrong = asyncio.create_task(engine.update_weights({"value": "x"}, header=header))
        stale = by_hand.header(engine, 9, 1)
        fenced = asyncio.create_task(engine.finish_weight_update(header=stale))
        await asyncio.wait([wrong, fenced], timeout=5)
        assert not slow.done()
        assert not raising.done()
        go.set()
        results = await asyncio.gather(slow, raising, wrong, fenced, return_exceptions=True)
        assert results[0] is None
        assert isinstance(results[1], ValueError)
        assert isinstance(results[2], aiosync.InvalidTransition | aiosync.Validation)
        assert isinstance(results[3], aiosync.Fenced)


@pytest.mark.parametrize(
    ("what", "backend"), [("round", "gloo"), ("open", "ipc"), ("open", "gloo"), ("waiting", "gloo")]
)
async def test_a_cancel_4_the_process_ends(what, backend):
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "ends_well.py"), what, backend]
    root = str(SUPPORT.parents[1])
    run = await asyncio.to_thread(
        subprocess.run,
        command,
        capture_output=True,
        text=True,
        timeout=40,
        env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-2000:]


# -- iterators ---------------------------------------------------------------------------------


def listed(count, kind):
    """An iterator of `count` tensors: a plain generator, an async one, or a bare object."""
    pairs = [(f"t{n}", torch.full((4,), float(n))) for n in range(count)]
    if kind == "plain":
        return (pair for pair in pairs)
    if kind == "async":

        async def yielding():
            for pair in pairs:
                yield pair

        return yielding()

    class Bare:
        def __init__(self):
            self.left = iter(pairs)

        def __iter__(self):
            return self

        def __next__(self):
            return next(self.left)

    return Bare()


@pytest.mark.parametrize("kind", ["plain", "async", "bare"])
@pytest.mark.parametrize("count", [0, 3, 4, 5])
async def test_a_cancel_5_iterators_end(count, kind):
    metas = [ParamMeta(f"t{n}", torch.float32, (4,)) for n in range(4)]
    source = IteratorSource(
        [m.name for m in metas], ["float32"] * 4, [list(m.shape) for m in metas]
    )
    model = {m.name: torch.full((4,), -1.0) for m in metas}
    async with carried(source, model) as (sync, worker):
        source.set(listed(count, kind))
        if count == 4:
            await sync.send_weights(timeout=10)
            assert [int(t[0]) for t in model.values()] == [0, 1, 2, 3]
            return
        with bounded(3), pytest.raises(aiosync.Validation, match=f"t{min(count, 4)}"):
            await sync.send_weights(timeout=10)
        assert worker.version is None


async def ticking(gaps, stop):
    """The longest time the loop did not come round."""
    last = time.monotonic()
    while not stop.is_set():
        await asyncio.sleep(0.02)
        now = time.monotonic()
        gaps.append(now - last)
        last = now


async def test_a_cancel_5_a_slow_next_does_not_stop_the_loop():
    ticks, gate = [], threading.Event()

    def slow(index):
        if index == 2:
            gate.wait(20)

    async with looped(source=lambda module: paced(slow)) as pair:
        stop = asyncio.Event()
        ticker = asyncio.create_task(ticking(ticks, stop))
        round_ = asyncio.create_task(pair.trainer.send_weights(version=1, budget=BUDGET))
        async with asyncio.timeout(10):
            while len(ticks) < 10:  # the loop comes round while the source blocks
                await asyncio.sleep(0.01)
        assert not round_.done()
        gate.set()
        await round_
        stop.set()
        await ticker


# -- several calls -----------------------------------------------------------------------------


async def test_a_cancel_6_nothing_goes_on_behind_the_callers_back():
    running = []

    async def before(member, method):
        if method == "start_weight_update" and active:
            if member == "w2":
                await asyncio.sleep(0.05)
                raise aiosync.RemoteError("no memory", replica="w2")
            running.append(member)
            try:
                await asyncio.sleep(30)
            finally:
                running.remove(member)

    active = True
    async with looped(workers=4, before=before) as pair:
        tasks = asyncio.all_tasks()
        with bounded(2), pytest.raises(aiosync.RemoteError, match="no memory") as caught:
            await pair.trainer.send_weights(version=1, budget=BUDGET)
        assert caught.value.replica == "w2"
        assert running == []
        assert asyncio.all_tasks() <= tasks
        aborted = {member for member, method in pair.calls if method == "abort_weight_update"}
        assert {"w0", "w1", "w3"} <= aborted
        active = False
        await pair.assert_next_round_works(1)


# -- init --------------------------------------------------------------------------------------


def held():
    """Threads that are no pool's, and descriptors."""
    threads = {thread.name for thread in threading.enumerate()}
    return len(list(Path("/proc/self/fd").iterdir())), {n for n in threads if "asyncio_" not in n}


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_cancel_7_init_cancelled_at_many_points(backend, free_shm):
    source = paced()
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    options = {"master_port": port} if backend == "gloo" else {}
    async with replica(seed=2, backend=backend) as worker:

        async def init():
            async with aiosync.connect(
                source, workers=[worker.url], **wired(backend), **options
            ) as sync:
                return sync.state

        await init()
        before = held()
        for turn in range(12):
            task = asyncio.create_task(init())
            await asyncio.sleep(0.002 * turn)
            task.cancel()
            await asyncio.wait([task], timeout=5)
            assert task.done()
        async with asyncio.timeout(10):
            while held()[0] > before[0] or held()[1] - before[1]:
                await asyncio.sleep(0.02)
        async with aiosync.connect(
            source, workers=[worker.url], **wired(backend), **options
        ) as sync:
            await assert_round_works(sync, source, [worker], 1)


# -- the loop ----------------------------------------------------------------------------------


class Blocking(torch.nn.Module):
    """Its loader blocks; on the worker's lane, not on its loop."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)
        self.gate, self.entered = threading.Event(), threading.Event()

    def load_weights(self, pairs):
        for _ in pairs:
            self.entered.set()
            self.gate.wait(20)


@pytest.mark.parametrize("backend", ALL)
async def test_a_cancel_8_a_loader_that_blocks_leaves_the_loop_and_the_server_alone(backend):
    model = Blocking()
    async with carried(Blocking().inner, model, backend, sink="in_place") as (sync, worker):
        async with aiosync.serve(worker) as server:
            client = aiosync.HTTPVLLMWeightSyncClient(server.url)
            round_ = asyncio.create_task(sync.send_weights(version=1, timeout=20))
            await until(model.entered)
            async with asyncio.timeout(5):
                for _ in range(5):
                    await client.health()
            assert not round_.done()
            model.gate.set()
            assert (await round_).outcome == "committed"


async def test_a_cancel_8_a_large_round_leaves_both_loops_responsive():
    source = paced(kind="large")
    async with replica(kind="large", seed=2) as worker:
        client = aiosync.HTTPVLLMWeightSyncClient(worker.url)
        async with aiosync.connect(source, workers=[worker.url]) as sync, client:
            gaps, stop = [], asyncio.Event()
            ticker = asyncio.create_task(ticking(gaps, stop))
            round_ = asyncio.create_task(sync.send_weights(version=1, timeout=30))
            while not round_.done():
                async with asyncio.timeout(5):
                    await client.health()
                await asyncio.sleep(0.02)
            await round_
            stop.set()
            await ticker
            assert max(gaps, default=0) < 2
            assert (await worker.facts())["prints"] == models.fingerprint(source.module)


@pytest.mark.parametrize("call", ["send_weights", "initialize", "shutdown", "aclose"])
async def test_a_cancel_8_a_source_that_calls_back_is_refused(call):
    """From the source's thread a loop of its own cannot wait for the round that waits for it."""
    raised = []

    def again(index):
        if index == 1:
            try:
                asyncio.run(getattr(engine[0], call)())
            except Exception as error:
                raised.append(error)
                raise

    engine = []
    async with looped(source=lambda module: paced(again)) as pair:
        engine.append(pair.trainer)
        with bounded(), pytest.raises(aiosync.AiosyncError):
            await pair.trainer.send_weights(version=1, budget=BUDGET)
        assert isinstance(raised[0], aiosync.AiosyncError)
        pair.trainer.source.before = lambda _: None
        assert pair.trainer.state is not State.CLOSED
        hold = Hold(-1)
        pair.trainer.source.before = hold
        report = await pair.trainer.send_weights(version=2, budget=BUDGET)
        assert report.outcome == "committed"
