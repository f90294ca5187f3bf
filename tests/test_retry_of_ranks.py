"""``retry_without_lost`` of a trainer of several ranks: all begin again, or none does."""

from __future__ import annotations

import asyncio

import pytest
from fleets import BUDGET
from ranked import ENGINES, ranks_over

import aiosync

pytestmark = pytest.mark.asyncio


async def lost():
    raise aiosync.PeerLost("cut off", replica="w1")


async def unanswered(**_):
    raise aiosync.PeerLost("gone") from ConnectionRefusedError(111, "refused")


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("phase", ["start_weight_update", "update_weights"])
async def test_all_ranks_begin_again_without_the_lost_member(backend, phase):
    async with ranks_over(3, backend=backend, retry_without_lost=True) as (it, engines):
        assert [r.outcome for r in await it.send(version=1)] == ["committed"] * 2
        it.client.members[1].client.capabilities = unanswered
        it.faults["w1", phase] = lost
        reports = await it.send(version=2)
        assert [report.outcome for report in reports] == ["committed"] * 2, reports
        assert [report.left_out for report in reports] == [["w1"]] * 2
        assert all("begun again without w1" in " ".join(report.notes) for report in reports)
        assert it.routable() == it.holders() == {"w0", "w2"}
        assert [report.outcome for report in await it.send(version=3)] == ["committed"] * 2
        assert [engine.version.label for engine in engines] == [3, 3]


async def test_three_ranks():
    async with ranks_over(2, size=3, retry_without_lost=True) as (it, _):
        it.client.members[1].client.capabilities = unanswered
        it.faults["w1", "prepare_weight_update"] = lost
        assert [report.outcome for report in await it.send(version=1)] == ["committed"] * 3
        assert it.holders() == {"w0"}


async def test_a_member_that_is_alive_is_not_left_and_every_rank_hears_so():
    async with ranks_over(3, retry_without_lost=True) as (it, _):
        it.faults["w1", "update_weights"] = lost
        errors = await it.send(version=1)
        assert [isinstance(error, aiosync.PeerLost) for error in errors] == [True, True]
        assert {error.replica for error in errors} == {"w1"}
        assert it.holders() == set()
        it.faults.clear()
        assert [report.outcome for report in await it.send(version=1)] == ["committed"] * 2
        assert it.holders() == {"w0", "w1", "w2"}


async def test_without_the_option_nobody_waits_for_a_word():
    async with ranks_over(2) as (it, engines):
        it.client.members[1].client.capabilities = unanswered
        it.faults["w1", "update_weights"] = lost
        errors = await it.send(version=1)
        assert [isinstance(error, aiosync.PeerLost) for error in errors] == [True, True]
        assert not engines[0].ranks.promised
        assert "may_begin_again" not in errors[1].detail
        it.faults.clear()


async def test_rank_0_that_is_cancelled_while_it_decides_tells_the_others():
    async with ranks_over(2, retry_without_lost=True) as (it, engines):
        asked = asyncio.Event()

        async def silent(**_):
            asked.set()
            await asyncio.sleep(60)

        it.client.members[1].client.capabilities = silent
        it.faults["w1", "update_weights"] = lost
        it.change()
        first = asyncio.create_task(engines[0].send_weights(version=1, budget=BUDGET))
        second = asyncio.create_task(engines[1].send_weights(version=1, budget=BUDGET))
        await asked.wait()
        while not engines[0].ranks.promised and engines[0].state == "updating":
            await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        async with asyncio.timeout(15):
            with pytest.raises(aiosync.PeerLost, match="cut off"):
                await second
        it.faults.clear()


async def test_rank_0_that_is_cancelled_between_its_promise_and_its_word_takes_it_back():
    async with ranks_over(2, retry_without_lost=True) as (it, engines):
        ending = asyncio.Event()

        async def slow():
            ending.set()
            await asyncio.sleep(0.3)

        it.client.members[1].client.capabilities = unanswered
        it.faults["w1", "update_weights"] = lost
        it.faults["w0", "abort_weight_update"] = slow
        it.change()
        first = asyncio.create_task(engines[0].send_weights(version=1, budget=BUDGET))
        second = asyncio.create_task(engines[1].send_weights(version=1, budget=BUDGET))
        await ending.wait()
        assert engines[0].ranks.promised
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        async with asyncio.timeout(10):
            with pytest.raises(aiosync.PeerLost, match="cut off"):
                await second
        it.faults.clear()
