"""Programs that are told to end, or just end, at a bad moment: nothing outlives them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import models
import pytest
from interpreters import PROGRAMS, interpreter, run
from limits import SLACK
from processes import replica

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.timeout(120)]


def alive(group: int) -> set[str]:
    """Processes of a group, without the dead that nobody has waited for yet."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended while we looked
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.add(stat.parent.name)
    return found


@pytest.mark.usefixtures("free_shm")
@pytest.mark.parametrize("how", ["handled", "default"])
async def test_sigterm_to_a_whole_tree_in_the_middle_of_a_round(how, tmp_path):
    """A launcher ends trainer and workers at once: all go, with the weights they had."""
    arguments = (str(PROGRAMS / "tree.py"), how)
    async with interpreter(*arguments, group=True, TMPDIR=str(tmp_path)) as process:
        async with asyncio.timeout(30):
            assert await process.stdout.readline() == b"holding\n"
        assert len(list(tmp_path.glob("*/control.sock"))) == 2
        os.killpg(process.pid, signal.SIGTERM)
        async with asyncio.timeout(8 + SLACK):  # the output ends with the last process that has it
            out, err = await process.communicate()
    lines = sorted(out.decode().splitlines())
    assert err.decode() == ""
    workers = [line for line in lines if line.startswith("worker ")]
    assert [line.rpartition(" ")[2] for line in workers] == ["intact"] * 2
    assert all("SIGTERM" in line for line in workers)
    if how == "handled":
        assert process.returncode == 128 + signal.SIGTERM
        assert [line for line in lines if line not in workers] == [
            "trainer: cancelled",
            "workers ended with 0 0",
        ]
    else:
        assert process.returncode == -signal.SIGTERM
        assert lines == workers
    assert list(tmp_path.iterdir()) == []  # no socket, no folder
    async with asyncio.timeout(5):
        while alive(process.pid):
            await asyncio.sleep(0.02)


async def test_programs_end_whatever_they_dropped_left_open_or_wait_for():
    async with replica(seed=2) as worker:
        lines, err, code = await run("endings.py", worker.url, seconds=90)
        assert (err, code) == ("", 0)
        facts = await worker.wait_state("idle", "initialized", "failed")
        assert facts["weights"] == "intact"
        assert facts["prints"] == models.fingerprint(models.make("small", 7))
    ends = {end["scene"]: end for end in map(json.loads, lines)}
    for end in ends.values():
        assert end["code"] == 0, end
        assert end["seconds"] < 3 + SLACK, end
    dropped = ends["dropped"]
    assert dropped["lines"] == [
        "committed", "descriptors []", "threads []", "trainer next committed",
    ]  # fmt: skip
    said = dropped["err"].splitlines()
    assert ["was dropped in state initialized" in line for line in said] == [True, True], said
    assert ends["blocking"]["lines"] == ["committed"]
    assert ends["blocking"]["err"] == ""
    for scene in ("stuck", "blocking_stuck"):
        assert ends[scene]["lines"] == ["stuck"]
        for sign in ("Traceback", "ResourceWarning", "destroyed", "never awaited"):
            assert sign not in ends[scene]["err"]
