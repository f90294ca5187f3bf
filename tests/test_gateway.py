"""A fleet behind one worker's routes, and another process that lets rounds in."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import by_hand
import models
import pytest
from by_hand import ByHand
from plain_vllm import PlainClient
from processes import Replica, program, replica

import aiosync
from aiosync import (
    Budget,
    FleetClient,
    FleetGateway,
    GatewayClient,
    HTTPVLLMWeightSyncClient,
    InvalidTransition,
    Member,
    PeerLost,
    PhaseTimeout,
    Refused,
    Unauthorized,
    Validation,
)
from aiosync.testing import DirectClient

pytestmark = pytest.mark.asyncio
BUDGET = Budget(total=30.0, stall=20.0, finish=20.0, cleanup=3.0)


# --- members of this process, driven by hand ---


@dataclass
class Hand:
    gateway: FleetGateway
    engines: list[ByHand]

    def header(self, round: int, order: int | None = None, **options: Any) -> aiosync.RoundHeader:
        return by_hand.header(self.gateway.group, round, order, **options)


@asynccontextmanager
async def by_hands(members: int = 2, **options: Any):
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(by_hand.by_hand()) for _ in range(members)]
        fleet = FleetClient([Member(f"m{n}", DirectClient(e)) for n, e in enumerate(engines)])
        options = {"heartbeat_s": 5.0, **options}
        gateway = await stack.enter_async_context(FleetGateway(fleet, **options))
        await by_hand.owned(gateway.group)
        yield Hand(gateway, engines)


async def first(offers):
    async for offer in offers:
        await offers.aclose()
        return offer
    raise AssertionError("no offer")


async def test_a_start_that_is_repeated_while_a_gate_holds_it_begins_one_round():
    async with by_hands() as h:
        entered, go = asyncio.Event(), asyncio.Event()

        async def gate(_context):
            entered.set()
            await go.wait()

        h.gateway.group.gate("start", gate)
        this, gateway = h.header(1, 1), h.gateway
        start = asyncio.ensure_future(gateway.start_weight_update(header=this))
        offer = await first(gateway.offers())
        again = asyncio.ensure_future(gateway.start_weight_update(header=this))
        await asyncio.sleep(0)
        await offer.accept()
        await entered.wait()
        again.cancel()  # whatever becomes of this one, the round is the other one's
        with pytest.raises(asyncio.CancelledError):
            await again
        assert gateway.rounds()[-1].state == "accepted"
        go.set()
        await start
        await gateway.abort_weight_update("enough", header=this)
        assert gateway.rounds()[-1].state == "failed"
        assert not gateway._roster.driving


async def test_start_waits_for_the_decision_and_the_record_tells_the_outcome():
    async with by_hands() as h:
        this = h.header(1, 1)
        start = asyncio.ensure_future(h.gateway.start_weight_update(header=this))
        offer = await first(h.gateway.offers())
        assert (offer.version.label, offer.record.round, offer.record.state) == (1, 1, "offered")
        held = h.gateway.peer_state().detail["held"]
        assert held["offer"] == offer.id
        assert 0 < held["seconds_left"] <= 120
        assert all(engine.state == "initialized" for engine in h.engines)  # nobody was asked yet
        again = asyncio.ensure_future(h.gateway.start_weight_update(header=this))  # repeated
        await asyncio.sleep(0)
        await offer.accept()
        await offer.accept()
        await start
        await again
        assert len(h.gateway.rounds()) == 1
        assert h.gateway.rounds()[0].state == "accepted"
        with pytest.raises(Refused, match="accepted already"):
            await offer.decline("too late")
        await h.gateway.update_weights({"value": 1.0}, header=this)
        await h.gateway.finish_weight_update("1", header=this)
        (record,) = h.gateway.rounds()
        assert (record.state, record.version.label) == ("committed", 1)
        assert [(m.name, m.outcome) for m in record.members] == [
            ("m0", "committed"),
            ("m1", "committed"),
        ]
        assert record.ended_at >= record.decided_at >= record.offered_at
        assert [by_hand.values(engine.model) for engine in h.engines] == [{1.0}] * 2


async def test_a_declined_round_moves_nothing_and_says_why():
    async with by_hands() as h:
        this = h.header(1, 1)
        start = asyncio.ensure_future(h.gateway.start_weight_update(header=this))
        offer = await first(h.gateway.offers())
        await offer.decline("an evaluation is running")
        with pytest.raises(Refused, match="declined: an evaluation is running") as caught:
            await start
        assert caught.value.detail["offer"] == offer.id
        with pytest.raises(Refused, match="declined"):  # the same call again: the same answer
            await h.gateway.start_weight_update(header=this)
        assert [engine.steps for engine in h.engines] == [["init"]] * 2
        with pytest.raises(Validation, match="no offer 'nonsense'"):
            await h.gateway.desk.accept("nonsense")
        await whole(h, 2, 2)


async def whole(h: Hand, number: int, order: int) -> None:
    """One accepted round."""
    this = h.header(number, order)
    start = asyncio.ensure_future(h.gateway.start_weight_update(header=this))
    await (await first(h.gateway.offers())).accept()
    await start
    await h.gateway.update_weights({"value": float(order)}, header=this)
    await h.gateway.finish_weight_update(str(order), header=this)
    assert h.gateway.rounds()[-1].state == "committed"


async def test_an_offer_ends_by_time_by_the_trainers_abort_and_by_its_silence():
    async with by_hands(hold_s=1.0) as h:
        with pytest.raises(Refused, match="expired: nobody decided in time") as caught:
            await h.gateway.start_weight_update(header=h.header(1, 1))
        assert caught.value.retryable
        with pytest.raises(Refused, match="expired already"):
            await h.gateway.desk.accept(h.gateway.rounds()[-1].id)
    async with by_hands() as h:
        silent = h.header(2, 2, lease_s=1.0)
        with pytest.raises(Refused, match="withdrawn: no sign of life from trainer"):
            await h.gateway.start_weight_update(header=silent)
        this = h.header(3, 3)
        start = asyncio.ensure_future(h.gateway.start_weight_update(header=this))
        await first(h.gateway.offers())
        await h.gateway.abort_weight_update("changed its mind", header=this)
        with pytest.raises(Refused, match="withdrawn: changed its mind"):
            await start
        assert [record.state for record in h.gateway.rounds()] == ["withdrawn", "withdrawn"]
        await whole(h, 4, 4)


async def test_what_would_be_refused_anyway_is_not_offered():
    async with by_hands() as h:
        with pytest.raises(aiosync.Fenced):
            await h.gateway.start_weight_update(header=h.header(1, 1, owner="somebody else"))
        this = h.header(1, 1)
        start = asyncio.ensure_future(h.gateway.start_weight_update(header=this))
        await (await first(h.gateway.offers())).accept()
        await start
        await h.gateway.abort_weight_update("enough", header=this)
        assert h.gateway.rounds()[-1].state == "failed"
        assert "enough" in h.gateway.rounds()[-1].reason
        await h.gateway.shutdown(header=h.header(1))
        with pytest.raises(InvalidTransition):
            await h.gateway.start_weight_update(header=h.header(2, 2))
        assert len(h.gateway.rounds()) == 1


async def test_a_member_that_fails_is_named_in_the_record():
    async with by_hands() as h:
        this = h.header(1, 1)
        start = asyncio.ensure_future(h.gateway.start_weight_update(header=this))
        await (await first(h.gateway.offers())).accept()
        await start
        h.engines[1].errors["update"] = OSError("no memory")
        with pytest.raises(aiosync.AiosyncError, match="no memory"):
            await h.gateway.update_weights({"value": 1.0}, header=this)
        await h.gateway.abort_weight_update(header=this)
        (record,) = h.gateway.rounds()
        assert record.state == "failed"
        outcomes = {m.name: m for m in record.members}
        assert {m.outcome for m in outcomes.values()} == {"failed"}
        assert "no memory" in outcomes["m1"].error
        await whole(h, 2, 2)


async def test_a_policy_needs_a_data_plane_with_a_reader_for_each_member():
    async with by_hand.by_hand() as engine:
        fleet = FleetClient([Member("m", DirectClient(engine))], policy="quorum(1)")
        async with FleetGateway(fleet, heartbeat_s=5.0) as gateway:
            with pytest.raises(Validation, match=r"policy quorum\(1\): .*all members together"):
                await by_hand.owned(gateway.group)


async def test_vllms_own_client_drives_the_members_through_the_gateway():
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(by_hand.by_hand()) for _ in range(2)]
        fleet = FleetClient([Member(f"m{n}", DirectClient(e)) for n, e in enumerate(engines)])
        gateway = await stack.enter_async_context(FleetGateway(fleet, heartbeat_s=5.0))
        where = await stack.enter_async_context(aiosync.serve(gateway, port=0))

        def blocking() -> None:
            with PlainClient(where.url) as client:
                client.init_weight_transfer_engine({"address": "there"})
                client.start_weight_update()
                client.update_weights({"value": 3.0})
                client.finish_weight_update("step-3")
                assert client.get("weight_info")["weight_version"] == "step-3"

        driving = asyncio.ensure_future(asyncio.to_thread(blocking))
        offer = await first(gateway.offers())
        assert (offer.record.owner, offer.version) == (None, None)
        await offer.accept()
        await driving
        (record,) = gateway.rounds()
        assert (record.state, record.version.label) == ("committed", "step-3")
        assert [m.outcome for m in record.members] == ["committed"] * 2
        assert [by_hand.values(engine.model) for engine in engines] == [{3.0}] * 2


# --- real processes: trainer here or there, members and orchestrator elsewhere ---


@asynccontextmanager
async def served(members: int = 2, *, token: str | None = None, **options: Any):
    async with AsyncExitStack() as stack:
        found: list[Replica] = [
            await stack.enter_async_context(replica(name=f"r{n}", seed=n, lease=5))
            for n in range(members)
        ]
        fleet = FleetClient([Member(f"r{n}", each.url) for n, each in enumerate(found)])
        options = {"heartbeat_s": 0.2, "misses": 20, **options}  # a busy member is not a lost one
        gateway = await stack.enter_async_context(FleetGateway(fleet, **options))
        server = await stack.enter_async_context(aiosync.serve(gateway, token=token))
        yield gateway, server.url, found


async def accept_all(url: str, count: int = 1) -> None:
    async with GatewayClient(url) as client:
        offers = client.offers()
        for _ in range(count):
            await (await anext(offers)).accept()
        await offers.aclose()


@pytest.mark.slow
async def test_the_bytes_go_to_the_members_and_the_trainer_sees_one_worker(free_shm):
    async with served() as (gateway, url, replicas):
        assert await HTTPVLLMWeightSyncClient(url).get_world_size() == 2
        trained = models.make("small", 9)
        deciding = asyncio.ensure_future(accept_all(url, 2))
        async with aiosync.connect(trained, workers=[url]) as sync:
            for order in (1, 2):
                report = await sync.send_weights(version=order, budget=BUDGET)
                assert (report.outcome, report.verified) == ("committed", True)
        await deciding
        for each in replicas:
            facts = await each.facts()
            assert facts["prints"] == models.fingerprint(trained)
            assert (facts["version"], facts["weights"]) == (2, "intact")
        assert [record.state for record in gateway.rounds()] == ["committed", "committed"]


@pytest.mark.slow
async def test_a_slow_decision_does_not_cost_the_trainer_its_admit_time(free_shm):
    async with served(1) as (_, url, _):
        budget = Budget(total=30.0, admit=1.0, cleanup=3.0)
        async with aiosync.connect(models.make("small", 9), workers=[url]) as sync:
            update = sync.begin_update(version=1, budget=budget)
            async with GatewayClient(url) as client:
                offers = client.offers()
                offer = await anext(offers)
                await asyncio.sleep(2.5)  # an orchestrator that takes longer than admit
                await offer.accept()
                await offers.aclose()
            report = await update
            assert report.outcome == "committed"
            assert report.seconds["start"] >= 2.0
            assert any("held start" in note for note in report.notes)
            # The round's own time is not renewed, and the gateway hears that it is over.
            with pytest.raises(PhaseTimeout):
                await sync.send_weights(version=2, budget=Budget(total=1.5, cleanup=3.0))
            async with GatewayClient(url) as client:
                assert (await client.rounds())[-1].state in ("withdrawn", "expired")
            update = sync.begin_update(version=3, budget=budget)
            await accept_all(url)
            assert (await update).outcome == "committed"


@pytest.mark.slow
async def test_an_orchestrator_dies_before_and_in_a_round_and_its_successor_asks(free_shm):
    async with served(1) as (_, url, replicas):
        async with aiosync.connect(models.make("small", 9), workers=[url]) as sync:
            update = sync.begin_update(version=1, budget=BUDGET)
            async with program("orchestrator.py", url, "look") as dying:
                seen = json.loads(await dying.stdout.readline())
                await dying.kill()  # it has seen the offer, and decided nothing
            async with program("orchestrator.py", url, "accept") as dying:
                taken = json.loads(await dying.stdout.readline())
                assert taken["id"] == seen["id"]  # it still waits
                await dying.kill()  # in the round
            assert (await update).outcome == "committed"
            async with program("orchestrator.py", url, "ask") as asking:
                records = json.loads(await asking.stdout.readline())
            assert [record["id"] for record in records] == [seen["id"]]
            assert records[0]["state"] == "committed"
            assert [m["outcome"] for m in records[0]["members"]] == ["committed"]
        assert (await replicas[0].facts())["version"] == 1


@pytest.mark.slow
async def test_a_member_that_dies_in_a_round_is_named_by_trainer_and_record(free_shm):
    async with served(2) as (gateway, url, replicas):
        async with aiosync.connect(models.make("large", 9), workers=[url]) as sync:
            update = sync.begin_update(version=1, budget=BUDGET)
            offer = await first(gateway.offers())
            replicas[1].signal(9)
            await offer.accept()
            with pytest.raises(PeerLost) as error:
                await update
            assert error.value.detail["reported_by"] == "r1"
        record = gateway.rounds()[-1]
        assert record.state in ("failed", "unknown")
        assert {m.name: m.outcome for m in record.members}["r1"] != "committed"
        facts = await replicas[0].facts()
        assert (facts["version"], facts["weights"]) == (None, "intact")


@pytest.mark.slow
async def test_decisions_need_the_token():
    async with served(1, token="s3cret-token-of-the-gateway") as (_, url, _):
        stranger = GatewayClient(url)
        with pytest.raises(Unauthorized):
            await stranger.rounds()
        with pytest.raises(Unauthorized):
            await stranger.accept("x")
        with pytest.raises(Unauthorized):
            await anext(stranger.offers())
        owner = GatewayClient(url, token="s3cret-token-of-the-gateway")
        assert await owner.rounds() == []
        with pytest.raises(Validation, match="no offer 'x'"):
            await owner.accept("x")
