"""Members come, go, return and restart; what the fleet says of each, and what that costs."""

from __future__ import annotations

import asyncio

import pytest
from fleets import fleet
from limits import SLACK

import aiosync
from aiosync import MemberState
from aiosync.fleet_health import Health


async def lost():
    raise aiosync.PeerLost("cut off")


async def refused():
    raise ConnectionRefusedError(111, "Connection refused")


async def hangs():
    await asyncio.sleep(60)


async def probe(it):
    await Health(it.client.roster).probe_all()


def methods_of(it, name, since=0):
    return [method for who, method in it.calls[since:] if who == name]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("backend", "policy"), [("ipc", "all"), ("ipc", "quorum(1)"), ("gloo", "all")]
)
async def test_a_member_that_is_added_is_current_after_one_round(backend, policy):
    async with fleet(1, backend=backend, policy=policy) as it:
        seen = []
        it.client.on_member(lambda t: seen.append((t.engine, t.trigger, t.dest, t.version)))
        await it.send(version=1)
        it.client.add(aiosync.Member("w9", await it.worker("w9")))
        assert it.states() == {"w0": "current", "w9": "joining"}
        assert it.routable() == {"w0"}
        report = await it.send(version=2)
        assert it.routable() == it.holders() == {"w0", "w9"}
        assert any("joined: w9" in note for note in report.notes)
        assert seen[-2:] == [("w0", "commit", "current", "2"), ("w9", "commit", "current", "2")]
        removed = it.client.remove("w0")
        assert removed.name == "w0"
        report = await it.send(version=3)
        assert it.holders() == it.routable() == {"w9"}
        assert [member.name for member in report.members] == ["w9"]
        assert "shutdown" in methods_of(it, "w0")
        assert it.workers["w0"].state == "idle"
        assert it.workers["w0"].version.label == 2
        assert seen[-2][:3] == ("w0", "leave", "left")


@pytest.mark.asyncio
async def test_the_channel_of_those_who_stay_is_left_alone_when_one_joins():
    async with fleet(2) as it:
        await it.send(version=1)
        since = len(it.calls)
        it.client.add(aiosync.Member("w9", await it.worker("w9")))
        await it.send(version=2)
        assert "init_transfer_engine" not in methods_of(it, "w0", since)
        assert methods_of(it, "w9")[0] == "init_transfer_engine"


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", [lost, hangs], ids=["refuses", "hangs"])
async def test_a_joiner_that_fails_costs_one_admission_share_and_nothing_more(fault, monkeypatch):
    defaults = aiosync.DEFAULTS
    changed = type(defaults)(join_s=1.0)
    monkeypatch.setattr("aiosync.roll_call.DEFAULTS", changed)
    async with fleet(2, policy="quorum(2)") as it:
        await it.send(version=1)
        client = await it.worker("w9")
        it.faults["w9", "init_transfer_engine"] = fault
        it.client.add(aiosync.Member("w9", client))
        report = await it.send(version=2)
        assert report.outcome == "committed"
        assert report.left_out == ["w9"]
        assert it.states() == {"w0": "current", "w1": "current", "w9": "lost"}
        assert it.client.roster.standings["w9"].error
        assert report.seconds["admit"] < 1.0 + SLACK
        report = await it.send(version=3)
        assert len(methods_of(it, "w9")) == 1
        assert report.left_out == ["w9"]
        await probe(it)
        assert it.states()["w9"] == "lost"  # it answers, as it did when it failed
        it.faults.clear()
        it.client.add(aiosync.Member("w9", client))
        await it.send(version=4)
        assert it.routable() == it.holders() == {"w0", "w1", "w9"}


@pytest.mark.asyncio
async def test_a_round_looks_for_lost_members_beside_its_work():
    async with fleet(2, policy="quorum(1)") as it:
        await it.send(version=1)
        client = it.client.members[1].client
        answers, client.capabilities = client.capabilities, unanswered
        await probe(it)
        assert it.states()["w1"] == "lost"
        await it.send(version=2)
        assert it.states()["w1"] == "lost"
        client.capabilities = answers
        report = await it.send(version=3)
        assert report.left_out == ["w1"]
        assert it.states()["w1"] == "joining"
        await it.send(version=4)
        assert it.routable() == it.holders() == {"w0", "w1"}


@pytest.mark.asyncio
async def test_a_restarted_member_is_noticed_before_a_byte_moves_and_is_served_again():
    async with fleet(2, policy="quorum(1)") as it:
        await it.send(version=1)
        await probe(it)
        client = await it.worker("w1")
        it.restart("w1", client.engine)
        report = await it.send(version=2)
        assert report.recovered
        assert it.routable() == it.holders() == {"w0", "w1"}
        assert any("restarted" in note for note in report.notes)


@pytest.mark.asyncio
async def test_a_member_that_restarts_in_the_middle_of_a_round_is_left_behind():
    async with fleet(3, policy="quorum(2)") as it:
        await it.send(version=1)
        again = (await it.worker("w1")).engine

        async def restart():
            it.faults.clear()
            it.restart("w1", again)

        it.faults["w1", "prepare_weight_update"] = restart
        report = await it.send(version=2)
        assert report.outcome == "committed"
        assert it.holders() == it.routable() == {"w0", "w2"}
        assert again.version is None
        await it.send(version=3)
        assert it.holders() == it.routable() == {"w0", "w1", "w2"}


@pytest.mark.asyncio
async def test_a_restarted_member_gets_no_traffic_once_a_probe_has_seen_it():
    async with fleet(2, policy="quorum(1)") as it:
        await it.send(version=1)
        client = await it.worker("w1")
        it.restart("w1", client.engine)
        assert it.routable() == {"w0", "w1"}  # nobody has looked yet
        await probe(it)
        assert it.routable() == {"w0"}
        assert it.states()["w1"] == "joining"
        since = len(it.calls)
        await it.send(version=2)
        assert "init_transfer_engine" not in methods_of(it, "w0", since)
        assert it.routable() == it.holders() == {"w0", "w1"}


@pytest.mark.asyncio
async def test_a_member_that_was_away_and_missed_nothing_is_current_at_once():
    async with fleet(2, policy="quorum(1)") as it:
        await it.send(version=1)
        answers = it.client.members[1].client.capabilities
        it.client.members[1].client.capabilities = unanswered
        await probe(it)
        assert it.states()["w1"] == "lost"
        it.client.members[1].client.capabilities = answers
        await probe(it)
        assert it.routable() == {"w0", "w1"}


async def unanswered(**_):
    raise aiosync.PeerLost("gone") from ConnectionRefusedError(111, "refused")


@pytest.mark.asyncio
async def test_one_unanswered_probe_is_no_death_and_three_are(monkeypatch):
    async def silent(**_):
        await asyncio.sleep(60)

    monkeypatch.setattr("aiosync.fleet_health.DEFAULTS", type(aiosync.DEFAULTS)(beat_s=0.05))
    async with fleet(2, policy="quorum(1)") as it:
        await it.send(version=1)
        answers = it.client.members[1].client.capabilities
        it.client.members[1].client.capabilities = silent
        await probe(it)
        await probe(it)
        assert it.states()["w1"] == "current"
        it.client.members[1].client.capabilities = answers
        await probe(it)
        it.client.members[1].client.capabilities = silent
        await probe(it)
        await probe(it)
        assert it.states()["w1"] == "current"
        await probe(it)
        assert it.states() == {"w0": "current", "w1": "lost"}
        assert "no answer" in it.client.roster.standings["w1"].error


@pytest.mark.asyncio
async def test_a_broken_connection_alone_is_no_death():
    async def cut(**_):
        raise aiosync.PeerLost("the connection broke") from ConnectionResetError(104, "reset")

    async with fleet(2, policy="quorum(1)") as it:
        await it.send(version=1)
        it.client.members[1].client.capabilities = cut
        await probe(it)
        assert it.states()["w1"] == "current"


@pytest.mark.asyncio
async def test_probes_run_only_while_the_fleet_is_entered():
    async with fleet(2) as it:
        await it.send(version=1)  # by its end the workers have looked at their models
        before = {task.get_name() for task in asyncio.all_tasks()}
        assert "fleet-health" not in before
        async with it.client:
            assert "fleet-health" in {task.get_name() for task in asyncio.all_tasks()}
            with pytest.raises(aiosync.Busy):
                await it.client.__aenter__()
            it.client.members[1].client.capabilities = unanswered
            async with asyncio.timeout(5):
                async for transition in it.client.subscribe(since=0):
                    if transition.dest == MemberState.LOST:
                        break
        assert transition.engine == "w1"
        assert transition.role == "member"
        assert {task.get_name() for task in asyncio.all_tasks()} == before


@pytest.mark.asyncio
async def test_wait_version_and_what_cannot_be_changed():
    async with fleet(2) as it:
        waiting = asyncio.create_task(it.client.wait_version(2, timeout=10))
        await it.send(version=1)
        assert not waiting.done()
        await it.send(version=2)
        assert (await waiting).label == 2
        with pytest.raises(TimeoutError, match="order 3"):
            await it.client.wait_version(3, timeout=0.05)
        with pytest.raises(aiosync.Validation, match="already"):
            it.client.add(it.client.members[0])
        with pytest.raises(aiosync.Validation, match="no member 'w7'"):
            it.client.remove("w7")
        it.client.remove("w1")
        with pytest.raises(aiosync.Validation, match="last member"):
            it.client.remove("w0")


@pytest.mark.asyncio
async def test_under_all_a_lost_member_ends_the_round_by_name():
    async with fleet(2) as it:
        await it.send(version=1)
        it.client.members[1].client.capabilities = unanswered
        it.faults["w1", "start_weight_update"] = lost
        with pytest.raises(aiosync.PeerLost) as caught:
            await it.send(version=2)
        assert caught.value.replica == "w1"
        it.client.remove("w1")
        await it.send(version=2)
        assert it.routable() == it.holders() == {"w0"}


@pytest.mark.asyncio
@pytest.mark.parametrize("backend", ["ipc", "gloo"])
@pytest.mark.parametrize("phase", ["start_weight_update", "update_weights"])
async def test_retry_without_lost_begins_again_under_a_new_epoch(backend, phase):
    async with fleet(3, backend=backend, retry_without_lost=True) as it:
        await it.send(version=1)
        epoch = it.workers["w0"].peer_state().epoch
        it.client.members[1].client.capabilities = unanswered
        it.faults["w1", phase] = lost
        report = await it.send(version=2)
        assert report.outcome == "committed"
        assert report.left_out == ["w1"]
        assert any("begun again without w1" in note for note in report.notes)
        if backend == "gloo":
            assert it.workers["w0"].peer_state().epoch > epoch
        assert it.routable() == it.holders() == {"w0", "w2"}
        assert it.states()["w1"] == "lost"


@pytest.mark.asyncio
async def test_a_member_that_only_failed_is_not_left_behind_by_retry_without_lost():
    async with fleet(3, retry_without_lost=True) as it:
        await it.send(version=1)
        it.faults["w1", "update_weights"] = lost
        with pytest.raises(aiosync.PeerLost):
            await it.send(version=2)
        assert it.holders() == set()


@pytest.mark.asyncio
@pytest.mark.parametrize("backend", ["ipc", "gloo"])
async def test_the_servers_of_a_member_share_a_group_and_commit_together(backend):
    async with fleet(1, backend=backend, init=False) as it:
        servers = [await it.worker("a"), await it.worker("b")]
        members = [*it.client.members, aiosync.Member("pair", servers=servers)]
        client = aiosync.FleetClient(members)
        assert await Sizes.of(client) == 3
        it.client = client
        cls = type(it.trainer)
        async with cls(client=client, source=it.model) as trainer:
            it.trainer = trainer
            await trainer.initialize()
            report = await it.send(version=1)
            assert {m.name: m.outcome for m in report.members} == {
                "w0": "committed",
                "pair": "committed",
            }
            assert it.holders() == {"w0", "a", "b"}
            assert it.routable() == {"w0", "pair"}
            it.faults["b", "prepare_weight_update"] = lost
            with pytest.raises(aiosync.PeerLost) as caught:
                await it.send(version=2)
            assert caught.value.replica == "pair#1"
            assert it.holders() == set()
            row = next(m for m in caught.value.report.members if m.name == "pair")
            assert row.error.startswith("pair#1: PeerLost")


@pytest.mark.asyncio
async def test_a_member_whose_one_server_fails_commits_on_none():
    async with fleet(1, init=False) as it:
        servers = [await it.worker("a"), await it.worker("b")]
        it.client = aiosync.FleetClient(
            [*it.client.members, aiosync.Member("pair", servers=servers)], policy="quorum(1)"
        )
        async with type(it.trainer)(client=it.client, source=it.model) as trainer:
            it.trainer = trainer
            await trainer.initialize()
            await it.send(version=1)
            it.faults["b", "update_weights"] = lost
            report = await it.send(version=2)
            assert report.outcome == "committed"
            assert it.outcomes() == {"w0": "committed", "pair": "failed"}
            assert it.holders() == it.routable() == {"w0"}
            assert it.workers["a"].version.label == 1


class Sizes:
    @staticmethod
    async def of(client):
        for member in client.members:
            for server in member.servers:
                server.get_world_size = one
        return await client.get_world_size()


async def one(include_dp=True):
    return 1


@pytest.mark.asyncio
async def test_connect_takes_a_fleet_as_it_is():
    async with fleet(2) as it:
        members = [aiosync.Member(name, await it.worker(name)) for name in ("a", "b", "c")]
        mine = aiosync.FleetClient(members, policy="quorum(2)")
        with pytest.raises(aiosync.Validation, match="members have their own tokens"):
            async with aiosync.connect(it.model, workers=mine, token="secret"):
                pass

        it.faults["c", "prepare_weight_update"] = lost
        async with aiosync.connect(it.model, workers=mine, backend="ipc") as sync:
            report = await sync.send_weights(version=1)
        outcomes = {member.name: member.outcome for member in report.members}
        assert outcomes == {"a": "committed", "b": "committed", "c": "failed"}
        assert {member.name for member in mine.routable()} == {"a", "b"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("backend", "policy"), [("ipc", "all"), ("ipc", "quorum(1)"), ("gloo", "all")]
)
async def test_another_member_under_the_name_of_one_that_left(backend, policy):
    async with fleet(2, backend=backend, policy=policy) as it:
        await it.send(version=1)
        old, copy = it.workers["w1"], it.copies["w1"]
        it.client.remove("w1")
        it.client.add(aiosync.Member("w1", await it.worker("w1")))
        assert it.workers["w1"] is not old
        report = await it.send(version=2)
        assert it.holders() == it.routable() == {"w0", "w1"}
        assert it.workers["w1"].version.label == 2
        assert old.version.label == 1
        assert (old.state, it.copies["w1"] is copy) == ("idle", False)
        assert any("joined: w1; left: w1" in note for note in report.notes)


@pytest.mark.asyncio
async def test_a_name_that_changes_hands_in_a_round_is_not_current_by_it():
    async with fleet(2, policy="quorum(1)") as it:
        await it.send(version=1)

        async def change():
            it.faults.clear()
            await handed_over.wait()

        handed_over = asyncio.Event()
        old = it.workers["w1"]
        it.faults["w1", "prepare_weight_update"] = change
        round_ = asyncio.create_task(it.send(version=2))
        while it.faults:
            await asyncio.sleep(0.01)
        it.client.remove("w1")
        it.client.add(aiosync.Member("w1", await it.worker("w1")))
        handed_over.set()
        await round_
        assert old.version.label == 2
        assert it.states()["w1"] == "joining"
        assert it.client.held["w1"] is None
        assert it.routable() == {"w0"}
        await it.send(version=3)
        assert it.holders() == it.routable() == {"w0", "w1"}
