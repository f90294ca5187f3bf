"""Members that are brought up by a copy of what another member holds."""

from __future__ import annotations

import asyncio
import copy
from contextlib import asynccontextmanager

import anyio
import models
import pytest
import torch
from fleets import fleet
from many import many

import aiosync
from aiosync import State
from aiosync.copy_order import CopyOrder, Reach


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """No member is given up because this machine is slow."""
    monkeypatch.setattr("aiosync.lone_round.DEFAULTS", type(aiosync.DEFAULTS)(join_s=30.0))


@asynccontextmanager
async def served(count, **options):
    """A fleet whose workers are reached by URL, as another worker would."""

    async def client_of(self, name):
        serving = aiosync.serve(self.workers[name], token="secret")
        server = await self._stack.enter_async_context(serving)
        return aiosync.HTTPVLLMWeightSyncClient(server.url, token="secret")

    async with fleet(count, catch_up="peer", served=client_of, **options) as it, it.client:
        yield it


async def current(it, *names, seconds=30):
    with anyio.move_on_after(seconds):
        while not {*names} <= it.routable():
            await asyncio.sleep(0.01)
    assert {*names} <= it.routable(), [s.error for s in it.client.roster.standings.values()]
    ids = {it.workers[name].generation.weights.weights_id for name in ("w0", *names)}
    assert len(ids) == 1


async def fell_back(it, name, seconds=30):
    async with asyncio.timeout(seconds):
        async for transition in it.client.subscribe(since=0):
            if (transition.engine, transition.trigger) == (name, "fall_back"):
                break
    return transition.error


class Hangs:
    """A gate of a worker that holds its first caller until it is cancelled."""

    def __init__(self, worker, trigger):
        self.reached = asyncio.Event()
        self.remove = worker.gate(trigger, self)

    async def __call__(self, _):
        self.remove()
        self.reached.set()
        await asyncio.sleep(60)


@pytest.mark.asyncio
@pytest.mark.parametrize("backend", ["ipc", "gloo"])
async def test_a_joiner_gets_what_a_peer_holds(backend):
    async with served(1, backend=backend) as it:
        await it.send(version=1)
        await it.send(version=2)
        before = copy.deepcopy(it.model.state_dict())
        it.change()  # the trainer has moved on
        passes = it.trainer.rounds
        it.client.add(aiosync.Member("w9", await it.worker("w9")))
        await current(it, "w9")
        held = it.copies["w9"].state_dict()
        assert all(torch.equal(held[name], tensor) for name, tensor in before.items())
        assert it.workers["w9"].version == it.client.version
        assert it.trainer.rounds == passes
        assert it.workers["w0"].generation.in_flight == 0
        report = await it.send(version=3)
        assert [member.outcome for member in report.members] == ["committed", "committed"]
        assert it.routable() == it.holders() == {"w0", "w9"}


@pytest.mark.asyncio
@pytest.mark.parametrize("trigger", ["start", "complete"])
async def test_a_round_ends_the_copy_and_takes_the_joiner_along(trigger, monkeypatch):
    monkeypatch.setattr("aiosync.catch_up.WAY_S", 10.0)  # however slow this machine is
    async with served(1) as it:
        await it.send(version=1)
        client = await it.worker("w9")
        hangs = Hangs(it.workers["w9"], trigger)
        it.client.add(aiosync.Member("w9", client))
        await asyncio.wait_for(hangs.reached.wait(), 30)
        assert it.workers["w0"].generation.in_flight == 1
        report = await it.send(version=2)
        assert [member.outcome for member in report.members] == ["committed", "committed"]
        assert it.routable() == it.holders() == {"w0", "w9"}
        assert it.workers["w9"].generation.statistics()["swaps_done"] == 1
        assert it.workers["w0"].generation.in_flight == 0


@pytest.mark.asyncio
async def test_the_peer_gives_the_copy_up_for_whatever_else_it_has_to_do():
    async with served(1) as it:
        await it.send(version=1)
        client = await it.worker("w9")
        hangs = Hangs(it.workers["w9"], "start")
        it.client.add(aiosync.Member("w9", client))
        await asyncio.wait_for(hangs.reached.wait(), 30)
        await it.workers["w0"].pause_generation(mode="wait", timeout=10)
        assert "generation" in await fell_back(it, "w9")
        await it.workers["w0"].resume_generation()
        await it.workers["w9"].wait_for(State.IDLE, timeout=30)
        assert it.workers["w9"].version is None
        assert it.states() == {"w0": "current", "w9": "joining"}
        await it.send(version=2)
        assert it.routable() == it.holders() == {"w0", "w9"}


@pytest.mark.asyncio
async def test_a_swap_waits_for_the_copy_to_end_and_no_longer():
    async with served(1) as it:
        await it.send(version=1)
        client = await it.worker("w9")
        hangs = Hangs(it.workers["w9"], "start")
        it.client.add(aiosync.Member("w9", client))
        await asyncio.wait_for(hangs.reached.wait(), 30)
        async with it.workers["w0"].generation.swap(timeout=10):
            assert it.workers["w0"].generation.in_flight == 0
        await fell_back(it, "w9")


@pytest.mark.asyncio
async def test_closing_the_fleet_or_the_peer_ends_the_copy():
    async with served(2, policy="quorum(1)") as it:
        await it.send(version=1)
        client = await it.worker("w9")
        hangs = Hangs(it.workers["w9"], "start")
        it.client.add(aiosync.Member("w9", client))
        await asyncio.wait_for(hangs.reached.wait(), 30)
        await it.workers["w0"].aclose()
        assert await fell_back(it, "w9")
        it.client.remove("w9")
        hangs = Hangs(it.workers["w9"], "start")
        it.client.add(aiosync.Member("w9", client))
        await asyncio.wait_for(hangs.reached.wait(), 30)
        await it.client.__aexit__(None, None, None)
        async with asyncio.timeout(30):  # leaving waits for it, but not for ever
            await it.workers["w9"].wait_for(State.IDLE)
            while it.workers["w1"].generation.in_flight:
                await asyncio.sleep(0.01)
        await it.client.__aenter__()


def changed_sink(model, device):
    return aiosync.StagedSink(model, device=device, after_load=lambda: None)


@pytest.mark.asyncio
async def test_a_worker_that_may_hold_something_else_than_was_sent_is_no_peer():
    async with served(1, sink=changed_sink) as it:
        await it.send(version=1)
        it.client.add(aiosync.Member("w9", await it.worker("w9")))
        assert "w0 cannot send its model: its sink is one of its own" in await fell_back(it, "w9")
        await it.send(version=2)
        assert it.routable() == it.holders() == {"w0", "w9"}


@pytest.mark.asyncio
async def test_members_without_a_url_wait_for_the_next_round():
    async with fleet(1, catch_up="peer") as it, it.client:
        await it.send(version=1)
        it.client.add(aiosync.Member("w9", await it.worker("w9")))
        assert "w9 has no URL" in await fell_back(it, "w9")


@pytest.mark.asyncio
async def test_a_worker_sends_for_its_own_trainer_alone_and_what_it_holds():
    async with served(1) as it:
        await it.send(version=1)
        worker, link = it.workers["w0"], it.trainer.links[0]
        goal = it.client.roster.goal
        facts = {"id": "a", "owner": "b", "member": "w9", "seconds": 5.0}
        facts |= {"buffer_size_bytes": 4096, "digest_kind": it.trainer.digest}
        facts |= {"version": goal.version, "digest": goal.digest, "wire_digest": goal.wire_digest}
        order = CopyOrder(**facts, servers=[Reach(url="unix:///nowhere", token="secret")])
        assert "secret" not in repr(order)
        mine = aiosync.messages.RoundHeader(owner=it.trainer.owner, epoch=link.epoch)
        stranger = aiosync.messages.RoundHeader(owner="somebody", epoch=link.epoch)
        client = it.client.members[0].client
        with pytest.raises(aiosync.Fenced):
            await client.send_copy(order, header=stranger)
        with pytest.raises(aiosync.Fenced):
            await client.send_copy(order, header=None)
        with pytest.raises(aiosync.PeerLost):  # it tries to
            await client.send_copy(order, header=mine)
        newer = aiosync.Version(9, goal.version.lineage, 9)
        for change, said in [
            ({"version": newer}, "it holds '1', not '9'"),
            ({"digest": "other"}, "not those that the fleet has"),
            ({"wire_digest": "other"}, "announced otherwise"),
        ]:
            other = CopyOrder(**(facts | change), servers=order.servers)
            with pytest.raises(aiosync.Refused, match=said) as caught:
                await client.send_copy(other, header=mine)
            assert caught.value.detail["begun"] is False
        assert worker.generation.in_flight == 0
        await client.cancel_copy("a", header=mine)  # it is over


@pytest.mark.asyncio
async def test_a_peer_that_is_killed_in_the_middle_costs_the_joiner_the_next_round():
    async with many(2, policy="quorum(1)", catch_up="peer") as it, it.fleet:
        await it.send()
        joiner = await it.start("w2")

        async def stop_both():
            it.stop("w2")  # the copy begins, and comes no further

            async def kill():
                await asyncio.sleep(0.2)
                await it.kill("w0")

            tasks.append(asyncio.create_task(kill()))

        tasks = []
        it.at("w0", "send_weights", stop_both)
        it.fleet.add(joiner)
        async with asyncio.timeout(40):
            async for transition in it.fleet.subscribe(since=0):
                if transition.engine == "w2" and transition.trigger in ("fall_back", "lose"):
                    break
        await tasks[0]
        it.resume("w2")
        await it.until("w2", "joining", "current")
        await it.send()
        await it.until("w2", "current")
        assert "w0" not in it.routable()
        assert await it.holders("w1", "w2") == {"w1", "w2"}


@pytest.mark.asyncio
async def test_real_processes_bring_each_other_up():
    async with many(2, catch_up="peer") as it, it.fleet:
        await it.send()
        it.fleet.add(await it.start("w2"))
        await it.until("w2", "current")
        assert await it.holders("w0", "w1", "w2") == {"w0", "w1", "w2"}
        facts = await it.replicas["w2"].facts()
        others = await it.replicas["w0"].facts()
        assert facts["ids"] == others["ids"]
        assert facts["prints"] == models.fingerprint(it.model)
        await it.send()
        assert await it.holders("w0", "w1", "w2") == it.routable() == {"w0", "w1", "w2"}
