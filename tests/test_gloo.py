"""The gloo backend over real replica processes: whole rounds, and everything that ends one."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import cached_property
from pathlib import Path

import models
import pytest
import torch
from limits import PATIENT, SLACK
from paced import Hold, Paced
from processes import program, replica
from proxy import proxy

import aiosync
from aiosync import Budget, State

BUDGET = Budget(total=6.0, stall=2.0, cleanup=1.0)  # of rounds that only the clock ends
SMALL = {"backend": "gloo", "buffer_size_bytes": 4096}


async def until(event, seconds=20.0):
    """Wait for a threading.Event without blocking the loop."""
    async with asyncio.timeout(seconds):
        while not event.is_set():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def replicas(count, **options):
    """Worker processes of the gloo backend, no two alike."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        yield [
            await enter(replica(**({"backend": "gloo", "seed": 2 + i} | options)))
            for i in range(count)
        ]


def changed(module, version):
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dtype.is_floating_point:
                parameter.add_(version)


async def assert_next_round_works(sync, source, workers, version):
    source.before = lambda _: None
    changed(source.module, 1)
    report = await sync.send_weights(version=version, budget=PATIENT)
    assert report.outcome == "committed"
    for worker in workers:
        facts = await worker.facts()
        assert facts["prints"] == models.fingerprint(source.module)
        assert facts["version"] == version
    assert sync.state is State.INITIALIZED


async def assert_old(worker, old):
    facts = await worker.wait_state("initialized", "failed", "idle")
    assert facts["prints"] == old["prints"]
    assert facts["weights"] == "intact"


# -- rounds ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "count", "sink", "verify"),
    [
        ("small", 1, "staged", "digest"),
        ("odd", 3, "in_place", "digest"),
        ("odd", 1, "in_place", "counts"),
        ("tied", 3, "staged", "digest"),
        ("large", 1, "in_place", "counts"),
        ("large", 3, "staged", "digest"),
    ],
)
@pytest.mark.parametrize("buffer", [1024, 8 << 20])
async def test_three_rounds_arrive_bit_equal(kind, count, sink, verify, buffer):
    if kind == "large":
        buffer = max(buffer, 1 << 18)  # 250 broadcasts a round are enough
    model = models.make(kind, seed=1)
    async with replicas(count, kind=kind, sink=sink, verify=verify) as workers:
        urls = [worker.url for worker in workers]
        options = {"backend": "gloo", "buffer_size_bytes": buffer}
        async with aiosync.connect(model, workers=urls, **options) as sync:
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


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]


class Everything(aiosync.WeightSource):
    """Each dtype as a scalar, empty, odd, and large; strided, expanded; all bit patterns."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.tensors = {}
        for dtype in DTYPES:
            for shape in [(), (0, 7), (7,), (3, 5), (500, 1001)]:
                count = torch.Size(shape).numel() * dtype.itemsize
                top = 2 if dtype == torch.bool else 256  # other bits are no bool
                raw = torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator)
                name = f"{dtype}.{'x'.join(map(str, shape))}"
                self.tensors[name] = raw.view(dtype).view(shape)
        whole = torch.arange(120.0)
        self.tensors["turned"] = whole.view(10, 12).t()
        self.tensors["strided"] = whole[::3]
        self.tensors["expanded"] = torch.arange(5.0)[:, None].expand(5, 4)
        self.tensors["large turned"] = torch.randn(1001, 1024, generator=generator).t()
        self.tensors["conjugated"] = torch.randn(4, 3, dtype=torch.complex64).conj()

    @cached_property
    def metadata(self):
        return [
            aiosync.ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        ]

    def iter_full(self):
        yield from self.tensors.items()


@pytest.mark.fault("A-LAYOUT-2", "A-LAYOUT-3", "A-LAYOUT-5", "A-LAYOUT-6", "A-LAYOUT-8")
@pytest.mark.asyncio
@pytest.mark.parametrize("buffer", [1 << 16, 1 << 20])
async def test_every_dtype_and_layout_arrives_as_it_was(buffer):
    from aiosync.testing import DirectClient

    source = Everything()
    model = {
        name: torch.zeros(tensor.shape, dtype=tensor.dtype)
        for name, tensor in source.tensors.items()
    }
    config = aiosync.WeightTransferConfig("gloo")
    create = aiosync.WeightTransferEngineFactory.create_engine
    options = {"backend": "gloo", "buffer_size_bytes": buffer}
    async with create(config, None, None, model) as engine:
        clients = [DirectClient(engine)]
        async with aiosync.connect(source, workers=clients, **options) as sync:
            await sync.send_weights(version=1, timeout=30)
    for name, tensor in source.tensors.items():
        sent = tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)
        assert model[name].shape == tensor.shape
        assert torch.equal(model[name].view(-1).view(torch.uint8), sent), name


# -- rounds that end early -------------------------------------------------------------------------


@asynccontextmanager
async def pair(before=lambda _: None, *, count=1, broken=False, **options):
    """A paced source and a connected engine over replicas, the first behind a proxy if asked."""
    source = Paced(models.make("small", seed=1), before)
    async with replicas(count) as workers, proxy(workers[0].url) as middle:
        urls = [worker.url for worker in workers]
        if broken:
            urls[0] = middle.url
        async with aiosync.connect(source, workers=urls, **SMALL, **options) as sync:
            yield sync, source, workers, middle


@pytest.mark.fault("A-CANCEL-1")
@pytest.mark.asyncio
@pytest.mark.parametrize(("at", "count"), [(0, 1), (3, 3), (6, 1)], ids=["first", "middle", "last"])
async def test_cancelled(at, count):
    hold = Hold(at)
    async with pair(hold, count=count) as (sync, source, workers, _):
        old = [await worker.facts() for worker in workers]
        round_ = asyncio.create_task(sync.send_weights(version=1, budget=PATIENT))
        await until(hold.reached)
        began = time.monotonic()
        round_.cancel()
        asyncio.get_running_loop().call_later(0.1, hold.released.set)
        await asyncio.wait([round_])
        assert round_.cancelled()
        assert time.monotonic() - began < PATIENT.cleanup + SLACK
        for worker, before in zip(workers, old, strict=True):
            await assert_old(worker, before)
        await assert_next_round_works(sync, source, workers, 1)


@pytest.mark.fault("A-HANG-9")
@pytest.mark.asyncio
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("count", [1, 3])
async def test_worker_lost_in_mid_round(sign, count):
    hold = Hold(3)
    async with pair(hold, count=count) as (sync, source, workers, _):
        old = [await worker.facts() for worker in workers]
        lost, healthy = workers[-1], workers[:-1]
        began = time.monotonic()
        round_ = asyncio.create_task(sync.send_weights(version=1, budget=BUDGET))
        await until(hold.reached)
        lost.signal(sign)
        hold.released.set()
        with pytest.raises(aiosync.AiosyncError) as caught:
            await round_
        assert time.monotonic() - began < BUDGET.total + BUDGET.cleanup + SLACK
        assert isinstance(caught.value, ConnectionError | TimeoutError)
        assert caught.value.replica == lost.url
        assert sync.state is State.FAILED
        for worker, before in zip(healthy, old, strict=False):
            await assert_old(worker, before)
        if sign == signal.SIGSTOP:
            lost.signal(signal.SIGCONT)
            await assert_old(lost, old[-1])
            await assert_next_round_works(sync, source, workers, 1)
        elif healthy:
            urls = [worker.url for worker in healthy]
            async with aiosync.connect(source, workers=urls, **SMALL) as again:
                await assert_next_round_works(again, source, healthy, 1)


@pytest.mark.fault("A-HANG-2")
@pytest.mark.asyncio
@pytest.mark.parametrize("at", [0, 2, 6], ids=["first", "middle", "after-last"])
async def test_source_raises(at):
    class Mine(ValueError):
        pass

    def boom(index):
        if index == at:
            raise Mine("gather failed")

    async with pair(boom, count=2) as (sync, source, workers, _):
        old = [await worker.facts() for worker in workers]
        with pytest.raises(Mine, match="gather failed"):
            await sync.send_weights(version=1, budget=PATIENT)
        assert source.closed == 1
        for worker, before in zip(workers, old, strict=True):
            await assert_old(worker, before)
        await assert_next_round_works(sync, source, workers, 1)


@pytest.mark.fault("A-HANG-1")
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("how", "at"),
    [("500", 0), ("500", 3), ("500", 6), ("reset", 0), ("reset", 6), ("hang", 3)],
)
async def test_update_call_fails_while_the_transmit_runs(how, at):
    hold = Hold(at)
    async with pair(hold, count=2, broken=True) as (sync, source, workers, middle):
        old = [await worker.facts() for worker in workers]
        middle.break_route("update_weights", how, lambda: until(hold.reached))
        budget = BUDGET if how == "hang" else PATIENT
        began = time.monotonic()
        round_ = asyncio.create_task(sync.send_weights(version=1, budget=budget))
        await until(hold.reached)
        asyncio.get_running_loop().call_later(0.1, hold.released.set)
        with pytest.raises(aiosync.AiosyncError) as caught:
            await round_
        assert time.monotonic() - began < BUDGET.total + BUDGET.cleanup + SLACK
        if how == "500":
            assert "no memory for down_proj" in str(caught.value)
        if how != "hang":
            assert caught.value.replica == middle.url
        hold.released.set()
        for worker, before in zip(workers, old, strict=True):
            await assert_old(worker, before)
        middle.heal()
        await assert_next_round_works(sync, source, workers, 2)


@pytest.mark.fault("A-RDZV-5")
@pytest.mark.asyncio
async def test_a_restarted_worker_is_met_anew(tmp_path):
    path = str(tmp_path / "worker.sock")
    source = Paced(models.make("small", seed=1))
    async with replicas(1, path=path) as (worker,):
        async with aiosync.connect(source, workers=[worker.url], **SMALL) as sync:
            await assert_next_round_works(sync, source, [worker], 1)
            await worker.kill()
            async with replicas(1, path=path) as (fresh,):
                await assert_next_round_works(sync, source, [fresh], 2)


@pytest.mark.fault("A-HANG-8")
@pytest.mark.asyncio
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_trainer_lost_in_mid_round(sign):
    async with replicas(1) as (worker,):
        old = await worker.facts()
        async with program("group_trainer.py", worker.url) as trainer:
            async with asyncio.timeout(30):
                assert await trainer.stdout.readline() == b"holding\n"
            trainer.signal(sign)
            if sign == signal.SIGKILL:
                await assert_old(worker, old)  # long before the lease
            else:
                with pytest.raises(aiosync.Busy):  # it has an owner, which may come back
                    async with aiosync.connect(
                        models.make("small", 1), workers=[worker.url], **SMALL
                    ):
                        pass
            trainer.signal(signal.SIGKILL)
            await worker.wait_state("failed")
        source = Paced(models.make("small", seed=1))
        async with aiosync.connect(source, workers=[worker.url], **SMALL) as sync:
            await assert_next_round_works(sync, source, [worker], 1)


# -- init ------------------------------------------------------------------------------------------


class Slow(aiosync.HTTPVLLMWeightSyncClient):
    """Hands the init info on after `seconds`."""

    seconds = 1.0

    async def init_weight_transfer_engine(self, *args, **options):
        await asyncio.sleep(self.seconds)
        return await super().init_weight_transfer_engine(*args, **options)


def engine_for(source, members, **options):
    info = aiosync.GlooTrainerInitInfo(rank=0, **options)
    client = aiosync.FleetClient(members)
    cls = aiosync.GlooTrainerWeightTransferEngine
    return cls.from_init_info(info, client=client, source=source, hub=None)


@pytest.mark.fault("A-HANG-5")
@pytest.mark.asyncio
async def test_a_worker_that_joins_late_is_waited_for():
    source = Paced(models.make("small", seed=1))
    async with replicas(2) as workers:
        members = [aiosync.Member("slow", Slow(workers[0].url)), workers[1].url]
        async with engine_for(source, members) as engine:
            await engine.initialize(timeout=20)
            await assert_next_round_works(engine, source, workers, 1)


@pytest.mark.fault("A-HANG-5", "A-HANG-7")
@pytest.mark.asyncio
async def test_a_worker_that_never_joins_is_named_and_the_others_are_free_again():
    source = Paced(models.make("small", seed=1))
    async with replicas(2) as workers:
        never = Slow(workers[0].url)
        never.seconds = 60
        members = [aiosync.Member("never", never), aiosync.Member("other", workers[1].url)]
        async with engine_for(source, members) as engine:
            began = time.monotonic()
            with pytest.raises(aiosync.PhaseTimeout) as caught:
                await engine.initialize(timeout=2)
            assert time.monotonic() - began < 2 + SLACK
            assert (caught.value.replica, caught.value.phase) == ("never", "init")
            assert engine.state is State.FAILED
            await workers[1].wait_state("failed")
            never.seconds = 0
            await engine.initialize(timeout=20)
            await assert_next_round_works(engine, source, workers, 1)


@pytest.mark.asyncio
async def test_a_worker_that_is_not_there_is_named(tmp_path):
    source = Paced(models.make("small", seed=1))
    absent = f"unix://{tmp_path}/absent.sock"
    async with replicas(1) as workers:
        with pytest.raises(aiosync.PeerLost) as caught:
            async with aiosync.connect(source, workers=[workers[0].url, absent], **SMALL):
                pass
        assert caught.value.replica == absent
        async with aiosync.connect(source, workers=[workers[0].url], **SMALL) as sync:
            await assert_next_round_works(sync, source, workers, 1)


@pytest.mark.fault("A-HANG-5")
@pytest.mark.asyncio
async def test_an_init_call_that_fails_ends_the_join_and_frees_the_port():
    source = Paced(models.make("small", seed=1))
    async with replicas(2) as workers, proxy(workers[0].url) as middle:

        async def at_once():
            return

        with closing(socket.create_server(("127.0.0.1", 0))) as probe:
            port = probe.getsockname()[1]
        middle.break_route("init_weight_transfer_engine", "500", at_once)
        urls = [middle.url, workers[1].url]
        async with engine_for(source, urls, master_port=port) as engine:
            with pytest.raises(aiosync.RemoteError, match="no memory for down_proj") as caught:
                await engine.initialize(timeout=20)
            assert caught.value.replica == middle.url
            middle.heal()
            await engine.initialize(timeout=20)
            await assert_next_round_works(engine, source, workers, 1)
            await engine.shutdown()
            with closing(socket.create_server(("127.0.0.1", port))):
                pass


@pytest.mark.fault("A-RDZV-2")
@pytest.mark.asyncio
async def test_a_taken_port_is_refused_before_a_worker_hears_of_it():
    source = Paced(models.make("small", seed=1))
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        async with replicas(1) as workers:
            began = time.monotonic()
            with pytest.raises(aiosync.Validation, match=f"port {port}"):
                async with aiosync.connect(
                    source, workers=[workers[0].url], master_port=port, **SMALL
                ):
                    pass
            assert time.monotonic() - began < SLACK
            assert (await workers[0].facts())["state"] == "idle"


@pytest.mark.fault("A-RDZV-1")
@pytest.mark.asyncio
@pytest.mark.parametrize("address", ["[::1]", "localhost"])
async def test_forms_of_the_master_address(address):
    source = Paced(models.make("small", seed=1))
    async with replicas(2) as workers:
        urls = [worker.url for worker in workers]
        options = SMALL | {"master_address": address}
        async with aiosync.connect(source, workers=urls, **options) as sync:
            await assert_next_round_works(sync, source, workers, 1)


@pytest.mark.fault("A-RDZV-6")
@pytest.mark.asyncio
async def test_a_wildcard_as_master_address_is_refused():
    async with replicas(1) as workers:
        options = SMALL | {"master_address": "0.0.0.0"}
        with pytest.raises(aiosync.Validation, match="wildcard"):
            async with aiosync.connect(
                models.make("small", 1), workers=[workers[0].url], **options
            ):
                pass


@pytest.mark.fault("A-RDZV-8")
@pytest.mark.asyncio
async def test_backends_that_differ_are_refused_with_both_names():
    async with replicas(1, backend="ipc") as workers:
        began = time.monotonic()
        with pytest.raises(aiosync.ProtocolMismatch, match=r"'ipc'.*'gloo'"):
            async with aiosync.connect(
                models.make("small", 1), workers=[workers[0].url], backend="gloo"
            ):
                pass
        assert time.monotonic() - began < SLACK
        assert (await workers[0].facts())["state"] == "idle"


@pytest.mark.fault("A-RDZV-2")
@pytest.mark.asyncio
async def test_two_trainers_on_one_host_at_once():
    async def train(worker, seed):
        source = Paced(models.make("small", seed))
        async with aiosync.connect(source, workers=[worker.url], **SMALL) as sync:
            for version in range(1, 6):
                await assert_next_round_works(sync, source, [worker], version)

    async with replicas(2) as workers, asyncio.TaskGroup() as group:
        for seed, worker in enumerate(workers):
            group.create_task(train(worker, seed))


def descriptors(pid="self"):
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.fault("A-RDZV-2", "A-CANCEL-7")
@pytest.mark.asyncio
async def test_twenty_cycles_of_init_and_close_leave_no_descriptors():
    source = Paced(models.make("small", seed=1))
    async with replicas(1) as (worker,):
        pid = worker.process.pid

        async def cycle():
            async with aiosync.connect(source, workers=[worker.url], **SMALL):
                pass
            await worker.wait_state("idle")

        await cycle()
        await asyncio.sleep(0.2)
        before = descriptors(), descriptors(pid)
        for _ in range(20):
            await cycle()
        async with asyncio.timeout(5):
            while descriptors() > before[0] or descriptors(pid) > before[1]:
                await asyncio.sleep(0.02)
