"""Trainers with child processes: they disturb nothing, and are told what they may not use."""

from __future__ import annotations

import models
import pytest
from interpreters import run
from processes import replica

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.timeout(120)]


async def test_children_of_every_kind_between_and_during_rounds():
    async with replica(seed=2) as worker, replica(seed=2) as other:
        lines, err, code = await run("forks.py", worker.url, other.url)
        assert (err, code) == ("", 0)
        loader = "loader [[0, 1, 2, 3], [4, 5, 6, 7]]"
        assert lines == [
            "first committed",
            loader,
            "second committed",
            loader,
            "inherited WrongProcess",
            "fork 0",
            "spawn 0",
            "forkserver 0",
            "third committed",
            "fourth committed",
            "closed",
        ]
        assert (await worker.facts())["prints"] == models.fingerprint(models.make("small", 7))
        facts = await other.facts()
        assert facts["prints"] == models.fingerprint(models.make("small", 3))
        assert facts["version"] == 3


async def test_a_forked_child_of_a_blocking_trainer():
    async with replica(seed=2) as worker:
        lines, err, code = await run("forked_blocking.py", worker.url)
        assert (err, code) == ("", 0)
        assert lines == ["child refused", "child 7", "parent committed"]
