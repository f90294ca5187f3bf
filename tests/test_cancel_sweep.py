"""Given up, or broken, k turns of the loop after each transition of either side.

`make sweep` runs every k, every way and every backend.
"""

from __future__ import annotations

import pytest
import sweep

from aiosync import opening
from aiosync.opening import may_start_with_update
from aiosync.worker_commit import Ending

pytestmark = pytest.mark.asyncio

TURNS = [0, 1, 2, 5, 10, 20, 50]
FEW = [0, 5, 50]  # where a point costs a new group
WORKERS = {"loopback": 2, "ipc": 1, "gloo": 1}
ALL = [(backend, scene) for backend in sweep.BACKENDS for scene in sweep.scenes(backend)]
ROUNDS = [(backend, scene) for backend, scene in ALL if scene.name == "round"]


def named(cases):
    return [pytest.param(*case, id="-".join(str(part) for part in case)) for case in cases]


@pytest.mark.fault("A-CANCEL-1")
@pytest.mark.parametrize("how", sweep.HOW)
@pytest.mark.parametrize(("backend", "scene"), named(ALL))
async def test_cancelled_after_k_turns(backend, scene, how, monkeypatch):
    few = backend == "gloo" and scene.name != "round"
    async with sweep.rig(backend, monkeypatch, workers=WORKERS[backend]) as it:
        await sweep.sweep(it, scene, how, FEW if few else TURNS)


@pytest.mark.parametrize("how", sweep.HOW)
@pytest.mark.parametrize(("backend", "scene"), named(ROUNDS[:9]))
async def test_cancelled_while_the_model_is_filled_in_place(backend, scene, how, monkeypatch):
    async with sweep.rig(backend, monkeypatch, workers=2, sink="in_place") as it:
        await sweep.sweep(it, scene, how, TURNS)


@pytest.mark.parametrize("how", ["scope", *sweep.NATIVE])
@pytest.mark.parametrize("scene", [pytest.param(s, id=str(s)) for b, s in ROUNDS if b == "ipc"])
async def test_cancelled_with_a_client_of_ours(scene, how, monkeypatch):
    """Alone, and its calls are awaited without a task or a group around them."""
    async with sweep.rig("ipc", monkeypatch, tapped=False) as it:
        await sweep.sweep(it, scene, how, TURNS)


@pytest.mark.parametrize("how", ["scope", "native", "session", "client"])
@pytest.mark.parametrize(
    ("backend", "scene"), named((b, s) for b, s in ROUNDS if b != "gloo" and s.side == "worker")
)
async def test_cancelled_or_broken_where_the_update_starts_the_round(
    backend, scene, how, monkeypatch
):
    together = []

    def judge(this):
        together.append(may_start_with_update(this))
        return together[-1]

    monkeypatch.setattr(opening, "may_start_with_update", judge)
    # The rig's client hands each call on as it is.
    monkeypatch.setattr(opening, "_starts_plainly", lambda client: True)
    async with sweep.rig(backend, monkeypatch) as it:
        monkeypatch.setattr(type(it.trainer), "starts_with_update", True)
        together.clear()
        await sweep.sweep(it, scene, how, TURNS)
        assert sum(together) >= len(TURNS)


@pytest.mark.parametrize("how", ["scope", *sweep.NATIVE, "session", "hook"])
@pytest.mark.parametrize(
    "scene", [pytest.param(s, id=str(s)) for b, s in ROUNDS if b == "ipc" and s.side == "worker"]
)
async def test_cancelled_or_broken_where_a_round_is_two_steps(scene, how, monkeypatch):
    """The update starts it, and the commit is done where it is asked for."""
    done = []
    original = Ending.commit_now

    def commit_now(self, commit):
        done.append(original(self, commit))
        return done[-1]

    monkeypatch.setattr(Ending, "commit_now", commit_now)
    async with sweep.rig("ipc", monkeypatch, sink="in_place", tapped=False) as it:
        monkeypatch.setattr(type(it.trainer), "starts_with_update", True)
        await sweep.sweep(it, scene, how, TURNS)
    assert sum(done) >= len(TURNS)


@pytest.mark.parametrize("how", [*sweep.FAULTS, "session"])
@pytest.mark.parametrize(("backend", "scene"), named(ROUNDS))
async def test_something_raises_after_k_turns(backend, scene, how, monkeypatch):
    async with sweep.rig(backend, monkeypatch, workers=WORKERS[backend]) as it:
        await sweep.sweep(it, scene, how, FEW if backend == "gloo" else TURNS)


async def test_the_sweep_hits_what_it_aims_at(monkeypatch):
    async with sweep.rig("loopback", monkeypatch) as it:
        for scene in sweep.scenes("loopback"):
            ways = [how for how in sweep.HOW if (await sweep.sweep(it, scene, how, [0]))["hit"]]
            assert ways == list(sweep.HOW), scene
