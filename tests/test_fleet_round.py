"""Rounds that an orchestrator drives: tickets go to trainers elsewhere, it commits or cancels."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack, asynccontextmanager

import by_hand
import models
import msgspec
import pytest
from interpreters import PROGRAMS, interpreter
from paced import Hold, Paced
from processes import program, replica

import aiosync
from aiosync import (
    Budget,
    FleetClient,
    FleetRound,
    HTTPVLLMWeightSyncClient,
    Member,
    PhaseTimeout,
    ProtocolMismatch,
    Refused,
    RoundCancelled,
    Validation,
)
from aiosync.testing import DirectClient

pytestmark = pytest.mark.asyncio
BUDGET = Budget(total=30.0, stall=20.0, finish=20.0, cleanup=3.0)


@asynccontextmanager
async def fleet_of(members: int = 2, **options):
    async with AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(replica(name=f"r{n}", seed=n, **options))
            for n in range(members)
        ]
        fleet = FleetClient([Member(f"m{n}", each.url) for n, each in enumerate(found)])
        yield fleet, found


def connected(source, replicas):
    urls = [each.url for each in replicas]
    return aiosync.connect(source, workers=urls, packed_buffer_size_bytes=4096)


async def line(process) -> str:
    async with asyncio.timeout(30):
        return (await process.stdout.readline()).decode().strip()


# --- engines of this process, driven by hand ---


@asynccontextmanager
async def hand_fleet(members: int = 2):
    async with AsyncExitStack() as stack:
        engines, urls = [], []
        for _ in range(members):
            engines.append(await stack.enter_async_context(by_hand.by_hand()))
            server = await stack.enter_async_context(aiosync.serve(engines[-1]))
            urls.append(server.url)
        for engine in engines:
            await by_hand.owned(engine)
        yield FleetClient([Member(f"m{n}", url) for n, url in enumerate(urls)]), engines


def header(engine, ticket, **options):
    return by_hand.header(engine, ticket.round, version=ticket.version, ticket=ticket.id, **options)


async def receive(engine, ticket, value: float) -> asyncio.Future:
    """One worker's part up to finish, which waits for the driver."""
    this = header(engine, ticket)
    await engine.start_weight_update(header=this)
    await engine.update_weights({"value": value}, header=this)
    return asyncio.ensure_future(engine.finish_weight_update(None, header=this))


async def test_nobody_commits_before_everybody_has_the_round():
    async with hand_fleet() as (fleet, (one, two)):
        async with fleet.round(version=3, timeout=20) as rnd:
            first = await receive(one, rnd.ticket, 3.0)
            client = fleet.members[0].client
            state = await client.ticket_state(rnd.ticket.id, beside="running", wait_s=5)
            assert state.phase == "received"
            assert by_hand.values(one.model) == {0.0}
            with pytest.raises(Refused, match="is open"):
                await fleet.members[1].client.commit_ticket(rnd.ticket.id)
            second = await receive(two, rnd.ticket, 3.0)
            report = await rnd.wait()
            await first
            await second
        assert rnd.report is report
        assert fleet.version == report.version
        assert fleet.routable() == fleet.members
        assert (report.outcome, report.version.label) == ("committed", 3)
        assert [(m.name, m.outcome) for m in report.members] == [
            ("m0", "committed"),
            ("m1", "committed"),
        ]
        assert [by_hand.values(each.model) for each in (one, two)] == [{3.0}] * 2
        with pytest.raises(Refused, match="it is committed"):
            await one.start_weight_update(header=header(one, rnd.ticket))


async def test_a_quorum_is_enough_and_the_rest_is_left_behind():
    async with hand_fleet() as (both, (one, two)):
        fleet = FleetClient(both.members, policy="quorum(1)")
        async with fleet.round(version=1, timeout=20) as rnd:
            two.errors["update"] = OSError("no memory")
            with pytest.raises(OSError, match="no memory"):
                await receive(two, rnd.ticket, 1.0)
            await receive(one, rnd.ticket, 1.0)
        assert rnd.report.outcome == "committed"
        assert {m.name: m.outcome for m in rnd.report.members} == {
            "m0": "committed",
            "m1": "failed",
        }
        assert [member.name for member in fleet.routable()] == ["m0"]
        assert fleet.states["m1"] == "stale"


async def test_one_round_over_several_fleets_commits_on_all_of_them_or_on_none():
    async with hand_fleet() as (both, (one, two)):
        ours, theirs = (FleetClient([member]) for member in both.members)
        async with FleetRound([ours, theirs], version=1, timeout=20) as rnd:
            first = await receive(one, rnd.ticket, 1.0)
            await both.members[0].client.ticket_state(rnd.ticket.id, beside="running", wait_s=5)
            assert by_hand.values(one.model) == {0.0}  # the other fleet has not got it
            await receive(two, rnd.ticket, 1.0)
            await rnd.wait()
            await first
        assert [(m.name, m.outcome) for m in rnd.report.members] == [
            ("m0", "committed"),
            ("m1", "committed"),
        ]
        with pytest.raises(RoundCancelled, match="no memory"):
            async with FleetRound([ours, theirs], version=2, timeout=20) as rnd:
                waiting = await receive(one, rnd.ticket, 2.0)
                two.errors["update"] = OSError("no memory")
                with pytest.raises(OSError, match="no memory"):
                    await receive(two, rnd.ticket, 2.0)
        with pytest.raises(RoundCancelled):
            await waiting
        assert [by_hand.values(each.model) for each in (one, two)] == [{1.0}] * 2
        with pytest.raises(Validation, match="unique names"):
            FleetRound([both, ours])


async def test_generation_of_all_members_stands_still_from_the_first_commit_to_the_last():
    async with hand_fleet() as (fleet, engines):
        seen = []
        for index, engine in enumerate(engines):
            engine.events.on_transition(
                lambda t, index=index: (
                    seen.append([each.generation.state.value for each in engines])
                    if t.trigger == "complete"
                    else None
                )
            )
            del index
        async with fleet.round(version=1, timeout=20, pause="keep") as rnd:
            for engine in engines:
                await receive(engine, rnd.ticket, 1.0)
        assert seen == [["paused", "paused"]] * 2
        assert rnd.report.pause_seconds > 0
        assert [engine.generation.state.value for engine in engines] == ["running"] * 2


async def test_a_member_that_fails_ends_the_round_everywhere():
    async with hand_fleet() as (fleet, (one, two)):
        with pytest.raises(RoundCancelled, match="no memory") as caught:
            async with fleet.round(version=1, timeout=20) as rnd:
                waiting = await receive(one, rnd.ticket, 1.0)
                two.errors["update"] = OSError("no memory")
                with pytest.raises(OSError, match="no memory"):
                    await receive(two, rnd.ticket, 1.0)
        assert caught.value.replica == "m1"
        with pytest.raises(RoundCancelled, match="by its driver"):
            await waiting
        assert caught.value.report is rnd.report
        outcomes = {m.name: m for m in rnd.report.members}
        assert {m.outcome for m in outcomes.values()} == {"failed"}
        assert [by_hand.values(each.model) for each in (one, two)] == [{0.0}] * 2
        async with fleet.round(version=2, timeout=20) as again:
            for engine in (one, two):
                if engine.state == "failed":
                    await by_hand.owned(engine)
                await receive(engine, again.ticket, 2.0)
        assert again.report.outcome == "committed"


async def test_leaving_by_exception_or_cancellation_refuses_the_ticket_from_then_on():
    async with hand_fleet(1) as (fleet, (engine,)):
        with pytest.raises(KeyError):
            async with fleet.round(version=1, timeout=20) as rnd:
                waiting = await receive(engine, rnd.ticket, 1.0)
                raise KeyError("the orchestrator's own affair")
        with pytest.raises(RoundCancelled, match="KeyError"):
            await waiting
        assert rnd.report.outcome == "failed"
        assert engine.state == "initialized"  # usable again: everything was intact
        with pytest.raises(Refused, match="by its driver"):
            await engine.start_weight_update(header=header(engine, rnd.ticket))

        entered, tickets = asyncio.Event(), []

        async def drive() -> None:
            async with fleet.round(version=2, timeout=20) as rnd:
                tickets.append(rnd.ticket)
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.ensure_future(drive())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(Refused, match="by its driver"):  # before anything had begun
            await engine.start_weight_update(header=header(engine, tickets[0]))
        assert by_hand.values(engine.model) == {0.0}


async def test_what_a_worker_does_not_expect_it_refuses():
    async with hand_fleet(1) as (fleet, (engine,)):
        with pytest.raises(RoundCancelled, match="that is all"):
            async with fleet.round(version=1, timeout=20) as rnd:
                number = rnd.ticket.round
                stranger = by_hand.header(engine, number, ticket="x" * 32)
                with pytest.raises(Refused, match="not announced here"):
                    await engine.start_weight_update(header=stranger)
                other = by_hand.header(engine, number + 1, ticket=rnd.ticket.id)
                with pytest.raises(Refused):
                    await engine.start_weight_update(header=other)
                with pytest.raises(Validation, match="no ticket 'x'"):
                    await fleet.members[0].client.ticket_state("x")
                own = msgspec.structs.replace(rnd.ticket, driver=None)
                with pytest.raises(Validation, match="names no driver"):
                    await fleet.members[0].client.announce_ticket(own)
                await rnd.cancel("that is all")
        assert rnd.report.outcome == "failed"


async def test_nobody_carries_it_out():
    async with hand_fleet() as (fleet, engines):
        with pytest.raises(PhaseTimeout, match="no trainer has begun it on m0, m1") as caught:
            async with fleet.round(version=1, timeout=1.0):
                pass
        assert caught.value.report.outcome == "failed"
        assert [engine.state.value for engine in engines] == ["initialized"] * 2
        with pytest.raises(Validation, match="pause must be"):
            fleet.round(pause="sometimes")
        with pytest.raises(Validation, match="enter the round first"):
            _ = fleet.round().ticket


async def test_members_that_know_no_drivers_are_refused_by_name():
    async with by_hand.by_hand() as engine:
        client = DirectClient(engine)
        probe = client.capabilities

        async def without(refresh: bool = False):
            found = await probe(refresh=refresh)
            return aiosync.Capabilities(protocol=1, features=["prepare"], peer=found.peer)

        client.capabilities = without
        fleet = FleetClient([Member("old", client)])
        with pytest.raises(ProtocolMismatch, match="no rounds from a driver") as caught:
            async with fleet.round(version=1):
                pass
        assert caught.value.replica == "old"


# --- replicas, trainers and drivers as processes ---


@pytest.mark.slow
async def test_trainers_elsewhere_carry_the_ticket_out(free_shm):
    async with fleet_of() as (fleet, replicas):
        urls = [each.url for each in replicas]
        async with program("ticket_rank.py", "-1", *urls) as rank:
            assert await line(rank) == "connected"
            async with fleet.round(version=5, timeout=30, pause="keep") as rnd:
                os.write(rank._stdin, rnd.ticket.encode().encode() + b"\n")
                assert await line(rank) == "committed"
            assert rnd.report.outcome == "committed"
        for each in replicas:
            facts = await each.facts()
            assert facts["prints"] == models.fingerprint(models.make("small", 7))
            assert (facts["version"], facts["weights"]) == (5, "intact")
        # Versions go on from what the members hold; a trainer of this process is another run.
        async with connected(models.make("small", 8), replicas) as sync:
            async with fleet.round(timeout=30) as rnd:
                assert rnd.ticket.version.label == 6
                report = await sync.send_weights(ticket=rnd.ticket, budget=BUDGET)
            assert (report.outcome, report.version) == ("committed", rnd.report.version)
            assert await sync.send_weights(ticket=rnd.ticket) is report  # repeated: the record
            assert (await sync.send_weights(version=7, budget=BUDGET)).outcome == "committed"


@pytest.mark.slow
async def test_cancelling_the_driver_ends_the_round_of_a_trainer_in_the_transfer(free_shm):
    async with fleet_of() as (fleet, replicas):
        source = Paced(models.make("small", 7))
        async with connected(source, replicas) as sync:
            source.before = hold = Hold(2)
            task = None
            with pytest.raises(RoundCancelled, match="changed its mind") as caught:
                async with fleet.round(version=1, timeout=30) as rnd:
                    task = sync.begin_update(ticket=rnd.ticket, budget=BUDGET)
                    while not hold.reached.is_set():
                        await asyncio.sleep(0.01)
                    await rnd.cancel("changed its mind")
                    hold.released.set()
                    with pytest.raises(RoundCancelled, match="changed its mind") as at_rank:
                        await task
            assert at_rank.value.report.outcome == "failed"
            assert caught.value.report.outcome == "failed"
            for each in replicas:
                facts = await each.facts()
                assert (facts["version"], facts["weights"]) == (None, "intact")
            with pytest.raises((Refused, Validation)):  # the ticket is used up
                await sync.send_weights(ticket=rnd.ticket, budget=BUDGET)
            async with fleet.round(version=2, timeout=30) as again:
                await sync.send_weights(ticket=again.ticket, budget=BUDGET)
            assert again.report.outcome == "committed"


@pytest.mark.slow
async def test_a_driver_that_is_killed_leaves_the_old_version_everywhere(free_shm):
    async with fleet_of() as (_, replicas):
        urls = [each.url for each in replicas]
        source = Paced(models.make("small", 7))
        async with connected(source, replicas) as sync:
            source.before = hold = Hold(2)
            async with program("driver.py", "4", *urls) as driver:
                word = await line(driver)
                update = sync.begin_update(ticket=word, budget=BUDGET)
                while not hold.reached.is_set():
                    await asyncio.sleep(0.01)
                await driver.kill()
                hold.released.set()
                with pytest.raises(PhaseTimeout):
                    await update
            for each in replicas:
                facts = await each.wait_state("initialized", "failed", "idle")
                assert (facts["version"], facts["weights"]) == (None, "intact")
            fleet = FleetClient([Member(f"m{n}", url) for n, url in enumerate(urls)])
            async with fleet.round(version=2, timeout=30) as rnd:
                assert (await sync.send_weights(ticket=rnd.ticket)).outcome == "committed"


@pytest.mark.slow
async def test_a_member_that_dies_is_named_and_the_others_keep_their_version(free_shm):
    async with fleet_of() as (fleet, replicas):
        source = Paced(models.make("small", 7))
        async with connected(source, replicas) as sync:
            source.before = hold = Hold(2)
            with pytest.raises(aiosync.AiosyncError) as caught:
                async with fleet.round(version=1, timeout=30) as rnd:
                    update = sync.begin_update(ticket=rnd.ticket, budget=BUDGET)
                    while not hold.reached.is_set():
                        await asyncio.sleep(0.01)
                    replicas[1].signal(signal.SIGKILL)
                    hold.released.set()
                    with pytest.raises(aiosync.AiosyncError):
                        await update
            assert caught.value.report is rnd.report
            outcomes = {m.name: m for m in rnd.report.members}
            assert {m.outcome for m in outcomes.values()} == {"failed"}
            assert outcomes["m1"].error.startswith("PeerLost")
            assert (outcomes["m0"].weights, outcomes["m1"].weights) == ("intact", "unknown")
            facts = await replicas[0].facts()
            assert (facts["version"], facts["weights"]) == (None, "intact")


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_torchrun_ranks_carry_out_one_ticket_and_hear_of_its_end(tmp_path):
    async with replica(kind="ranks", seed=2) as worker:
        fleet = FleetClient([Member("m", worker.url)])
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        script = (str(PROGRAMS / "ticket_rank.py"), worker.url, str(tmp_path))
        async with interpreter(*launcher, *script, strict=False, group=True) as process:

            async def said(name: str) -> list[str]:
                files = [tmp_path / f"{name}{rank}" for rank in (0, 1)]
                async with asyncio.timeout(60):
                    while not all(file.exists() for file in files):
                        await asyncio.sleep(0.05)
                return [file.read_text() for file in files]

            assert await said("connected") == ["", ""]
            async with fleet.round(version=1, timeout=60) as rnd:
                (tmp_path / "ticket1.new").write_text(rnd.ticket.encode())
                (tmp_path / "ticket1.new").rename(tmp_path / "ticket1")
                assert await said("outcome1-") == ["committed"] * 2
            with pytest.raises(RoundCancelled):
                async with fleet.round(version=2, timeout=60) as rnd:
                    (tmp_path / "ticket2.new").write_text(rnd.ticket.encode())
                    (tmp_path / "ticket2.new").rename(tmp_path / "ticket2")
                    await said("holding2-")
                    await rnd.cancel("enough")
                    assert await said("outcome2-") == ["RoundCancelled"] * 2
            async with asyncio.timeout(30):
                out, err = await process.communicate()
            assert process.returncode == 0, (out + err).decode()
        facts = await worker.facts()
        assert (facts["version"], facts["weights"]) == (1, "intact")
        assert await HTTPVLLMWeightSyncClient(worker.url).get_world_size() == 1
