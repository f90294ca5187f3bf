"""The interpreter's switch interval while somebody works in short turns."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack

import pytest
from insiders import another_inside

from aiosync.short_turns import TURN_S, short_turns


@pytest.fixture(autouse=True)
def interval():
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-3)
    yield
    sys.setswitchinterval(before)


def test_turns_are_short_inside_and_as_before_outside():
    with pytest.raises(KeyError), short_turns:
        assert sys.getswitchinterval() == pytest.approx(TURN_S, rel=0.02)
        raise KeyError
    assert sys.getswitchinterval() == pytest.approx(5e-3)


def test_the_last_of_several_threads_puts_it_back():
    with ExitStack() as stack:
        with short_turns:
            stack.enter_context(another_inside(short_turns))
        assert sys.getswitchinterval() == pytest.approx(TURN_S, rel=0.02)
    assert sys.getswitchinterval() == pytest.approx(5e-3)


def test_turns_that_are_shorter_stay():
    sys.setswitchinterval(5e-5)
    before = sys.getswitchinterval()
    with short_turns:
        assert sys.getswitchinterval() == before
    assert sys.getswitchinterval() == before


def test_what_is_put_back_does_not_drift():
    sys.setswitchinterval(1.0025e-3)
    before = sys.getswitchinterval()
    for _ in range(100):
        with short_turns:
            pass
    assert sys.getswitchinterval() == before


def test_what_somebody_sets_meanwhile_stays():
    with short_turns:
        sys.setswitchinterval(2e-2)
    assert sys.getswitchinterval() == pytest.approx(2e-2)


@pytest.mark.filterwarnings("ignore:.*fork")  # of a process with threads
def test_a_forked_child_has_nobody_inside():
    # The lock is held by a thread that the child does not have.
    with another_inside(short_turns), short_turns._lock:
        pid = os.fork()
        if pid == 0:
            found = [sys.getswitchinterval()]
            if short_turns._lock.acquire(timeout=1):
                short_turns._lock.release()
                with short_turns:
                    found.append(sys.getswitchinterval())
                found.append(sys.getswitchinterval())
            os._exit(found != pytest.approx([5e-3, TURN_S, 5e-3], rel=0.02))
        assert os.waitpid(pid, 0)[1] == 0
    assert sys.getswitchinterval() == pytest.approx(5e-3)


def test_what_somebody_saved_inside_and_put_back_afterwards_does_not_stay():
    with short_turns:
        saved = sys.getswitchinterval()
        sys.setswitchinterval(2e-3)
    sys.setswitchinterval(saved)
    with short_turns:
        assert sys.getswitchinterval() == pytest.approx(TURN_S, rel=0.02)
    assert sys.getswitchinterval() == pytest.approx(5e-3)
