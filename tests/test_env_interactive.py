"""A notebook's kernel, whose loop runs between cells, and a terminal's prompt, where it stops."""

from __future__ import annotations

import asyncio
import signal

import models
import pytest
from interpreters import interpreter, run
from processes import replica

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.timeout(180)]
LEASE_S = 1.0


async def test_notebook(tmp_path):
    async with replica(seed=2) as worker:
        lines, err, code = await run("kernel.py", worker.url, str(tmp_path), strict=False)
        assert (err, code) == ("", 0)
        assert lines == [
            "set-up: committed",
            "again: committed 2",
            "background: holding",
            "released: committed",
            "interrupted: holding CancelledError",
            "free: failed failed",
            "after: committed 4",
            "close: closed",
        ]
        facts = await worker.facts()
        assert facts["prints"] == models.fingerprint(models.make("small", 7))
        assert facts["version"] == 4


class Prompt:
    """A terminal IPython; what a cell prints after its marker comes back."""

    def __init__(self, process):
        self.process = process

    def enter(self, line):
        self.process.stdin.write(line.encode() + b"\n")

    async def cell(self, line):
        self.enter(f"{line}; print('<<<', *said); said = []")
        return (await self.said("<<<")).split()

    async def said(self, marker):
        seen = []
        try:
            async with asyncio.timeout(40):
                while line := (await self.process.stdout.readline()).decode():
                    seen.append(line)
                    if marker in line:
                        return line.partition(marker)[2]
        except TimeoutError:
            pass
        raise AssertionError(f"{marker!r} is not in\n{''.join(seen)}")


async def test_terminal_prompt(tmp_path):
    arguments = ["--simple-prompt", "--no-banner", "--colors=NoColor", "--no-confirm-exit"]
    async with (
        replica(seed=2) as worker,
        interpreter("-m", "IPython", *arguments, strict=False, IPYTHONDIR=str(tmp_path)) as process,
    ):
        prompt = Prompt(process)
        prompt.enter("import asyncio, contextlib, threading, torch, models, aiosync; said = []")
        prompt.enter("from paced import Hold, Paced; torch.set_num_threads(1)")
        prompt.enter("source, stack = Paced(models.make('small', 7)), contextlib.AsyncExitStack()")
        options = f"packed_buffer_size_bytes=4096, lease_s={LEASE_S}"
        prompt.enter(f"connecting = aiosync.connect(source, workers=['{worker.url}'], {options})")
        prompt.enter("sync = await stack.enter_async_context(connecting)")
        send = "said.append((await sync.send_weights()).outcome)"
        assert await prompt.cell(send) == ["committed"]
        await asyncio.sleep(1.6 * LEASE_S)  # nobody types, and the engine has no lease to lose
        assert await prompt.cell(send) == ["committed"]

        # A round in the background gets no turn at the prompt: its worker gives it up.
        prompt.enter("hold = source.before = Hold(3); update = sync.begin_update()")
        assert "inside a coroutine" in await prompt.said("  next_step ")  # no loop runs here
        turns = "said.append(await asyncio.to_thread(hold.reached.wait, 20))"
        assert await prompt.cell(f"update = sync.begin_update(); {turns}") == ["True"]
        old = await worker.wait_state("updating")
        await worker.wait_state("initialized", "failed", seconds=30)
        prompt.enter("hold.released.set(); source.before = lambda index: None")
        caught = "(await asyncio.gather({}, return_exceptions=True))[0]"
        lost = f"said.append(isinstance({caught.format('update.wait()')}, aiosync.AiosyncError))"
        assert await prompt.cell(lost) == ["True"]
        assert await prompt.cell(send) == ["committed"]
        assert (await worker.facts())["version"] == old["version"] + 1

        # Ctrl-C leaves the cell's task in the loop that stands still.
        prompt.enter("hold = source.before = Hold(3)")
        prompt.enter("reached = lambda: hold.reached.wait(20) and print('reached', flush=True)")
        prompt.enter("threading.Thread(target=reached).start(); await sync.send_weights()")
        await prompt.said("reached")
        process.send_signal(signal.SIGINT)
        await prompt.said("KeyboardInterrupt")
        prompt.enter("hold.released.set(); source.before = lambda index: None")
        busy = caught.format("sync.send_weights()")
        assert "on_busy='wait'" in " ".join(await prompt.cell(f"said.append({busy}.next_step)"))
        superseding = send.replace("()", "(on_busy='supersede')")
        assert await prompt.cell(superseding) == ["committed"]
        assert await prompt.cell("await stack.aclose(); said.append(sync.state)") == ["closed"]
        prompt.enter("exit")
        async with asyncio.timeout(20):
            await process.wait()
        assert process.returncode == 0
        complaints = (await process.stderr.read()).decode()
        for sign in ("destroyed", "never awaited", "never retrieved", "ResourceWarning"):
            assert sign not in complaints
