"""A trainer that dies and goes on from a checkpoint, while its worker holds later weights."""

from __future__ import annotations

import asyncio

import pytest
from processes import program, replica

pytestmark = pytest.mark.asyncio


async def line_of(process):
    async with asyncio.timeout(30):
        return (await process.stdout.readline()).decode().strip()


@pytest.mark.fault("A-VERSION-2")
@pytest.mark.parametrize("stop", ["after", "inside"])
async def test_a_run_goes_on_from_its_checkpoint_below_what_the_worker_holds(tmp_path, stop):
    checkpoint = tmp_path / "checkpoint.json"
    async with replica(seed=2, lease=3.0) as worker:
        run = ("checkpointed.py", worker.url, str(checkpoint))
        async with program(*run, "--upto", "12", "--save", "8", "--stop", stop) as first:
            lines = [await line_of(first) for _ in range(13)]
            assert [line.split()[0] for line in lines] == [*map(str, range(1, 13)), "stopped"]
            await first.kill()
        facts = await worker.facts()
        assert (facts["version"], facts["weights"]) == (12, "intact")
        assert facts["prints"]["0.weight"] == lines[11].split()[1]
        if stop == "inside":  # the dead trainer's round ends by itself
            await worker.wait_state("initialized", "failed", "idle")
        async with program(*run, "--upto", "13") as second:
            later = [await line_of(second) for _ in range(5)]
        assert [line.split()[0] for line in later] == ["9", "10", "11", "12", "13"]
        facts = await worker.facts()
        assert (facts["version"], facts["weights"]) == (13, "intact")
        assert facts["prints"]["0.weight"] == later[-1].split()[1]
        # Versions 9 to 12 were there twice with other weights: what salts a cache never repeats.
        assert len(facts["ids"]) == len(set(facts["ids"])) == 17
