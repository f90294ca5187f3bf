"""What comes between an NCCL round's start, when both sides get ready, and its update."""

from __future__ import annotations

import asyncio
import threading

import anyio
import fake_nccl
import models
import pytest
import torch
from limits import PATIENT
from nccl_cases import create

import aiosync
from aiosync import ModuleSource
from aiosync.engines.nccl_trainer import NCCLTrainerWeightTransferEngine
from aiosync.engines.nccl_worker import NCCLWeightTransferEngine
from aiosync.testing import DirectClient
from transports.nccl_sender import NcclSender

OPTIONS = {"backend": "nccl", "packed_buffer_size_bytes": 1 << 12}


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    fake_nccl.install(monkeypatch)


class Loading(torch.nn.Module):
    """Writes down what it is given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.given = {}

    def load_weights(self, pairs):
        self.given = {name: tensor.clone() for name, tensor in pairs}
        return set(self.given)


def module_of(name, *shape, dtype=torch.float32):
    net = torch.nn.Module()
    for letter in "ab":  # two: they share a chunk
        tensor = torch.arange(12).view(shape).to(dtype)
        net.register_parameter(name + letter, torch.nn.Parameter(tensor, requires_grad=False))
    return net


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "other", [("y", 3, 4), ("x", 4, 3), ("x", 3, 4, torch.int32)], ids=["name", "shape", "dtype"]
)
async def test_a_round_of_other_tensors_that_are_cut_alike(other):
    name, *shape = [part for part in other if not isinstance(part, torch.dtype)]
    dtype = other[-1] if isinstance(other[-1], torch.dtype) else torch.float32
    nets = [module_of("x", 3, 4), module_of(name, *shape, dtype=dtype)]
    sources, target = [ModuleSource(net) for net in nets], Loading()
    async with create(target) as worker:
        clients = [DirectClient(worker)]
        async with aiosync.connect(nets[0], workers=clients, **OPTIONS) as sync:
            for at in (0, 0, 1, 1, 0):
                report = await sync.send_weights(source=sources[at], budget=PATIENT)
                assert not report.notes
                sent = dict(nets[at].named_parameters())
                assert target.given.keys() == sent.keys()
                for key, tensor in sent.items():
                    assert tensor.dtype == target.given[key].dtype
                    assert torch.equal(tensor, target.given[key])


@pytest.mark.asyncio
async def test_an_update_that_overtakes_the_end_of_its_start():
    class Slow(NCCLWeightTransferEngine):
        async def start_weight_update(self):
            await has_come.wait()

    class Hasty:
        """Does not wait for the worker's answer to start."""

        name = "worker"

        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        async def start_weight_update(self, *, header=None):
            has_come.clear()
            self.start = asyncio.create_task(self.inner.start_weight_update(header=header))
            while worker.state is not aiosync.State.UPDATING:
                await asyncio.sleep(0.001)

        async def update_weights(self, info, *, header=None):
            asyncio.get_running_loop().call_later(0.05, has_come.set)
            reply = await self.inner.update_weights(info, header=header)
            await self.start
            return reply

    has_come = asyncio.Event()
    model, target = models.make("small", seed=1), models.make("small", seed=2)
    config = aiosync.WeightTransferConfig("nccl")
    async with Slow(config, None, None, target) as worker:
        clients = [Hasty(DirectClient(worker))]
        async with aiosync.connect(model, workers=clients, **OPTIONS) as sync:
            for _ in range(4):
                report = await sync.send_weights(budget=PATIENT)
                assert not report.notes
                await worker.lane.run(lambda: None)
                assert not worker.receiver._is_open


@pytest.mark.asyncio
async def test_an_engine_that_transmits_by_itself_has_its_sender_to_itself():
    class Own(NCCLTrainerWeightTransferEngine):
        async def transmit(self, round):
            feed, plan = round.validated()
            sender = self.sender

            def send():
                sender.describe(feed.metadata)
                sender.open(plan, self.count_readers(round), round=round.number, stall=5)
                sender.write([(i, p.detach()) for i, p in enumerate(model.parameters())])
                return sender.finish()

            return await self.source_lane.run(send)

    model, target = models.make("small", seed=1), models.make("small", seed=2)
    async with create(target) as worker:
        async with Own(client=DirectClient(worker), source=ModuleSource(model)) as engine:
            await engine.initialize()
            for _ in range(2):
                report = await engine.send_weights(budget=PATIENT)
                assert report.outcome == "committed"
    assert models.fingerprint(target) == models.fingerprint(model)


@pytest.mark.asyncio
async def test_what_takes_longer_than_the_members_answers_is_not_their_delay(monkeypatch):
    late, open_ = threading.Event(), NcclSender.open

    def slow(sender, *args, **options):
        assert late.wait(20)
        open_(sender, *args, **options)

    async def after(method):
        if method == "start_weight_update":  # a second is left, and more is needed
            sync.admission.current.limit.deadline = anyio.current_time() + 1
            asyncio.get_running_loop().call_later(1.5, late.set)

    monkeypatch.setattr(NcclSender, "open", slow)
    model, target = models.make("small", seed=1), models.make("small", seed=2)
    async with create(target) as worker:
        clients = [DirectClient(worker, after=after)]
        async with aiosync.connect(model, workers=clients, **OPTIONS) as sync:
            report = await sync.send_weights(budget=PATIENT)
            assert report.outcome == "committed"
