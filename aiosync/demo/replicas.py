"""The demonstration's inference workers, seen from the trainer: processes and their requests."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, final

import aiohttp
import msgspec

from aiosync.concurrency import collapse
from aiosync.demo.messages import (
    Fingerprints,
    Generated,
    Logits,
    LogitsRequest,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
    from pathlib import Path

    from aiosync.demo.messages import GenerateRequest

T = TypeVar("T", bound=msgspec.Struct)
_START_S = 120.0
_REQUEST_S = 60.0
_TERMINATE_S = 2.0
_HTTP_OK = 200
_LAST_LINES = 20


class DemoFailed(Exception):
    """The demonstration could not go on; the text is for its user."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the workers of one run have in common.

    Attributes:
        folder: Private folder for the sockets.
        policy: Makes the model's configuration, as JSON, from a seed.
        model: Folder of a checkpoint to receive too.
    """

    folder: Path
    backend: str
    policy: Callable[[int], str]
    seed: int
    model: Path | None = None


@final
class Replica:
    """One worker process, in a session of its own: a terminal's Ctrl-C is for the trainer."""

    def __init__(self, index: int, launch: Launch) -> None:
        self.name = f"worker-{index}"
        self.index = index
        self.path = str(launch.folder / f"{self.name}.sock")
        self._launch = launch
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._reading: asyncio.Task[None] | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process and wait until it serves.

        Raises:
            DemoFailed: It ended, or was not ready in time; with its last words.
        """
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        self._reading = asyncio.create_task(self._keep_last_lines(process.stderr))
        try:
            async with asyncio.timeout(_START_S):
                ready = await process.stdout.readline()
        except TimeoutError:
            raise DemoFailed(f"{self.name} was not ready within {_START_S:g} s") from None
        if not ready:
            await asyncio.wait([self._reading], timeout=_TERMINATE_S)
            raise DemoFailed(f"{self.name} ended before it was ready\n{self.last_words}")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(self.path),
            timeout=aiohttp.ClientTimeout(total=_REQUEST_S),
        )

    def _command(self) -> list[str]:
        launch = self._launch
        policy = launch.policy(launch.seed + 1 + self.index)
        command = [sys.executable, "-m", "aiosync.demo.worker", "--socket", self.path]
        command += ["--name", self.name, "--backend", launch.backend, "--policy", policy]
        return command if launch.model is None else [*command, "--model", str(launch.model)]

    async def _keep_last_lines(self, stderr: asyncio.StreamReader) -> None:
        while line := await stderr.readline():
            self._last_lines.append(line.decode(errors="replace").rstrip())

    @property
    def last_words(self) -> str:
        """The end of the process's standard error."""
        return "\n".join(self._last_lines)

    async def stop(self) -> None:
        """End the process, by force after two seconds. Idempotent."""
        if self._session is not None:
            await self._session.close()
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_TERMINATE_S):
                await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=_TERMINATE_S)

    async def generate(self, request: GenerateRequest) -> Generated:
        """Have the worker sample answers."""
        return await self._call("POST", "generate", request, Generated)

    async def logits(self, tokens: list[list[int]]) -> Logits:
        """The worker's logits of `tokens`."""
        return await self._call("POST", "logits", LogitsRequest(tokens=tokens), Logits)

    async def fingerprints(self) -> Fingerprints:
        """What the worker holds of the checkpoint."""
        return await self._call("GET", "fingerprints", None, Fingerprints)

    async def _call(
        self, method: str, route: str, body: msgspec.Struct | None, reply: type[T]
    ) -> T:
        assert self._session is not None
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(method, f"http://worker/{route}", data=data) as http:
                content = await http.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            words = f"\n{self.last_words}" if self.last_words else ""
            raise DemoFailed(
                f"{self.name}: {route}: {str(error) or type(error).__name__}{words}"
            ) from error
        if http.status != _HTTP_OK:
            text = content.decode(errors="replace")
            raise DemoFailed(f"{self.name}: {route}: HTTP {http.status}: {text}")
        return msgspec.json.decode(content, type=reply)


@asynccontextmanager
async def replicas(count: int, launch: Launch) -> AsyncIterator[list[Replica]]:
    """`count` workers that serve; however the block is left, their processes are gone."""
    fleet = [Replica(index, launch) for index in range(count)]
    try:
        await together([replica.start() for replica in fleet])
        yield fleet
    finally:
        await together([replica.stop() for replica in fleet])


async def together(calls: Sequence[Coroutine[object, object, None]]) -> None:
    """Await all; the first failure cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call)
    except BaseExceptionGroup as failures:
        raise collapse(failures) from None


async def generate(
    fleet: Sequence[Replica], requests: Sequence[GenerateRequest]
) -> list[Generated]:
    """The answers in order; each worker takes the next request when it is done with one."""
    waiting = deque(enumerate(requests))
    answers: dict[int, Generated] = {}

    async def serve(replica: Replica) -> None:
        while waiting:
            index, request = waiting.popleft()
            answers[index] = await replica.generate(request)

    await together([serve(replica) for replica in fleet])
    return [answers[index] for index in range(len(requests))]
