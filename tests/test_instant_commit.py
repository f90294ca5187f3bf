"""A commit that has nothing to wait for is done where it is asked for."""

from __future__ import annotations

import asyncio

import pytest
from looped import BUDGET, looped

import aiosync
from aiosync import GateRejected, RemoteError, State
from aiosync.sinks import InPlaceSink, make_sink
from aiosync.worker_commit import Ending

pytestmark = pytest.mark.asyncio


@pytest.fixture
def instant(monkeypatch):
    """What the worker said of each commit before it began."""
    said = []
    original = Ending.is_instant

    def is_instant(self, bare):
        said.append(original(self, bare))
        return said[-1]

    monkeypatch.setattr(Ending, "is_instant", is_instant)
    return said


def around_finish(pair, look):
    """What `look` says right before each finish, and right after it."""
    found = []

    async def note(method):
        if method == "finish_weight_update":
            found.append(look())

    client = pair.trainer.links[0].client
    client._before = client._after = note
    return found


async def test_a_model_that_was_filled_in_place_needs_no_thread_to_be_committed(instant):
    async with looped(sink="in_place") as pair:
        calls = around_finish(pair, lambda: pair.worker.lane.statistics().calls)
        await pair.assert_next_round_works()
        assert calls[0] == calls[1]
        assert instant == [True]


async def test_nothing_of_the_round_is_left_when_finish_is_answered(instant):
    async with looped(sink="in_place") as pair:
        running = around_finish(pair, lambda: [t.get_name() for t in asyncio.all_tasks()])
        await pair.assert_next_round_works()
        assert any(name.startswith("w0-round") for name in running[0])
        assert not any(name.startswith("w0-round") for name in running[1])
        assert instant == [True]


async def test_the_flips_are_those_of_a_commit_that_takes_time(instant):
    flips = []
    async with looped(sink="in_place") as pair:
        gate = pair.worker.generation
        pair.worker.on_transition(lambda t: flips.append((t.trigger, t.dest, t.weights)))
        gate.on_transition(lambda t: flips.append((t.trigger, t.dest, gate.weights.version)))
        await pair.assert_next_round_works()
        now = [flip[:2] for flip in flips]
        flips.clear()
        pair.worker.gate("complete", lambda _: True)
        await pair.assert_next_round_works()
        assert [flip[:2] for flip in flips] == now
    assert instant == [True, False]


def gated(pair):
    pair.worker.gate("complete", lambda _: True)


def emptied(pair):
    pair.worker.generation.tie_cache("flush", lambda _: None)


def with_a_callback(model, device):
    return make_sink(model, "in_place", device, after_load=lambda: None)


class Own(InPlaceSink):
    """Of somebody else's."""


def of_ones_own(model, device):
    return Own(model, device=device)


@pytest.mark.parametrize("why", [gated, emptied])
async def test_what_may_wait_is_left_to_the_rounds_own_task(instant, why):
    async with looped(sink="in_place") as pair:
        why(pair)
        await pair.assert_next_round_works()
        assert instant == [False]


@pytest.mark.parametrize(
    "sink", ["staged", with_a_callback, of_ones_own], ids=["staged", "a callback", "a subclass"]
)
async def test_a_commit_that_may_block_is_the_lanes(instant, sink):
    async with looped(sink=sink) as pair:
        calls = around_finish(pair, lambda: pair.worker.lane.statistics().calls)
        await pair.assert_next_round_works()
        assert calls[0] < calls[1]
        assert instant == [False]


async def test_a_gate_that_comes_with_the_flip_is_asked(monkeypatch):
    async with looped(sink="in_place") as pair:
        asked = []

        async def check(context):
            await asyncio.sleep(0.01)
            asked.append(context.state)

        def note(transition):
            if transition.dest == State.FINALIZING:
                pair.worker.gate("complete", check)

        pair.worker.on_transition(note)
        link = pair.trainer.links[0]
        monkeypatch.setattr(type(link), "has_verified", lambda self, round: True)  # no prepare
        await pair.assert_next_round_works()
        assert asked == ["finalizing"]


async def test_a_gate_of_generation_of_ones_own_may_wait(instant):
    class Slow(aiosync.GenerationGate):
        async def renew_cache(self, weights_id):
            await asyncio.sleep(0.01)
            await super().renew_cache(weights_id)

    async with looped(sink="in_place") as pair:
        pair.worker.generation = Slow()
        await pair.assert_next_round_works()
        assert instant == [False]


async def test_deferred_work_of_an_engine_of_ones_own_is_waited_for(instant, monkeypatch):
    drained = []

    async def drain_pending(self):
        await asyncio.sleep(0.01)
        drained.append(self.state)

    monkeypatch.setattr(aiosync.LoopbackWeightTransferEngine, "drain_pending", drain_pending)
    async with looped(sink="in_place") as pair:
        link = pair.trainer.links[0]
        monkeypatch.setattr(type(link), "has_verified", lambda self, round: True)  # no prepare
        await pair.assert_next_round_works()
        assert drained == [State.FINALIZING]
        assert instant == [False]


async def test_a_swap_under_way_is_waited_for(instant):
    async with looped(sink="in_place") as pair:
        await pair.assert_next_round_works()
        reached, go = asyncio.Event(), asyncio.Event()

        async def other():
            async with pair.worker.generation.swap():
                reached.set()
                await go.wait()

        async def hold(method):
            if method == "finish_weight_update":
                tasks.append(asyncio.create_task(other()))
                await reached.wait()

        tasks = []
        pair.trainer.links[0].client._before = hold
        sending = asyncio.create_task(pair.trainer.send_weights(budget=BUDGET))
        await reached.wait()
        await asyncio.sleep(0.05)
        assert instant == [True, False]
        assert not sending.done()
        go.set()
        assert (await sending).outcome == "committed"
        await asyncio.gather(*tasks)


async def test_a_commit_that_fails_ends_the_round_as_any_does(instant, monkeypatch):
    async with looped(sink="in_place") as pair:
        await pair.assert_next_round_works()
        held = pair.worker.version

        def commit(self):
            raise OSError("no")

        with monkeypatch.context() as patched:
            patched.setattr(InPlaceSink, "commit", commit)
            with pytest.raises(RemoteError, match="OSError: no") as caught:
                await pair.trainer.send_weights(budget=BUDGET)
        assert instant == [True, True]
        assert caught.value.phase == "finish"
        assert caught.value.report.outcome == "failed"
        assert (pair.worker.state, pair.worker.weights) == (State.FAILED, "torn")
        assert pair.worker.version == held
        await pair.assert_next_round_works()


async def test_a_veto_costs_the_round(instant):
    async with looped(sink="in_place") as pair:
        remove = pair.worker.gate("complete", lambda _: False)
        with pytest.raises(GateRejected):
            await pair.trainer.send_weights(budget=BUDGET)
        assert instant == [False]
        remove()
        await pair.assert_next_round_works()


async def test_a_finish_that_comes_twice_is_one_commit(instant):
    async with looped(sink="in_place") as pair:
        again = []

        async def repeat(method):
            if method == "finish_weight_update":
                header = pair.trainer.admission.current.header(pair.trainer.links[0])
                again.append(await pair.worker.finish_weight_update("1", header=header))

        pair.trainer.links[0].client._after = repeat
        commits = pair.worker.cycle.ending.commits
        await pair.assert_next_round_works(1)
        assert again == [None]
        assert pair.worker.cycle.ending.commits == commits + 1
        assert instant == [True]
