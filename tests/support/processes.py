"""Replicas and trainers as real processes, started and ended by a test."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

HERE = Path(__file__).parent


class Replica:
    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, Any]) -> None:
        self.process = process
        self.url: str = ready["url"]
        self._extra: str = ready["extra"]

    async def facts(self) -> dict[str, Any]:
        """What the replica serves now: fingerprints, version, state, weights."""
        async with aiohttp.ClientSession() as session, session.get(
            f"{self._extra}/fingerprint", timeout=aiohttp.ClientTimeout(total=10)
        ) as reply:
            result: dict[str, Any] = await reply.json()
            return result

    async def wait_state(self, *states: str, seconds: float = 20.0) -> dict[str, Any]:
        """Wait until the replica reports one of `states`."""
        async with asyncio.timeout(seconds):
            while True:
                facts = await self.facts()
                if facts["state"] in states:
                    return facts
                await asyncio.sleep(0.02)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def replica(**options: Any) -> AsyncIterator[Replica]:
    """A replica process for the length of the block."""
    args: list[str] = []
    for name, value in options.items():
        args += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    async with program("replica.py", *args) as process:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = await process.stdout.readline()
        assert line, "the replica ended before it was ready"
        yield Replica(process, json.loads(line))


@asynccontextmanager
async def program(name: str, *args: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """``python tests/support/NAME ARGS`` with pipes; killed at the end if it does not end itself."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / name),
        *args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **options,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        transport = process._transport  # type: ignore[attr-defined]
        transport.close()
