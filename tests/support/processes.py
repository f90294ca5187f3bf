"""Replicas and trainers as real processes, started and ended by a test."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

HERE = Path(__file__).parent
_ZYGOTE: list[Any] = []
_ASKING = threading.Lock()


class Program:
    """A process forked from the zygote: its pid and its pipes."""

    def __init__(self, pid: int, stdin: int, stdout: asyncio.StreamReader, pidfd: int) -> None:
        self.pid = pid
        self.stdout = stdout
        self._stdin = stdin
        self._pidfd = pidfd

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def close_stdin(self) -> None:
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    async def wait(self, seconds: float = 20.0) -> None:
        """Wait until the process is gone."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(self._pidfd, gone.set)  # a pidfd turns readable when its process ends
        try:
            async with asyncio.timeout(seconds):
                await gone.wait()
        finally:
            loop.remove_reader(self._pidfd)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.wait()

    def close(self) -> None:
        self.close_stdin()
        os.close(self._pidfd)


class Replica:
    """An inference replica (`replica.py`) and what it says of itself."""

    def __init__(self, process: Program, ready: dict[str, Any]) -> None:
        self.process = process
        self.url: str = ready["url"]
        self._extra: str = ready["extra"]

    async def facts(self) -> dict[str, Any]:
        """What the replica serves now: fingerprints, version, state, weights."""
        timeout = aiohttp.ClientTimeout(total=30)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{self._extra}/fingerprint") as reply,
        ):
            result: dict[str, Any] = await reply.json()
            return result

    async def wait_state(self, *states: str, seconds: float = 30.0) -> dict[str, Any]:
        """Wait until the replica reports one of `states`."""
        async with asyncio.timeout(seconds):
            while True:
                facts = await self.facts()
                if facts["state"] in states:
                    return facts
                await asyncio.sleep(0.02)

    def signal(self, number: int) -> None:
        self.process.signal(number)

    async def kill(self) -> None:
        await self.process.kill()


@asynccontextmanager
async def replica(**options: Any) -> AsyncIterator[Replica]:
    """A replica process for the length of the block."""
    args: list[str] = []
    for name, value in options.items():
        args += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    async with program("replica.py", *args) as process:
        async with asyncio.timeout(60):
            line = await process.stdout.readline()
        assert line, "the replica ended before it was ready"
        yield Replica(process, json.loads(line))


@asynccontextmanager
async def program(script: str, *args: str) -> AsyncIterator[Program]:
    """``tests/support/SCRIPT ARGS`` in a process of its own; gone when the block is left."""
    loop = asyncio.get_running_loop()
    child_in, stdin = os.pipe()
    stdout, child_out = os.pipe()
    try:
        pid = await loop.run_in_executor(None, _fork, script, list(args), child_in, child_out)
    finally:
        os.close(child_in)
        os.close(child_out)
    reader = asyncio.StreamReader()
    file = os.fdopen(stdout, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    process = Program(pid, stdin, reader, os.pidfd_open(pid))
    try:
        yield process
    finally:
        process.signal(signal.SIGCONT)
        process.close_stdin()
        try:
            await process.wait(10)
        except TimeoutError:
            await process.kill()
        process.close()
        transport.close()


def _fork(script: str, args: list[str], stdin: int, stdout: int) -> int:
    with _ASKING:  # one zygote, and its answers come in the order of the questions
        return _ask_zygote(script, args, stdin, stdout)


def _ask_zygote(script: str, args: list[str], stdin: int, stdout: int) -> int:
    if not _ZYGOTE:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("COVERAGE_PROCESS_START", None)
        zygote = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py"), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()
        _ZYGOTE.extend((mine, zygote))
        atexit.register(_stop)
    request = json.dumps({"script": script, "args": args}).encode()
    socket.send_fds(_ZYGOTE[0], [request], [stdin, stdout])
    return int(json.loads(_ZYGOTE[0].recv(4096))["pid"])


def _stop() -> None:
    mine, zygote = _ZYGOTE
    mine.close()
    zygote.wait(10)


async def lines(process, seconds):
    """Everything that a program says until it ends, a JSON value a line."""
    said = []
    async with asyncio.timeout(seconds):
        while line := await process.stdout.readline():
            said.append(json.loads(line))
    return said
