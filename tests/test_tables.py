"""The tables: what they allow, what they refuse to become, and which pairs a round can reach."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pytest

from statemachines import (
    ENGINE,
    LEGAL_PAIRS,
    Rule,
    State,
    Table,
    Trigger,
    Validation,
    Weights,
    is_legal_pair,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

EVERY = {"idle", "initialized", "updating", "finalizing", "failed", "closed"}
LIFE_CYCLE = {
    "initialize": ({"idle"}, "initialized"),
    "start": ({"initialized"}, "updating"),
    "update": ({"updating"}, "updating"),
    "finalize": ({"updating"}, "finalizing"),
    "complete": ({"finalizing"}, "initialized"),
    "abort": ({"updating", "finalizing"}, "initialized"),
    "fail": ({"idle", "initialized", "updating", "finalizing"}, "failed"),
    "release": ({"initialized"}, "idle"),
    "reset": ({"failed"}, "idle"),
    "close": (EVERY - {"closed"}, "closed"),
}


def test_the_names_on_the_wire():
    assert {str(state) for state in State} == EVERY == set(ENGINE.states)
    assert [str(trigger) for trigger in Trigger] == list(LIFE_CYCLE) == list(ENGINE.triggers)
    assert [str(weights) for weights in Weights] == ["intact", "torn", "unknown"]
    assert ENGINE.initial == "idle"
    assert ENGINE.final == ("closed",)


@pytest.mark.parametrize("trigger", Trigger)
@pytest.mark.parametrize("state", State)
def test_the_engine_table_is_the_life_cycle(state, trigger):
    sources, dest = LIFE_CYCLE[trigger]
    assert ENGINE.target(state, trigger) == (dest if state in sources else None)
    assert (trigger in ENGINE.allowed(state)) == (state in sources)


def test_fail_leads_out_of_wherever_work_can_be_under_way():
    assert set(ENGINE.working) == EVERY - {"failed", "closed"}
    assert set(ENGINE.busy) == {"updating", "finalizing"}
    assert all(ENGINE.target(state, "fail") == "failed" for state in ENGINE.working)


def test_a_table_is_a_value():
    twin = replace(ENGINE)
    assert twin == ENGINE
    assert twin is not ENGINE
    assert hash(twin) == hash(ENGINE)
    assert replace(ENGINE, name="other") != ENGINE
    with pytest.raises(AttributeError):
        ENGINE.name = "other"


GO, STOP = Rule("go", ("a",), "b"), Rule("stop", ("b",), "a")


def test_other_machines_use_the_same_machinery():
    gate = Table(
        name="generation",
        states=("running", "pausing", "paused"),
        initial="running",
        rules=(
            Rule("pause", ("running",), "pausing"),
            Rule("drained", ("pausing",), "paused"),
            Rule("resume", ("pausing", "paused"), "running"),
        ),
    )
    assert gate.allowed("pausing") == ("drained", "resume")
    assert gate.target("running", "resume") is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"states": ("a", "b", "a")}, "listed twice"),
        ({"states": ("a", "b", "not ok")}, "not an identifier: 'not ok'"),
        ({"rules": (GO, STOP, Rule("a-b", ("a",), "b"))}, "not an identifier: 'a-b'"),
        ({"initial": "c"}, "unknown state 'c'"),
        ({"final": ("c",)}, "unknown state 'c'"),
        ({"working": ("c",)}, "unknown state 'c'"),
        ({"busy": ("c",)}, "unknown state 'c'"),
        ({"rules": (GO, STOP, Rule("x", ("c",), "a"))}, "unknown state 'c'"),
        ({"rules": (GO, STOP, Rule("x", ("a",), "c"))}, "unknown state 'c'"),
        ({"rules": (GO, STOP, Rule("x", (), "a"))}, "'x' needs a tuple of source states"),
        ({"rules": (GO, STOP, Rule("x", "a", "b"))}, "'x' needs a tuple of source states"),
        ({"rules": (GO, STOP, Rule("go", ("a",), "a"))}, "two targets for 'go' in state 'a'"),
        ({"rules": (GO, STOP, Rule("x", ("a", "a"), "b"))}, "two targets for 'x'"),
        (
            {"states": ("a", "b", "c"), "rules": (GO, STOP, Rule("x", ("c",), "a"))},
            "nothing leads to state 'c'",
        ),
        ({"rules": (GO,)}, "no way out of state 'b'"),
        ({"rules": (GO, Rule("again", ("b",), "b"))}, "no way out of state 'b'"),
        ({"final": ("b",)}, "final state 'b' has a rule"),
        ({"working": ("a",)}, "'fail' does not lead out of working state 'a'"),
        (
            {"working": ("a", "b"), "rules": (GO, STOP, Rule("fail", ("a", "b"), "a"))},
            "'fail' does not lead out of working state 'a'",
        ),
        ({"busy": ("a",)}, "busy state 'a' is not a working state"),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(changes, reason):
    fine = {"name": "t", "states": ("a", "b"), "initial": "a", "rules": (GO, STOP)}
    Table(**fine)
    with pytest.raises(Validation, match="table 't': ") as caught:
        Table(**(fine | changes))
    assert reason in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_pairs():
    assert all(isinstance(side, State) for pair in LEGAL_PAIRS for side in pair)
    assert is_legal_pair("finalizing", "updating")
    assert is_legal_pair(State.IDLE, State.UPDATING)
    assert not is_legal_pair("initialized", "finalizing")
    assert not is_legal_pair("updating", "finalizing")
    assert not is_legal_pair("updating", "no such state")


class World(NamedTuple):
    """One trainer, one worker, and a channel that loses, repeats and delays what it carries.

    Sent messages stay in `sent`: each may arrive now, later, again, or never. Rounds and epochs
    only grow; the worker fences by them.
    """

    trainer: str = "idle"
    worker: str = "idle"
    epochs: int = 0  # handed out so far
    rounds: int = 0
    trainer_epoch: int = 0
    trainer_round: int = 0
    ticket: int = 0  # a round that a third party started on the worker
    worker_epoch: int = 0
    worker_round: int = 0  # the highest it has seen
    joining: bool = False
    sent: frozenset[tuple] = frozenset()
    answered: frozenset[tuple] = frozenset()

    def send(self, *message: object, **changes: object) -> World:
        return self._replace(sent=self.sent | {message}, **changes)

    def answer(self, *message: object, **changes: object) -> World:
        return self._replace(answered=self.answered | {message}, **changes)


LIMIT = 2
OPEN = EVERY - {"closed"}
BUSY = {"updating", "finalizing"}


def trainer_moves(world: World, *, tickets: bool) -> Iterator[World]:
    state, epoch, number = world.trainer, world.trainer_epoch, world.trainer_round
    if state == "idle" and world.epochs < LIMIT:
        fresh = world.epochs + 1
        yield world.send("init", fresh, epochs=fresh, trainer_epoch=fresh)
    if state == "idle" and ("joined", epoch) in world.answered:
        yield world._replace(trainer="initialized")
    if state == "initialized":
        if world.rounds < LIMIT:
            fresh = world.rounds + 1
            start = world.send("start", epoch, fresh, rounds=fresh)
            yield start._replace(trainer="updating", trainer_round=fresh, ticket=0)
            if tickets:
                yield start._replace(ticket=fresh)
        if world.ticket:
            yield world._replace(trainer="updating", trainer_round=world.ticket, ticket=0)
        yield world._replace(trainer="idle", trainer_epoch=0, ticket=0)
    if state == "updating" and ("started", number) in world.answered:
        yield world.send("finish", number, trainer="finalizing")
    if state == "finalizing" and ("committed", number) in world.answered:
        yield world._replace(trainer="initialized")
    if state in BUSY:
        yield world.send("abort", number)
        if ("abort", number) in world.sent and ("aborted", number) in world.answered:
            yield world._replace(trainer="initialized")
    if state in OPEN:
        yield world._replace(trainer="failed", trainer_epoch=0, ticket=0)
        yield world._replace(trainer="closed", trainer_epoch=0, ticket=0)
        # `reset`, or a new process in its place.
        yield world._replace(trainer="idle", trainer_epoch=0, ticket=0)


def worker_moves(world: World) -> Iterator[World]:
    state, seen = world.worker, world.worker_round
    if world.joining:
        yield world._replace(worker="initialized", joining=False)
    if state == "finalizing":
        yield world.answer("committed", seen, worker="initialized")
    if state in BUSY:  # the lease ends
        yield world.answer("aborted", seen, worker="initialized")
    if state == "initialized":
        yield world._replace(worker="idle")
    if state in OPEN:
        yield world._replace(worker="failed", joining=False)
        yield world._replace(worker="closed", joining=False)
        if state == "failed":
            yield world._replace(worker="idle")
        # A new process: it remembers nothing, and what was on its way to the old one is lost.
        yield world._replace(
            worker="idle", joining=False, worker_epoch=0, worker_round=0, sent=frozenset()
        )
    for message in world.sent:
        yield from arrivals(world, *message)


def arrivals(world: World, kind: str, *about: int) -> Iterator[World]:
    state, number, seen = world.worker, about[-1], world.worker_round
    match kind:
        case "init":
            if number > world.worker_epoch and state not in BUSY | {"closed"}:
                yield world.answer("joined", number, worker="idle", worker_epoch=number)._replace(
                    joining=True
                )
        case "start":
            if state == "initialized" and about[0] == world.worker_epoch and number > seen:
                yield world.answer("started", number, worker="updating", worker_round=number)
        case "finish":
            if state == "updating" and number == seen:
                yield world._replace(worker="finalizing")
        case "abort":
            if state in BUSY and number == seen:
                yield world.answer("aborted", number, worker="initialized")
            elif state == "initialized" and number > seen:
                yield world.answer("aborted", number, worker_round=number)


def reachable_pairs(*, tickets: bool) -> set[tuple[str, str]]:
    seen = {World()}
    frontier = [World()]
    while frontier:
        world = frontier.pop()
        for moves in (trainer_moves(world, tickets=tickets), worker_moves(world)):
            for after in moves:
                if after not in seen:
                    seen.add(after)
                    frontier.append(after)
    return {(world.trainer, world.worker) for world in seen}


def test_the_legal_pairs_are_those_that_a_round_can_reach():
    assert reachable_pairs(tickets=True) == LEGAL_PAIRS


def test_only_a_ticket_lets_the_worker_start_first():
    ours = reachable_pairs(tickets=False)
    assert LEGAL_PAIRS - ours == {(State.INITIALIZED, State.UPDATING)}
