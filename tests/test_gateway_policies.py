"""A gateway whose fleet has a quorum or best effort: rounds that go on without some members."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import models
import pytest
import torch
from fleets import BUDGET, Fleet
from paced import Hold, Paced
from processes import program, replica

import aiosync
from aiosync import FleetClient, FleetGateway, GatewayClient, Member
from aiosync.testing import DirectClient

pytestmark = pytest.mark.asyncio
STEPS = {
    "start": "start_weight_update",
    "update": "update_weights",
    "prepare": "prepare_weight_update",
    "finish": "finish_weight_update",
}


class Gated(Fleet):
    """Workers behind a gateway that lets everything in, and a trainer that sees the gateway."""

    gateway: FleetGateway

    async def accept(self) -> None:
        async for offer in self.gateway.offers():
            await offer.accept()


@asynccontextmanager
async def gated(count: int, *, policy: str, backend: str = "ipc", init: bool = True):
    it = Gated()
    it.backend = backend
    async with it._stack as stack:
        members = [Member(f"w{n}", await it.worker(f"w{n}")) for n in range(count)]
        it.client = FleetClient(members, policy=policy)
        it.gateway = await stack.enter_async_context(
            FleetGateway(it.client, heartbeat_s=0.2, misses=50)
        )
        deciding = asyncio.create_task(it.accept())
        stack.callback(deciding.cancel)
        it.trainer = aiosync.IPCTrainerWeightTransferEngine(
            client=DirectClient(it.gateway, name="gateway"),
            source=it.model,
            packed=True,
            packed_buffer_size_bytes=4096,
        )
        await stack.enter_async_context(it.trainer)
        if init:
            await it.trainer.initialize()
        yield it


async def lost():
    raise aiosync.PeerLost("cut off")


async def hangs():
    await asyncio.sleep(60)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """More than a busy machine takes, or healthy members would be left behind."""
    monkeypatch.setattr("aiosync.attendance.Attendance.floor", 2.0)


def outcomes(it: Gated) -> dict[str, str]:
    return {m.name: m.outcome for m in it.gateway.rounds()[-1].members}


@pytest.mark.parametrize("policy", ["quorum(2)", "best_effort"])
@pytest.mark.parametrize("phase", STEPS)
async def test_the_others_go_on_without_a_member_that_fails(policy, phase):
    async with gated(3, policy=policy) as it:
        await it.send(version=1)
        assert it.routable() == it.holders() == {"w0", "w1", "w2"}
        it.faults["w1", STEPS[phase]] = lost
        report = await it.send(version=2)
        assert (report.outcome, report.left_out) == ("committed", ["gateway/w1"])
        assert it.gateway.rounds()[-1].state == "committed"
        assert it.holders() == it.routable() == {"w0", "w2"}
        assert it.states()["w1"] in ("stale", "lost")
        assert outcomes(it)["w1"] != "committed"
        assert (it.gateway.group.weights, it.gateway.group.version.label) == ("intact", 2)
        it.faults.clear()
        await back(it, "w1")
        assert (await it.send(version=3)).left_out == []
        assert it.holders() == it.routable() == {"w0", "w1", "w2"}
        assert set(outcomes(it).values()) == {"committed"}


async def back(it: Gated, name: str) -> None:
    """The gateway's heartbeat has heard the member."""
    rank = next(rank for rank in it.gateway.group.ranks if rank.link.name == name)
    async with asyncio.timeout(20):
        while rank.lost is not None:
            await asyncio.sleep(0.02)


async def test_a_slow_member_is_left_behind():
    async with gated(3, policy="quorum(2)") as it:
        it.faults["w1", "prepare_weight_update"] = hangs
        report = await it.send(version=1)
        assert report.outcome == "committed"
        assert it.holders() == it.routable() == {"w0", "w2"}


@pytest.mark.parametrize("phase", ["start", "update", "prepare"])
async def test_too_few_are_left_and_nothing_is_committed_anywhere(phase):
    async with gated(3, policy="quorum(3)") as it:
        await it.send(version=1)
        old = it.holders()
        it.faults["w1", STEPS[phase]] = lost
        with pytest.raises(aiosync.AiosyncError, match="cut off"):
            await it.send(version=2)
        assert (old, it.holders()) == ({"w0", "w1", "w2"}, set())
        assert {worker.version.label for worker in it.workers.values()} == {1}
        assert it.gateway.rounds()[-1].state in ("failed", "unknown")  # w1 cannot be asked
        it.faults.clear()
        await back(it, "w1")
        await it.send(version=2)
        assert it.routable() == it.holders() == {"w0", "w1", "w2"}


async def test_too_few_at_finish_is_told_and_mended():
    async with gated(2, policy="quorum(2)") as it:
        await it.send(version=1)
        it.faults["w1", "finish_weight_update"] = lost
        with pytest.raises(aiosync.AiosyncError):
            await it.send(version=2)
        assert it.routable() == {"w0"}
        it.faults.clear()
        await back(it, "w1")
        await it.send(version=2)
        assert it.routable() == it.holders() == {"w0", "w1"}


async def test_a_member_that_restarts_is_brought_back_without_the_others_noticing():
    async with gated(3, policy="quorum(2)") as it:
        await it.send(version=1)
        await it.worker("w1")  # another process under this name
        it.restart("w1", it.workers["w1"])
        async with asyncio.timeout(20):
            while it.gateway.group.ranks[1].trouble is None:
                await asyncio.sleep(0.02)
        since = len(it.calls)
        report = await it.send(version=2)
        assert not report.recovered
        assert it.routable() == it.holders() == {"w0", "w1", "w2"}
        inits = [name for name, call in it.calls[since:] if call == "init_transfer_engine"]
        assert set(inits) <= {"w1"}


async def test_a_backend_that_needs_all_members_is_refused_by_name():
    async with gated(2, policy="quorum(1)", backend="gloo", init=False) as it:
        other = aiosync.GlooTrainerWeightTransferEngine(
            client=DirectClient(it.gateway, name="gateway"), source=it.model
        )
        async with other:
            with pytest.raises(aiosync.Validation, match=r"policy quorum\(1\): .*all members"):
                await other.initialize()


@pytest.mark.slow
async def test_a_member_killed_in_the_middle_of_the_bytes_is_left_behind(free_shm):
    async with AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(replica(name=f"r{n}", seed=n, lease=5))
            for n in range(3)
        ]
        members = [Member(f"r{n}", each.url) for n, each in enumerate(found)]
        fleet = FleetClient(members, policy="quorum(2)")
        gateway = await stack.enter_async_context(FleetGateway(fleet))
        server = await stack.enter_async_context(aiosync.serve(gateway))
        model = models.make("small", 9)
        source = Paced(model, hold := Hold(2))
        accepting = await stack.enter_async_context(program("accept_all.py", server.url))
        sync = await stack.enter_async_context(
            aiosync.connect(source, workers=[server.url], packed_buffer_size_bytes=4096)
        )
        update = sync.begin_update(version=1, budget=BUDGET)
        async with asyncio.timeout(30):
            while not hold.reached.is_set():
                await asyncio.sleep(0.01)
        await found[1].kill()
        hold.released.set()
        assert (await update).outcome == "committed"
        for each in (found[0], found[2]):
            assert (await each.facts())["prints"] == models.fingerprint(model)
        assert [member.name for member in fleet.routable()] == ["r0", "r2"]
        with torch.no_grad():
            next(model.parameters()).add_(1)
        assert (await sync.send_weights(version=2, budget=BUDGET)).outcome == "committed"
        async with GatewayClient(server.url) as client:
            record = (await client.rounds())[-1]
        assert {m.name: m.outcome for m in record.members}["r0"] == "committed"
        assert {m.name: m.outcome for m in record.members}["r1"] != "committed"
        await accepting.kill()


async def refuses():
    raise aiosync.Validation("out of order")


@pytest.mark.parametrize("way", ["rollback", "another run"])
async def test_who_was_left_behind_at_a_higher_version_is_not_taken_for_the_newest(way):
    async with gated(2, policy="best_effort") as it:
        await it.send(version=5)
        it.faults["w1", STEPS["prepare"]] = refuses
        if way == "rollback":
            report = await it.send(version=1, rollback=True)
        else:
            it.trainer.lineage = "another"
            report = await it.send(version=1)
        assert (report.outcome, report.left_out) == ("committed", ["gateway/w1"])
        assert it.gateway.rounds()[-1].version.label == 1
        assert outcomes(it) == {"w0": "committed", "w1": "failed"}
        assert it.routable() == it.holders() == {"w0"}
        assert it.gateway.group.version.label == 1


async def test_who_was_left_behind_by_a_repeated_version_does_not_pass_for_a_holder_of_it():
    async with gated(2, policy="best_effort") as it:
        await it.send(version=5)
        it.faults["w1", STEPS["prepare"]] = refuses
        report = await it.send(version=5, rollback=True)
        assert (report.outcome, report.left_out) == ("committed", ["gateway/w1"])
        assert outcomes(it) == {"w0": "committed", "w1": "failed"}
        assert it.routable() == it.holders() == {"w0"}
