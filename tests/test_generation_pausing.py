"""Pauses: modes, owners, admission, spans, caches, and the seconds they cost."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint
from limits import SLACK

from aiosync.errors import GenerationAborted, Paused, PhaseTimeout, Validation
from aiosync.generation import GenerationGate, Span, WeightsTag
from aiosync.generation_table import GENERATION, GateState
from aiosync.version import Version
from statemachines.diagrams import table_markdown
from statemachines.errors import InvalidTransition

pytestmark = pytest.mark.anyio
settle = anyio.wait_all_tasks_blocked


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


class Stream:
    """A client that reads a generation token by token; one token per `step`."""

    def __init__(self, group, gate, **options):
        self.tokens, self.times, self.request, self.error = [], [], None, None
        self.done = anyio.Event()
        self._gate, self._options = gate, options
        self._wanted = 0
        self._more = anyio.Event()
        group.start_soon(self._run)

    async def _run(self):
        try:
            async with self._gate.request(**self._options) as self.request:
                while True:
                    while len(self.tokens) >= self._wanted:
                        await self._more.wait()
                        self._more = anyio.Event()
                        if self._wanted < 0:
                            return
                    await self.request.checkpoint()
                    self.tokens.append(self.request.version)
                    self.times.append(time.monotonic())
                    self.request.produced()
        except Paused as error:
            self.error = error
        finally:
            self.done.set()

    async def step(self, count=1):
        self._wanted += count
        self._more.set()
        await settle()

    async def end(self):
        self._wanted = -1
        self._more.set()
        await settle()


def tag(order):
    return WeightsTag(Version(order, "run", order), f"run/{order}/x")


async def pausing(group, gate, *args, **options):
    """A pause in a task of its own; what it came to is in the list."""
    found = []

    async def run():
        try:
            found.append(await gate.pause(*args, **options))
        except Exception as error:
            found.append(error)

    group.start_soon(run)
    await settle()
    return found


@pytest.mark.parametrize("state", list(GateState))
@pytest.mark.parametrize("trigger", GENERATION.triggers)
async def test_every_pair_of_the_table(state, trigger):
    gate = GenerationGate()
    for step in {"running": (), "pausing": ("pause",), "paused": ("pause", "drained")}[state]:
        gate.machine.fire(step)
    legal = {
        ("running", "pause"): "pausing", ("pausing", "drained"): "paused",
        ("pausing", "resume"): "running", ("paused", "resume"): "running",
    }  # fmt: skip
    if (target := legal.get((state, trigger))) is None:
        with pytest.raises(InvalidTransition):
            gate.machine.fire(trigger)
        assert gate.state == state
    else:
        gate.machine.fire(trigger)
        assert gate.state == target


async def test_the_documented_table_is_the_gates():
    page = Path(__file__).resolve().parents[1] / "docs" / "control-plane.md"
    assert table_markdown(GENERATION).strip() in await anyio.Path(page).read_text("utf-8")


async def test_the_gate_is_watched_like_an_engine():
    gate = GenerationGate(name="replica")
    seen = []
    remove = gate.on_transition(lambda t: seen.append((t.engine, t.role, t.trigger, t.dest)))
    async with anyio.create_task_group() as group:
        stream = Stream(group, gate)
        await settle()
        found = await pausing(group, gate, "wait", owner="a")
        assert (gate.state, found) == ("pausing", [])
        await stream.end()
        assert await gate.wait_for("paused") == "paused"
        gate.resume("a")
    remove()
    assert seen == [
        ("replica", "generation", "pause", "pausing"),
        ("replica", "generation", "drained", "paused"),
        ("replica", "generation", "resume", "running"),
    ]
    with gate.subscribe(since=0) as events:
        assert [(await events.receive()).seq for _ in range(3)] == [1, 2, 3]


async def test_abort_ends_what_is_in_flight_with_its_partial_output():
    gate = GenerationGate()
    async with anyio.create_task_group() as group:
        stream = Stream(group, gate)
        await stream.step(3)
        found = await pausing(group, gate, "abort", owner="a")
        assert (gate.state, stream.request.aborted, found) == ("pausing", True, [])
        await stream.step()  # the next checkpoint ends the block, without an error
        assert stream.done.is_set()
        assert (len(stream.tokens), gate.state, len(found)) == (3, "paused", 1)
        assert "paused (a)" in stream.request.abort_reason
        with pytest.raises(Paused) as caught:
            async with gate.request():
                pytest.fail("entered")
        assert caught.value.retryable
        assert caught.value.detail["retry_after_s"] == gate.retry_after_s
        found[0].release()
        async with gate.request() as request:
            assert not request.aborted


async def test_abort_cancels_what_a_request_awaits_and_nothing_else():
    gate = GenerationGate()
    ended = []

    async def slow():
        await anyio.sleep_forever()

    async def generate():
        async with gate.request(id="r") as request:
            ended.append("in")
            await request.run(slow)
            ended.append("never")
        ended.append(request.aborted)

    async def by_itself():
        async with gate.request(id="other") as request:
            ended.append(await request.wait_aborted())

    async with anyio.create_task_group() as group:
        group.start_soon(generate)
        group.start_soon(by_itself)
        await settle()
        assert gate.abort(["r", "unknown"]) == 1
        await settle()
        assert ended == ["in", True]
        assert gate.abort(reason="enough") == 1
        await settle()
    assert ended == ["in", True, "enough"]
    assert (gate.in_flight, gate.state, gate.abort()) == (0, "running", 0)


async def test_a_request_that_was_let_in_but_had_not_run_is_ended_too():
    gate = GenerationGate()
    async with anyio.create_task_group() as group:
        hold = gate.hold("keep", owner="a")
        late = Stream(group, gate)
        await settle()
        hold.release()  # it is let in, and runs only later
        found = await pausing(group, gate, "abort", owner="b")
        assert late.request.aborted
        await late.step()
        assert len(found) == 1
        gate.resume("b")


async def test_an_abort_of_another_request_is_not_swallowed():
    gate = GenerationGate()
    with pytest.raises(GenerationAborted):
        async with gate.request():
            raise GenerationAborted("of something else")


async def test_wait_lets_requests_finish_and_has_a_deadline():
    gate = GenerationGate()
    async with anyio.create_task_group() as group:
        stream = Stream(group, gate)
        await stream.step()
        with pytest.raises(PhaseTimeout, match="1 requests were still running") as caught:
            await gate.pause("wait", owner="a", timeout=0)
        assert caught.value.detail == {"in_flight": 1}
        assert (gate.state, gate.holds) == ("running", ())
        found = await pausing(group, gate, "wait", owner="a")
        await stream.step(2)  # goes on: wait never parks
        assert (len(stream.tokens), found) == (3, [])
        await stream.end()
        assert (gate.state, len(found), stream.request.aborted) == ("paused", 1, False)


async def test_keep_parks_and_goes_on_under_the_new_weights():
    gate = GenerationGate()
    gate.adopt(tag(1))
    async with anyio.create_task_group() as group:
        stream = Stream(group, gate)
        await stream.step(2)
        found = await pausing(group, gate, "keep", owner="a")
        assert found == []
        await stream.step()  # parked at its checkpoint
        assert (gate.state, len(found), gate.in_flight) == ("paused", 1, 1)
        late = Stream(group, gate)  # accepted, and queued
        await late.step()
        assert (late.tokens, late.error) == ([], None)
        async with gate.swap(timeout=1):
            gate.adopt(tag(2))
        assert len(stream.tokens) == 2  # the swap is over, the pause is not
        assert gate.resume("a") == 1
        await settle()
        assert [v.label for v in stream.tokens] == [1, 1, 2]
        assert stream.request.spans == [
            Span("1", "run/1/x", 0, 2), Span("2", "run/2/x", 2, 3),
        ]  # fmt: skip
        assert [v.label for v in late.tokens] == [2]
        assert late.request.spans == [Span("2", "run/2/x", 0, 1)]
        await stream.end()
        await late.end()


async def test_a_swap_alone_parks_requests_that_stand_at_a_checkpoint():
    gate = GenerationGate()
    swapped = anyio.Event()

    async def swap():
        async with gate.swap(timeout=5):
            gate.adopt(tag(7))
        swapped.set()

    async with anyio.create_task_group() as group:
        stream = Stream(group, gate)
        await stream.step()
        group.start_soon(swap)
        await settle()
        assert gate.state == "pausing"
        await stream.step()
        assert swapped.is_set()
        assert [v and v.label for v in stream.tokens] == [None, 7]
        await stream.end()
    assert [span.version for span in stream.request.spans] == ["default", "7"]


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_a_swap_may_drain_or_end_the_requests_instead(mode):
    gate = GenerationGate(update_mode=mode)
    done = []

    async def swap():
        async with gate.swap(timeout=5):
            done.append(gate.in_flight)

    async with anyio.create_task_group() as group:
        stream = Stream(group, gate)
        await stream.step()
        group.start_soon(swap)
        await settle()
        await stream.step()
        assert len(stream.tokens) == {"wait": 2, "abort": 1}[mode]
        await stream.end()
        assert done == [0]


async def test_a_parked_request_can_be_aborted_or_cancelled():
    gate = GenerationGate()
    async with anyio.create_task_group() as group:
        stream, other = Stream(group, gate, id="s"), anyio.CancelScope()

        async def second():
            with other:
                async with gate.request() as request:
                    await checkpoint()
                    while True:
                        await request.checkpoint()
                        await checkpoint()

        group.start_soon(second)
        for _ in range(5):
            await checkpoint()
        hold = gate.hold("keep", owner="a")
        await stream.step()
        assert (gate.state, gate.in_flight) == ("paused", 2)
        other.cancel()
        await settle()
        assert (gate.state, gate.in_flight) == ("paused", 1)
        assert gate.abort(["s"]) == 1
        await settle()
        assert (stream.done.is_set(), stream.tokens, gate.in_flight) == (True, [], 0)
        hold.release()
    assert (gate.state, gate.statistics()["parked"]) == ("running", 0)
    async with gate.swap(timeout=0):
        pass


async def test_holds_are_counted_and_owned():
    gate = GenerationGate()
    first = await gate.pause("keep", owner="trainer")
    second = await gate.pause("keep", owner="trainer")
    await gate.pause("wait", owner="operator")
    assert gate.statistics()["held_by"] == ["trainer", "trainer", "operator"]
    first.release()
    first.release()  # idempotent: the second one stays
    assert gate.holds[0] is second
    assert gate.resume("stranger") == 0
    assert gate.resume("trainer") == 1
    assert gate.state == "paused"
    assert gate.resume("operator") == 1
    assert gate.state == "running"
    with pytest.raises(Validation, match="owner"):
        gate.hold("keep", owner="")
    with pytest.raises(Validation, match="mode must be one of abort, wait, keep"):
        gate.hold("stop", owner="a")


async def test_admission_is_held_apart_from_generation():
    gate = GenerationGate()
    async with anyio.create_task_group() as group:
        stream = Stream(group, gate)
        await stream.step()
        hold = gate.hold_admission(owner="router", reason="draining")
        assert gate.state == "running"
        await stream.step()
        assert len(stream.tokens) == 2
        late = Stream(group, gate)
        await settle()
        assert "router: draining" in str(late.error)
        with pytest.raises(Paused):
            gate.check_admission()
        hold.release()
        queueing = gate.hold_admission(owner="router", refuse=False)
        waiting = Stream(group, gate)
        await waiting.step()
        assert (waiting.tokens, waiting.error) == ([], None)
        queueing.release()
        await settle()
        assert len(waiting.tokens) == 1
        await stream.end()
        await waiting.end()


async def test_the_queue_is_bounded_in_length_and_time():
    gate = GenerationGate(queue_limit=1, new_requests="queue")
    hold = await gate.pause("abort", owner="a")
    async with anyio.create_task_group() as group:
        first = Stream(group, gate)
        await settle()
        with pytest.raises(Paused, match="1 requests are queued already"):
            async with gate.request():
                pytest.fail("entered")
        refusing = gate.hold("abort", owner="b", refuse=True)  # those that queue are told, too
        await settle()
        assert "paused (b)" in str(first.error)
        refusing.release()
        with pytest.raises(Paused, match=r"did not go on within 0\.01 s"):
            async with gate.request(timeout=0.01):
                pytest.fail("entered")
        assert gate.statistics()["requests_waiting"] == 0
    hold.release()
    async with gate.request():
        assert gate.in_flight == 1


async def test_a_cancelled_pause_is_lifted():
    gate = GenerationGate()
    async with anyio.create_task_group() as group:
        stream = Stream(group, gate)
        await settle()
        with anyio.move_on_after(0.01):
            await gate.pause("wait", owner="a")
        assert (gate.state, gate.holds) == ("running", ())
        await stream.end()


async def test_seconds_paused_are_the_gap_that_a_streaming_client_sees():
    gate = GenerationGate()
    async with anyio.create_task_group() as group:
        stream = Stream(group, gate)
        await stream.step()
        found = await pausing(group, gate, "keep", owner="a")
        await stream.step()
        parked_at = time.monotonic()
        assert len(found) == 1
        await anyio.sleep(0.05)
        assert gate.seconds_paused >= 0.05  # so far
        found[0].release()
        await settle()
        gap = stream.times[-1] - parked_at
        assert abs(gate.seconds_paused - gap) < SLACK  # a deadline, not a measurement
        assert gate.seconds_paused >= 0.05
        before = gate.seconds_paused
        await anyio.sleep(0.02)
        assert gate.seconds_paused == before
        await stream.end()


async def test_the_cache_is_flushed_kept_or_salted():
    gate, flushed = GenerationGate(), []

    async def flush(weights_id):
        await checkpoint()
        flushed.append((weights_id, gate.state))

    async def update(order):
        async with gate.swap():
            await gate.renew_cache(tag(order).weights_id)
            gate.adopt(tag(order))

    gate.tie_cache("flush", flush)
    await update(1)
    assert flushed == [("run/1/x", "paused")]
    hold = await gate.pause("keep", owner="a", clear_cache=False)
    await update(2)
    assert len(flushed) == 1  # the pause said that the cache survives
    hold.release()
    hold = await gate.pause("keep", owner="a", clear_cache=True)
    assert flushed[1:] == [("run/2/x", "paused")]
    hold.release()
    async with gate.request() as request:
        assert request.salt == ""
    gate.tie_cache("salt")
    async with gate.request() as request:
        assert request.salt == request.weights_id == "run/2/x"
    await update(3)
    async with gate.request() as request:
        assert request.salt == "run/3/x"
    assert len(flushed) == 2
    for policy, function in (("flush", None), ("burn", print)):
        with pytest.raises(Validation, match="policy"):
            gate.tie_cache(policy, function)


async def test_a_flush_that_fails_lifts_the_pause():
    gate = GenerationGate()
    gate.tie_cache("flush", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await gate.pause("keep", owner="a", clear_cache=True)
    assert (gate.state, gate.holds) == ("running", ())


@pytest.mark.parametrize("turns", range(0, 24, 2))
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_cancel_sweep_of_pauses(mode, turns):
    """Cancel everything k turns in; afterwards the gate is as new."""
    gate = GenerationGate()

    async def generate():
        async with gate.request() as request:
            for _ in range(4):
                await request.checkpoint()
                await checkpoint()

    async def pause(owner):
        hold = await gate.pause(mode, owner=owner, refuse=False)
        await checkpoint()
        hold.release()

    async def swap():
        async with gate.swap():
            await checkpoint()

    async with anyio.create_task_group() as group:
        for n in range(2):
            group.start_soon(generate)
            group.start_soon(pause, f"p{n}")
            group.start_soon(swap)
            group.start_soon(generate)
        for _ in range(turns):
            await checkpoint()
        group.cancel_scope.cancel()
    for hold in gate.holds:  # cancelled between its pause and its release
        hold.release()
    facts = gate.statistics()
    assert (gate.state, gate.in_flight, facts["parked"]) == ("running", 0, 0)
    assert facts["requests_waiting"] == facts["swaps_waiting"] == 0
    async with gate.swap(timeout=0):
        assert gate.state == "paused"
