"""Faults after which one side waits for what never comes (docs/faults.md)."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import AsyncExitStack

import models
import msgspec
import pytest
import torch
from fault_rig import (
    BACKENDS,
    BUDGET,
    assert_new_trainer_works,
    assert_old,
    assert_round_works,
    at_once,
    bounded,
    paced,
    replicas,
    until,
    wired,
)
from looped import looped
from paced import Hold, Paced
from processes import replica
from proxy import proxy

import aiosync
from aiosync import Budget, State
from aiosync.testing import DirectClient
from transports.loopback import LoopbackLink

pytestmark = pytest.mark.asyncio
KILLED_OR_STOPPED = pytest.mark.parametrize(
    "sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"]
)


# -- a control call fails ----------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["500", "reset", "hang"])
@pytest.mark.parametrize("route", ["start_weight_update", "prepare_weight_update"])
async def test_a_hang_1_other_calls_of_a_round_fail(route, how, backend):
    source = paced()
    budget = BUDGET
    if how == "hang":  # the part of the round that the route belongs to is cut short
        part = "admit" if route.startswith("start") else "finish"
        budget = msgspec.structs.replace(BUDGET, **{part: 2.0})
    async with replicas(2, backend) as workers, proxy(workers[1].url) as middle:
        old = [await worker.facts() for worker in workers]
        urls = [workers[0].url, middle.url]
        async with aiosync.connect(source, workers=urls, **wired(backend)) as sync:
            middle.break_route(route, how, at_once)
            with bounded(), pytest.raises(aiosync.AiosyncError) as caught:
                await sync.send_weights(version=1, budget=budget)
            assert caught.value.phase == route.split("_")[0]
            assert caught.value.replica == middle.url
            assert caught.value.report.members[1].error
            for worker, before in zip(workers, old, strict=True):
                await assert_old(worker, before)
            middle.heal()
            await assert_round_works(sync, source, workers, 2)


# -- the source fails --------------------------------------------------------------------------


class Breaking(Paced):
    """Raises `error` before tensor `at`, as a plain or an async generator."""

    def __init__(self, module, kind, at, error):
        super().__init__(module, self.break_at)
        self.is_async = kind == "async"
        self.at, self.error = at, error

    def break_at(self, index):
        if index == self.at:
            raise self.error

    async def _on_the_loop(self):
        for pair in super().iter_full():
            await asyncio.sleep(0)
            yield pair

    def iter_full(self):
        return self._on_the_loop() if self.is_async else super().iter_full()


@pytest.mark.parametrize("at", [0, 2, 6])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("gather failed"),
        asyncio.CancelledError("gather failed"),
        StopIteration("gather failed"),
        TimeoutError("gather failed"),
        type("Mine", (BaseException,), {})("gather failed"),
        aiosync.PeerLost("gather failed"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_hang_2_whatever_a_source_raises(kind, error, at):
    async with looped(source=lambda module: Breaking(module, kind, at, error)) as pair:
        old = models.fingerprint(pair.copies[0])
        source = pair.trainer.source
        with (
            bounded(),
            pytest.raises(BaseException, match=r"gather failed|StopIteration") as caught,
        ):
            await pair.trainer.send_weights(version=1, budget=BUDGET)
        raised = caught.value
        # A cancellation or StopIteration of the source's own is an error, not one of the caller's.
        assert not isinstance(raised, asyncio.CancelledError | StopIteration)
        assert "gather failed" in f"{raised} {raised.__cause__!r}"
        if not isinstance(error, asyncio.CancelledError | StopIteration):
            assert raised is error
        assert source.closed == source.passes == 1
        assert models.fingerprint(pair.copies[0]) == old
        assert pair.worker.weights == "intact"
        assert pair.worker.state in (State.INITIALIZED, State.FAILED)
        source.at = None
        await pair.assert_next_round_works(1)


@pytest.mark.parametrize("how", ["few", "many", "order", "none", "shape", "dtype"])
async def test_a_hang_3_a_stream_that_differs_over_gloo(how):
    source = paced()
    right = type(source).iter_full

    def wrong(self):
        pairs = [(name, parameter.detach()) for name, parameter in right(self)]
        if how == "few":
            pairs.pop()
        elif how == "many":
            pairs.append(("extra", torch.zeros(3)))
        elif how == "order":
            pairs[2], pairs[3] = pairs[3], pairs[2]  # of one shape: bytes alone would not tell
        elif how == "none":
            pairs = []
        elif how == "shape":
            pairs[0] = (pairs[0][0], pairs[0][1].t())
        elif how == "dtype":
            pairs[0] = (pairs[0][0], pairs[0][1].view(torch.int32))
        yield from pairs

    named = {"few": "2.bias", "many": "extra", "order": "1.bias"}.get(how, "0.weight")
    async with replicas(2, "gloo") as workers:
        old = [await worker.facts() for worker in workers]
        urls = [worker.url for worker in workers]
        async with aiosync.connect(source, workers=urls, **wired("gloo")) as sync:
            source.iter_full = wrong.__get__(source)
            with bounded(), pytest.raises(aiosync.Validation) as caught:
                await sync.send_weights(version=1, budget=BUDGET)
            assert named in str(caught.value)
            for worker, before in zip(workers, old, strict=True):
                await assert_old(worker, before)
            del source.iter_full
            await assert_round_works(sync, source, workers, 1)


# -- a worker fails while it loads -------------------------------------------------------------


class Loader:
    """A model that is written through its own loader, which can fail at a name."""

    def __init__(self, fault=None, at="b"):
        self.fault, self.at = fault, at
        self.held: dict[str, torch.Tensor] = {}
        self.taken: list[str] = []

    def load_weights(self, pairs):
        for name, tensor in pairs:
            if name == self.at and self.fault is not None:
                self.fault()
            self.taken.append(name)
            self.held[name] = tensor.clone()


def raises(error):
    def fault():
        raise error

    return fault


def stuck(free):
    return lambda: free.wait(20)


async def loaded(faults, check, *, sink="in_place", budget=BUDGET):
    """A round over one loopback worker for each fault (None: healthy), then one that works."""
    source = {name: torch.full((64,), float(n)) for n, name in enumerate("abcd", 1)}
    module = torch.nn.Module()
    for name, value in source.items():
        module.register_parameter(name, torch.nn.Parameter(value))
    config = aiosync.WeightTransferConfig("loopback", sink=sink)
    loaders = [Loader(fault) for fault in faults]
    async with AsyncExitStack() as stack:
        link = stack.enter_context(LoopbackLink(readers=len(loaders)))
        create = aiosync.WeightTransferEngineFactory.create_engine
        workers = [create(config, model=loader, name=f"w{n}") for n, loader in enumerate(loaders)]
        for worker in workers:
            await stack.enter_async_context(worker)
        members = [aiosync.Member(w.name, DirectClient(w, name=w.name)) for w in workers]
        trainer = aiosync.LoopbackTrainerWeightTransferEngine(
            client=aiosync.FleetClient(members), source=module, link=link, buffer_size_bytes=256
        )
        await stack.enter_async_context(trainer)
        with bounded(), pytest.raises(aiosync.AiosyncError) as caught:
            await trainer.send_weights(version=1, budget=budget)
        check(caught.value, workers, loaders)
        for loader in loaders:
            loader.fault = None
        report = await trainer.send_weights(version=1, budget=BUDGET)
        assert report.outcome == "committed"
        for loader, worker in zip(loaders, workers, strict=True):
            assert worker.weights == "intact"
            assert worker.version == report.version
            assert all(torch.equal(loader.held[name], value) for name, value in source.items())


@pytest.mark.parametrize("sink", ["in_place", "staged"])
@pytest.mark.parametrize("error", [KeyError("mlp.x"), SystemExit("mlp.x"), MemoryError("mlp.x")])
async def test_a_hang_4_one_of_three_workers_cannot_load(error, sink):
    def check(raised, workers, loaders):
        assert raised.replica == "w1"
        assert type(error).__name__ in str(raised)
        assert "mlp.x" in str(raised)
        assert "d" not in loaders[1].taken
        assert workers[1].weights == "torn"
        assert workers[1].version is None
        if sink == "in_place":  # the others were not told to finish
            assert all(worker.version is None for worker in workers)
        known = {member.name: member for member in raised.report.members}
        assert known["w1"].outcome == "failed"

    await loaded([None, raises(error), None], check, sink=sink)


async def test_a_hang_4_two_workers_fail_at_once_with_different_errors():
    def check(raised, workers, loaders):
        text = str(raised) + "".join(getattr(raised, "__notes__", ()))
        assert "mlp.x" in text
        assert "disk full" in text
        failed = {m.name for m in raised.report.members if m.error}
        assert {"w0", "w2"} <= failed

    await loaded([raises(KeyError("mlp.x")), None, raises(OSError("disk full"))], check)


async def test_a_hang_4_a_loader_that_never_returns():
    free = threading.Event()

    def check(raised, workers, loaders):
        assert isinstance(raised, TimeoutError)
        assert any(m.name == "w1" and m.error for m in raised.report.members)
        assert workers[1].weights != "intact"
        assert all(worker.version is None for worker in workers)

    try:
        budget = Budget(total=5, stall=2, cleanup=1)
        await loaded([None, stuck(free), None], check, budget=budget)
    finally:
        free.set()


# -- the group is set up -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_hang_5_an_init_answer_that_comes_late(backend):
    source = paced()
    async with replicas(2, backend) as workers:

        class Late(aiosync.HTTPVLLMWeightSyncClient):
            async def init_weight_transfer_engine(self, *args, **options):
                reply = await super().init_weight_transfer_engine(*args, **options)
                await asyncio.sleep(0.5)
                return reply

        clients = [Late(worker.url) for worker in workers]
        async with aiosync.connect(source, workers=clients, **wired(backend)) as sync:
            await assert_round_works(sync, source, workers, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@KILLED_OR_STOPPED
async def test_a_hang_7_a_worker_is_lost_while_the_group_is_set_up(sign, backend):
    source = paced()
    async with replicas(3, backend) as workers, proxy(workers[2].url) as middle:

        async def lose():
            workers[2].signal(sign)

        middle.break_route("init_weight_transfer_engine", "hang", lose)
        urls = [workers[0].url, workers[1].url, middle.url]
        with bounded(4 + 1), pytest.raises(aiosync.AiosyncError) as caught:
            async with asyncio.timeout(20):
                info = {"ipc": aiosync.IPCTrainerInitInfo, "gloo": aiosync.GlooTrainerInitInfo}
                cls = {
                    "ipc": aiosync.IPCTrainerWeightTransferEngine,
                    "gloo": aiosync.GlooTrainerWeightTransferEngine,
                }[backend]
                engine = cls.from_init_info(
                    info[backend](rank=0), client=aiosync.FleetClient(urls), source=source, hub=None
                )
                async with engine:
                    await engine.initialize(timeout=4)
        assert caught.value.replica == middle.url
        assert caught.value.phase == "init"
        async with aiosync.connect(source, workers=urls[:2], **wired(backend)) as sync:
            await assert_round_works(sync, source, workers[:2], 1)


# -- a replica is lost in a round --------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lost", [[1], [1, 2]], ids=["one", "two"])
async def test_a_hang_9_the_rest_goes_on_and_a_fresh_one_joins(lost, backend):
    hold = Hold(2)
    source = paced(hold)
    async with replicas(3, backend) as workers:
        old = await workers[0].facts()
        urls = [worker.url for worker in workers]
        async with aiosync.connect(source, workers=urls, **wired(backend)) as sync:
            round_ = asyncio.create_task(sync.send_weights(version=1, budget=BUDGET))
            await until(hold.reached)
            for index in lost:
                await workers[index].kill()
            hold.released.set()
            with bounded(), pytest.raises(aiosync.AiosyncError) as caught:
                await round_
            assert any(urls[index] in str(caught.value) for index in lost)
            assert isinstance(caught.value, ConnectionError | TimeoutError)
        await assert_old(workers[0], old)
        left = [worker for index, worker in enumerate(workers) if index not in lost]
        left_urls = [worker.url for worker in left]
        async with aiosync.connect(source, workers=left_urls, **wired(backend)) as sync:
            await assert_round_works(sync, source, left, 2)
        async with replica(backend=backend, seed=9) as fresh:
            urls = [*left_urls, fresh.url]
            async with aiosync.connect(source, workers=urls, **wired(backend)) as sync:
                await assert_round_works(sync, source, [*left, fresh], 3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("route", ["prepare_weight_update", "finish_weight_update"])
async def test_a_hang_9_killed_while_the_round_ends(route, backend):
    source = paced()
    async with replicas(2, backend) as workers, proxy(workers[1].url) as middle:
        old = await workers[0].facts()
        urls = [workers[0].url, middle.url]
        async with aiosync.connect(source, workers=urls, **wired(backend)) as sync:
            middle.break_route(route, "hang", workers[1].kill)
            with bounded(), pytest.raises(aiosync.AiosyncError) as caught:
                budget = msgspec.structs.replace(BUDGET, finish=2.0)
                await sync.send_weights(version=1, budget=budget)
            first, second = caught.value.report.members
            assert second.outcome in ("failed", "unknown")
            facts = await workers[0].wait_state("initialized", "failed", "idle")
            new = models.fingerprint(source.module)
            assert facts["prints"] == (new if first.outcome == "committed" else old["prints"])
            assert facts["version"] == (1 if first.outcome == "committed" else None)
            assert facts["weights"] == "intact"
            assert first.outcome == ("committed" if route.startswith("finish") else "failed")
        await assert_new_trainer_works(workers[:1], backend)
