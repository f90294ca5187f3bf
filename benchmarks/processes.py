"""Starting the other process, and telling it what to do."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).resolve().parents[1]
_START_S = 120.0
_COMMAND_S = 120.0
_END_S = 20.0


@final
class Peer:
    """A running module of `benchmarks.peers`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def do(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Have one of its commands carried out; its answer."""
        assert self._process.stdin is not None
        line = json.dumps({"do": command, **arguments})
        self._process.stdin.write(f"{line}\n".encode())
        await self._process.stdin.drain()
        return await self.answer(_COMMAND_S)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(seconds):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the other process ended; its error is above")
        result: dict[str, Any] = json.loads(line)
        return result


@asynccontextmanager
async def peer(module: str = "benchmarks.peers.worker") -> AsyncIterator[Peer]:
    """The other process, which runs `module`, for the length of the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        running = Peer(process)
        await running.answer(_START_S)
        yield running
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
