"""What becomes of a round, and of each member, when one member fails in each phase."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from fleets import fleet

import aiosync
from aiosync import State

STEPS = {
    "start": "start_weight_update",
    "update": "update_weights",
    "prepare": "prepare_weight_update",
    "finish": "finish_weight_update",
}


async def lost():
    raise aiosync.PeerLost("cut off", replica="w1")


async def hangs():
    await asyncio.sleep(60)


FAULTS = {"lost": lost, "hangs": hangs}


@pytest.fixture(autouse=True)
def little_patience(monkeypatch):
    monkeypatch.setattr("aiosync.attendance.Attendance.floor", 0.3)


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", ["quorum(2)", "best_effort"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("phase", STEPS)
async def test_the_others_go_on_without_a_member_that_fails(policy, fault, phase):
    async with fleet(3, policy=policy) as it:
        await it.send(version=1)
        assert it.routable() == it.holders() == {"w0", "w1", "w2"}
        it.faults["w1", STEPS[phase]] = FAULTS[fault]
        report = await it.send(version=2)
        assert report.outcome == "committed"
        assert it.trainer.state is State.INITIALIZED
        assert it.holders() == it.routable() == {"w0", "w2"}
        assert it.states()["w1"] == "stale"
        mine = next(member for member in report.members if member.name == "w1")
        assert mine.outcome == "failed"  # at finish, too: it was asked, and has given up
        assert mine.phase == phase
        assert mine.error
        assert it.workers["w1"].version.label == 1
        assert it.workers["w1"].weights == "intact"
        assert ("w1", "abort_weight_update") in it.calls or phase == "start"
        it.faults.clear()
        report = await it.send(version=3)
        assert it.holders() == it.routable() == {"w0", "w1", "w2"}
        assert set(it.outcomes().values()) == {"committed"}


@pytest.mark.asyncio
@pytest.mark.parametrize("phase", ["start", "update", "prepare"])
@pytest.mark.parametrize("policy", ["all", "quorum(3)"])
async def test_too_few_are_left_and_nothing_is_committed_anywhere(policy, phase):
    async with fleet(3, policy=policy) as it:
        await it.send(version=1)
        old = {name: worker.version for name, worker in it.workers.items()}
        it.faults["w1", STEPS[phase]] = lost
        with pytest.raises(aiosync.PeerLost) as caught:
            await it.send(version=2)
        assert caught.value.replica == "w1"
        assert caught.value.phase == phase
        assert caught.value.report.outcome == "failed"
        assert it.holders() == set()
        assert {name: worker.version for name, worker in it.workers.items()} == old
        assert {worker.weights.value for worker in it.workers.values()} == {"intact"}
        assert len([call for call in it.calls if call[1] == "finish_weight_update"]) == 3
        assert it.client.version.label == 1
        it.faults.clear()
        await it.send(version=2)
        assert it.holders() == it.routable() == {"w0", "w1", "w2"}


@pytest.mark.asyncio
async def test_a_quorum_that_was_not_met_at_finish_is_told():
    async with fleet(2, policy="quorum(2)") as it:
        await it.send(version=1)
        it.faults["w1", "finish_weight_update"] = lost
        with pytest.raises(aiosync.AiosyncError) as caught:
            await it.send(version=2)
        assert caught.value.report.outcome == "unknown"
        assert it.outcomes() == {"w0": "committed", "w1": "failed"}
        assert it.routable() == {"w0"}
        it.faults.clear()
        await it.send(version=2)
        assert it.routable() == it.holders() == {"w0", "w1"}


@pytest.mark.asyncio
async def test_a_policy_is_checked_against_the_backend_before_anything_is_asked():
    async with fleet(2, policy="quorum(1)", backend="gloo", init=False) as it:
        with pytest.raises(aiosync.Validation, match="gloo moves its bytes through all"):
            await it.trainer.initialize()
        assert not [call for call in it.calls if call[1] == "init_transfer_engine"]


@pytest.mark.asyncio
async def test_a_policy_is_checked_against_what_members_can_do():
    async with fleet(2, policy="best_effort", init=False) as it:
        it.client.members[1].client.capabilities = no_prepare(it.client.members[1].client)
        with pytest.raises(aiosync.Validation, match="can prepare") as caught:
            await it.trainer.initialize()
        assert caught.value.replica == "w1"


def no_prepare(client):
    ask = client.capabilities

    async def capabilities(**options):
        found = await ask(**options)
        features = [each for each in found.features if each != "prepare"]
        return aiosync.client.Capabilities(
            protocol=found.protocol, features=features, digests=found.digests, peer=found.peer
        )

    return capabilities


@pytest.mark.parametrize(
    "policy", ["most", "quorum", "quorum(0)", "quorum(-1)", 2, None, "quorum(1.5)"]
)
def test_a_policy_that_is_none_is_refused(policy):
    with pytest.raises(aiosync.Validation, match=r"policy must be|quorum must be"):
        aiosync.FleetClient(["unix:///nowhere"], policy=policy)


def test_policies_by_name_and_by_object():
    for policy in ("all", "quorum(2)", "best_effort"):
        assert str(aiosync.FleetClient(["unix:///nowhere"], policy=policy).policy) == policy
    fleet_ = aiosync.FleetClient(["unix:///nowhere"], policy=aiosync.Quorum(2))
    assert str(fleet_.policy) == "quorum(2)"
    with pytest.raises(aiosync.Validation, match="at least 1"):
        aiosync.Quorum(True)


def test_a_fleet_travels_by_pickle():
    members = [
        aiosync.Member("a", "unix:///nowhere"),
        aiosync.Member("b", servers=["http://x:1", "http://x:2"]),
    ]
    sent = aiosync.FleetClient(members, policy="quorum(1)", patience=0.5)
    sent.remove("a")
    sent.add(aiosync.Member("c", "unix:///there"))
    got = pickle.loads(pickle.dumps(sent))
    assert [member.name for member in got.members] == ["b", "c"]
    assert [s.name for s in got.members[0].servers] == ["http://x:1", "http://x:2"]
    assert (got.policy, got.patience) == (sent.policy, 0.5)
    assert set(got.states.values()) == {"joining"}


@pytest.mark.asyncio
async def test_a_member_that_drops_out_is_resumed_at_once_and_not_when_the_round_ends():
    async with fleet(3, policy="quorum(2)") as it:
        others = asyncio.Event()
        it.faults["w0", "prepare_weight_update"] = others.wait  # the round is held up here

        async def fails():
            assert str(it.workers["w1"].generation.state) == "paused"
            raise aiosync.PeerLost("cut off", replica="w1")

        it.faults["w1", "update_weights"] = fails
        running = asyncio.create_task(it.send(version=1, pause=aiosync.Pause()))
        async with asyncio.timeout(20):
            while ("w1", "update_weights") not in it.calls:
                await asyncio.sleep(0.01)
            await it.workers["w1"].generation.wait_for("running")
        assert not running.done()
        assert str(it.workers["w0"].generation.state) == "paused"
        others.set()
        report = await running
        assert report.outcome == "committed"
        assert it.holders() == {"w0", "w2"}
        rows = {member.name: member for member in report.members}
        assert rows["w1"].left_paused is None
