"""Cancelling, or breaking, what an engine does k turns of its loop after each of its transitions.

A `Rig` is one trainer and its workers in one process: over a loopback link, or over the real data
plane with the workers behind their servers. `Scene` says what is being done, after which flip of
which side the turns are counted, and what has to be made ready first. `disturb` does one point of
the sweep and judges what is left behind.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import anyio
import models
import torch
from paced import Paced

import aiosync
from aiosync import Budget, State
from aiosync.testing import DirectClient
from statemachines.tables import is_legal_pair
from transports.gloo_stream import GlooReceiver, GlooSender
from transports.loopback import LoopbackLink, LoopbackReceiver, LoopbackSender
from transports.shared_memory import ShmReceiver, ShmSender

BACKENDS = ("loopback", "ipc", "gloo")
HOW = ("scope", "native")
NATIVE = ("native", "native twice")
FAULTS = ("source", "client", "sender", "receiver", "hook")
BUDGET = Budget(total=30.0, stall=15.0, cleanup=4.0)  # what is slow is not to look left behind
BUFFER = 4096
LEASE_S = 2.0  # ends a worker's round whose abort was lost
_SETTLED_S = 10.0

HALVES: dict[str, tuple[Any, Any]] = {
    "loopback": (LoopbackSender, LoopbackReceiver),
    "ipc": (ShmSender, ShmReceiver),
    "gloo": (GlooSender, GlooReceiver),
}


class Injected(Exception):
    """What a test throws."""


class Faults:
    """One error that waits for whoever passes the place next."""

    def __init__(self) -> None:
        self.place: str | None = None
        self.thrown = 0

    def arm(self, place: str) -> None:
        self.place = place

    def disarm(self) -> None:
        self.place = None

    def at(self, place: str) -> None:
        if self.place == place:
            if place != "hook":  # every hook call fails, and none of them matters
                self.place = None
            self.thrown += 1
            raise Injected(f"injected into the {place}")


class Tapped:
    """A client that fails when told to, before a call or with its answer."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner, self._faults = inner, faults

    async def __aenter__(self) -> Self:
        if hasattr(self._inner, "__aenter__"):
            await self._inner.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if hasattr(self._inner, "__aexit__"):
            await self._inner.__aexit__(*exc)

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._inner, name)
        if not asyncio.iscoroutinefunction(inner):
            return inner

        async def call(*args: Any, **options: Any) -> Any:
            self._faults.at("client")
            reply = await inner(*args, **options)
            self._faults.at("client")
            return reply

        return call


class Rig:
    """One trainer and its workers, and everything their machines did."""

    def __init__(self, backend: str, sink: str) -> None:
        self.backend, self.sink = backend, sink
        self.faults = Faults()
        self.model = models.make("small", 1)
        self.source = Paced(self.model, lambda _: self.faults.at("source"))
        self.copies: list[Any] = []
        self.workers: list[Any] = []
        self.members: list[Any] = []
        self.link: LoopbackLink | None = None
        self.background: Any = None
        """Of a round that was begun and left to itself."""
        self.trainer: Any = None
        self.illegal: list[tuple[str, str]] = []
        self.seen: dict[tuple[str, str], list[Any]] = {}

    def watch(self, engine: Any) -> None:
        """Keep every transition of `engine`, and judge the pairs of states after each."""

        def note(transition: Any) -> None:
            self.seen.setdefault((transition.engine, transition.role), []).append(transition)
            for worker in self.workers:
                pair = (self.trainer.state, worker.state)
                if not is_legal_pair(*pair):
                    self.illegal.append(pair)

        engine.on_transition(note)
        engine.on_transition(lambda _: self.faults.at("hook"))

    def make_trainer(self) -> None:
        kind: Any = {
            "loopback": aiosync.LoopbackTrainerWeightTransferEngine,
            "ipc": aiosync.IPCTrainerWeightTransferEngine,
            "gloo": aiosync.GlooTrainerWeightTransferEngine,
        }[self.backend]
        options: dict[str, Any] = {"buffer_size_bytes": BUFFER, "lease_s": LEASE_S}
        if self.backend == "ipc":
            options = {"packed": True, "packed_buffer_size_bytes": BUFFER, "lease_s": LEASE_S}
        if self.backend == "loopback":
            options["link"] = self.link
        fleet = aiosync.FleetClient(self.members)
        self.trainer = kind(client=fleet, source=self.source, **options)
        self.seen.clear()
        self.watch(self.trainer)

    def prints(self) -> list[dict[str, str]]:
        return [models.fingerprint(copy) for copy in self.copies]

    def lanes(self) -> list[Any]:
        """Every lane that an engine holds now."""
        sides = [self.trainer.source_side, *self.workers]
        held = [side._lane_slot._lane for side in sides]
        return [lane for lane in held if lane is not None]

    def forget_seen(self) -> None:
        for seen in self.seen.values():
            seen.clear()

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1)

    async def send(self) -> Any:
        return await self.trainer.send_weights(budget=BUDGET)

    async def ready(self) -> None:
        """A usable trainer, initialised, over workers that are whole."""
        if self.trainer is None or self.trainer.state is State.CLOSED:
            self.make_trainer()
        self.change()
        report = await self.send()
        assert report.outcome == "committed"
        mine = models.fingerprint(self.model)
        for worker, theirs in zip(self.workers, self.prints(), strict=True):
            assert theirs == mine
            assert (worker.state, worker.weights) == (State.INITIALIZED, "intact")
            assert worker.version == self.trainer.version == report.version
        assert self.trainer.state is State.INITIALIZED
        assert self.illegal == []


@asynccontextmanager
async def rig(
    backend: str,
    monkeypatch: Any,
    *,
    workers: int = 1,
    sink: str = "staged",
    tapped: bool = True,
) -> AsyncIterator[Rig]:
    """A rig whose workers are up; leave it closed. `monkeypatch` is pytest's or one like it.

    Args:
        tapped: Wrap the clients, for the fault ``client``; our own are called in a shorter way.
    """
    it = Rig(backend, sink)
    _tap(backend, it.faults, monkeypatch)
    config = aiosync.WeightTransferConfig(backend, sink=sink)
    async with AsyncExitStack() as stack:
        if backend == "loopback":
            it.link = stack.enter_context(LoopbackLink(readers=workers))
        for number in range(workers):
            copy = models.make("small", 2 + number)
            engine = aiosync.WeightTransferEngineFactory.create_engine(
                config, None, "cpu", copy, name=f"w{number}"
            )
            await stack.enter_async_context(engine)
            client: Any = DirectClient(engine, name=engine.name)
            if backend != "loopback":
                server = await stack.enter_async_context(aiosync.serve(engine))
                client = aiosync.HTTPVLLMWeightSyncClient(server.url)
            it.watch(engine)
            it.copies.append(copy)
            it.workers.append(engine)
            client = Tapped(client, it.faults) if tapped else client
            it.members.append(aiosync.Member(engine.name, client))
        it.make_trainer()
        await it.ready()
        yield it
        it.faults.disarm()
        await it.trainer.aclose()


def _tap(backend: str, faults: Faults, monkeypatch: Any) -> None:
    sender, receiver = HALVES[backend]
    write, receive = sender.write, receiver.receive

    def tapped_write(self: Any, batch: Any) -> Any:
        faults.at("sender")
        return write(self, batch)

    def tapped_receive(self: Any, plan: Any, destination: Any, landed: Any, **options: Any) -> Any:
        def tapped(indices: Any) -> None:
            faults.at("receiver")
            landed(indices)

        return receive(self, plan, destination, tapped, **options)

    monkeypatch.setattr(sender, "write", tapped_write)
    monkeypatch.setattr(receiver, "receive", tapped_receive)


# -- what is disturbed -----------------------------------------------------------------------------

Action = Callable[[Rig], Awaitable[Any]]


async def _nothing(it: Rig) -> None:
    pass


async def _shut(it: Rig) -> None:
    await it.trainer.shutdown()


async def _fail_trainer(it: Rig) -> None:
    it.trainer.machine.fire("fail", error="made to fail")


async def _fail_both(it: Rig) -> None:
    await _fail_trainer(it)
    it.workers[0].machine.fire("fail", error="made to fail")


async def _begin_round(it: Rig) -> None:
    it.background = it.trainer.begin_update(budget=BUDGET)
    await it.trainer.wait_for(State.UPDATING)


async def _break_source(it: Rig) -> None:
    it.faults.arm("source")


@dataclass(frozen=True)
class Scene:
    """`act` is disturbed some turns after `side` fired `trigger` (or after it was called)."""

    name: str
    side: str
    trigger: str
    act: Action
    prepare: Action = _nothing
    may_raise: bool = False
    """Whether it goes wrong by itself."""

    def __str__(self) -> str:
        return f"{self.name}-{self.side}-{self.trigger}"


async def _initialize(it: Rig) -> None:
    await it.trainer.initialize()


async def _send(it: Rig) -> None:
    await it.send()


async def _close(it: Rig) -> None:
    await it.trainer.aclose()


def scenes(backend: str) -> list[Scene]:
    """Every scene a backend has."""
    given_up = "fail" if backend == "gloo" else "abort"
    found = [
        Scene("init", "trainer", "call", _initialize, _shut),
        Scene("init", "worker", "initialize", _initialize, _shut),
        Scene("init", "trainer", "initialize", _send, _shut),
        Scene("round", "trainer", "call", _send),
    ]
    for side in ("trainer", "worker"):
        flips = ("start", "update", "finalize", "complete")
        found += [Scene("round", side, trigger, _send) for trigger in flips]
        found.append(Scene("given_up", side, given_up, _send, _break_source, may_raise=True))
        found.append(Scene("shutdown", side, "release", _shut))
    return [
        *found,
        Scene("shutdown", "trainer", "call", _shut),
        Scene("mend", "trainer", "reset", _send, _fail_trainer),
        Scene("mend", "trainer", "initialize", _send, _fail_trainer),
        Scene("mend", "worker", "reset", _send, _fail_both),
        Scene("close", "trainer", "call", _close),
        Scene("close", "trainer", "close", _close),
        Scene("close", "worker", "release", _close),
        Scene("close_in_round", "trainer", "call", _close, _begin_round),
        Scene("close_in_round", "trainer", given_up, _close, _begin_round),
        Scene("close_in_round", "worker", given_up, _close, _begin_round),
    ]


# -- one point of the sweep ------------------------------------------------------------------------


class After:
    """Calls `what`, once, some turns of the loop after a trigger."""

    def __init__(self, trigger: str, turns: int, what: Callable[[], Any]) -> None:
        self.trigger, self.turns, self.what = trigger, turns, what
        self.is_off = False
        self._begun = False

    def __call__(self, transition: Any) -> None:
        if transition.trigger == self.trigger:
            self.begin()

    def begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._wait(self.turns)

    def _wait(self, left: int) -> None:
        if self.is_off:
            return
        if left:
            asyncio.get_running_loop().call_soon(self._wait, left - 1)
        else:
            self.what()


async def disturb(it: Rig, scene: Scene, turns: int, how: str) -> str:
    """One point: what it came to: ``hit``, ``late`` (the action was over, or past the place that
    was to raise), or ``idle`` (there was no task of a round to be cancelled).

    `how` is ``scope``, one of `NATIVE`, ``session`` (the worker's task of the round is cancelled,
    as a loop that shuts down does), or one of `FAULTS`.
    """
    tasks = asyncio.all_tasks()
    old = it.prints()
    it.change()
    await scene.prepare(it)
    it.forget_seen()
    scope = anyio.CancelScope()
    finished = False

    async def body() -> None:
        nonlocal finished
        with scope:
            await scene.act(it)
            finished = True

    struck = {"scope": False, "native": False, "session": False}
    in_time = False

    def strike() -> None:
        nonlocal in_time
        if task.done():
            return
        in_time = True
        if how == "scope":
            struck["scope"] = not finished
            scope.cancel()
        elif how in NATIVE:
            struck["native"] = task.cancel()
            if how == "native twice":
                asyncio.get_running_loop().call_soon(task.cancel)
        elif how == "session":
            for other in asyncio.all_tasks():
                if other.get_name().startswith("w0-round-"):
                    struck["session"] |= other.cancel()
        else:
            it.faults.arm(how)

    after = After(scene.trigger, turns, strike)
    engine = it.trainer if scene.side == "trainer" else it.workers[0]
    remove = engine.on_transition(after)
    thrown, report = it.faults.thrown, it.trainer.last_report
    task = asyncio.create_task(body(), name="disturbed")
    if scene.trigger == "call":
        after.begin()
    await asyncio.wait([task], timeout=BUDGET.total + 5)
    after.is_off = True
    remove()
    assert task.done(), "it hangs"
    it.faults.disarm()
    error = None if task.cancelled() else task.exception()
    if scene.may_raise and error is not None:
        pass  # its own error was on the way already, with nothing left to wait for
    elif how == "scope" and struck["scope"]:
        # It may end without another await: then nothing was left to be cancelled.
        assert finished or scope.cancelled_caught, f"the cancellation came out as {error!r}"
    elif how in NATIVE and struck["native"]:
        assert task.cancelled(), f"the cancellation came out as {error!r}, finished={finished}"
    elif how in ("scope", *NATIVE):
        assert error is None, repr(error)
    if how in FAULTS and how != "hook" and not scene.may_raise:
        assert isinstance(error, Exception | None)
        assert error is None or it.faults.thrown > thrown, repr(error)
    if how == "hook":
        assert error is None or scene.may_raise, repr(error)
    if it.trainer.last_report is not report:
        _judge_report(it)
    await _judge(it, old, tasks)
    if scene.may_raise:  # what was thrown may be its own
        return "hit" if in_time else "late"
    if any(struck.values()) or it.faults.thrown > thrown or error is not None:
        return "hit"
    return "idle" if how == "session" and in_time else "late"


def _judge_report(it: Rig) -> None:
    """The report of a round that was disturbed says of no worker what it does not hold."""
    report = it.trainer.last_report
    new = models.fingerprint(it.model)
    for member, worker, now in zip(report.members, it.workers, it.prints(), strict=True):
        holds_it = worker.version == report.version
        if member.outcome == "committed":
            assert holds_it, report
            assert now == new, report
        if member.outcome == "failed":
            assert not holds_it, report
    if report.outcome == "committed":
        assert all(member.outcome == "committed" for member in report.members)


async def _judge(it: Rig, old: list[dict[str, str]], tasks: set[Any]) -> None:
    if it.background is not None:
        with suppress(Exception):
            await it.background
        it.background = None
    settled = (State.IDLE, State.INITIALIZED, State.FAILED)
    for worker in it.workers:
        async with asyncio.timeout(_SETTLED_S):
            await worker.wait_for(*settled)
    assert it.trainer.state in (*settled, State.CLOSED)
    assert it.illegal == []
    new = models.fingerprint(it.model)
    for worker, before, now in zip(it.workers, old, it.prints(), strict=True):
        if worker.weights == "intact":
            assert now in (before, new), "mixed, and called intact"
    for lane in it.lanes():
        async with asyncio.timeout(_SETTLED_S):
            while lane.busy and not lane.poisoned:
                await asyncio.sleep(0.001)
        assert not lane.poisoned, "a call that can be aborted was left behind"
    for seen in it.seen.values():
        for one, other in pairwise(seen):
            assert (one.dest, one.seq + 1) == (other.source, other.seq), seen
    await it.ready()  # at once, as its user would
    await _no_task_left(tasks)


async def _no_task_left(before: set[Any]) -> None:
    left = asyncio.all_tasks()
    deadline = time.monotonic() + _SETTLED_S
    while left and time.monotonic() < deadline:
        # A server's task per connection ends when it has read that the client is gone.
        await asyncio.sleep(0.001)
        left = {task for task in asyncio.all_tasks() - before if not task.done()}
    assert not left, f"left behind: {left}"


async def sweep(
    it: Rig, scene: Scene, how: str, turns: Iterable[int], *, to_the_end: bool = False
) -> Counter[str]:
    """All points of one scene; `to_the_end`: until it is over before it is hit, three times."""
    counts: Counter[str] = Counter()
    late = 0
    for number in turns:
        try:
            outcome = await disturb(it, scene, number, how)
        except BaseException as error:
            error.add_note(f"{it.backend} {it.sink} {scene} {how}: after {number} turns")
            raise
        counts[outcome] += 1
        late = late + 1 if outcome == "late" else 0
        if to_the_end and late == 3:
            break
    return counts
