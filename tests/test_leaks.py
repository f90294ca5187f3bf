"""Rounds cancelled at random moments leave nothing behind, in either process; `make leaks`."""

from __future__ import annotations

import gc
import os
import random
import socket
import sys

import leaks
import pytest
import torch

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


@pytest.fixture(autouse=True)
def unwatched(blocking_detector):
    """Looking at /proc between two rounds may block."""
    blocking_detector.deactivate()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Before the other: gloo lets go of sockets for a while.
async def test_what_is_left_behind_is_found(monkeypatch):
    monkeypatch.setitem(leaks.SETTLE_S, "ipc", 2.0)
    left = []

    def leave():
        left.append(socket.socket())
        left.append(open(os.memfd_create("left"), "rb"))  # noqa: SIM115, PTH123

    gc.collect()  # what earlier tests left is not to close meanwhile
    _, more = await leaks.run("ipc", 3, 1, each=leave)
    for thing in left:
        thing.close()
    assert more == {"trainer": {"socket": 3, "memfd": 3}, "worker": {}}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("backend", "rounds"), [("ipc", 200), ("gloo", 60)])
async def test_cancelled_rounds_leave_nothing(backend, rounds):
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    line, more = await leaks.run(backend, rounds, seed)
    assert more == {"trainer": {}, "worker": {}}, line
