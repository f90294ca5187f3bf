"""What a trainer sees when a round goes wrong, over real replica processes."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import asynccontextmanager

import anyio
import models
import pytest
import torch
from limits import PATIENT, SLACK
from paced import Hold, Paced
from processes import replica
from proxy import proxy

import aiosync
from aiosync import Budget, State

BUDGET = Budget(total=5.0, stall=2.0, cleanup=1.0)  # of rounds that only the clock ends


async def until(event, seconds=20.0):
    """Wait for a threading.Event without blocking the loop."""
    async with asyncio.timeout(seconds):
        while not event.is_set():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def pair(before=lambda _: None, *, broken=False, **options):
    """A paced source and a connected engine over one replica (behind a proxy where asked)."""
    model = models.make("small", seed=1)
    source = Paced(model, before)
    async with replica(seed=2, **options) as worker:
        async with proxy(worker.url) as middle:
            url = middle.url if broken else worker.url
            async with aiosync.connect(
                source, workers=[url], packed_buffer_size_bytes=4096
            ) as sync:
                yield sync, source, worker, middle


async def assert_next_round_works(sync, source, worker, version):
    source.before = lambda _: None
    with torch.no_grad():
        for parameter in source.module.parameters():
            parameter.add_(1)
    report = await sync.send_weights(version=version, budget=PATIENT)
    assert report.outcome == "committed"
    facts = await worker.facts()
    assert facts["prints"] == models.fingerprint(source.module)
    assert facts["version"] == version
    assert sync.state is State.INITIALIZED


@pytest.mark.fault("A-HANG-1")
@pytest.mark.asyncio
@pytest.mark.parametrize("at", [0, 3, 6], ids=["first", "middle", "last"])
@pytest.mark.parametrize("how", ["500", "reset", "hang"])
async def test_update_call_fails_while_the_transmit_runs(how, at):
    hold = Hold(at)
    budget = BUDGET if how == "hang" else PATIENT
    async with pair(hold, broken=True) as (sync, source, worker, middle):
        old = await worker.facts()
        middle.break_route("update_weights", how, lambda: until(hold.reached))
        began = time.monotonic()
        with pytest.raises(aiosync.AiosyncError) as caught:
            round_ = asyncio.create_task(sync.send_weights(version=1, budget=budget))
            await until(hold.reached)
            asyncio.get_running_loop().call_later(0.1, hold.released.set)
            await round_
        assert time.monotonic() - began < BUDGET.total + BUDGET.cleanup + SLACK
        error = caught.value
        if how == "500":
            assert isinstance(error, aiosync.RemoteError)
            assert "no memory for down_proj" in str(error)
        if how == "hang":
            assert isinstance(error, TimeoutError)
        else:
            assert error.phase == "update"
        assert error.report.outcome == "failed"
        hold.released.set()
        facts = await worker.wait_state("initialized", "failed")
        assert facts["prints"] == old["prints"]
        assert facts["weights"] == "intact"
        assert sync.state in (State.INITIALIZED, State.FAILED)
        middle.heal()
        await assert_next_round_works(sync, source, worker, 2)
        assert source.closed == source.passes


@pytest.mark.fault("A-STATE-2")
@pytest.mark.asyncio
async def test_lost_answer_to_finish_is_asked_for_not_sent_again():
    async def at_once():
        return

    async with pair(broken=True) as (sync, source, worker, middle):
        middle.break_route("finish_weight_update", "lost", at_once)
        report = await sync.send_weights(version=1, budget=PATIENT)
        assert report.outcome == "committed"
        assert middle.calls.count("/finish_weight_update") == 1
        assert (await worker.facts())["version"] == 1
        middle.heal()
        await assert_next_round_works(sync, source, worker, 2)


@pytest.mark.fault("A-HANG-2")
@pytest.mark.asyncio
@pytest.mark.parametrize("at", [0, 2, 6], ids=["first", "middle", "after-last"])
async def test_source_raises(at):
    class Mine(ValueError):
        pass

    def boom(index):
        if index == at:
            raise Mine("gather failed")

    async with pair(boom) as (sync, source, worker, _):
        old = await worker.facts()
        with pytest.raises(Mine, match="gather failed") as caught:
            await sync.send_weights(version=1, budget=PATIENT)
        assert caught.value.report.outcome == "failed"
        assert source.closed == 1
        facts = await worker.wait_state("initialized", "failed")
        assert facts["prints"] == old["prints"]
        await assert_next_round_works(sync, source, worker, 1)


@pytest.mark.fault("A-HANG-9")
@pytest.mark.asyncio
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_worker_lost_in_mid_round(sign):
    hold = Hold(3)
    async with pair(hold) as (sync, source, worker, _):
        began = time.monotonic()
        round_ = asyncio.create_task(sync.send_weights(version=1, budget=BUDGET))
        await until(hold.reached)
        worker.signal(sign)
        hold.released.set()
        with pytest.raises(aiosync.AiosyncError) as caught:
            await round_
        assert time.monotonic() - began < BUDGET.total + BUDGET.cleanup + SLACK
        assert isinstance(caught.value, ConnectionError | TimeoutError)
        assert caught.value.replica == worker.url
        assert sync.state is State.FAILED
        assert caught.value.report.members[0].outcome == "failed"
        if sign == signal.SIGSTOP:
            worker.signal(signal.SIGCONT)
            facts = await worker.wait_state("initialized", "failed")
            assert facts["weights"] == "intact"
            await assert_next_round_works(sync, source, worker, 1)


@pytest.mark.fault("A-HANG-9")
@pytest.mark.asyncio
async def test_one_of_two_workers_killed_the_other_keeps_the_old_version():
    hold = Hold(3)
    model = models.make("small", seed=1)
    source = Paced(model, hold)
    async with replica(seed=2) as one, replica(seed=3) as two:
        old = await one.facts()
        members = [aiosync.Member(n, w.url) for n, w in (("one", one), ("two", two))]
        async with aiosync.connect(source, workers=members) as sync:
            round_ = asyncio.create_task(sync.send_weights(version=1, budget=PATIENT))
            await until(hold.reached)
            await two.kill()
            hold.released.set()
            with pytest.raises(aiosync.AiosyncError) as caught:
                await round_
            assert caught.value.replica == "two"
            facts = await one.wait_state("initialized", "failed")
            assert facts["prints"] == old["prints"]
        async with aiosync.connect(source, workers=members[:1]) as sync:
            await assert_next_round_works(sync, source, one, 1)


async def cancelled_by_wait_for(send):
    await asyncio.wait_for(send(), 0.3)


async def cancelled_by_timeout(send):
    async with asyncio.timeout(0.3):
        await send()


async def cancelled_by_fail_after(send):
    with anyio.fail_after(0.3):
        await send()


async def cancelled_by_sibling(send):
    async def sibling():
        await asyncio.sleep(0.3)
        raise TimeoutError("sibling")

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            group.create_task(sibling())
    except* TimeoutError as group_error:
        raise TimeoutError("sibling") from group_error


async def cancelled_by_own_timeout(send):
    await send(timeout=0.3)


@pytest.mark.fault("A-CANCEL-2")
@pytest.mark.asyncio
@pytest.mark.parametrize(
    "how",
    [
        cancelled_by_wait_for,
        cancelled_by_timeout,
        cancelled_by_fail_after,
        cancelled_by_sibling,
        cancelled_by_own_timeout,
    ],
)
async def test_given_up_from_outside(how):
    hold = Hold(3)
    async with pair(hold) as (sync, source, worker, _):
        old = await worker.facts()
        after = []

        async def send(**options):
            await sync.send_weights(version=1, **options)
            after.append("went on")

        # The source is inside its own blocking code: it comes back within the clean-up half.
        release = asyncio.get_running_loop().call_later(0.5, hold.released.set)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await how(send)
        assert time.monotonic() - began < 0.3 + 1.0 + SLACK
        assert after == []
        release.cancel()
        hold.released.set()
        assert sync.state in (State.INITIALIZED, State.FAILED)
        facts = await worker.wait_state("initialized", "failed")
        assert facts["prints"] == old["prints"]
        await assert_next_round_works(sync, source, worker, 1)


@pytest.mark.fault("A-CANCEL-4")
@pytest.mark.asyncio
async def test_source_stuck_for_good_poisons_its_lane_and_the_next_round_gets_a_new_one():
    hold = Hold(3)
    async with pair(hold) as (sync, source, worker, _):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await sync.send_weights(version=1, timeout=0.5)
        assert time.monotonic() - began < 0.5 + 1.0 + SLACK
        assert sync.state is State.FAILED
        await assert_next_round_works(sync, source, worker, 1)
        hold.released.set()


@pytest.mark.asyncio
async def test_wrong_order_is_refused_with_state_and_allowed_triggers():
    async with replica(seed=2) as worker:
        client = aiosync.HTTPVLLMWeightSyncClient(worker.url)
        calls = [
            client.start_weight_update(),
            client.update_weights({"names": [], "dtype_names": [], "shapes": []}),
            client.prepare_weight_update(),
            client.finish_weight_update("1"),
        ]
        for call in calls:
            with pytest.raises(aiosync.InvalidTransition) as caught:
                await call
            assert isinstance(caught.value, aiosync.RemoteError)
            assert caught.value.detail["state"] == "idle"
            assert "initialize" in caught.value.detail["allowed"]
            assert caught.value.detail["status"] == 409
        await client.abort_weight_update("nothing to abort")
        await client.shutdown_weight_transfer_engine()


@pytest.mark.fault("A-HANG-3", "A-NAMES-5")
@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["few", "many", "order", "dtype", "shape", "twice", "none"])
async def test_source_that_differs_from_its_metadata(how):
    async with pair() as (sync, source, worker, _):
        old = await worker.facts()
        right = Paced.iter_full

        def wrong(self):
            pairs = [(n, p.detach()) for n, p in right(self)]
            if how == "few":
                pairs.pop()
            elif how == "many":
                pairs.append(("extra", torch.zeros(3)))
            elif how == "order":
                pairs[2], pairs[3] = pairs[3], pairs[2]
            elif how == "dtype":
                pairs[1] = (pairs[1][0], pairs[1][1].double())
            elif how == "shape":
                pairs[1] = (pairs[1][0], pairs[1][1][None])
            elif how == "twice":
                pairs[1] = pairs[0]
            elif how == "none":
                pairs = []
            yield from pairs

        named = {"few": "2.bias", "many": "extra", "order": "1.bias", "none": "0.weight"}
        source.iter_full = wrong.__get__(source)
        with pytest.raises(aiosync.Validation) as caught:
            await sync.send_weights(version=1, budget=PATIENT)
        assert named.get(how, "0.") in str(caught.value)
        facts = await worker.wait_state("initialized", "failed")
        assert facts["prints"] == old["prints"]
        del source.iter_full
        await assert_next_round_works(sync, source, worker, 1)
