"""Pauses as part of a round: taken, held, measured and lifted, whatever becomes of the round."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from contextlib import asynccontextmanager

import pytest
from limits import SLACK
from looped import BUDGET, change, looped
from models import fingerprint
from processes import program, replica

import aiosync
from aiosync import Budget, Pause, PeerLost, PhaseTimeout, Refused, State, Validation
from aiosync.testing import DirectClient

pytestmark = pytest.mark.asyncio


class Calls:
    """Fails or holds chosen calls of chosen members; counts all."""

    def __init__(self):
        self.errors = {}
        self.holds = {}
        self.seen = []

    async def __call__(self, member, method):
        self.seen.append((member, method))
        for key in ((member, method), (None, method)):
            if self.errors.get(key):
                raise self.errors[key].pop(0)
            if key in self.holds:
                await self.holds[key].wait()

    def count(self, method):
        return [name for _, name in self.seen].count(method)


@asynccontextmanager
async def streaming(gate, times):
    """A generation that produces all the time, as a client sees it; `times` get its tokens'."""
    over = asyncio.Event()

    async def generate():
        while not over.is_set():
            try:
                async with gate.request() as request:
                    while not over.is_set():
                        await request.checkpoint()
                        times.append(time.monotonic())
                        request.produced()
                        await asyncio.sleep(0.001)
            except aiosync.Paused:
                await asyncio.sleep(0.001)

    task = asyncio.create_task(generate())
    try:
        yield
    finally:
        over.set()
        await asyncio.wait([task])
        task.result()


def holders(worker):
    return [str(hold) for hold in worker.generation.holds]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.parametrize("scope", ["round", "swap"])
@pytest.mark.parametrize("sink", ["staged", "in_place"])
async def test_generation_stands_still_from_where_it_must_to_the_commit(mode, scope, sink):
    states, pairs = {}, []

    async def before(member, method):
        if pairs:
            states[method] = [w.generation.state for w in pairs[0].workers]

    async with looped(workers=2, sink=sink, before=before) as pair:
        pairs.append(pair)
        change(pair.model)
        pause = Pause(mode=mode, scope=scope)
        report = await pair.trainer.send_weights(version=1, budget=BUDGET, pause=pause)
        early = scope == "round" or sink == "in_place"
        assert states["start_weight_update"] == ["paused" if early else "running"] * 2
        assert states["finish_weight_update"] == ["paused"] * 2
        assert [w.generation.state for w in pair.workers] == ["running"] * 2
        assert report.outcome == "committed"
        assert all(m.pause_seconds > 0 and m.left_paused is None for m in report.members)
        assert report.pause_seconds == max(m.pause_seconds for m in report.members)
        assert report.metrics("s")["s/pause_seconds"] == report.pause_seconds
        assert "pause" in report.seconds
        await pair.assert_next_round_works()


async def test_seconds_paused_are_those_of_this_round_and_of_the_swap_alone_without_a_pause():
    async with looped() as pair:
        gate = pair.worker.generation
        hold = gate.hold("keep", owner="operator")
        await asyncio.sleep(0.3)  # before the round: not its own
        hold.release()
        for version, options in ((1, {}), (2, {"pause": Pause()})):
            before = gate.seconds_paused
            report = await pair.trainer.send_weights(version=version, budget=BUDGET, **options)
            assert before >= 0.3
            assert 0 < report.pause_seconds < gate.seconds_paused - before + 0.2


async def test_the_report_says_what_a_streaming_client_saw():
    calls, times = Calls(), []
    calls.holds[None, "prepare_weight_update"] = go = asyncio.Event()
    async with looped(before=calls) as pair, streaming(pair.worker.generation, times):
        await asyncio.sleep(0.05)
        sending = asyncio.create_task(
            pair.trainer.send_weights(version=1, budget=BUDGET, pause=Pause())
        )
        await asyncio.sleep(0.4)
        go.set()
        report = await sending
        await asyncio.sleep(0.05)
    gap = max(after - before for before, after in itertools.pairwise(times))
    print(f"the client's gap {gap:.4f} s, reported {report.pause_seconds:.4f} s")
    assert gap > 0.3
    assert abs(gap - report.pause_seconds) < SLACK  # a deadline, not a measurement
    assert report.pause_seconds > 0.3


@pytest.mark.parametrize("how", ["options", "defaults", "begin", "session"])
async def test_every_way_to_begin_a_round_takes_it(how):
    calls = Calls()
    async with looped(before=calls) as pair:
        trainer, pause = pair.trainer, Pause(mode="wait")
        if how == "options":
            await trainer.send_weights(pause=pause)
        elif how == "defaults":
            trainer.round_defaults = {"pause": pause}
            await trainer.send_weights()
            await trainer.send_weights(pause=None)  # for this one round
        elif how == "begin":
            await trainer.begin_update(pause=pause)
        else:
            async with trainer.session(pause=pause) as session:
                for name, parameter in pair.model.named_parameters():
                    await session.send(name, parameter)
        assert (calls.count("pause_generation"), calls.count("resume_generation")) == (1, 1)
        assert holders(pair.worker) == []


@pytest.mark.fault("A-STATE-3")
@pytest.mark.parametrize("how", ["refused", "lost", "cancelled"])
async def test_a_pause_that_fails_on_one_member_is_lifted_on_all(how):
    calls = Calls()
    async with looped(workers=3, before=calls) as pair:
        budget = Budget(total=10, cleanup=1.0)
        if how == "cancelled":
            calls.holds["w1", "pause_generation"] = asyncio.Event()
        else:
            error = RuntimeError("no pause today") if how == "refused" else PeerLost("reset")
            calls.errors["w1", "pause_generation"] = [error] * 3
        sending = asyncio.create_task(
            pair.trainer.send_weights(version=1, budget=budget, pause=Pause())
        )
        if how == "cancelled":
            async with asyncio.timeout(5):
                while [w.generation.state for w in pair.workers].count("paused") < 2:
                    await asyncio.sleep(0.005)
            sending.cancel()
        await asyncio.wait([sending], timeout=10)
        if how == "cancelled":
            assert sending.cancelled()
        else:
            error = sending.exception()
            assert "no pause today" in str(error) or error.replica == "w1"
        report = pair.trainer.last_report
        assert [m.outcome for m in report.members] == ["failed"] * 3
        assert [m.weights for m in report.members] == ["intact"] * 3
        assert [w.generation.state for w in pair.workers] == ["running"] * 3
        assert not any(m.left_paused for m in report.members)
        assert calls.count("start_weight_update") == 0
        assert pair.trainer.state is State.INITIALIZED  # nothing but a pause has happened
        calls.holds.clear()
        await pair.assert_next_round_works()


@pytest.mark.fault("A-STATE-3")
async def test_a_member_that_never_confirms_its_resume_is_listed():
    calls = Calls()
    async with looped(workers=2, before=calls) as pair:
        calls.errors["w1", "resume_generation"] = [PeerLost("reset")] * 10_000
        budget = Budget(total=10, cleanup=0.5)
        report = await pair.trainer.send_weights(version=1, budget=budget, pause=Pause())
        assert report.outcome == "committed"
        assert report.members[0].left_paused is None
        assert "did not confirm that its generation goes on" in report.members[1].left_paused
        assert "w1 committed" in str(report)
        assert "did not confirm" in str(report)
        assert calls.count("resume_generation") > 2
        assert holders(pair.workers[1]) == [pair.trainer.owner]
        calls.errors.clear()
        # A later pause of the same trainer takes the hold's place; its resume lifts it.
        await pair.trainer.send_weights(version=2, budget=BUDGET, pause=Pause())
        assert holders(pair.workers[1]) == []


@pytest.mark.fault("A-HTTP-3")
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("method", ["pause_generation", "resume_generation"])
async def test_a_pause_or_resume_whose_answer_was_lost_is_sent_again(method, side):
    calls = Calls()
    calls.errors[None, method] = [PeerLost("reset")]
    async with looped(**{side: calls}) as pair:
        report = await pair.trainer.send_weights(version=1, budget=BUDGET, pause=Pause())
        assert report.outcome == "committed"
        assert calls.count(method) == 2
        assert report.members[0].left_paused is None
        assert holders(pair.worker) == []


async def test_requests_that_do_not_stop_cost_the_round_and_nothing_else():
    async with looped(workers=2) as pair:
        entered, over = asyncio.Event(), asyncio.Event()

        async def generate():
            async with pair.workers[1].generation.request():
                entered.set()
                await over.wait()

        generating = asyncio.create_task(generate())
        await entered.wait()
        pause = Pause(mode="wait", drain_timeout=0.2)
        with pytest.raises(PhaseTimeout, match=r"1 requests were still running after 0\.2 s") as e:
            await pair.trainer.send_weights(version=1, budget=BUDGET, pause=pause)
        assert (e.value.replica, e.value.phase) == ("w1", "pause")
        began = time.monotonic()
        with pytest.raises(PhaseTimeout) as e:
            await pair.trainer.send_weights(budget=Budget(pause=0.3), pause=Pause(mode="wait"))
        assert time.monotonic() - began < 0.3 + SLACK
        assert (e.value.replica, e.value.phase) == ("w1", "pause")
        assert [holders(w) for w in pair.workers] == [[], []]
        over.set()
        await generating
        await pair.assert_next_round_works()


@pytest.mark.parametrize("sink", ["staged", "in_place"])
async def test_after_a_failure_only_whole_weights_go_on(sink):
    calls = Calls()
    calls.errors["w0", "prepare_weight_update"] = [RuntimeError("disk full")]
    async with looped(workers=2, sink=sink, before=calls) as pair:
        with pytest.raises(RuntimeError, match="disk full") as caught:
            await pair.trainer.send_weights(version=1, budget=BUDGET, pause=Pause())
        members = caught.value.report.members
        if sink == "staged":
            assert [w.generation.state for w in pair.workers] == ["running"] * 2
            assert not any(m.left_paused for m in members)
        else:
            assert [w.generation.state for w in pair.workers] == ["paused"] * 2
            assert [holders(w)[0].split(":")[0] for w in pair.workers] == ["weights"] * 2
            assert all("stays paused" in m.left_paused for m in members)
            assert "stays paused" in str(caught.value.report)
        await pair.assert_next_round_works()  # a complete round lifts it
        assert [w.generation.state for w in pair.workers] == ["running"] * 2


async def test_a_cancelled_round_goes_on_everywhere():
    calls = Calls()
    calls.holds["w1", "update_weights"] = asyncio.Event()
    async with looped(workers=2, before=calls) as pair:
        update = pair.trainer.begin_update(version=1, budget=BUDGET, pause=Pause(mode="abort"))
        async with asyncio.timeout(5):
            while ("w1", "update_weights") not in calls.seen:
                await asyncio.sleep(0.005)
        assert [w.generation.state for w in pair.workers] == ["paused"] * 2
        update.cancel()
        with pytest.raises(aiosync.RoundCancelled):
            await update
        assert [w.generation.state for w in pair.workers] == ["running"] * 2
        calls.holds.clear()
        await pair.assert_next_round_works()


class Stock:
    """A server with vLLM's calls alone, over a worker engine; some lack pause and resume."""

    def __init__(self, engine, *, pauses=True):
        self._client = DirectClient(engine, name="stock")
        self.name = "stock"
        self.calls = []
        for name in (
            "init_weight_transfer_engine",
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
            *(("pause", "resume") if pauses else ()),
        ):
            setattr(self, name, self._plain(name))

    def _plain(self, name):
        async def call(*args, **options):
            assert "header" not in options
            self.calls.append(name)
            await getattr(self._client, name)(*args, **options)

        return call


class Open(aiosync.LoopbackTrainerWeightTransferEngine):
    def check_peers(self):
        pass  # lets a server of another kind in


@asynccontextmanager
async def stock(**options):
    async with looped() as pair:
        await pair.trainer.shutdown()
        client = Stock(pair.worker, **options)
        trainer = Open(client=client, source=pair.model, link=pair.link, buffer_size_bytes=4096)
        async with trainer:
            await trainer.initialize()
            yield trainer, client, pair


async def test_a_server_with_vllms_routes_alone_is_paused_too():
    async with stock() as (trainer, client, pair):
        pause = Pause(mode="keep", scope="swap")  # it cannot say how it receives: the round
        report = await trainer.send_weights(version=1, budget=BUDGET, pause=pause)
        assert client.calls[1:] == [
            "pause", "start_weight_update", "update_weights", "finish_weight_update", "resume",
        ]  # fmt: skip
        assert report.pause_seconds > 0  # by the trainer's own clock
        assert pair.worker.generation.state == "running"
        assert fingerprint(pair.copies[0]) == fingerprint(pair.model)


async def test_a_server_that_cannot_say_what_it_holds_stays_paused():
    async with stock() as (trainer, client, pair):
        client.update_weights = None

        async def broken(*args):
            raise RuntimeError("out of memory")

        client.update_weights = broken
        with pytest.raises(RuntimeError, match="out of memory") as caught:
            await trainer.send_weights(version=1, budget=BUDGET, pause=Pause())
        assert "resume" not in client.calls
        assert "stays paused: its weights are unknown" in str(caught.value.report)
        assert pair.worker.generation.state == "paused"
        await pair.worker.resume_generation()


async def test_a_member_that_cannot_be_paused_is_refused_before_anything_moves():
    async with stock(pauses=False) as (trainer, client, _):
        before = list(client.calls)
        with pytest.raises(Refused, match="stock cannot be paused") as caught:
            await trainer.send_weights(version=1, pause=Pause())
        assert client.calls == before
        assert caught.value.replica == "stock"
        assert trainer.state is State.INITIALIZED
        report = await trainer.send_weights(version=1, pause=Pause(optional=True))
        assert "stock was not paused: it cannot be" in report.notes


async def test_contexts_are_entered_under_the_pause_and_left_before_it_ends():
    seen = []

    def around(name):
        @asynccontextmanager
        async def context(member):
            worker = pair.workers[int(member.name[1])]
            seen.append((name, member.name, "in", worker.generation.state))
            try:
                yield
            finally:
                seen.append((name, member.name, "out", worker.generation.state))

        return context

    calls = Calls()
    async with looped(workers=2, before=calls) as pair:
        contexts = [around("a"), around("b")]
        await pair.trainer.send_weights(pause=Pause(), around=contexts)
        for member in ("w0", "w1"):
            assert [(n, way, s) for n, m, way, s in seen if m == member] == [
                ("a", "in", "paused"), ("b", "in", "paused"),
                ("b", "out", "paused"), ("a", "out", "paused"),
            ]  # fmt: skip
        seen.clear()
        calls.errors["w1", "prepare_weight_update"] = [RuntimeError("boom")]
        with pytest.raises(RuntimeError, match="boom"):
            await pair.trainer.send_weights(around=contexts, budget=BUDGET)
        assert sorted(way for *_, way, _ in seen) == ["in"] * 4 + ["out"] * 4


async def test_contexts_that_fail():
    left = []

    @asynccontextmanager
    async def refuses(member):
        if member.name == "w1":
            raise RuntimeError("cannot sleep")
        yield
        left.append(member.name)

    @asynccontextmanager
    async def breaks(member):
        yield
        raise RuntimeError("cannot wake up")

    async with looped(workers=2) as pair:
        with pytest.raises(RuntimeError, match="cannot sleep"):
            await pair.trainer.send_weights(pause=Pause(), around=[refuses], budget=BUDGET)
        assert left == ["w0"]
        assert [w.generation.state for w in pair.workers] == ["running"] * 2
        report = await pair.trainer.send_weights(pause=Pause(), around=[breaks], budget=BUDGET)
        assert report.outcome == "committed"
        assert "w0: leaving a context failed: cannot wake up" in report.notes
        assert [w.generation.state for w in pair.workers] == ["running"] * 2


async def test_a_worker_that_restarted_is_paused_again():
    calls = Calls()
    async with looped(before=calls) as pair:
        pair.worker.incarnation += "'"
        pair.worker.cycle.ownership.take(None)
        report = await pair.trainer.send_weights(pause=Pause(), budget=BUDGET)
        assert report.recovered
        assert calls.count("pause_generation") == 2
        assert holders(pair.worker) == []


async def test_a_pause_that_arrives_after_its_round_is_refused():
    async with looped() as pair:
        headers = []
        client = pair.trainer.links[0].client
        pause = client.pause

        async def spy(*args, header=None, **options):
            headers.append(header)
            return await pause(*args, header=header, **options)

        client.pause = spy
        await pair.trainer.send_weights(pause=Pause())
        with pytest.raises(aiosync.Fenced, match="round 1 is over"):
            await pause("keep", header=headers[0])
        assert holders(pair.worker) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pause": "keep"}, "pause must be a Pause"),
        ({"pause": lambda: Pause(mode="stop")}, "pause.mode must be one of"),
        ({"pause": lambda: Pause(scope="all")}, "pause.scope must be round or swap"),
        ({"pause": lambda: Pause(drain_timeout=0)}, "pause.drain_timeout"),
        ({"pause": lambda: Pause(clear_cache="no")}, "pause.clear_cache must be True or False"),
        ({"around": 5}, "around must be a list"),
        ({"around": [5]}, "around[0] must be a function"),
    ],
)
async def test_options_that_cannot_be_right(options, text):
    async with looped() as pair:
        before = list(pair.calls)
        with pytest.raises(Validation, match=re.escape(text)):
            made = {name: v() if callable(v) else v for name, v in options.items()}
            await pair.trainer.send_weights(**made)
        assert pair.calls == before


async def test_the_pause_of_a_trainer_that_was_killed_ends_with_its_lease():
    async with replica(seed=2) as worker:
        client = aiosync.HTTPVLLMWeightSyncClient(worker.url)
        run = ("trainer.py", worker.url, "--hold", "2", "--lease", "2.0", "--pause")
        async with program(*run) as trainer, asyncio.timeout(40):
            assert [await trainer.stdout.readline() for _ in range(2)] == [
                b"connected\n",
                b"holding\n",
            ]
            assert await client.is_paused()
            await trainer.kill()
            while await client.is_paused():
                await asyncio.sleep(0.05)
        assert (await worker.facts())["weights"] == "intact"
