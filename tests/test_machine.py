"""StateMachine: every pair of the table, random walks, threads, and tasks that wait."""

from __future__ import annotations

import logging
import threading

import anyio
import msgspec
import pytest
import sniffio
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from statemachines import (
    ENGINE,
    InvalidTransition,
    ReentrantTransition,
    Rule,
    State,
    StateMachine,
    Table,
    Transition,
    TransitionHub,
    Trigger,
    Validation,
    Weights,
    WrongThread,
)
from statemachines.events import describe_error

PATHS = {
    State.IDLE: (),
    State.INITIALIZED: ("initialize",),
    State.UPDATING: ("initialize", "start"),
    State.FINALIZING: ("initialize", "start", "finalize"),
    State.FAILED: ("fail",),
    State.CLOSED: ("close",),
}


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


def machine_in(state, **kwargs):
    machine = StateMachine(ENGINE, name="weights", role="trainer", **kwargs)
    for trigger in PATHS[state]:
        machine.fire(trigger)
    return machine


def in_thread(fn):
    """What `fn` returned or raised on a thread of its own."""
    outcome = []

    def body():
        try:
            outcome.append(fn())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return outcome[0]


@pytest.mark.anyio
async def test_the_running_library_is_the_parametrised_one(anyio_backend):
    assert sniffio.current_async_library() == anyio_backend


# --- flips


@pytest.mark.parametrize("trigger", [*Trigger, "no_such_trigger"])
@pytest.mark.parametrize("state", State)
def test_full_product_of_states_and_triggers(state, trigger):
    machine = machine_in(state)
    seq, history = machine.seq, machine.hub.statistics().published
    dest = ENGINE.target(state, trigger)
    assert machine.may(trigger) == (dest is not None) == (trigger in machine.allowed())
    if dest is None:
        with pytest.raises(InvalidTransition) as caught:
            machine.fire(trigger)
        assert caught.value.detail == {
            "state": state,
            "allowed": list(ENGINE.allowed(state)),
            "trigger": trigger,
        }
        assert (machine.state, machine.seq) == (state, seq)
        assert machine.hub.statistics().published == history
    else:
        event = machine.fire(trigger)
        assert (event.source, event.dest, event.trigger) == (state, dest, trigger)
        assert machine.state is State(dest)
        assert machine.seq == event.seq == seq + 1


def test_what_a_refusal_says():
    with pytest.raises(InvalidTransition) as caught:
        machine_in(State.UPDATING).fire(Trigger.START)
    assert str(caught.value) == (
        "weights (trainer): cannot start in state updating; "
        "allowed: update, finalize, abort, fail, close"
    )
    with pytest.raises(InvalidTransition, match="allowed: nothing"):
        machine_in(State.CLOSED).fire(Trigger.FAIL)


@given(st.lists(st.sampled_from(list(Trigger)), max_size=60))
def test_random_walk(triggers):
    machine = StateMachine(ENGINE, name="walk", role="worker")
    with machine.subscribe() as events:
        state, seq = State.IDLE, 0
        for trigger in triggers:
            target = ENGINE.target(state, trigger)
            if target is None:
                with pytest.raises(InvalidTransition):
                    machine.fire(trigger)
            else:
                event = machine.fire(trigger)
                assert event == events.receive_nowait()
                assert (event.seq, event.source, event.dest) == (seq + 1, state, target)
                state, seq = State(target), seq + 1
            assert (machine.state, machine.seq) == (state, seq)
            assert machine.allowed() == ENGINE.allowed(state)
        with pytest.raises(anyio.EndOfStream if state == "closed" else anyio.WouldBlock):
            events.receive_nowait()


def test_facts_travel():
    now = 100.0
    machine = StateMachine(ENGINE, name="weights", role="worker", clock=lambda: now)
    now = 101.5
    first = machine.fire("initialize")
    assert (first.monotonic, first.seconds_in_source) == (101.5, 1.5)
    now = 102.0
    machine.fire("start", round=3, version="v3")
    now = 104.0
    machine.fire("update", nbytes=10, phase="transmit")
    now = 105.0
    failed = machine.fire(
        Trigger.FAIL,
        phase="transmit",
        round=3,
        version=7,
        nbytes=20,
        weights=Weights.TORN,
        error=OSError(5, "broken\nsecond line"),
    )
    assert failed.seconds_in_source == 3.0  # an update does not leave the state
    assert failed.wall_time > 1e9
    assert failed == Transition(
        engine="weights",
        role="worker",
        seq=4,
        trigger="fail",
        source="updating",
        dest="failed",
        phase="transmit",
        wall_time=failed.wall_time,
        monotonic=105.0,
        seconds_in_source=3.0,
        round=3,
        version=7,
        nbytes=20,
        weights="torn",
        error="OSError: [Errno 5] broken",
        schema=1,
    )
    encoded = msgspec.json.encode(failed)
    assert msgspec.json.decode(encoded, type=Transition) == failed
    assert all(type(value) in (str, int, float) for value in msgspec.structs.astuple(failed))
    with pytest.raises(AttributeError):
        failed.seq = 5


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("as it is\nwith lines", "as it is\nwith lines"),
        (ValueError(), "ValueError"),
        (ValueError("\n  first\nsecond"), "ValueError: first"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (InvalidTransition("no", rank=3), "InvalidTransition: no"),
        (Unprintable(), "Unprintable: <message not printable>"),
        (OSError("bad name \udcff"), "OSError: bad name \\udcff"),
    ],
)
def test_errors_in_events(error, text):
    assert describe_error(error) == text
    event = machine_in(State.UPDATING).fire("fail", error=error)
    assert msgspec.json.decode(msgspec.json.encode(event), type=Transition) == event
    assert event.error == text


def test_long_errors_are_cut():
    assert len(describe_error(ValueError("x" * 10_000))) == 1000


def test_weights_are_checked_before_the_flip():
    machine = machine_in(State.UPDATING)
    with pytest.raises(Validation, match="intact, torn, unknown, not 'fine'"):
        machine.fire("fail", weights="fine")
    assert (machine.state, machine.seq) == ("updating", 2)
    assert machine.fire("fail", weights="intact").weights == "intact"


def test_repr():
    assert repr(machine_in(State.FAILED)) == "<StateMachine weights (trainer) failed seq=1>"


def test_the_library_below_stays_quiet(caplog):
    with caplog.at_level(logging.DEBUG):
        machine_in(State.FINALIZING)
    assert {record.name for record in caplog.records} == {"statemachines.hub"}


def test_a_table_of_another_kind():
    table = Table(
        name="gate",
        states=("running", "paused"),
        initial="running",
        rules=(Rule("pause", ("running",), "paused"), Rule("resume", ("paused",), "running")),
    )
    machine = StateMachine(table, name="generation", role="gate")
    machine.fire("pause")
    assert machine.state == "paused"
    with pytest.raises(Validation, match="table 'gate' has no trigger 'start'"):
        machine.gate("start", lambda _: True)


# --- hooks that fire, and threads


@pytest.mark.fault("A-CANCEL-8")
def test_a_hook_cannot_fire_its_own_machine():
    machine = StateMachine(ENGINE, name="weights", role="trainer")
    seen, raised = [], []

    def meddle(event):
        try:
            machine.fire("close")
        except ReentrantTransition as error:
            raised.append(error)
            raise

    machine.on_transition(meddle)
    machine.on_transition(seen.append)
    machine.fire("initialize")
    assert (machine.state, machine.seq) == ("initialized", 1)
    assert [event.trigger for event in seen] == ["initialize"]
    assert "from inside a hook" in str(raised[0])
    assert machine.hub.statistics().hook_errors == 1
    machine.fire("start")
    assert (machine.state, machine.seq, len(raised)) == ("updating", 2, 2)


def test_a_hook_may_fire_another_machine_but_not_come_back():
    hub = TransitionHub()
    first = StateMachine(ENGINE, name="first", role="trainer", hub=hub)
    second = StateMachine(ENGINE, name="second", role="worker", hub=hub)
    first.on_transition(lambda _: second.fire("initialize"))
    second.on_transition(lambda _: first.fire("start"))
    first.fire("initialize")
    assert (first.state, second.state) == ("initialized", "initialized")
    (trouble,) = hub.statistics().hooks.values()
    assert trouble.errors == 1
    assert trouble.last_error.startswith("ReentrantTransition: first (trainer)")


def test_an_interrupt_in_a_hook_passes_through_after_the_flip():
    machine = StateMachine(ENGINE, name="weights", role="trainer")
    events = machine.subscribe()

    def interrupt(_):
        raise KeyboardInterrupt

    machine.on_transition(interrupt)
    with pytest.raises(KeyboardInterrupt):
        machine.fire("close")
    assert [event.seq for event in [events.receive_nowait()]] == [1]
    with pytest.raises(anyio.EndOfStream):
        events.receive_nowait()
    assert machine.state == "closed"


@pytest.mark.parametrize("state", State)
def test_a_busy_machine_belongs_to_one_thread(state):
    machine = machine_in(state)
    seq = machine.seq
    result = in_thread(lambda: machine.fire("fail"))
    if state in ENGINE.busy:
        assert isinstance(result, WrongThread)
        assert "rebind_thread" in result.next_step
        assert (machine.state, machine.seq) == (state, seq)
        machine.fire("update" if state == "updating" else "complete")
    elif state in ENGINE.working:
        assert machine.state == "failed"
        machine.fire("reset")
    else:
        assert isinstance(result, InvalidTransition)


def test_the_next_round_may_run_on_another_thread():
    machine = machine_in(State.INITIALIZED)
    in_thread(lambda: machine.fire("start"))
    with pytest.raises(WrongThread):
        machine.fire("update")
    machine.rebind_thread()
    machine.fire("fail")
    assert machine.state == "failed"


def test_an_illegal_attempt_does_not_take_the_machine_over():
    machine = machine_in(State.INITIALIZED)
    assert isinstance(in_thread(lambda: machine.fire("complete")), InvalidTransition)
    machine.fire("start")
    machine.fire("update")
    assert machine.state == "updating"


def test_two_threads_cannot_flip_at_once():
    machine = StateMachine(ENGINE, name="weights", role="trainer")
    result = []
    machine.on_transition(lambda _: result.append(in_thread(lambda: machine.fire("start"))))
    machine.fire("initialize")
    assert isinstance(result[0], WrongThread)
    assert "another thread flips it" in str(result[0])
    assert (machine.state, machine.seq) == ("initialized", 1)


# --- waiting


@pytest.mark.anyio
async def test_wait_for_looks_first():
    assert await machine_in(State.UPDATING).wait_for("updating", "failed") is State.UPDATING
    assert await machine_in(State.CLOSED).wait_for(State.CLOSED, timeout=0) is State.CLOSED


@pytest.mark.anyio
async def test_many_wait_for_one():
    machine = StateMachine(ENGINE, name="weights", role="worker")
    reached = []

    async def wait(*states):
        reached.append((states, await machine.wait_for(*states)))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(wait, "initialized")
            group.start_soon(wait, "finalizing", "failed")
            await wait_all_tasks_blocked()
            machine.fire("initialize")
            await wait_all_tasks_blocked()
            assert reached == [(("initialized",), "initialized")] * 20
            machine.fire("start")
            await wait_all_tasks_blocked()
            assert len(reached) == 20
            machine.fire("fail")
    assert reached[-1] == (("finalizing", "failed"), "failed")


@pytest.mark.anyio
async def test_a_state_that_is_left_again_was_reached():
    machine = StateMachine(ENGINE, name="weights", role="worker")
    reached = []

    async def wait(*states):
        reached.append(await machine.wait_for(*states))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(wait, "updating")
            group.start_soon(wait, "initialized", "failed")
            await wait_all_tasks_blocked()
            for trigger in ("initialize", "start", "fail", "close"):
                machine.fire(trigger)
    assert sorted(reached) == ["initialized", "updating"]


@pytest.mark.anyio
async def test_waiting_ends_with_the_machine():
    machine = StateMachine(ENGINE, name="weights", role="worker")
    errors = []

    async def wait():
        with pytest.raises(InvalidTransition) as caught:
            await machine.wait_for("updating")
        errors.append(caught.value)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await wait_all_tasks_blocked()
            machine.fire("close")
        await wait()
    assert len(errors) == 2
    assert "cannot wait for updating in state closed (it has ended)" in str(errors[0])


@pytest.mark.anyio
async def test_waiting_has_a_deadline():
    machine = StateMachine(ENGINE, name="weights", role="worker")
    with pytest.raises(TimeoutError, match=r"not updating or failed within 0.01 s but idle"):
        await machine.wait_for("updating", "failed", timeout=0.01)
    with pytest.raises(TimeoutError), anyio.fail_after(0.01):
        await machine.wait_for("updating")
    machine.fire("fail")  # nobody is left to be told
    assert machine.state == "failed"


@pytest.mark.anyio
@pytest.mark.parametrize("states", [(), ("bogus",), ("idle", "bogus")])
async def test_waiting_for_what_cannot_come(states):
    with pytest.raises(Validation, match="table 'engine' cannot reach"):
        await machine_in(State.IDLE).wait_for(*states)


@pytest.mark.anyio
async def test_a_waiter_sees_what_another_thread_did():
    machine = StateMachine(ENGINE, name="weights", role="worker")
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(machine.wait_for, "initialized")
            await wait_all_tasks_blocked()
            await anyio.to_thread.run_sync(machine.fire, "initialize")
    assert machine.state == "initialized"


@pytest.mark.fault("A-CANCEL-1")
@pytest.mark.anyio
async def test_fail_fires_in_a_cancelled_scope():
    machine = machine_in(State.UPDATING)
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await checkpoint()
        finally:
            machine.fire("fail", error="cancelled", weights="unknown")
    assert scope.cancelled_caught
    assert machine.state == "failed"
