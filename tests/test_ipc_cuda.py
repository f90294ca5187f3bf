"""Backend ipc over a GPU's memory: trainer and workers as processes of their own.

Those that look for lost memory see the whole GPU's: nobody else may take some of it and keep it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import models
import pytest
import torch
from everything import Everything
from gpu_memory import MIB, assert_as_free, free_memory
from paced import Hold, Paced
from processes import lines, program, replica
from torch import nn

import aiosync
from aiosync import Budget, State
from transports.device_memory import CudaMemory
from transports.digest import ChunkDigest
from transports.pointer_digest import PointerDigest, pointer_digests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(50),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BUDGET = Budget(total=20.0, stall=5.0, cleanup=1.0)
ADDED = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int16}
DEVICE = "cuda:0"
WORKERS = f"cuda:{1 % max(torch.cuda.device_count(), 1)}"
"""On the other GPU, where there is one."""


@asynccontextmanager
async def replicas(count=1, **options):
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                replica(**({"seed": 2 + i, "device": WORKERS} | options))
            )
            for i in range(count)
        ]


def changed(module, version):
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_contiguous() and parameter.dtype in ADDED:
                parameter.add_(version)


async def until(event, seconds=30.0):
    async with asyncio.timeout(seconds):
        while not event.is_set():
            await asyncio.sleep(0.005)


async def assert_same(workers, model, version):
    for worker in workers:
        facts = await worker.facts()
        assert facts["prints"] == models.fingerprint(model)
        assert (facts["version"], facts["weights"]) == (version, "intact")


def statistics(sync):
    return sync.sender.statistics()


# -- rounds ------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "count", "sink", "verify"),
    [
        ("odd", 2, "in_place", "digest"),
        ("tied", 1, "staged", "digest"),
        ("large", 1, "staged", "digest"),
        ("large", 2, "in_place", "counts"),
        ("odd", 1, "layerwise", "digest"),
    ],
)
async def test_rounds_arrive_bit_equal(kind, count, sink, verify):
    model = models.make(kind, 1, DEVICE)
    async with replicas(count, kind=kind, sink=sink, verify=verify) as workers:
        urls = [worker.url for worker in workers]
        async with aiosync.connect(model, workers=urls) as sync:
            for version in (1, 2, 3):
                changed(model, version)
                report = await sync.send_weights(version=version, budget=BUDGET)
                assert report.outcome == "committed"
                assert report.verified == (verify == "digest")
                await assert_same(workers, model, version)
        for worker in workers:
            assert (await worker.wait_state("idle"))["version"] == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("device", [DEVICE, "cpu"])
@pytest.mark.parametrize("sink", ["in_place", "staged"])
async def test_every_dtype_and_layout_arrives_as_it_was(device, sink):
    source = Everything(device)
    async with replicas(1, kind="everything", sink=sink) as (worker,):
        async with aiosync.connect(
            source, workers=[worker.url], packed_buffer_size_bytes=1 << 13
        ) as sync:
            for version in (1, 2):
                await sync.send_weights(version=version, budget=BUDGET)
                assert (await worker.facts())["prints"] == models.fingerprint(source.tensors)


class Resident(nn.Module):
    """Every dtype as a parameter: views of one storage, strided, expanded, tied, on the CPU."""

    def __init__(self):
        super().__init__()
        everything = Everything(DEVICE)
        for at, tensor in enumerate(everything.tensors.values()):
            if tensor.is_conj():
                continue
            self.add(f"p{at}", tensor)
        self.add("tied", self.p3)
        self.add("on_cpu", torch.arange(40.0))
        self.add("turned_on_cpu", torch.arange(40.0).view(8, 5).t())

    def add(self, name, tensor):
        if not isinstance(tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=False)
        self.register_parameter(name, tensor)


@pytest.mark.asyncio
async def test_parameters_of_every_kind_are_read_where_they_are():
    model = Resident()
    async with replicas(1, kind="resident", sink="in_place") as (worker,):
        async with aiosync.connect(model, workers=[worker.url]) as sync:
            for version in (1, 2):
                changed(model, version)
                await sync.send_weights(version=version, budget=BUDGET)
                await assert_same([worker], model, version)
            assert statistics(sync)["exported"] > 1


@pytest.mark.asyncio
async def test_trainer_on_the_gpu_worker_on_the_cpu():
    model = models.make("odd", 1, DEVICE)
    async with replicas(1, kind="odd", device="cpu") as workers:
        async with aiosync.connect(model, workers=[workers[0].url]) as sync:
            for version in (1, 2):
                changed(model, version)
                await sync.send_weights(version=version, budget=BUDGET)
                await assert_same(workers, model, version)


@pytest.mark.asyncio
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_a_trainer_uses_the_gpu_that_its_thread_has_chosen():
    model = models.make("odd", 1, "cuda:1")
    async with replicas(1, kind="odd", device="cuda:1") as (worker,):
        with torch.cuda.device(1):
            async with aiosync.connect(model, workers=[worker.url]) as sync:
                await sync.send_weights(version=1, budget=BUDGET)
                await assert_same([worker], model, 1)
                assert sync._memory.device == torch.device("cuda:1")


async def sent_without_a_gpu(url):
    """A trainer process that sees no GPU sends two versions; what it sent."""
    trainer = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).parent / "support" / "ipc_trainer.py"),
        url,
        "cpu",
        "twice",
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        async with asyncio.timeout(40):
            said, _ = await trainer.communicate()
    finally:
        if trainer.returncode is None:
            trainer.kill()
            await trainer.wait()
    facts = json.loads(said)
    assert not facts["sees_gpu"]
    return facts["prints"]


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["staged", "in_place", "layerwise"])
async def test_a_trainer_that_sees_no_gpu_sends_through_the_hosts_memory(sink):
    async with replicas(1, kind="odd", sink=sink) as (worker,):
        for _ in range(2):
            sent = await sent_without_a_gpu(worker.url)
            facts = await worker.wait_state("idle")
            assert facts["prints"] == sent
            assert (facts["version"], facts["weights"]) == (2, "intact")
            # The next trainer is on the GPU: the bytes come another way.
            model = models.make("odd", 3, DEVICE)
            async with aiosync.connect(model, workers=[worker.url]) as sync:
                await sync.send_weights(version=1, budget=BUDGET)
                await assert_same([worker], model, 1)


@pytest.mark.asyncio
async def test_workers_on_gpu_and_cpu_are_refused_by_name():
    model = models.make("small", 1, DEVICE)
    async with replicas(1) as (gpu,), replicas(1, device="cpu") as (cpu,):
        with pytest.raises(aiosync.ProtocolMismatch, match="on the CPU") as caught:
            async with aiosync.connect(model, workers=[gpu.url, cpu.url]):
                pass
        assert cpu.url in str(caught.value)


@pytest.mark.asyncio
async def test_what_training_has_queued_is_what_arrives():
    """The step's kernels are still running when the round begins, on a stream of their own."""
    model = models.make("large", 1, DEVICE)
    stream = torch.cuda.Stream()
    async with replicas(1, kind="large") as workers:
        async with aiosync.connect(model, workers=[workers[0].url]) as sync:
            for version in (1, 2):
                with torch.cuda.stream(stream), torch.no_grad():
                    torch.cuda._sleep(200_000_000)  # a tenth of a second or so
                    for parameter in model.parameters():
                        parameter.add_(version)
                    await sync.send_weights(version=version, budget=BUDGET)
                await assert_same(workers, model, version)


@pytest.mark.asyncio
async def test_changed_storage_is_exported_again_and_the_old_one_let_go():
    model = models.make("large", 1, DEVICE)
    async with replicas(1, kind="large") as workers:
        async with aiosync.connect(model, workers=[workers[0].url]) as sync:
            await sync.send_weights(version=1, budget=BUDGET)
            table = statistics(sync)["table"]
            await sync.send_weights(version=2, budget=BUDGET)
            assert statistics(sync)["table"] == table
            model[3].weight.data = torch.randn_like(model[3].weight)
            await sync.send_weights(version=3, budget=BUDGET)
            await assert_same(workers, model, 3)
            assert statistics(sync)["table"] != table
            model[5].weight = nn.Parameter(torch.randn_like(model[5].weight))
            gc.collect()
            torch.cuda.empty_cache()  # what was exported may be freed now
            fill = [torch.randn(1024, 1024, device=DEVICE) for _ in range(64)]
            await sync.send_weights(version=4, budget=BUDGET)
            await assert_same(workers, model, 4)
            del fill


# -- memory ----------------------------------------------------------------------------------------


def descriptors(pid="self"):
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.asyncio
async def test_ten_rounds_leak_nothing():
    model = models.make("large", 1, DEVICE)
    async with replicas(1, kind="large") as workers:
        pid = workers[0].process.pid
        async with aiosync.connect(model, workers=[workers[0].url]) as sync:
            for version in (1, 2):
                await sync.send_weights(version=version, budget=BUDGET)
            before = await free_memory(), descriptors(), descriptors(pid)
            for version in range(3, 13):
                await sync.send_weights(version=version, budget=BUDGET)
            await assert_as_free(before[0], slack=4 * MIB)
            assert descriptors() <= before[1] + 2
            assert descriptors(pid) <= before[2] + 2
            await assert_same(workers, model, 12)


@pytest.mark.asyncio
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_lost_reader_costs_the_round_and_no_memory(sign):
    source = Paced(models.make("large", 1, DEVICE))
    hold = Hold(3)
    async with replicas(2, kind="large") as workers:
        urls = [worker.url for worker in workers]
        async with aiosync.connect(source, workers=urls) as sync:
            await sync.send_weights(version=1, budget=BUDGET)
            before = await free_memory()
            source.before = hold
            round_ = asyncio.create_task(sync.send_weights(version=2, budget=BUDGET))
            await until(hold.reached)
            workers[1].signal(sign)
            hold.released.set()
            with pytest.raises(aiosync.AiosyncError) as caught:
                await round_
            assert caught.value.replica == workers[1].url
            workers[1].signal(signal.SIGCONT)
        source.before = lambda _: None
        if sign == signal.SIGSTOP:
            await workers[1].wait_state("initialized", "failed", "idle")
        await workers[1].kill()
        async with aiosync.connect(source, workers=urls[:1]) as sync:
            changed(source.module, 1)
            await sync.send_weights(version=3, budget=BUDGET)
            await assert_same(workers[:1], source.module, 3)
        await assert_as_free(before, slack=4 * MIB)


@pytest.mark.asyncio
async def test_a_killed_trainer_leaves_no_memory_with_the_worker():
    """Between rounds: the worker has the trainer's memory mapped, which keeps it alive."""
    async with replicas(1, kind="large", lease=3.0) as (worker,):
        await worker.facts()
        before = await free_memory()
        async with program("ipc_trainer.py", worker.url, DEVICE, "idle") as trainer:
            async with asyncio.timeout(40):
                assert await trainer.stdout.readline() == b"sent\n"
            held = await free_memory()
            assert held <= before - 64 * MIB
            await trainer.kill()
            async with asyncio.timeout(20):
                # Its model is 64 MiB; the worker's staging memory stays.
                while await free_memory() < held + 64 * MIB:
                    await asyncio.sleep(0.05)
        assert (await worker.facts())["weights"] == "intact"


@pytest.mark.asyncio
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_trainer_lost_in_mid_round(sign):
    async with replicas(1, lease=3.0) as (worker,):
        old = await worker.facts()
        async with program("ipc_trainer.py", worker.url, DEVICE, "hold") as trainer:
            async with asyncio.timeout(40):
                assert await trainer.stdout.readline() == b"holding\n"
            trainer.signal(sign)
            facts = await worker.wait_state("failed", "initialized")
            assert facts["prints"] == old["prints"]
            assert facts["weights"] == "intact"
            trainer.signal(signal.SIGKILL)
        model = models.make("small", 1, DEVICE)
        async with aiosync.connect(model, workers=[worker.url]) as sync:
            await sync.send_weights(version=1, budget=BUDGET)
            await assert_same([worker], model, 1)


@pytest.mark.asyncio
async def test_cancelled_rounds_end_in_time_and_the_next_one_works():
    source = Paced(models.make("large", 1, DEVICE))
    async with replicas(1, kind="large") as workers:
        async with aiosync.connect(
            source, workers=[workers[0].url], packed_buffer_size_bytes=4 * MIB
        ) as sync:
            await sync.send_weights(version=1, budget=BUDGET)
            before = await free_memory()
            for number in range(10):
                hold = source.before = Hold(3 + number)
                round_ = asyncio.create_task(sync.send_weights(version=2 + number, budget=BUDGET))
                await until(hold.reached)
                began = time.monotonic()
                round_.cancel()
                hold.released.set()
                await asyncio.wait([round_])
                assert round_.cancelled()
                assert time.monotonic() - began < BUDGET.cleanup + 1
            source.before = lambda _: None
            changed(source.module, 1)
            await sync.send_weights(version=50, budget=BUDGET)
            await assert_same(workers, source.module, 50)
            assert sync.state is State.INITIALIZED
            await assert_as_free(before, slack=8 * MIB)


# -- the device's own calls ------------------------------------------------------------------------


def test_expandable_segments_are_refused_with_the_setting():
    code = """
import torch
from transports.device_memory import CudaMemory
from statemachines.errors import Validation
memory = CudaMemory(torch.device("cuda", 0))
tensor = torch.zeros(1 << 22, device="cuda")
try:
    memory.export(memory.allocation(tensor.data_ptr()).base)
except Validation as error:
    print(error, error.next_step)
"""
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | setting,
        capture_output=True,
        text=True,
        timeout=40,
        check=True,
    )
    assert "expandable_segments:False" in result.stdout, result.stdout + result.stderr


def test_allocations_are_told_apart():
    memory = CudaMemory(torch.device("cuda", 0))
    first = memory.take(4 * MIB)
    known = memory.allocation(first + 100)
    assert (known.base, known.nbytes) == (first, 4 * MIB)
    assert len(memory.export(first)) == 64
    memory.give(first)
    second = memory.take(4 * MIB)
    assert memory.allocation(second).identity != known.identity
    memory.bytes_at(second, 10).fill_(7)
    assert memory.bytes_at(second + 9, 1).tolist() == [7]
    memory.give(second)


def test_a_torn_handle_is_refused():
    memory = CudaMemory(torch.device("cuda", 0))
    with pytest.raises(aiosync.Validation, match="cannot be mapped"):
        memory.open(b"\1" * 64, "elsewhere")


def test_the_kernel_computes_the_defined_digest():
    device = torch.device("cuda", 0)
    assert pointer_digests(device)
    data = torch.randint(0, 256, ((33 << 20) + 5,), dtype=torch.uint8, device=device)
    cuts = [(0, 0), (0, 1), (3, 10), (8, 8200), (16, 4112), (1, 9 << 20), (0, len(data))]
    pieces = [data[a:b] for a, b in cuts]
    digest = PointerDigest([len(piece) for piece in pieces], device)
    found = digest.values([piece.data_ptr() for piece in pieces]).tolist()
    for piece, value in zip(pieces, found, strict=True):
        known = ChunkDigest("wsum64")
        known.update(piece.cpu())
        assert value % 2**64 == known.value()


# -- a stock vLLM --------------------------------------------------------------------------------


@asynccontextmanager
async def stock(device=0):
    """`ipc_raw.py` as a process, and its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).parent / "support" / "ipc_raw.py"),
        str(device),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(40):
            line = await process.stdout.readline()
        yield line.decode().strip()
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def said_by(url):
    async with aiohttp.ClientSession() as session, session.get(f"{url}/prints") as reply:
        return await reply.json()


@pytest.mark.asyncio
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["large", "everything"])
async def test_a_stock_vllm_understands_our_handles(packed, kind):
    if kind == "everything":
        source = Everything(DEVICE)
        order = sorted(source.tensors, key=lambda name: -source.tensors[name].itemsize)
        source.tensors = {name: source.tensors[name] for name in order}  # its alignment rule
        tensors, limit = source.tensors, 1 << 17
    else:
        source = models.make("large", 1, DEVICE)
        tensors, limit = source, 9 * MIB
    async with stock() as url:
        client = aiosync.HTTPVLLMWeightSyncClient(url, allow_pickled_handles=True)
        async with aiosync.connect(
            source,
            workers=[client],
            backend="ipc",
            packed=packed,
            packed_buffer_size_bytes=limit,
        ) as sync:
            for version in (1, 2):
                if kind == "large":
                    changed(source, version)
                report = await sync.send_weights(version=version, budget=BUDGET)
                assert report.outcome == "committed"
                facts = await said_by(url)
                assert facts["prints"] == models.fingerprint(tensors)
                assert facts["calls"][-1] == f"finish {version}"
                if packed:
                    assert 0 < facts["biggest"] <= limit
                else:
                    assert facts["calls"].count(f"update {len(facts['prints'])}") == version
            before = await free_memory()
            for version in range(3, 6):
                await sync.send_weights(version=version, budget=BUDGET)
            await assert_as_free(before, slack=8 * MIB)


@pytest.mark.asyncio
async def test_a_stock_vllm_that_fails_is_heard():
    class Wrong(Everything):
        def iter_full(self):
            yield from self.tensors.items()

    source = Wrong(DEVICE)
    async with stock() as url:
        client = aiosync.HTTPVLLMWeightSyncClient(url, allow_pickled_handles=True)
        async with aiosync.connect(source, workers=[client], backend="ipc", packed=True) as sync:
            with pytest.raises(aiosync.Validation, match="itemsize"):
                await sync.send_weights(version=1, budget=BUDGET)
        plain = aiosync.HTTPVLLMWeightSyncClient(url)
        with pytest.raises(aiosync.Validation, match="pickled") as caught:
            async with aiosync.connect(source, workers=[plain], backend="ipc"):
                pass
        assert "allow_pickled_handles" in caught.value.next_step


async def by_ranks(url, tmp_path, devices, *flags):
    """A trainer rank on each of `devices` sends twice; what each said."""
    async with AsyncExitStack() as stack:
        ranks = [
            await stack.enter_async_context(
                program(
                    "ipc_rank.py", url, "--rank", str(rank), "--size", str(len(devices)),
                    "--store", str(tmp_path / "store"), "--device", device, "--kind", "large",
                    "--limit", str(9 * MIB), *flags,
                )
            )
            for rank, device in enumerate(devices)
        ]  # fmt: skip
        return await asyncio.gather(*(lines(process, 45) for process in ranks))


async def assert_sent_twice(url, said):
    for rank in said:
        assert [word["outcome"] for word in rank[1:]] == ["committed"] * 2, rank
    facts = await said_by(url)
    assert facts["prints"] == said[0][-1]["prints"]
    assert facts["calls"][-1] == "finish 2"


@pytest.mark.asyncio
@pytest.mark.parametrize("flags", [[], ["--packed"]], ids=["unpacked", "packed"])
async def test_of_the_ranks_on_a_gpu_the_last_one_exports_to_a_stock_vllm(flags, tmp_path):
    """Rank 0 posts what rank 1 exported: also with one GPU the memory is another process's."""
    async with stock() as url:
        await assert_sent_twice(url, await by_ranks(url, tmp_path, [DEVICE, DEVICE], *flags))


@pytest.mark.asyncio
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("flags", [[], ["--packed"]], ids=["unpacked", "packed"])
@pytest.mark.parametrize("worker", [0, 1])
async def test_a_stock_vllm_gets_the_handles_of_the_rank_on_its_gpu(worker, flags, tmp_path):
    async with stock(worker) as url:
        await assert_sent_twice(url, await by_ranks(url, tmp_path, ["cuda:0", "cuda:1"], *flags))
