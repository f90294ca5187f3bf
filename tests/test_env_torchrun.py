"""Trainer ranks that torchrun starts, watches and ends."""

from __future__ import annotations

import asyncio
import json

import models
import pytest
from interpreters import PROGRAMS, interpreter
from processes import replica

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.timeout(180)]


async def torchrun(worker, folder, what):
    """Exit code of the launcher, and what it printed."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    program = (str(PROGRAMS / "torchrun_rank.py"), worker.url, str(folder), what)
    async with interpreter(*launcher, *program, strict=False, group=True) as process:
        async with asyncio.timeout(120):
            out, err = await process.communicate()
        return process.returncode, (out + err).decode()


async def test_two_ranks_sync_twice_with_one_report(tmp_path):
    async with replica(kind="ranks", seed=2) as worker:
        code, output = await torchrun(worker, tmp_path, "sync")
        assert code == 0, output
        said = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
        assert said[0] == said[1]
        assert len(said[0]["reports"]) == 2
        assert "round 2 version 2 committed" in said[0]["reports"][1]
        assert (await worker.facts())["prints"] == models.fingerprint(models.make("ranks", 5))


async def test_the_other_rank_ends_by_itself_when_one_is_killed(tmp_path):
    async with replica(kind="ranks", seed=2) as worker:
        code, output = await torchrun(worker, tmp_path, "lose")
        assert code == 1, output
        assert "SIGKILL" in output
        facts = await worker.wait_state("idle", "initialized", "failed")
        assert (facts["weights"], facts["version"]) == ("intact", 1)
