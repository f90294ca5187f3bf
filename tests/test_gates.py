"""Gates: order, vetoes, timeouts, and what happens to the state meanwhile."""

from __future__ import annotations

import functools
import math

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from statemachines import (
    ENGINE,
    GATED,
    GateContext,
    GateRejected,
    InvalidTransition,
    StateMachine,
    Trigger,
    Validation,
)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


@pytest.fixture
def machine():
    machine = StateMachine(ENGINE, name="weights", role="trainer")
    machine.fire("initialize")
    return machine


@pytest.mark.parametrize("trigger", Trigger)
def test_only_three_triggers_take_gates(machine, trigger):
    assert GATED == ("initialize", "start", "complete")
    if trigger in GATED:
        machine.gate(trigger, lambda _: True)()
    else:
        with pytest.raises(Validation, match=f"'{trigger}' takes no gates"):
            machine.gate(trigger, lambda _: True)


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan, None, True, "1"])
def test_a_gate_needs_a_bounded_timeout(machine, timeout):
    with pytest.raises(Validation, match="timeout of a gate must be positive seconds"):
        machine.gate("start", lambda _: True, timeout=timeout)


def test_a_gate_needs_a_check(machine):
    with pytest.raises(Validation, match="must be callable, not None"):
        machine.gate("start", None)
    with pytest.raises(Validation, match="has no trigger 'bogus'"):
        machine.gate("bogus", lambda _: True)


@pytest.mark.anyio
async def test_gates_run_in_order_and_know_what_they_are_asked(machine):
    calls = []

    async def slow(context):
        await anyio.lowlevel.checkpoint()
        calls.append(("slow", context))
        return True

    def quiet(context):
        calls.append(("quiet", context))

    machine.gate("start", slow)
    machine.gate("start", quiet)
    machine.gate("complete", lambda _: False)
    event = await machine.advance("start", round=2, version="v2", nbytes=5)
    context = GateContext(
        engine="weights",
        role="trainer",
        trigger="start",
        state="initialized",
        round=2,
        version="v2",
    )
    assert calls == [("slow", context), ("quiet", context)]
    assert (event.trigger, event.round, event.version, event.nbytes) == ("start", 2, "v2", 5)


@pytest.mark.anyio
async def test_without_gates_advance_is_fire(machine):
    assert (await machine.advance("start")).dest == "updating"
    assert (await machine.advance("fail", error="x")).error == "x"


@pytest.mark.anyio
async def test_fire_and_other_triggers_ask_no_gate(machine):
    machine.gate("start", lambda _: False)
    assert await machine.pass_gates("fail") is False
    assert (await machine.advance("release")).dest == "idle"
    machine.fire("initialize")
    assert machine.fire("start").dest == "updating"


class Falsy:
    def __bool__(self):
        return False


class NoTruth:
    def __bool__(self):
        raise ValueError("ambiguous")


async def say_no(context):
    return False


async def break_down(context):
    raise OSError("no quorum server")


def explain(context):
    raise GateRejected("two replicas are missing", replica="r1")


def check_object(context, answer):
    return answer


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("check", "reason", "cause"),
    [
        (lambda _: False, "said no", None),
        (say_no, "said no", None),
        (lambda _: Falsy(), "said no", None),
        (functools.partial(check_object, answer=False), "partial before 'start' said no", None),
        (lambda _: NoTruth(), "raised ValueError", ValueError),
        (break_down, "raised OSError", OSError),
        (explain, "two replicas are missing", None),
    ],
)
async def test_veto(machine, check, reason, cause):
    later = []
    machine.gate("start", check)
    machine.gate("start", later.append)
    with pytest.raises(GateRejected) as caught:
        await machine.advance("start", round=4)
    assert reason in str(caught.value)
    assert caught.value.retryable
    assert type(caught.value.__cause__) is (cause or type(None))
    if check is not explain:
        assert caught.value.phase == "start"
        assert caught.value.round == 4
        assert caught.value.detail["state"] == "initialized"
    assert (machine.state, machine.seq, later) == ("initialized", 1, [])


@pytest.mark.anyio
async def test_each_gate_has_its_own_timeout(machine):
    async def never(context):
        await anyio.sleep_forever()

    machine.gate("start", lambda _: True, timeout=60)
    remove = machine.gate("start", never, timeout=0.01)
    with pytest.raises(GateRejected, match=r"did not answer within 0.01 s") as caught:
        await machine.advance("start")
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert (machine.state, machine.seq) == ("initialized", 1)
    remove()
    remove()
    assert (await machine.advance("start")).seq == 2


@pytest.mark.anyio
async def test_a_timeout_of_the_checks_own_is_an_error_like_others(machine):
    async def impatient(context):
        with anyio.fail_after(0):
            await anyio.sleep_forever()

    machine.gate("start", impatient)
    with pytest.raises(GateRejected, match="raised TimeoutError"):
        await machine.advance("start")


@pytest.mark.fault("A-CANCEL-1")
@pytest.mark.anyio
async def test_cancelled_while_it_waits_nothing_has_changed(machine):
    machine.gate("start", lambda _: anyio.sleep_forever())
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(machine.advance, "start")
            await wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    assert (machine.state, machine.seq) == ("initialized", 1)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "meanwhile",
    [
        ("fail",),
        ("close",),
        # Back in the same state, but what the gate agreed to is over.
        ("start", "abort"),
    ],
)
async def test_legality_is_judged_again_after_waiting(machine, meanwhile):
    opened = anyio.Event()
    errors = []

    async def hold(context):
        await opened.wait()

    async def advance():
        with pytest.raises(InvalidTransition, match="moved on while its gates") as caught:
            await machine.advance("start")
        errors.append(caught.value)

    machine.gate("start", hold)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(advance)
            await wait_all_tasks_blocked()
            for trigger in meanwhile:
                machine.fire(trigger)
            before = machine.state, machine.seq
            opened.set()
    assert (machine.state, machine.seq) == before
    assert errors[0].detail == {
        "state": machine.state,
        "allowed": list(machine.allowed()),
        "trigger": "start",
    }


@pytest.mark.anyio
async def test_an_illegal_advance_asks_nobody(machine):
    asked = []
    machine.gate("complete", asked.append)
    with pytest.raises(InvalidTransition):
        await machine.advance("complete")
    assert asked == []


@pytest.mark.fault("A-CANCEL-3")
@pytest.mark.anyio
async def test_one_of_two_racing_advances_wins(machine):
    results = []

    async def advance():
        try:
            results.append((await machine.advance("start")).dest)
        except InvalidTransition as error:
            results.append(error.code)

    machine.gate("start", lambda _: anyio.lowlevel.checkpoint())
    async with anyio.create_task_group() as group:
        group.start_soon(advance)
        group.start_soon(advance)
    assert sorted(results) == ["invalid_transition", "updating"]
    assert machine.seq == 2


@pytest.mark.anyio
async def test_a_gate_that_is_removed_meanwhile_is_not_asked(machine):
    asked = []

    def first(context):
        remove()

    machine.gate("start", first)
    remove = machine.gate("start", asked.append)
    await machine.advance("start")
    assert asked == []


@pytest.mark.asyncio
async def test_an_async_check_that_awaits_something_cancelled_is_a_veto_not_a_cancellation():
    import asyncio

    machine = StateMachine(ENGINE, name="e", role="trainer")

    async def check(_context):
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    machine.gate("initialize", check)
    with pytest.raises(GateRejected, match="cancelled from elsewhere"):
        await machine.advance("initialize")
    assert machine.state == "idle"
