"""The root of the error tree: kinds, sides, fields, text, copies."""

from __future__ import annotations

import copy

import pytest

from statemachines.errors import (
    AiosyncError,
    GateRejected,
    InvalidTransition,
    LocalError,
    ReentrantTransition,
    RemoteError,
    Validation,
    WrongThread,
)

KINDS = [Validation, InvalidTransition, ReentrantTransition, GateRejected, WrongThread]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_two_sides(kind):
    local, remote = kind("here"), kind.remote("there")
    assert isinstance(local, kind)
    assert isinstance(local, LocalError)
    assert not isinstance(local, RemoteError)
    assert isinstance(remote, kind)
    assert isinstance(remote, RemoteError)
    assert not isinstance(remote, LocalError)
    assert local.kind is remote.kind is kind
    assert type(local) is type(kind("again"))
    assert type(local).__name__ == type(remote).__name__ == kind.__name__
    assert local.code == remote.code != AiosyncError.code


def test_codes_are_unique():
    assert len({kind.code for kind in KINDS}) == len(KINDS)


def test_the_root_has_two_sides_as_well():
    assert type(AiosyncError("x")) is LocalError
    assert type(AiosyncError.remote("x")) is RemoteError
    assert type(LocalError("x")) is LocalError
    assert type(RemoteError("x")) is RemoteError
    assert AiosyncError("x").kind is RemoteError("x").kind is AiosyncError


def test_bad_input_is_a_value_error():
    with pytest.raises(ValueError, match="no"):
        raise Validation("no")


def test_fields():
    error = GateRejected(
        "no quorum",
        replica="r1",
        rank=0,
        phase="start",
        tensor="w",
        round=3,
        weights="intact",
        next_step="Add a replica.",
        report="the report",
        detail={"gate": "quorum"},
    )
    assert error.args == ("no quorum",)
    assert error.message == "no quorum"
    assert error.retryable
    assert not GateRejected("x", retryable=False).retryable
    assert not Validation("x").retryable
    assert error.report == "the report"
    assert error.detail == {"gate": "quorum"}
    assert str(error) == (
        "no quorum\n"
        "  replica   r1\n"
        "  rank      0\n"
        "  phase     start\n"
        "  tensor    w\n"
        "  round     3\n"
        "  weights   intact\n"
        "  next_step Add a replica."
    )


def test_defaults():
    error = Validation()
    assert str(error) == "validation"
    assert error.next_step is None
    assert error.detail == {}
    assert (error.replica, error.rank, error.round, error.report) == (None,) * 4
    assert "round" not in str(Validation("x", round=0, rank=0))  # a round without a number yet


def test_details_are_not_shared():
    detail = {"a": 1}
    error = Validation("x", detail=detail)
    detail["a"] = 2
    assert error.detail == {"a": 1}


def test_locate_keeps_what_is_known():
    error = Validation("x", rank=1)
    assert error.locate(rank=2, phase="plan") is error
    assert (error.rank, error.phase) == (1, "plan")


@pytest.mark.parametrize("make", [GateRejected, GateRejected.remote])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_is_the_same_error(make, duplicate):
    error = make("no", rank=2, retryable=False, report={"a": 1}, detail={"b": 2})
    twin = duplicate(error)
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert (twin.retryable, twin.report, twin.detail) == (False, {"a": 1}, {"b": 2})


def test_a_subclass_is_a_kind_of_its_own():
    class Special(Validation):
        code = "special"

    error = Special.remote("x")
    assert isinstance(error, Validation)
    assert isinstance(error, RemoteError)
    assert error.kind is Special
    assert not isinstance(Validation("x"), Special)
