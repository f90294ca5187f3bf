"""A driver that dies between two members' commits leaves a mixed fleet: told, routed, mended."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager

import models
import pytest
from fleets import fleet
from processes import program, replica

import aiosync
from aiosync import FleetClient, HTTPVLLMWeightSyncClient, Member

pytestmark = pytest.mark.asyncio
MIX = "the members hold different versions (m0: 2; m1: 1)"


# --- real processes, the driver killed at that very point ---


@asynccontextmanager
async def mixed_by(driver: str):
    """Two replicas, of which the driver that was killed let only the first commit version 2."""
    async with AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(replica(name=f"m{n}", seed=n, lease=1))
            for n in range(2)
        ]
        async with program("half_committed.py", driver, *[each.url for each in found]) as dying:
            await dying.wait(40)
            assert await dying.stdout.read() == b""
        for each in found:  # the lease of the one that was not told to commit
            await each.wait_state("initialized")
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["trainer", "driver", "gateway"])
async def test_every_member_says_what_it_holds_and_the_next_round_makes_them_equal(driver):
    async with mixed_by(driver) as replicas:
        clients = [HTTPVLLMWeightSyncClient(each.url) for each in replicas]
        said = [(await client.weight_info()).message["weight_version"] for client in clients]
        assert said == ["2", "1"]
        facts = [await each.facts() for each in replicas]
        assert [each["weights"] for each in facts] == ["intact", "intact"]
        assert facts[0]["prints"] != facts[1]["prints"]
        for client in clients:  # nobody is held: not by the round, nor by a pause of the dead
            await until_resumed(client)
            assert (await client.ready()).ready
        after = FleetClient([Member(f"m{n}", client) for n, client in enumerate(clients)])
        await after.wait_ready(10)
        assert [member.name for member in after.routable()] == ["m0"]
        assert after.states["m1"] == "stale"
        assert (after.version.label, after.held["m1"].label) == (2, 1)
        trained = models.make("small", 9)
        async with aiosync.connect(trained, workers=list(after.members), lineage="run") as sync:
            report = await sync.send_weights(version=2)  # the very version that died
        assert report.notes == [MIX]
        prints = [(await each.facts())["prints"] for each in replicas]
        assert prints == [models.fingerprint(trained)] * 2
        await after.wait_ready(10)
        assert [member.name for member in after.routable()] == ["m0", "m1"]


async def until_resumed(client):
    async with asyncio.timeout(20):
        while await client.is_paused():
            await asyncio.sleep(0.05)


# --- the same without processes ---


async def split(it) -> None:
    """Only w0 has committed version 2, and its trainer is gone."""
    await it.send(version=1)

    async def never():
        raise aiosync.PeerLost("the trainer is dead")

    it.faults["w1", "finish_weight_update"] = never
    with pytest.raises(aiosync.AiosyncError):
        await it.send(version=2)
    it.faults.clear()
    assert [worker.version.label for worker in it.workers.values()] == [2, 1]


def successor(it, **options):
    members = [Member(name, it.client_of(name)) for name in it.workers]
    return FleetClient(members, **options)


async def test_a_trainer_of_the_same_run_names_the_mixture_and_sends_that_version_again(caplog):
    async with fleet(2) as it:
        await split(it)
        client = successor(it)
        caplog.set_level(logging.WARNING, logger="aiosync")
        async with aiosync.IPCTrainerWeightTransferEngine(
            client=client, source=it.model, packed=True, lineage=it.trainer.lineage
        ) as trainer:
            await trainer.initialize()
            text = "the members hold different versions (w0: 2; w1: 1)"
            assert text in caplog.text
            it.change()
            report = await trainer.send_weights(version=2)
            assert report.notes[-1] == text
            assert it.holders() == {"w0", "w1"}
            with pytest.raises(aiosync.Refused, match="repeats"):  # all hold it: once was meant
                await trainer.send_weights(version=2)
            assert (await trainer.send_weights()).version.label == 3


async def test_members_that_agree_are_not_called_a_mixture():
    async with fleet(2) as it:
        await it.send(version=1)
        async with aiosync.IPCTrainerWeightTransferEngine(
            client=successor(it), source=it.model, packed=True, lineage=it.trainer.lineage
        ) as trainer:
            await trainer.initialize()
            with pytest.raises(aiosync.Refused, match="repeats"):
                await trainer.send_weights(version=1)
            report = await trainer.send_weights(version=2)
            assert not [note for note in report.notes if "different versions" in note]


async def test_a_fleet_that_has_had_no_round_follows_what_its_members_hold():
    async with fleet(3) as it:
        watching = successor(it)
        await watching.wait_ready(10)
        assert (watching.version, watching.routable()) == (None, ())
        await it.send(version=1)
        await watching.wait_ready(10)
        assert watching.version.label == 1
        assert len(watching.routable()) == 3
        it.faults["w1", "finish_weight_update"] = lost
        with pytest.raises(aiosync.AiosyncError):
            await it.send(version=2)
        it.faults.clear()
        await watching.wait_ready(10)
        assert {name: state.value for name, state in watching.states.items()} == {
            "w0": "current",
            "w1": "stale",
            "w2": "current",
        }
        assert watching.roster.standings["w1"].error == "it holds version 1, the fleet's is 2"
        await it.send(version=1, rollback=True)  # back, on all of them
        await watching.wait_ready(10)
        assert watching.version.label == 1
        assert len(watching.routable()) == 3


async def lost():
    raise aiosync.PeerLost("cut off")


async def test_of_two_runs_nobody_can_say_which_is_newer(caplog):
    async with fleet(2) as it:
        await it.send(version=5)
        before = successor(it)
        await before.wait_ready(10)
        assert len(before.routable()) == 2
        other = aiosync.IPCTrainerWeightTransferEngine(
            client=FleetClient([Member("w0", it.client_of("w0"))]),
            source=it.model,
            packed=True,
            lineage="other",
        )
        async with other:
            await other.initialize()
            await other.send_weights(version=1)
        for watching in (successor(it), before):
            for _ in range(2):
                await watching.wait_ready(10)
                assert (watching.version, watching.routable()) == (None, ())
        assert f"w0: 1 of other; w1: 5 of {it.trainer.lineage}" in caplog.text
