"""Rounds over NCCL whose workers look at their models while the chunks come."""

from __future__ import annotations

import contextlib

import fake_nccl
import pytest
import torch
from fake_nccl import FakeGroup
from limits import PATIENT
from torch import nn

import aiosync
from aiosync import glance as glances
from aiosync.glance import Looking
from aiosync.sinks import InPlaceSink
from aiosync.testing import DirectClient

KNOWN = 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.big = nn.Linear(4, 4), nn.Linear(16, 16, bias=False)
        self.none = nn.Parameter(torch.ones(8)[4:4])


def model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(*(Layer() for _ in range(4)))


class Pair:
    def __init__(self, ours, theirs, trainer, worker):
        self.ours, self.theirs, self.trainer, self.worker = ours, theirs, trainer, worker
        self.version = 0

    async def round(self):
        self.version += 1
        with torch.no_grad():
            for parameter in self.ours.parameters():
                parameter.uniform_()
        return await self.trainer.send_weights(version=self.version, budget=PATIENT)

    async def good_round(self):
        await self.round()
        for name, tensor in self.ours.state_dict().items():
            assert torch.equal(tensor, self.theirs.state_dict()[name]), name
        assert self.worker.version.label == self.version


@contextlib.asynccontextmanager
async def pair(sink):
    ours, theirs = model(1), model(2)
    config = aiosync.WeightTransferConfig("nccl", sink=sink)
    make = aiosync.WeightTransferEngineFactory.create_engine
    async with make(config, None, None, theirs) as worker:
        options = {"backend": "nccl", "packed_buffer_size_bytes": 128}
        async with aiosync.connect(ours, workers=[DirectClient(worker)], **options) as trainer:
            both = Pair(ours, theirs, trainer, worker)
            for _ in range(KNOWN):
                await both.good_round()
            yield both


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    fake_nccl.install(monkeypatch)
    monkeypatch.setattr(glances, "_RUN", (2, 2))


def replace(net):
    net[2].one.weight = nn.Parameter(torch.ones(4, 4))


def replace_big(net):
    net[2].big.weight = nn.Parameter(torch.ones(16, 16))


def move_last(net):
    net[-1].big.weight.data = torch.ones(16, 16)


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["in_place", "staged"])
@pytest.mark.parametrize("change", [replace, replace_big, move_last])
@pytest.mark.parametrize("side", ["ours", "theirs"])
async def test_tensors_that_moved_are_found(sink, change, side, monkeypatch):
    calls = []
    reaches = Looking.reaches

    def counted(self, count):
        calls.append(count)
        return reaches(self, count)

    monkeypatch.setattr(Looking, "reaches", counted)
    async with pair(sink) as both:
        await both.good_round()
        assert len(calls) > 1
        change(getattr(both, side))
        for _ in range(KNOWN):
            await both.good_round()


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["in_place", "staged"])
async def test_other_bytes_than_were_sent_end_the_round_and_the_next_one_works(sink, monkeypatch):
    async with pair(sink) as both:
        await both.good_round()
        wire = len(FakeGroup.made[0].hub.wire)

        def spoiled(at, sent):
            if at == wire + 2:
                sent[0] ^= 1
            return sent

        with monkeypatch.context() as patch:
            patch.setattr(FakeGroup, "spoil", staticmethod(spoiled))
            with pytest.raises(aiosync.AiosyncError, match="arrived with digest"):
                await both.round()
        assert both.worker.weights == ("torn" if sink == "in_place" else "intact")
        for _ in range(KNOWN):
            await both.good_round()


@pytest.mark.asyncio
@pytest.mark.parametrize("sink", ["in_place", "staged"])
async def test_a_model_that_no_longer_fits_ends_the_round_and_can_be_mended(sink):
    async with pair(sink) as both:
        await both.good_round()
        right = both.theirs[2].big.weight
        both.theirs[2].big.weight = nn.Parameter(torch.ones(2, 4))
        with pytest.raises(aiosync.AiosyncError, match=r"2.big.weight"):
            await both.round()
        if sink == "staged":
            assert both.worker.weights == "intact"
        both.theirs[2].big.weight = right
        await both.good_round()


@pytest.mark.asyncio
@pytest.mark.parametrize("first", [0, 1])
async def test_a_tensor_that_was_written_and_replaced_ends_the_round(first, monkeypatch):
    """Also where it is a chunk of its own, whose destination is asked for alone."""
    async with pair("in_place") as both:
        await both.good_round()
        seen = InPlaceSink._look_upto
        done = []

        def changed_meanwhile(self, end):
            if end > 6 and not done:
                done.append(True)
                net = both.theirs
                inside = (net[0].one, net[0].big)[first]
                inside.weight = nn.Parameter(inside.weight.detach().clone())
                move_last(net)
            return seen(self, end)

        with monkeypatch.context() as patch:
            patch.setattr(InPlaceSink, "_look_upto", changed_meanwhile)
            with pytest.raises(aiosync.AiosyncError, match="replaced, renamed or moved"):
                await both.round()
        assert done
        await both.good_round()
