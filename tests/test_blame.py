"""Whom a round names when nothing moves any more."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from aiosync.liveness import _to_blame

STALL = 6.0


def waiting(*silences):
    now = time.monotonic()
    return [
        SimpleNamespace(name=f"worker-{at}", heard_at=now - silence)
        for at, silence in enumerate(silences)
    ]


@pytest.mark.parametrize(
    ("silences", "named"),
    [
        ((0.0, 7.0), "worker-1"),  # it answers no heartbeat
        ((7.0, 1.0, 2.0), "worker-0"),
        ((7.0, 8.0), None),  # both may be the one
        ((1.0, 2.0), None),  # they answer, and do not move
        ((1.0,), "worker-0"),  # nobody else is waited for
        ((7.0,), "worker-0"),
        ((), None),
    ],
)
def test_the_silent_one_of_those_that_are_waited_for_is_named(silences, named):
    assert _to_blame(waiting(*silences), STALL) == named
