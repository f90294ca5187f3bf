"""Rounds that wait for their turn, in the background and in sessions; waiting with a limit."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest
from looped import BUDGET, looped
from paced import Hold, Paced

from aiosync import (
    Budget,
    Busy,
    InvalidTransition,
    PhaseTimeout,
    RoundCancelled,
    State,
    Validation,
)

pytestmark = pytest.mark.asyncio


class Held:
    """An engine whose first round stands still inside its pass."""

    def __init__(self, pair, hold, first):
        self.pair, self.trainer, self.hold, self.first = pair, pair.trainer, hold, first
        self.go = hold.released.set


async def reached(hold):
    async with asyncio.timeout(20):
        while not hold.reached.is_set():
            await asyncio.sleep(0.005)


def held(fn):
    """Call `fn` with a `Held`; afterwards the engine must work, and nothing may be left."""

    async def test(**params):
        hold = Hold(1)
        async with looped(source=lambda model: Paced(model, hold)) as pair:
            first = pair.trainer.begin_update(version=1, budget=BUDGET)
            await reached(hold)
            try:
                await fn(Held(pair, hold, first), **params)
            finally:
                hold.released.set()
            admission = pair.trainer.admission
            assert admission.current is None
            assert admission._queue == []
            await pair.assert_next_round_works(100)

    test.__name__ = fn.__name__
    return test


async def settled():
    for _ in range(20):
        await asyncio.sleep(0)


@held
async def test_waiting_rounds_run_in_the_order_of_the_calls(at):
    updates = [at.trainer.begin_update(on_busy="wait") for _ in range(2)]
    sending = asyncio.ensure_future(at.trainer.send_weights(on_busy="wait"))
    await settled()
    updates.append(at.trainer.begin_update(version="last", on_busy="wait"))
    assert [update.progress.phase for update in updates] == ["wait"] * 3
    assert all(update.number == 0 and update.report is None for update in updates)
    with pytest.raises(Busy, match=r"round 1 \(version 1\) is under way in phase update"):
        at.trainer.begin_update()
    at.go()
    reports = [await at.first, *[await update for update in updates[:2]], await sending]
    reports.append(await updates[2])
    assert [report.round for report in reports] == [1, 2, 3, 4, 5]
    assert [report.version.order for report in reports] == [1, 2, 3, 4, 5]
    assert all("wait" in report.seconds for report in reports[1:])
    assert "wait" not in reports[0].seconds


@held
async def test_nobody_slips_in_between_two_turns(at):
    waiting = at.trainer.begin_update(on_busy="wait")
    tried = []

    def intrude(transition):
        if transition.trigger == "complete" and not tried:
            tried.append(asyncio.ensure_future(begin()))

    async def begin():
        return at.trainer.begin_update()

    remove = at.trainer.on_transition(intrude)
    at.go()
    await at.first
    await waiting
    remove()
    with pytest.raises(Busy):
        await tried[0]


@held
async def test_supersede_cancels_whatever_runs_and_waits(at):
    waiting = at.trainer.begin_update(on_busy="wait")
    newest = at.trainer.begin_update(version=9, on_busy="supersede")
    for old in (waiting, at.first):
        if old is at.first:
            at.go()
        with pytest.raises(RoundCancelled):
            await old
    assert waiting.report.outcome == "failed"
    assert waiting.number == 0
    assert waiting.report.members == []
    assert waiting.report.nbytes == 0
    assert (await newest).version.label == 9
    assert at.trainer.last_report is newest.report


@held
async def test_cancel_while_waiting_ends_at_once_and_the_next_in_line_moves_up(at):
    second = at.trainer.begin_update(version=2, on_busy="wait")
    third = at.trainer.begin_update(version=3, on_busy="wait")
    second.cancel()
    with pytest.raises(RoundCancelled) as caught:
        await second
    assert caught.value.phase == "wait"
    assert caught.value.report is second.report
    assert not at.first.done
    at.go()
    assert (await at.first).outcome == "committed"
    assert (await third).round == 2


@held
async def test_leaving_the_block_of_a_waiting_handle_cancels_it(at):
    async with at.trainer.begin_update(version=2, on_busy="wait") as second:
        await settled()
    assert second.done
    assert second.report.outcome == "failed"
    at.go()
    await at.first


@held
async def test_a_native_cancel_while_waiting_leaves_the_queue(at):
    sending = asyncio.ensure_future(at.trainer.send_weights(version=2, on_busy="wait"))
    await settled()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert at.trainer.admission._queue == []
    at.go()
    await at.first


@held
async def test_a_budget_spent_while_waiting_names_the_round_that_has_the_turn(at):
    second = at.trainer.begin_update(version=2, on_busy="wait", timeout=1)
    with pytest.raises(PhaseTimeout, match=r"1 s, waiting for its turn: round 1 \(version 1\)"):
        await second
    assert second.report.seconds["wait"] > 0.5
    assert not at.first.done
    at.go()
    await at.first


@held
async def test_waiting_is_part_of_the_budget(at):
    second = at.trainer.begin_update(version=2, on_busy="wait", budget=Budget(total=30))
    before = second._round.seconds_left
    asyncio.get_running_loop().call_later(0.2, at.go)
    await at.first
    await second
    assert second._round.seconds_left < before - 0.1


@held
async def test_a_dropped_handle_of_a_waiting_round_logs_once_if_it_fails(at):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("aiosync.handle").addHandler(handler)
    try:
        at.trainer.begin_update(version=2, on_busy="wait", timeout=0.2)
        at.trainer.begin_update(version=3, on_busy="wait")
        gc.collect()
        async with asyncio.timeout(20):
            while not records:
                await asyncio.sleep(0.01)
        at.go()
        await at.first
        assert (await at.trainer.wait_version(3, timeout=20)).label == 3
        gc.collect()
        assert len(records) == 1
        assert "PhaseTimeout" in records[0].getMessage() or "failed" in records[0].getMessage()
    finally:
        logging.getLogger("aiosync.handle").removeHandler(handler)


@held
async def test_a_failed_round_hands_its_turn_on(at):
    second = at.trainer.begin_update(version=0, on_busy="wait")  # goes back: refused
    third = at.trainer.begin_update(version=3, on_busy="wait")
    at.go()
    await at.first
    with pytest.raises(Exception, match="goes back"):
        await second
    assert (await third).outcome == "committed"


async def test_closing_ends_what_runs_and_what_waits():
    hold = Hold(1)
    async with looped(source=lambda model: Paced(model, hold)) as pair:
        updates = [pair.trainer.begin_update(version=1, budget=BUDGET)]
        await reached(hold)
        updates += [pair.trainer.begin_update(on_busy="wait") for _ in range(3)]
        asyncio.get_running_loop().call_later(0.1, hold.released.set)
        await pair.trainer.aclose()
        for update in updates:
            with pytest.raises(RoundCancelled):
                await update
        with pytest.raises(InvalidTransition):
            pair.trainer.begin_update(on_busy="wait")


@pytest.mark.parametrize("how", ["wait", "supersede"])
async def test_sessions_take_turns(how):
    async with looped() as pair:
        named = [(name, p.detach()) for name, p in pair.model.named_parameters()]
        order = []

        async def push(version):
            async with pair.trainer.session(version, on_busy=how, budget=BUDGET) as session:
                order.append(version)
                for name, tensor in named:
                    await session.send(name, tensor)
                    await asyncio.sleep(0.01)
            return session.report

        pushing = [asyncio.ensure_future(push(1))]
        while not order:
            await asyncio.sleep(0.005)
        pushing += [asyncio.ensure_future(push(2)), asyncio.ensure_future(push(3))]
        ended = await asyncio.gather(*pushing, return_exceptions=True)
        if how == "wait":
            assert [report.version.label for report in ended] == [1, 2, 3]
            assert order == [1, 2, 3]
        else:
            assert all(isinstance(end, RoundCancelled) for end in ended[:2])
            assert not isinstance(ended[2], BaseException), ended[2]
            assert ended[2].version.label == 3
        await pair.assert_next_round_works(100)


async def test_a_session_that_gives_up_waiting_leaves_the_running_one_alone():
    async with looped() as pair:
        named = [(name, p.detach()) for name, p in pair.model.named_parameters()]
        async with pair.trainer.session(1, budget=BUDGET) as session:
            await session.send(*named[0])
            with pytest.raises(PhaseTimeout, match="waiting for its turn"):
                async with pair.trainer.session(2, on_busy="wait", timeout=0.2):
                    raise AssertionError("not entered")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2), pair.trainer.session(2, on_busy="wait"):
                    raise AssertionError("not entered")
            with pytest.raises(Busy):
                async with pair.trainer.session(2):
                    raise AssertionError("not entered")
            for name, tensor in named[1:]:
                await session.send(name, tensor)
        assert session.report.outcome == "committed"
        await pair.assert_next_round_works(100)


@pytest.mark.parametrize("call", ["send_weights", "begin_update", "session"])
async def test_unknown_options_are_refused_by_name(call):
    async with looped() as pair:
        with pytest.raises(TypeError, match=rf"{call}\(\) takes no on_bussy=; it takes timeout"):
            await getattr(pair.trainer, call)(on_bussy="wait")
        with pytest.raises(Validation, match="raise, wait or supersede"):
            await getattr(pair.trainer, call)(on_busy="queue")
        await pair.assert_next_round_works()


# -- waiting with a limit


async def test_wait_version_has_a_limit():
    async with looped() as pair:
        trainer = pair.trainer
        with pytest.raises(PhaseTimeout, match=r"no version of order 1.*there is none") as caught:
            await trainer.wait_version(1, timeout=0.05)
        assert trainer.name in caught.value.message
        await trainer.send_weights(version="a")
        assert (await trainer.wait_version(1, timeout=0.05)).label == "a"
        with pytest.raises(PhaseTimeout, match=r"order 2 or more within 0.05 s; it is a \(order 1"):
            await trainer.wait_version(2, timeout=0.05)
        for bad in (0, -1, "5", float("inf")):
            with pytest.raises(Validation, match="timeout"):
                await trainer.wait_version(1, timeout=bad)
        assert trainer._versions._waiting == set()


async def test_wait_for_has_a_limit_on_both_sides():
    async with looped() as pair:
        for engine in (pair.trainer, pair.worker):
            assert await engine.wait_for("initialized", timeout=0.05) is State.INITIALIZED
            with pytest.raises(
                PhaseTimeout, match=r"not failed or updating within 0\.05 s"
            ) as caught:
                await engine.wait_for("failed", State.UPDATING, timeout=0.05)
            assert engine.name in caught.value.message
            assert "state is initialized" in caught.value.message
            assert caught.value.detail["state"] == "initialized"
            assert isinstance(caught.value, TimeoutError)
            for bad in (0, True, "1"):
                with pytest.raises(Validation, match="timeout"):
                    await engine.wait_for("failed", timeout=bad)
