"""The hub: hooks that misbehave, streams that lag, replay, and machines that share it."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from statemachines import (
    ENGINE,
    HubStatistics,
    StateMachine,
    Transition,
    TransitionHub,
    Validation,
)
from statemachines.waiting import Wakeup


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


def transition(seq, engine="e", role="worker", **facts):
    return Transition(
        engine=engine,
        role=role,
        seq=seq,
        trigger="update",
        source="updating",
        dest="updating",
        wall_time=0.0,
        monotonic=0.0,
        seconds_in_source=0.0,
        **facts,
    )


def publish(hub, *seqs, **facts):
    for seq in seqs:
        hub.publish(transition(seq, **facts))


def waiting(subscription):
    """The seqs that can be read without waiting."""
    seqs = []
    while True:
        try:
            seqs.append(subscription.receive_nowait().seq)
        except (anyio.WouldBlock, anyio.EndOfStream):
            return seqs


async def read_all(subscription, into):
    async for event in subscription:
        into.append(event.seq)


# --- hooks


def test_hooks_run_in_order_until_removed():
    hub, calls = TransitionHub(), []
    remove = hub.on_transition(lambda event: calls.append(("first", event.seq)))
    hub.on_transition(lambda event: calls.append(("second", event.seq)))
    publish(hub, 1)
    remove()
    remove()
    publish(hub, 2)
    assert calls == [("first", 1), ("second", 1), ("second", 2)]


def test_a_hook_removed_by_an_earlier_one_is_not_called():
    hub, calls = TransitionHub(), []
    hub.on_transition(lambda _: remove())
    remove = hub.on_transition(calls.append)
    publish(hub, 1)
    assert calls == []


def test_a_hook_that_raises_is_counted_and_named():
    hub, calls = TransitionHub(), []

    def broken(event):
        raise ValueError(f"cannot take {event.seq}")

    hub.on_transition(broken)
    hub.on_transition(calls.append)
    publish(hub, 1, 2)
    assert len(calls) == 2
    statistics = hub.statistics()
    assert statistics.hook_errors == 2
    ((name, trouble),) = statistics.hooks.items()
    assert name.endswith("test_a_hook_that_raises_is_counted_and_named.<locals>.broken")
    assert (trouble.errors, trouble.slow) == (2, 0)
    assert trouble.last_error == "ValueError: cannot take 2"


def test_a_hook_that_blocks_is_counted_and_named():
    now = 0.0

    def pause(seconds):
        nonlocal now
        now += seconds

    class Exporter:
        def __call__(self, event):
            pause({1: 0.005, 2: 0.0051, 3: 0.25, 4: 0.006}[event.seq])
            if event.seq == 4:
                raise OSError("gone")

    hub = TransitionHub(clock=lambda: now)
    hub.on_transition(lambda _: None)
    hub.on_transition(Exporter())
    publish(hub, 1)
    assert hub.statistics().hooks == {}
    publish(hub, 2, 3, 4)
    statistics = hub.statistics()
    assert statistics.slow_hooks == 3
    ((name, trouble),) = statistics.hooks.items()
    assert name.endswith("Exporter")
    assert (trouble.errors, trouble.slow) == (1, 3)
    assert trouble.slowest_seconds == pytest.approx(0.25)


async def coroutine_hook(event):
    """Never awaited."""


async def generator_hook(event):
    yield


class AsyncCall:
    async def __call__(self, event):
        """Never awaited."""


@pytest.mark.parametrize(
    "hook",
    [
        coroutine_hook,
        generator_hook,
        functools.partial(coroutine_hook),
        AsyncCall(),
        AsyncCall().__call__,
        None,
        "on_update",
    ],
)
def test_a_hook_must_be_a_plain_function(hook):
    with pytest.raises(Validation, match="must be a plain function"):
        TransitionHub().on_transition(hook)
    with pytest.raises(Validation, match="must be a plain function"):
        StateMachine(ENGINE, name="e", role="worker").on_transition(hook)


def test_a_hook_that_turns_out_to_be_async_is_counted():
    hub = TransitionHub()
    hub.on_transition(lambda event: coroutine_hook(event))
    publish(hub, 1)
    gc.collect()  # a coroutine left behind would warn, and a warning is an error here
    (trouble,) = hub.statistics().hooks.values()
    assert trouble.last_error == "TypeError: the hook returned a coroutine"


# --- the log


def test_one_line_per_transition(caplog):
    machine = StateMachine(ENGINE, name="weights", role="trainer")

    def broken(_):
        raise ValueError

    machine.on_transition(broken)
    with caplog.at_level(logging.INFO):
        machine.fire("initialize")
        machine.fire("fail", error=OSError("no route"))
    assert [record.getMessage() for record in caplog.records] == [
        "weights (trainer) #1 initialize: idle -> initialized",
        "weights (trainer) #2 fail: initialized -> failed [OSError: no route]",
    ]


# --- subscriptions


def test_a_subscription_needs_no_loop():
    hub = TransitionHub()
    subscription = hub.subscribe(size=3)
    publish(hub, 1, 2)
    assert repr(subscription) == "<Subscription open 2/3 dropped=0>"
    seen = []
    hub.close()
    anyio.run(read_all, subscription, seen)
    assert seen == [1, 2]
    assert repr(subscription) == "<Subscription ended 0/3 dropped=0>"


@pytest.mark.anyio
async def test_a_slow_subscriber_loses_the_oldest_and_nobody_else_does():
    hub = TransitionHub()
    slow, quick, seen = hub.subscribe(size=3), hub.subscribe(size=3), []
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(read_all, quick, seen)
            for seq in range(1, 11):
                publish(hub, seq)
                await wait_all_tasks_blocked()
            assert slow.dropped == 7
            assert [(await slow.receive()).seq, (await slow.receive()).seq] == [8, 9]
            publish(hub, 11)
            hub.close()
    assert seen == list(range(1, 12))
    assert waiting(slow) == [10, 11]
    assert quick.dropped == 0
    assert hub.statistics() == HubStatistics(
        published=11, dropped=7, hook_errors=0, slow_hooks=0, subscribers=0, hooks={}
    )


@pytest.mark.anyio
async def test_several_readers_of_one_stream_share_it():
    hub, seen = TransitionHub(), []
    subscription = hub.subscribe()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(read_all, subscription, seen)
            await wait_all_tasks_blocked()
            publish(hub, 1)
            await wait_all_tasks_blocked()
            publish(hub, 2, 3)
            hub.close()
    assert sorted(seen) == [1, 2, 3]


@pytest.mark.anyio
async def test_a_cancelled_read_loses_nothing():
    hub, seen = TransitionHub(), []
    subscription = hub.subscribe()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(read_all, subscription, seen)
            await wait_all_tasks_blocked()
            publish(hub, 1, 2)  # woken and cancelled in the same step
            group.cancel_scope.cancel()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await subscription.receive()
    assert scope.cancelled_caught
    assert seen + waiting(subscription) == [1, 2]
    assert not subscription._wakeups


@pytest.mark.anyio
async def test_closing_ends_the_reader_at_once():
    hub, seen = TransitionHub(), []
    with anyio.fail_after(10):
        async with hub.subscribe() as outer:
            with hub.subscribe() as subscription:
                async with anyio.create_task_group() as group:
                    group.start_soon(read_all, subscription, seen)
                    await wait_all_tasks_blocked()
                    publish(hub, 1, 2)
                    subscription.close()
            assert hub.statistics().subscribers == 1
        subscription.close()
        with pytest.raises(anyio.EndOfStream):
            await outer.receive()
    publish(hub, 3)
    assert seen == []
    assert waiting(subscription) == waiting(outer) == []
    assert hub.statistics().subscribers == 0


@pytest.mark.anyio
async def test_a_loop_that_is_left_costs_nothing_afterwards():
    hub = TransitionHub()

    async def read_one():
        async for event in hub.subscribe(since=0):
            seen.append(event.seq)
            break

    seen = []
    publish(hub, 1, 2)
    await read_one()
    assert seen == [1]
    gc.collect()
    assert hub.statistics().subscribers == 0


@pytest.mark.anyio
async def test_the_end_comes_after_what_is_left():
    machine = StateMachine(ENGINE, name="weights", role="trainer")
    subscription, seen = machine.subscribe(), []
    unfiltered = machine.hub.subscribe()
    machine.fire("initialize")
    machine.fire("close")
    with anyio.fail_after(10):
        await read_all(subscription, seen)
        await read_all(unfiltered, seen)
        await read_all(machine.subscribe(since=1), seen)
        await read_all(machine.subscribe(), seen)
    assert seen == [1, 2, 1, 2, 2]


@pytest.mark.anyio
async def test_the_end_wakes_a_reader():
    machine, seen = StateMachine(ENGINE, name="weights", role="trainer"), []
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(read_all, machine.subscribe(), seen)
            await wait_all_tasks_blocked()
            machine.fire("close")
    assert seen == [1]


@pytest.mark.anyio
async def test_a_reader_sees_what_another_thread_published():
    hub, seen = TransitionHub(), []
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(read_all, hub.subscribe(), seen)
            await wait_all_tasks_blocked()
            await anyio.to_thread.run_sync(publish, hub, 1)
            await anyio.to_thread.run_sync(hub.close)
    assert seen == [1]


@pytest.mark.anyio
async def test_an_event_is_never_set_from_another_thread():
    wakeup = Wakeup()
    await anyio.to_thread.run_sync(wakeup.wake)
    assert not wakeup._event.is_set()
    wakeup.wake()
    assert wakeup._event.is_set()


def test_waking_a_waiter_whose_loop_is_gone_is_not_an_error():
    loop = asyncio.new_event_loop()

    async def start():
        wakeup = Wakeup()
        task = loop.create_task(wakeup._event.wait())
        await wait_all_tasks_blocked()
        return wakeup, task

    wakeup, task = loop.run_until_complete(start())
    loop.close()
    wakeup.wake()
    assert wakeup._event.is_set()
    task._log_destroy_pending = False


@pytest.mark.parametrize("size", [0, -1, True, 1.0, None, "2"])
def test_size_must_be_a_count(size):
    with pytest.raises(Validation, match="size must be a whole number of at least 1"):
        TransitionHub().subscribe(size=size)


@pytest.mark.parametrize("history", [-1, False, 1.5, None])
def test_history_must_be_a_count(history):
    with pytest.raises(Validation, match="history must be a whole number of at least 0"):
        TransitionHub(history=history)


@pytest.mark.parametrize("since", [True, 1.0, "2"])
def test_since_must_be_a_seq(since):
    with pytest.raises(Validation, match="since must be a whole number, not"):
        TransitionHub().subscribe(since=since)


# --- replay


@pytest.mark.parametrize(
    ("since", "seqs"),
    [(None, [6]), (0, [3, 4, 5, 6]), (-1, [3, 4, 5, 6]), (3, [4, 5, 6]), (5, [6]), (9, [6])],
)
def test_replay(since, seqs):
    hub = TransitionHub(history=3)
    publish(hub, 1, 2, 3, 4, 5)
    subscription = hub.subscribe(since=since)
    publish(hub, 6)
    assert waiting(subscription) == seqs


def test_replay_fills_no_more_than_the_size():
    hub = TransitionHub()
    publish(hub, 1, 2, 3, 4)
    subscription = hub.subscribe(since=0, size=2)
    assert (waiting(subscription), subscription.dropped) == ([3, 4], 2)
    assert hub.statistics().dropped == 2


def test_without_history_nothing_is_replayed():
    hub = TransitionHub(history=0)
    publish(hub, 1, 2)
    assert waiting(hub.subscribe(since=0)) == []


def test_a_closed_hub_still_replays():
    hub, calls = TransitionHub(), []
    hub.on_transition(calls.append)
    publish(hub, 1)
    hub.close()
    hub.close()
    publish(hub, 2)
    assert repr(hub) == "<TransitionHub closed published=1>"
    subscription = hub.subscribe(since=0)
    assert subscription.receive_nowait().seq == 1
    with pytest.raises(anyio.EndOfStream):
        subscription.receive_nowait()
    assert len(calls) == hub.statistics().published == 1


# --- several machines


@pytest.mark.anyio
async def test_two_machines_share_a_hub():
    hub = TransitionHub()
    trainer = StateMachine(ENGINE, name="weights", role="trainer", hub=hub)
    worker = StateMachine(ENGINE, name="weights", role="worker", hub=hub)
    assert trainer.hub is worker.hub is hub
    both, of_trainer, hooked, seen = hub.subscribe(), trainer.subscribe(), [], []
    trainer.on_transition(lambda event: hooked.append(event.role))
    trainer.fire("initialize")
    worker.fire("initialize")
    worker.fire("start")
    trainer.fire("close")
    worker.fire("fail")
    with anyio.fail_after(10):
        await read_all(of_trainer, seen)  # ends: its machine is closed
    assert seen == [1, 2]
    assert hooked == ["trainer", "trainer"]
    events = [both.receive_nowait() for _ in range(5)]
    assert [(event.role, event.seq) for event in events] == [
        ("trainer", 1),
        ("worker", 1),
        ("worker", 2),
        ("trainer", 2),
        ("worker", 3),
    ]
    with pytest.raises(anyio.WouldBlock):  # the shared hub stays open
        both.receive_nowait()
    assert waiting(worker.subscribe(since=1)) == [2, 3]
    late = trainer.subscribe(since=1)
    assert late.receive_nowait().trigger == "close"
    with pytest.raises(anyio.EndOfStream):
        late.receive_nowait()
    assert repr(hub) == "<TransitionHub open published=5>"
