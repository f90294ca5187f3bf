"""The protocol explored exhaustively, and every change of it or of its table caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
from protocol_model import TICKET, Model, Protocol, Violation

from statemachines import ENGINE, LEGAL_PAIRS, Rule, State, Table, Validation


def small(**options) -> Model:
    return Model(**{"workers": 1, "accidents": 1, **options})


def test_every_run_of_one_worker_and_two_rounds():
    model = Model(workers=1, rounds=2, accidents=2).explore()
    assert model.states > 10_000
    assert model.reached == LEGAL_PAIRS - {TICKET}
    assert set(model.fired) == {(s, t) for s in State for t in ENGINE.allowed(s)}
    assert all(model.outcomes[outcome] for outcome in ("committed", "failed", "unknown"))


def test_every_run_of_two_workers():
    model = Model(workers=2, inits=1, accidents=1).explore()
    assert model.states > 10_000
    assert model.reached <= LEGAL_PAIRS


def caught(rules: tuple[Rule, ...]) -> str:
    """What the changed table fails on: its own check, or the exploration."""
    try:
        small(table=replace(ENGINE, rules=rules)).explore()
    except Validation as error:
        return f"table: {error}"
    except Violation as error:
        return f"model: {error}"
    return ""


def changed(trigger: str, **changes) -> tuple[Rule, ...]:
    return tuple(replace(r, **changes) if r.trigger == trigger else r for r in ENGINE.rules)


LEGAL = [(state, rule) for rule in ENGINE.rules for state in rule.sources]
ILLEGAL = [(s, rule) for rule in ENGINE.rules for s in State if s not in rule.sources]
ELSEWHERE = [(s, rule) for rule in ENGINE.rules for s in State if s != rule.dest]


def named(part):
    return getattr(part, "trigger", part)


@pytest.mark.parametrize("rule", ENGINE.rules, ids=named)
def test_a_table_without_a_rule_is_caught(rule):
    assert caught(tuple(other for other in ENGINE.rules if other is not rule))


@pytest.mark.parametrize(("state", "rule"), LEGAL, ids=named)
def test_a_trigger_that_is_not_legal_where_it_is_needed_is_caught(state, rule):
    rest = tuple(source for source in rule.sources if source != state)
    assert caught(changed(rule.trigger, sources=rest))


@pytest.mark.parametrize(("state", "rule"), ILLEGAL, ids=named)
def test_a_trigger_that_is_legal_where_it_should_not_be_is_caught(state, rule):
    assert caught(changed(rule.trigger, sources=(*rule.sources, state)))


@pytest.mark.parametrize(("dest", "rule"), ELSEWHERE, ids=named)
def test_a_trigger_that_leads_elsewhere_is_caught(dest, rule):
    assert caught(changed(rule.trigger, dest=dest))


def test_a_pair_that_is_reached_but_not_legal_is_caught():
    with pytest.raises(Violation, match="trainer finalizing over worker initialized"):
        small(pairs=LEGAL_PAIRS - {("finalizing", "initialized")}).explore()


@pytest.mark.parametrize(
    ("missing", "options", "promise"),
    [
        ("lease", {}, "a worker's round has no limit"),
        ("timers", {}, "without a limit"),
        ("asks", {}, "holds what was reported as failed"),
        ("two_phases", {"workers": 2, "inits": 1}, "what another one cannot verify"),
        ("fenced", {}, "trainer "),
        ("remembers_aborts", {}, "trainer initialized over worker updating"),
        ("later_epochs", {"overtaken": 2}, "trainer initialized over worker updating"),
    ],
)
def test_a_protocol_that_leaves_something_out_is_caught(missing, options, promise):
    model = small(protocol=Protocol(**{missing: False}), **options)
    with pytest.raises(Violation, match=promise):
        model.explore()


def test_the_way_to_a_violation_is_told():
    with pytest.raises(Violation) as error:
        small(protocol=Protocol(asks=False)).explore()
    steps = error.value.__notes__[0].splitlines()
    assert steps[0].startswith("initialize: ")
    assert any(step.startswith("start: ") for step in steps)


def test_a_state_without_an_exit_is_caught_by_the_table_itself():
    with pytest.raises(Validation, match="no way out of state 'failed'"):
        Table(
            "t",
            states=("idle", "failed"),
            initial="idle",
            rules=(Rule("fail", ("idle",), "failed"),),
        )
