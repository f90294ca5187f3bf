"""Programs with the loops that users have; nothing may be left over, and nothing said of it."""

from __future__ import annotations

import json

import pytest
from interpreters import run
from processes import replica

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.timeout(120)]


async def test_rounds_are_the_same_under_asyncio_and_uvloop():
    async with replica(kind="odd", seed=2) as one, replica(kind="odd", seed=2) as other:
        lines, err, code = await run("loops.py", one.url, other.url)
        assert (err, code) == ("", 0)
        stories = [json.loads(line) for line in lines]
        assert stories[0] == stories[1]
        outcomes = [told["outcome"] for told in stories[0]["told"] if isinstance(told, dict)]
        assert outcomes == ["committed", "failed", "committed", "failed", "failed", "committed"]
        for worker, story in zip((one, other), stories, strict=True):
            assert (await worker.facts())["prints"] == story["prints"]


async def test_one_engine_in_the_hands_of_several_tasks_and_threads():
    async with replica(seed=2) as worker:
        lines, err, code = await run("tasks.py", worker.url)
        assert (err, code) == ("", 0)
        assert lines == [
            "-- opened_and_closed_elsewhere",
            "committed",
            "closed",
            "-- closed_while_awaited",
            "RoundCancelled RoundCancelled Busy closed",
            "-- in_a_task_group",
            "committed committed",
            "sibling failed True failed",
            "committed",
            "-- in_a_generator",
            "committed committed closed",
            "committed",
            "committed",
            "in a thread committed",
            "from four threads" + " committed" * 4,
            "in another loop committed",
            "blocking" + " committed" * 4,
            "orders 1 2 3 4",
            "over",
        ]
        assert (await worker.facts())["state"] == "idle"  # every engine said good-bye


async def test_the_interpreter_of_these_programs_complains(tmp_path):
    """Else an empty stderr would mean nothing."""
    (tmp_path / "careless.py").write_text(
        "import asyncio, gc, socket\n"
        "async def wait(): await asyncio.Event().wait()\n"
        "socket.socket()\n"
        "wait()\n"
        "loop = asyncio.new_event_loop()\n"
        "task = loop.create_task(wait())\n"
        "loop.call_soon(loop.stop)\n"
        "loop.run_forever()\n"
        "loop.close()\n"
        "del task, loop\n"
        "gc.collect()\n"
    )
    _, err, _ = await run(str(tmp_path / "careless.py"))
    for sign in ("ResourceWarning: unclosed <socket", "was never awaited", "was destroyed but"):
        assert sign in err
