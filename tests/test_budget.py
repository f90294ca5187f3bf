from __future__ import annotations

import math

import msgspec
import pytest

from aiosync.budget import Budget, check_seconds
from aiosync.defaults import DEFAULTS
from aiosync.errors import Validation

FIELDS = ("total", "admit", "pause", "stall", "finish", "cleanup")
BAD = [0, -1, math.nan, math.inf, -math.inf, True, "5", 1e300, [1], b"1"]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", BAD)
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(Validation, match=f"budget.{field}"):
        Budget(**{field: value})


@pytest.mark.parametrize("field", FIELDS)
def test_none_never_means_infinity(field):
    value = getattr(Budget(**{field: None}), field)
    assert value is None or math.isfinite(value)
    assert math.isfinite(getattr(DEFAULTS, f"{field}_s"))


def test_ints_become_floats_and_the_rest_stays():
    budget = Budget(total=60, stall=5)
    assert (budget.total, budget.stall, budget.cleanup) == (60.0, 5.0, DEFAULTS.cleanup_s)
    assert isinstance(budget.total, float)


def test_timeout_is_short_for_total():
    assert Budget.of(None, None) == Budget()
    assert Budget.of(None, 60) == Budget(total=60)
    assert Budget.of(Budget(stall=3), 60) == Budget(total=60, stall=3)
    given = Budget(total=5)
    assert Budget.of(given) is given
    with pytest.raises(Validation, match="give one"):
        Budget.of(Budget(total=5), 60)
    with pytest.raises(Validation, match="timeout must be"):
        Budget.of(None, -1)
    with pytest.raises(Validation, match="timeout="):
        Budget.of(60)


def test_a_budget_cannot_be_changed():
    with pytest.raises(AttributeError):
        Budget().total = 3


def test_check_seconds():
    assert check_seconds(2, "x") == 2.0
    with pytest.raises(Validation, match="lease"):
        check_seconds(None, "lease")


def test_every_default_is_positive_and_finite():
    for name, value in msgspec.structs.asdict(DEFAULTS).items():
        assert value > 0, name
        assert math.isfinite(value), name
    assert DEFAULTS.heartbeat_s == DEFAULTS.lease_s / 3


@pytest.mark.parametrize("seconds", [10**400, 2e9])
def test_limits_that_no_peer_would_take_are_refused_here(seconds):
    with pytest.raises(Validation, match=r"budget\.total"):
        Budget(total=seconds)
