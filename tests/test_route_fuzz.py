"""Random calls to the routes, for a short while; `make fuzz SECONDS=3600` for a long one."""

from __future__ import annotations

import random

import route_fuzz


def test_no_route_fails_hangs_or_changes_state_when_it_refuses(capsys, blocking_detector):
    blocking_detector.deactivate()  # loops come and go here: its own cost would be all of the time
    number = random.SystemRandom().randrange(2**32)
    with capsys.disabled():
        print(f" seed {number} ", end="", flush=True)  # repeats it: route_fuzz.py SECONDS SEED
    before = sum(route_fuzz.SEEN.values())
    assert route_fuzz.fuzz(15, number) > 0
    assert sum(route_fuzz.SEEN.values()) > before
    assert route_fuzz.SEEN["/finish_weight_update", 200]
