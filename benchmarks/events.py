"""What watching costs: a transition with two hooks, and subscribers of which one never reads.

Raw is the least that anybody could do to tell the same four: two calls, and an object into two
bounded queues, one of which is read.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from benchmarks.measure import alternate, record
from statemachines.hub import TransitionHub
from statemachines.machine import StateMachine
from statemachines.tables import ENGINE, Trigger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.measure import Options

_CYCLES = 2_000
_CYCLE = (Trigger.START, Trigger.UPDATE, Trigger.FINALIZE, Trigger.COMPLETE)
_QUEUE = 256


async def run(options: Options) -> AsyncIterator[dict[str, Any]]:
    hub = TransitionHub()
    machine = StateMachine(ENGINE, name="engine", role="trainer", hub=hub)
    machine.fire(Trigger.INITIALIZE)
    seen = [0, 0]

    def first(_: object) -> None:
        seen[0] += 1

    def second(_: object) -> None:
        seen[1] += 1

    hub.on_transition(first)
    hub.on_transition(second)
    reading, dead = hub.subscribe(), hub.subscribe()

    async def ours() -> float:
        began = time.perf_counter()
        for number in range(_CYCLES):
            for trigger in _CYCLE:
                machine.fire(trigger, round=number, version="1")
            for _ in _CYCLE:
                await reading.receive()
        return _each(began)

    async def raw() -> float:
        read: deque[object] = deque(maxlen=_QUEUE)
        unread: deque[object] = deque(maxlen=_QUEUE)
        began = time.perf_counter()
        for _ in range(_CYCLES):
            for trigger in _CYCLE:
                read.append(trigger)
                unread.append(trigger)
                first(trigger)
                second(trigger)
            for _ in _CYCLE:
                read.popleft()
        return _each(began)

    await ours(), await raw()
    pairs = await alternate(ours, raw, options.repeat)
    dead.close()
    reading.close()
    yield record(
        "events",
        pairs,
        variant="two hooks, one subscriber, one dead subscriber",
        payload=f"{_CYCLES * len(_CYCLE)} transitions",
        unit="us per transition",
        target="ours <= 30 us",
        dropped_for_the_dead=hub.statistics().dropped,
    )


def _each(began: float) -> float:
    return (time.perf_counter() - began) / (_CYCLES * len(_CYCLE)) * 1e6
