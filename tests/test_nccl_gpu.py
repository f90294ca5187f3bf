"""The nccl backend on a GPU: trainer and workers as processes of their own, on one device or two.

Needs NCCL that puts several ranks on one GPU (2.29 or newer, ``NCCL_MULTI_RANK_GPU_ENABLE=1``), or
a GPU for each rank. Those that look for lost memory see the whole GPU's: nobody else may take some
of it and keep it.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import signal
import sys
import time
import urllib.request
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import models
import nccl_wire
import pytest
import torch
from everything import Everything
from gpu_memory import MIB, assert_as_free, free_memory
from paced import Hold, Paced
from processes import program, replica
from proxy import proxy

import aiosync
from aiosync import Budget, State

has_cuda = torch.cuda.is_available()
has_nccl = importlib.util.find_spec("nccl") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(50),
    pytest.mark.skipif(not has_cuda, reason="needs a CUDA device"),
    pytest.mark.skipif(not has_nccl, reason="needs nccl4py"),
]

BUDGET = Budget(total=20.0, stall=5.0, cleanup=1.0)
SMALL = {"backend": "nccl", "packed_buffer_size_bytes": 4096}
INIT_S = 60.0
CANCELLED = 6


def device_of(rank):
    return f"cuda:{rank % torch.cuda.device_count()}"


@asynccontextmanager
async def replicas(count, **options):
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                replica(
                    **({"backend": "nccl", "seed": 2 + i, "device": device_of(1 + i)} | options)
                )
            )
            for i in range(count)
        ]


def changed(module, version):
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dtype.is_floating_point:
                parameter.add_(version)


async def until(event, seconds=30.0):
    async with asyncio.timeout(seconds):
        while not event.is_set():
            await asyncio.sleep(0.005)


async def assert_old(worker, old):
    facts = await worker.wait_state("initialized", "failed", "idle")
    assert facts["prints"] == old["prints"]
    assert facts["weights"] == "intact"


async def assert_next_round_works(sync, source, workers, version):
    source.before = lambda _: None
    changed(source.module, 1)
    report = await sync.send_weights(version=version, budget=Budget(total=60.0, admit=40.0))
    assert report.outcome == "committed"
    for worker in workers:
        facts = await worker.facts()
        assert facts["prints"] == models.fingerprint(source.module)
        assert facts["version"] == version
    assert sync.state is State.INITIALIZED


# -- rounds ------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "count", "sink", "verify", "options"),
    [
        ("odd", 2, "in_place", "digest", {"packed_buffer_size_bytes": 1024}),
        ("tied", 1, "staged", "digest", {"master_address": "127.0.0.1"}),
        ("large", 1, "staged", "digest", {"packed_buffer_size_bytes": 6 * MIB}),
        ("large", 2, "in_place", "counts", {"packed": False}),
    ],
)
async def test_rounds_arrive_bit_equal(kind, count, sink, verify, options):
    model = models.make(kind, 1, device_of(0))
    async with replicas(count, kind=kind, sink=sink, verify=verify) as workers:
        urls = [worker.url for worker in workers]
        async with aiosync.connect(model, workers=urls, backend="nccl", **options) as sync:
            for version in (1, 2, 3):
                changed(model, version)
                report = await sync.send_weights(version=version, timeout=30)
                assert report.outcome == "committed"
                assert report.verified == (verify == "digest")
                for worker in workers:
                    facts = await worker.facts()
                    assert facts["prints"] == models.fingerprint(model)
                    assert (facts["version"], facts["weights"]) == (version, "intact")
        for worker in workers:
            assert (await worker.wait_state("idle"))["version"] == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("packed", [True, False])
async def test_every_dtype_and_layout_arrives_as_it_was(packed):
    source = Everything(device_of(0))
    options = {"backend": "nccl", "packed": packed, "packed_buffer_size_bytes": 1 << 13}
    async with replicas(1, kind="everything", sink="in_place") as (worker,):
        async with aiosync.connect(source, workers=[worker.url], **options) as sync:
            for version in (1, 2):
                await sync.send_weights(version=version, budget=BUDGET)
                prints = (await worker.facts())["prints"]
                assert prints == models.fingerprint(source.tensors)


@pytest.mark.asyncio
async def test_what_training_has_queued_is_what_arrives():
    """The step's kernels are still running when the round begins, on a stream of their own."""
    model = models.make("large", 1, device_of(0))
    stream = torch.cuda.Stream()
    async with replicas(1, kind="large") as (worker,):
        async with aiosync.connect(model, workers=[worker.url], backend="nccl") as sync:
            for version in (1, 2):
                with torch.cuda.stream(stream), torch.no_grad():
                    torch.cuda._sleep(200_000_000)  # a tenth of a second or so
                    for parameter in model.parameters():
                        parameter.add_(version)
                    await sync.send_weights(version=version, budget=BUDGET)
                facts = await worker.facts()
                assert facts["prints"] == models.fingerprint(model)


# -- raw peers -----------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(("way", "packed"), [("id", True), ("store", False)])
async def test_a_raw_worker_understands_our_trainer(way, packed):
    tensors = {
        n: torch.frombuffer(bytearray(nccl_wire.content(n, d, s) or b"\0"), dtype=torch.uint8)[
            : nccl_wire.nbytes(d, s)
        ]
        .cuda()
        .view(getattr(torch, d))
        .view(s)
        for n, d, s in raw_tensors()
    }
    source = Dict(tensors)
    options = {"backend": "nccl", "packed": packed, "packed_buffer_size_bytes": 600}
    if way == "store":
        options["master_address"] = "127.0.0.1"
    async with raw("worker") as (_, said):
        url = said
        async with aiosync.connect(source, workers=[url], **options) as sync:
            for version in (1, 2):
                for tensor in tensors.values():
                    if tensor.dtype == torch.bfloat16:
                        tensor.add_(1)
                report = await sync.send_weights(version=version, budget=BUDGET)
                assert report.outcome == "committed"
                facts = await asyncio.to_thread(get, f"{url}/prints")
                assert facts["prints"] == models.fingerprint(tensors)


@pytest.mark.asyncio
@pytest.mark.parametrize(("way", "form"), [("store", "packed"), ("id", "unpacked")])
async def test_our_worker_understands_a_raw_trainer(way, form):
    async with replicas(1, kind="wire", tcp=True, sink="in_place") as (worker,):
        async with raw("trainer", worker.url, way, form) as (_, said):
            assert said == "done"
            facts = await worker.facts()
            for name, dtype, shape in raw_tensors():
                raw_bytes = nccl_wire.content(name, dtype, shape)
                assert facts["prints"][name] == hashlib.sha256(raw_bytes).hexdigest(), name


def raw_tensors():
    known = [t for t in nccl_wire.DENSE if t[1] in nccl_wire.NCCL_TYPE]
    return sorted(known, key=lambda t: -nccl_wire.ITEMSIZE[t[1]])


class Dict:
    def __init__(self, tensors):
        self.tensors = tensors
        self.metadata = [aiosync.ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]

    def iter_full(self):
        yield from self.tensors.items()


def get(url):
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.loads(reply.read())


@asynccontextmanager
async def raw(*args):
    """`nccl_raw.py` as a process, and the first line it says."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).parent / "support" / "nccl_raw.py"),
        *args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60):
            line = await process.stdout.readline()
        yield process, line.decode().strip()
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


# -- rounds that end early -------------------------------------------------------------------------


@asynccontextmanager
async def pair(before=lambda _: None, *, count=1, broken=False, kind="small"):
    source = Paced(models.make(kind, 1, device_of(0)), before)
    async with replicas(count, kind=kind) as workers, proxy(workers[0].url) as middle:
        urls = [worker.url for worker in workers]
        if broken:
            urls[0] = middle.url
        async with aiosync.connect(source, workers=urls, **SMALL) as sync:
            yield sync, source, workers, middle


@pytest.mark.asyncio
@pytest.mark.timeout(100)
async def test_cancelled_rounds_leave_no_memory_behind(record_property):
    hold = Hold(3)
    async with pair(hold, kind="large") as (sync, source, workers, _):
        old = (await workers[0].facts())["prints"]
        source.before = lambda _: None
        await sync.send_weights(version=1, budget=BUDGET)
        await sync.reset() if sync.state is State.FAILED else None
        took, before = [], 0
        for number in range(CANCELLED):
            hold = source.before = Hold(3 + number % 5)
            round_ = asyncio.create_task(
                sync.send_weights(version=2 + number, budget=Budget(total=60.0, admit=40.0))
            )
            await until(hold.reached)
            began = time.monotonic()
            round_.cancel()
            hold.released.set()
            await asyncio.wait([round_])
            took.append(time.monotonic() - began)
            assert round_.cancelled()
            assert sync.state is State.FAILED
            await workers[0].wait_state("failed", "initialized")
            if not number:
                await asyncio.sleep(1.0)  # the aborts end beside this
                before = await free_memory()
        record_property("cancelled_after_s", took)
        print("cancelled rounds left after", [round(t, 3) for t in took])
        assert max(took) < BUDGET.cleanup + 1
        await assert_as_free(before, slack=16 * MIB)
        assert old != {}
        await assert_next_round_works(sync, source, workers, 50)


@pytest.mark.asyncio
async def test_ten_rounds_leak_nothing():
    async with pair(kind="large") as (sync, source, workers, _):
        for version in (1, 2):
            await assert_next_round_works(sync, source, workers, version)
        before, files = await free_memory(), descriptors()
        for version in range(3, 13):
            await sync.send_weights(version=version, budget=BUDGET)
        await assert_as_free(before, slack=4 * MIB)
        assert len(descriptors()) <= len(files) + 2


def descriptors():
    return list(Path("/proc/self/fd").iterdir())


@pytest.mark.asyncio
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_worker_lost_in_mid_round(sign):
    hold = Hold(3)
    async with pair(hold, count=2) as (sync, source, workers, _):
        old = [await worker.facts() for worker in workers]
        lost, healthy = workers[-1], workers[:-1]
        began = time.monotonic()
        round_ = asyncio.create_task(sync.send_weights(version=1, budget=BUDGET))
        await until(hold.reached)
        lost.signal(sign)
        hold.released.set()
        with pytest.raises(aiosync.AiosyncError) as caught:
            await round_
        print(f"{sign!r}: {type(caught.value).__name__} after {time.monotonic() - began:.2f} s")
        assert time.monotonic() - began < BUDGET.total + BUDGET.cleanup + 1
        assert isinstance(caught.value, ConnectionError | TimeoutError)
        assert caught.value.replica == lost.url
        assert sync.state is State.FAILED
        for worker, before in zip(healthy, old, strict=False):
            await assert_old(worker, before)
        if sign == signal.SIGSTOP:
            lost.signal(signal.SIGCONT)
            await assert_old(lost, old[-1])
            await assert_next_round_works(sync, source, workers, 1)
        else:
            urls = [worker.url for worker in healthy]
            async with aiosync.connect(source, workers=urls, **SMALL) as again:
                await assert_next_round_works(again, source, healthy, 1)


@pytest.mark.asyncio
async def test_source_raises():
    class Mine(ValueError):
        pass

    def boom(index):
        if index == 2:
            raise Mine("gather failed")

    async with pair(boom) as (sync, source, workers, _):
        old = [await worker.facts() for worker in workers]
        with pytest.raises(Mine, match="gather failed"):
            await sync.send_weights(version=1, budget=BUDGET)
        await assert_old(workers[0], old[0])
        await assert_next_round_works(sync, source, workers, 1)


@pytest.mark.asyncio
async def test_update_call_fails_while_the_transmit_runs():
    hold = Hold(3)
    async with pair(hold, broken=True) as (sync, source, workers, middle):
        old = await workers[0].facts()
        middle.break_route("update_weights", "500", lambda: until(hold.reached))
        round_ = asyncio.create_task(sync.send_weights(version=1, budget=BUDGET))
        await until(hold.reached)
        asyncio.get_running_loop().call_later(0.1, hold.released.set)
        with pytest.raises(aiosync.RemoteError, match="no memory for down_proj"):
            await round_
        await assert_old(workers[0], old)
        middle.heal()
        await assert_next_round_works(sync, source, workers, 2)


@pytest.mark.asyncio
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_trainer_lost_in_mid_round(sign):
    async with replicas(1, lease=3.0) as (worker,):
        old = await worker.facts()
        args = (worker.url, "nccl", device_of(0))
        async with program("group_trainer.py", *args) as trainer:
            async with asyncio.timeout(INIT_S):
                assert await trainer.stdout.readline() == b"holding\n"
            began = time.monotonic()
            trainer.signal(sign)
            facts = await worker.wait_state("failed")
            print(f"trainer {sign!r}: the worker gave up after {time.monotonic() - began:.2f} s")
            assert facts["prints"] == old["prints"]
            assert facts["weights"] == "intact"
            trainer.signal(signal.SIGKILL)
        source = Paced(models.make("small", 1, device_of(0)))
        async with aiosync.connect(source, workers=[worker.url], **SMALL) as sync:
            await assert_next_round_works(sync, source, [worker], 1)


# -- init ----------------------------------------------------------------------------------------


class Slow(aiosync.HTTPVLLMWeightSyncClient):
    seconds = 60.0

    async def init_weight_transfer_engine(self, *args, **options):
        await asyncio.sleep(self.seconds)
        return await super().init_weight_transfer_engine(*args, **options)


@pytest.mark.asyncio
async def test_a_worker_that_never_joins_ends_in_time_and_the_others_are_free_again():
    source = Paced(models.make("small", 1, device_of(0)))
    async with replicas(2) as workers:
        never = Slow(workers[0].url)
        members = [aiosync.Member("never", never), aiosync.Member("other", workers[1].url)]
        info = aiosync.NCCLTrainerInitInfo(rank=0)
        cls = aiosync.NCCLTrainerWeightTransferEngine
        client = aiosync.FleetClient(members)
        async with cls.from_init_info(info, client=client, source=source, hub=None) as engine:
            began = time.monotonic()
            with pytest.raises(aiosync.PhaseTimeout) as caught:
                await engine.initialize(timeout=6)
            took = time.monotonic() - began
            print(f"a peer absent at init: {took:.2f} s; {caught.value}")
            assert took < 8
            assert caught.value.phase == "init"
            assert engine.state is State.FAILED
            never.seconds = 0
            await workers[1].wait_state("failed")
            await engine.initialize(timeout=40)
            await assert_next_round_works(engine, source, workers, 1)
