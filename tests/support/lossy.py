"""A control link that delays, resets, loses and repeats: TCP in front of a replica.

Every call of our client has a connection of its own, so what happens to one is decided by its
route. The proxy reads nothing else of what passes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Lossy:
    """Forwards connections to a replica's server.

    Args:
        delay: Seconds each way.
        resets: Share of the connections that are reset, half of them after the call was delivered.
    """

    def __init__(self, target: str, *, delay: float, resets: float, seed: int) -> None:
        self.target = target.removeprefix("http://")
        self.delay = delay
        self.resets = resets
        self.url = ""
        self.calls: list[str] = []
        self.plans: dict[str, list[str]] = {}
        """By route, what happens to its next calls: ``reset`` (never delivered), ``lost``
        (delivered, its answer is not), ``twice`` (delivered so), ``held`` (never answered)."""
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._call(reader, writer)
        finally:
            writer.transport.abort() if self._failing(writer) else writer.close()

    def _failing(self, writer: asyncio.StreamWriter) -> bool:
        return not getattr(writer, "answered", False)

    async def _call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        route = head.split()[1].decode().partition("?")[0].strip("/")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        # Closed after the answer, which then ends where the stream does.
        head = head.removesuffix(b"\r\n") + b"Connection: close\r\n\r\n"
        request = head + await reader.readexactly(length)
        self.calls.append(route)
        fate = self._fate(route)
        await asyncio.sleep(self.delay)
        if fate == "reset":
            return
        if fate == "twice":
            first, _ = await asyncio.gather(self._deliver(request), self._deliver(request))
        else:
            first = await self._deliver(request)
        if fate == "held":
            await asyncio.sleep(60)
        await asyncio.sleep(self.delay)
        if fate != "lost":
            writer.write(first)
            await writer.drain()
            writer.answered = True  # type: ignore[attr-defined]

    def _fate(self, route: str) -> str:
        if self.plans.get(route):
            return self.plans[route].pop(0)
        if self._random.random() < self.resets:
            return self._random.choice(["reset", "lost"])
        return "ok"

    async def _deliver(self, request: bytes) -> bytes:
        host, port = self.target.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.close()

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


@asynccontextmanager
async def lossy(
    target: str, *, delay: float = 0.0, resets: float = 0.0, seed: int = 0
) -> AsyncIterator[Lossy]:
    it = Lossy(target, delay=delay, resets=resets, seed=seed)
    server = await asyncio.start_server(it.accept, "127.0.0.1", 0)
    it.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield it
    finally:
        server.close()
        await it.aclose()
        await server.wait_closed()
