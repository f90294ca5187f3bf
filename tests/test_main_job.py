"""The main job over real processes, real sockets and real shared memory."""

from __future__ import annotations

import asyncio

import anyio
import models
import pytest
import torch
from processes import replica

import aiosync
from aiosync import State


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["small", "odd", "tied"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("sink", ["staged", "in_place"])
async def test_three_rounds_arrive_bit_equal(kind, packed, sink):
    model = models.make(kind, seed=1)
    async with replica(kind=kind, seed=2, sink=sink) as worker:
        assert (await worker.facts())["prints"] != models.fingerprint(model)
        async with aiosync.connect(
            model, workers=[worker.url], packed=packed, packed_buffer_size_bytes=4096
        ) as sync:
            for version in (1, 2, 3):
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.dtype.is_floating_point:
                            parameter.add_(version)
                report = await sync.send_weights(version=version)
                assert report.outcome == "committed"
                assert report.verified
                facts = await worker.facts()
                assert facts["prints"] == models.fingerprint(model)
                assert facts["version"] == version
                assert facts["weights"] == "intact"
                assert sync.state is State.INITIALIZED
        assert (await worker.wait_state("idle"))["version"] == 3


@pytest.mark.asyncio
async def test_several_replicas_over_tcp_with_a_token():
    model = models.make("small", seed=1)
    async with (
        replica(seed=2, tcp=True, token="secret") as one,
        replica(seed=3, tcp=True, token="secret") as two,
    ):
        with pytest.raises(aiosync.Unauthorized):
            async with aiosync.connect(model, workers=[one.url]):
                pass
        async with aiosync.connect(model, workers=[one.url, two.url], token="secret") as sync:
            report = await sync.send_weights(version=1)
            assert [member.outcome for member in report.members] == ["committed"] * 2
        for worker in (one, two):
            assert (await worker.facts())["prints"] == models.fingerprint(model)


@pytest.mark.asyncio
async def test_event_sequence_of_a_round_on_both_sides():
    model = models.make("small", seed=1)
    hub = aiosync.TransitionHub()
    seen: list[str] = []
    hub.on_transition(lambda t: seen.append(t.trigger))
    async with replica(seed=2) as worker:
        client = aiosync.HTTPVLLMWeightSyncClient(worker.url)
        theirs: list[str] = []

        async def watch() -> None:
            async for event in client.events(since=0):
                theirs.append(event["trigger"])  # noqa: PERF401  read while it grows

        watching = asyncio.create_task(watch())
        async with aiosync.connect(model, workers=[worker.url], hub=hub) as sync:
            await sync.send_weights(version=1)
        await worker.wait_state("idle")
        watching.cancel()
        await asyncio.wait([watching])
    path = ["initialize", "start", "update", "finalize", "complete"]
    assert seen == [*path, "close"]
    assert theirs[: len(path)] == path


@pytest.mark.asyncio
async def test_auto_takes_the_backend_the_worker_was_started_with():
    model = models.make("small", seed=1)
    async with replica(seed=2, backend="gloo", tcp=True) as worker:
        async with aiosync.connect(model, workers=[worker.url]) as sync:
            assert sync.backend_name == "gloo"
            await sync.send_weights(version=1)
        assert (await worker.facts())["prints"] == models.fingerprint(model)


@pytest.mark.asyncio
async def test_leaving_a_cancelled_scope_closes_everything(free_shm):
    model = models.make("small", seed=1)
    async with replica(seed=2) as worker:
        with anyio.move_on_after(0.5):
            async with aiosync.connect(model, workers=[worker.url]) as sync:
                await anyio.sleep(30)
        assert sync.state is State.CLOSED
        await worker.wait_state("idle")


@pytest.mark.asyncio
@pytest.mark.parametrize("packed", [True, False])
async def test_plan_says_what_a_round_moves_and_holds(packed):
    model = models.make("small", seed=1)
    nbytes = sum(p.nbytes for p in model.parameters())
    async with replica(seed=2) as worker:
        async with aiosync.connect(
            model, workers=[worker.url], packed=packed, packed_buffer_size_bytes=4096
        ) as sync:
            plan = await sync.plan()
            assert (plan.tensors, plan.nbytes) == (6, nbytes)
            assert plan.worker_bytes == {worker.url: nbytes}
            assert plan.trainer_bytes == nbytes if not packed else plan.trainer_bytes <= 2 * 4096
            assert plan.chunks > 1
            report = await sync.send_weights(version=1)
            assert report.nbytes == plan.nbytes
