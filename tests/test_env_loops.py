"""Programs with the loops that users have; nothing may be left over, and nothing said of it."""

from __future__ import annotations

import json
from pathlib import Path

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
            "RoundCancelled RoundCancelled RoundCancelled closed",
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


async def test_a_loop_that_ends_inside_the_block_of_serve_ends_the_server(tmp_path):
    (tmp_path / "kept.py").write_text(
        "import asyncio, sys, torch\n"
        "import aiosync\n"
        "kept = []\n"
        "async def main(**options):\n"
        "    asyncio.get_running_loop().slow_callback_duration = 60\n"
        "    config = aiosync.WeightTransferConfig('ipc')\n"
        "    model = torch.nn.Linear(3, 2)\n"
        "    factory = aiosync.WeightTransferEngineFactory\n"
        "    async with factory.create_engine(config, model=model) as engine:\n"
        "        kept.append(aiosync.serve(engine, **options))\n"
        "        server = await kept[-1].__aenter__()\n"
        "        await aiosync.HTTPVLLMWeightSyncClient(server.url).ready()\n"
        "        print(server.url)\n"
        "asyncio.run(main())\n"
        "asyncio.run(main(port=0))\n"
    )
    lines, err, code = await run(str(tmp_path / "kept.py"))
    assert (err, code) == ("", 0)
    assert len(lines) == 2
    where = Path(lines[0].removeprefix("unix://"))
    assert where.name == "control.sock"
    assert not where.parent.exists()


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
