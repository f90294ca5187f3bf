"""Rounds whose workers copy a module's parameters from the trainer's own memory."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial

import models
import msgspec
import pytest
import torch
from limits import PATIENT
from processes import lines, program, replica
from torch import nn

import aiosync
from aiosync import ModuleSource, PeerLost, RoundCancelled, Validation, WeightTransferConfig
from aiosync.testing import DirectClient
from transports.foreign_memory import ForeignMemory

pytestmark = pytest.mark.asyncio

SMALL = {"packed_buffer_size_bytes": 4096}  # so that a round has several chunks


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.Linear(30, 7))


def nbytes_of(model):
    return sum(parameter.nbytes for parameter in model.parameters())


def step(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def same(worker, model):
    theirs, ours = worker.model.state_dict(), model.state_dict()
    return all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())


@asynccontextmanager
async def trained(source, *, workers=1, model=net, sink="staged", verify="digest", **options):
    """The trainer's engine over shared memory, and the workers' in the same process."""
    config = WeightTransferConfig(backend="ipc", sink=sink, verify=verify)
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                aiosync.IPCWeightTransferEngine(config, None, "cpu", model(), name=f"w{number}")
            )
            for number in range(workers)
        ]
        clients = [DirectClient(engine, name=engine.name) for engine in engines]
        sync = await stack.enter_async_context(aiosync.connect(source, workers=clients, **options))
        yield sync, *engines


def went(sync):
    """Bytes that were read where they are, and bytes that were copied into a buffer."""
    seen = sync.sender.statistics()
    return seen["bytes_in_place"], seen["bytes_copied"]


@contextmanager
def watched_reads(monkeypatch, before=lambda: None):
    """Each read of tensors is preceded by that; what is yielded counts them."""
    read, counted = ForeignMemory.read, []

    def noted(memory, *args):
        if memory._peer == "trainer":  # else somebody asks whether it could be read
            before()
            counted.append(memory)
        return read(memory, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ForeignMemory, "read", noted)
        yield counted


@pytest.mark.parametrize("verify", ["digest", "counts"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("sink", ["staged", "in_place", "layerwise"])
async def test_all_of_a_module_is_read_where_it_is(sink, packed, verify):
    model = net()
    options = {"sink": sink, "verify": verify, "packed": packed, **SMALL}
    async with trained(model, workers=2, **options) as (sync, *workers):
        for round in range(1, 6):  # the module is looked at otherwise each time
            report = await sync.send_weights(version=round)
            assert report.outcome == "committed"
            assert report.nbytes == nbytes_of(model)
            assert all(same(worker, model) for worker in workers)
            assert went(sync) == (round * nbytes_of(model), 0)
            assert sync.sender.statistics()["buffer_nbytes"] == 0
            step(model)


class Kinds(nn.Module):
    """Empty and 0-d parameters, many dtypes, tied ones, one larger than a chunk, a part of one."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 7))
        self.halves = nn.Parameter(torch.randn(97, 3).bfloat16())
        self.flag = nn.Parameter(torch.zeros(5, dtype=torch.bool), requires_grad=False)
        self.count = nn.Parameter(torch.arange(3, dtype=torch.int16), requires_grad=False)
        self.big = nn.Parameter(torch.randn(300, 301, dtype=torch.float64))
        self.head = nn.Linear(8, 50, bias=False)
        self.embed = nn.Embedding(50, 8)
        self.embed.weight = self.head.weight
        self.part = nn.Parameter(torch.randn(100)[7:50])
        self.eighths = nn.Parameter(torch.randn(33).to(torch.float8_e4m3fn), requires_grad=False)


@pytest.mark.parametrize("verify", ["digest", "counts"])
async def test_parameters_of_all_kinds(verify):
    model = Kinds()
    async with trained(model, model=Kinds, verify=verify, **SMALL) as (sync, worker):
        for round in range(1, 5):
            await sync.send_weights()
            for name, parameter in model.named_parameters():
                theirs = worker.model.get_parameter(name)
                assert torch.equal(theirs.view(-1).view(torch.uint8), raw(parameter)), name
            assert went(sync) == (round * nbytes_of(model), 0)
            with torch.no_grad():
                model.big.add_(1)
                model.head.weight.mul_(2)


def raw(tensor):
    return tensor.detach().view(-1).view(torch.uint8)


def generated(model):
    names, tensors = zip(*model.named_parameters(), strict=True)
    source = aiosync.IteratorSource(
        names, [t.dtype for t in tensors], [tuple(t.shape) for t in tensors]
    )
    source.set((name, tensor.detach().clone()) for name, tensor in model.named_parameters())
    return source


class Doubled(ModuleSource):
    def iter_full(self):
        for name, tensor in super().iter_full():
            yield name, tensor * 2


OTHERS = {
    "cast": lambda model: ModuleSource(model, dtype=torch.float32),
    "generated": generated,
    "overridden": Doubled,
}


@pytest.mark.parametrize("kind", OTHERS)
async def test_sources_that_make_their_tensors_are_copied(kind):
    model = net().double() if kind == "cast" else net()
    async with trained(OTHERS[kind](model), **SMALL) as (sync, worker):
        await sync.send_weights()
        factor = 2 if kind == "overridden" else 1
        for theirs, ours in zip(worker.model.parameters(), model.parameters(), strict=True):
            assert torch.equal(theirs, ours.float() * factor)
        assert went(sync) == (0, nbytes_of(worker.model))


async def test_a_parameter_that_is_not_contiguous_has_all_copied_until_it_is():
    model = net()
    model[0].weight.data = torch.randn(40, 30).t()
    async with trained(model, **SMALL) as (sync, worker):
        for _ in range(3):
            await sync.send_weights()
            assert same(worker, model)
        assert went(sync) == (0, 3 * nbytes_of(model))
        model[0].weight.data = torch.randn(30, 40)
        await sync.send_weights()
        assert same(worker, model)
        assert went(sync) == (nbytes_of(model), 3 * nbytes_of(model))


@pytest.mark.parametrize("packed", [True, False])
async def test_direct_can_be_turned_off(packed, monkeypatch):
    model = net()
    with watched_reads(monkeypatch) as reads:
        async with trained(model, direct=False, packed=packed, **SMALL) as (sync, worker):
            for _ in range(4):
                await sync.send_weights()
                assert same(worker, model)
                step(model)
            assert went(sync) == (0, 4 * nbytes_of(model))
            assert "mark" not in sync.get_worker_init_payload()
    assert reads == []


async def test_what_share_tensors_made_is_read_there(monkeypatch):
    model = net()
    storage = await asyncio.to_thread(aiosync.share_tensors, {"weight": model[0].weight})
    with watched_reads(monkeypatch) as reads:
        async with trained(model, shared=[storage], **SMALL) as (sync, worker):
            for _ in range(3):
                report = await sync.send_weights()
                assert report.nbytes == nbytes_of(model)
                assert same(worker, model)
                step(model)
            shared = 3 * model[0].weight.nbytes
            assert went(sync) == (shared, 3 * nbytes_of(model) - shared)
    assert reads == []


@pytest.mark.parametrize("verify", ["digest", "counts"])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
async def test_what_is_replaced_between_rounds_is_what_is_read(before, verify):
    model = net()
    async with trained(model, verify=verify, **SMALL) as (sync, worker):
        for _ in range(before):
            await sync.send_weights()
        kept = [parameter.data for parameter in model.parameters()]  # what was there stays
        model[0].weight = nn.Parameter(torch.full((30, 40), 7.0))
        await sync.send_weights()
        assert worker.model[0].weight.eq(7).all()
        model[2].bias.data = torch.full((7,), 8.0)
        await sync.send_weights()
        assert worker.model[2].bias.eq(8).all()
        assert same(worker, model)
        assert went(sync) == ((before + 2) * nbytes_of(model), 0)
        assert len(kept) == 6


@contextmanager
def before_finish(sync, act):
    """That happens once all is announced."""
    bare = sync.sender.finish

    def acted():
        act()
        return bare()

    sync.sender.finish = acted
    try:
        yield
    finally:
        sync.sender.finish = bare


@pytest.mark.parametrize("verify", ["digest", "counts"])
async def test_what_is_replaced_while_workers_read_stays_for_them(monkeypatch, verify):
    model, gone = net(), threading.Event()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    others = []

    def replace():
        model[2].weight = nn.Parameter(torch.zeros(7, 30))
        others.extend(torch.full((7, 30), 9.0) for _ in range(8))
        gone.set()

    with watched_reads(monkeypatch, lambda: gone.wait(20)) as reads:
        async with trained(model, verify=verify) as (sync, worker):
            with before_finish(sync, replace):
                await sync.send_weights(budget=PATIENT)
            theirs = worker.model.state_dict()
            assert all(torch.equal(theirs[name], tensor) for name, tensor in expected.items())
    assert reads


@pytest.mark.parametrize("verify", ["digest", "counts"])
async def test_a_storage_that_is_taken_away_while_workers_read_costs_the_round(verify):
    model = net()
    async with trained(model, verify=verify) as (sync, worker):
        await sync.send_weights(version=1)
        held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        step(model)
        kept = model[2].weight.data

        def move():
            model[2].weight.data = kept + 1

        with before_finish(sync, move):
            with pytest.raises(Validation, match="tensor 4 was moved"):
                await sync.send_weights(version=2)
        assert (worker.version.order, worker.weights) == (1, "intact")
        assert all(torch.equal(worker.model.state_dict()[name], held[name]) for name in held)
        await sync.send_weights(version=3)
        assert same(worker, model)


async def test_nothing_is_read_any_more_when_it_has_returned(monkeypatch):
    model, late = net(), threading.Event()
    returned = False

    def look():
        if returned:
            late.set()

    with watched_reads(monkeypatch, look) as reads:
        async with trained(model, workers=2, **SMALL) as (sync, *workers):
            for version in (1, 2, 3):
                returned = False
                update = sync.begin_update(version=version)
                await update.released
                returned = True
                sent = [parameter.detach().clone() for parameter in model.parameters()]
                step(model)
                assert (await update).outcome == "committed"
                for worker in workers:
                    assert all(map(torch.equal, worker.model.parameters(), sent))
    assert reads
    assert not late.is_set()


def blinded(engine):
    """From the next init on, the worker is not told where the trainer's mark is."""
    bare = engine.open_receiver
    engine.open_receiver = lambda info: bare(msgspec.structs.replace(info, mark=None))
    return engine


async def test_two_workers_of_which_one_cannot_read():
    model, config = net(), WeightTransferConfig(backend="ipc")
    make = partial(aiosync.IPCWeightTransferEngine, config, None, "cpu")
    async with make(net(), name="w0") as one, make(net(), name="w1") as other:
        clients = [DirectClient(one, name="w0"), DirectClient(blinded(other), name="w1")]
        async with aiosync.connect(model, workers=clients, **SMALL) as sync:
            for _ in range(3):
                await sync.send_weights()
                assert same(one, model)
                assert same(other, model)
                step(model)
            assert went(sync) == (0, 3 * nbytes_of(model))


async def test_a_cancelled_round_and_the_next_one(monkeypatch):
    model, reading, goes_on = net(), threading.Event(), threading.Event()

    async with trained(model) as (sync, worker):
        await sync.send_weights(version=1)

        def hold():
            reading.set()
            goes_on.wait(20)

        with watched_reads(monkeypatch, hold):
            update = sync.begin_update(version=2)
            await asyncio.to_thread(reading.wait, 20)
            update.cancel()
            goes_on.set()
            with pytest.raises(RoundCancelled):
                await update
        assert (worker.version.order, worker.weights) == (1, "intact")
        step(model)
        await sync.send_weights(version=3)
        assert same(worker, model)
        assert went(sync)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("sink", ["staged", "in_place", "layerwise"])
@pytest.mark.parametrize("verify", ["digest", "counts"])
async def test_between_processes(sink, verify):
    model = models.make("many", 7)
    async with replica(kind="many", sink=sink, verify=verify) as one:
        async with replica(kind="many", seed=1, verify=verify) as other:
            async with aiosync.connect(model, workers=[one.url, other.url], **SMALL) as sync:
                for version in range(1, 5):
                    await sync.send_weights(version=version)
                    for worker in (one, other):
                        assert (await worker.facts())["prints"] == models.fingerprint(model)
                    step(model)
                assert went(sync) == (4 * nbytes_of(model), 0)


@pytest.mark.slow
async def test_a_trainer_in_a_process_of_its_own():
    async with replica(kind="many") as worker:
        async with program("direct_trainer.py", worker.url, "twice") as trainer:
            (said,) = await lines(trainer, 60)
        facts = await worker.facts()
        assert facts["prints"] == said["prints"]
        assert said["statistics"]["bytes_copied"] == 0
        assert said["statistics"]["bytes_in_place"] == 2 * nbytes_of(models.make("many", 0))


@pytest.mark.slow
async def test_a_trainer_that_is_killed_while_workers_read():
    async with replica(kind="many", lease=5) as worker:
        async with program("direct_trainer.py", worker.url, "hold") as trainer:
            async with asyncio.timeout(60):
                said = json.loads(await trainer.stdout.readline())
            await trainer.kill()
        facts = await worker.wait_state("initialized", "failed")
        assert (facts["version"], facts["weights"]) == (1, "intact")
        assert facts["prints"] == said["prints"]
        model = models.make("many", 9)
        async with aiosync.connect(model, workers=[worker.url]) as sync:
            await sync.send_weights(version=3)
            assert went(sync) == (nbytes_of(model), 0)
        assert (await worker.facts())["prints"] == models.fingerprint(model)


@pytest.mark.slow
async def test_a_killed_worker_is_named_and_the_process_after_it_reads_too(tmp_path):
    model, path = models.make("many", 7), tmp_path / "worker.sock"
    async with replica(kind="many", path=path) as first:
        sync = await AsyncExitStack().__aenter__()
        engine = await sync.enter_async_context(
            aiosync.connect(model, workers=[first.url], **SMALL)
        )
        await engine.send_weights(version=1)
        write = engine.sender.write

        def killing(batch):
            first.process.signal(9)
            engine.sender.write = write
            write(batch)

        engine.sender.write = killing
        with pytest.raises(PeerLost) as caught:
            await engine.send_weights(version=2, budget=PATIENT)
        assert caught.value.replica == first.url
    async with replica(kind="many", path=path) as fresh, sync:
        await engine.send_weights(version=3, budget=PATIENT)
        assert (await fresh.facts())["prints"] == models.fingerprint(model)
        assert went(engine)[1] == 0
