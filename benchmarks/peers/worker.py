"""The other process: a worker engine behind its server, and the raw primitives' far end.

Commands are JSON objects, one a line on stdin; each is answered by one line on stdout. It ends
when stdin does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from aiohttp import web

import aiosync
from benchmarks import layouts
from benchmarks.broadcast import Group
from benchmarks.ring import Ring, checksum, copy_from

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

BODY_LIMIT = 64 << 20


class Peer:
    """What this process holds between commands."""

    def __init__(self) -> None:
        self._worker = AsyncExitStack()
        self._bare = AsyncExitStack()
        self._flat: torch.Tensor | None = None
        self._model: nn.Module | None = None
        self._ring: Ring | None = None
        self._group: Group | None = None

    async def open(
        self,
        *,
        layout: str,
        nbytes: int,
        tensors: int,
        sink: str,
        verify: str,
        tcp: bool,
        backend: str = "ipc",
    ) -> dict[str, Any]:
        """A fresh model, a worker engine for it, and its server."""
        await self.close()
        self._flat, self._model = layouts.build(layout, nbytes, tensors, trains=False)
        config = aiosync.WeightTransferConfig(backend, sink=sink, verify=verify)
        engine = aiosync.WeightTransferEngineFactory.create_engine(
            config, None, torch.device("cpu"), self._model, name="worker"
        )
        await self._worker.enter_async_context(engine)
        where: dict[str, Any] = {"host": "127.0.0.1", "port": 0} if tcp else {}
        server = await self._worker.enter_async_context(aiosync.serve(engine, **where))
        return {"url": server.url}

    async def open_many(self, *, nbytes: int, count: int) -> dict[str, Any]:
        """As many small workers, each behind a server of its own."""
        await self.close()
        urls = []
        for number in range(count):
            _, model = layouts.build("one", nbytes, 1, trains=False)
            engine = aiosync.WeightTransferEngineFactory.create_engine(
                aiosync.WeightTransferConfig("ipc"),
                None,
                torch.device("cpu"),
                model,
                name=f"worker-{number}",
            )
            await self._worker.enter_async_context(engine)
            urls.append((await self._worker.enter_async_context(aiosync.serve(engine))).url)
        return {"urls": urls}

    async def close(self) -> dict[str, Any]:
        await self._worker.aclose()
        self._worker = AsyncExitStack()
        self._flat = self._model = self._ring = self._group = None
        return {}

    async def checksum(self) -> dict[str, Any]:
        """CRC-32 over all bytes of the model."""
        return {"crc": await asyncio.to_thread(checksum, self._bytes())}

    async def pull(self, *, ring: str) -> dict[str, Any]:
        """The reading half of `Ring.push`."""
        if self._ring is None:
            self._ring = Ring.attach(ring)
        await asyncio.to_thread(self._ring.pull, self._bytes())
        return {}

    async def copy(self, *, source: str, piece: int) -> dict[str, Any]:
        """Plain copies from shared memory into the model."""
        seconds = await asyncio.to_thread(copy_from, source, self._bytes(), piece)
        return {"seconds": seconds}

    async def join(self, *, port: int) -> dict[str, Any]:
        """The other end of a raw group."""
        self._group = await asyncio.to_thread(Group, port, 1)
        return {}

    async def take(self) -> dict[str, Any]:
        """The receiving half of `Group.move`."""
        assert self._group is not None, "join comes first"
        await asyncio.to_thread(self._group.move, self._bytes())
        return {}

    async def bare(self, *, tcp: bool) -> dict[str, Any]:
        """A server that does nothing but parse a body and answer as many bytes as it is told."""
        await self._bare.aclose()
        self._bare = AsyncExitStack()
        app = web.Application(client_max_size=BODY_LIMIT)
        app.add_routes([web.route("*", "/{_:.*}", _answer)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        self._bare.push_async_callback(runner.cleanup)
        if tcp:
            site: web.BaseSite = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            return {"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}
        folder = self._bare.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        path = str(Path(folder) / "bare.sock")
        site = web.UnixSite(runner, path)
        await site.start()
        return {"url": f"unix://{path}"}

    async def end(self) -> None:
        await self.close()
        await self._bare.aclose()

    def _bytes(self) -> torch.Tensor:
        assert self._flat is not None, "no worker is open"
        return self._flat


async def _answer(request: web.Request) -> web.Response:
    body = await request.read()
    if body:
        msgspec.json.decode(body)
    return web.Response(body=b" " * int(request.headers.get("reply", "2")))


async def obey(make: Callable[[], Any]) -> None:
    """Carry out the commands on stdin until it ends."""
    torch.set_num_threads(1)
    peer = make()
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print("{}", flush=True)
    while line := await reader.readline():
        command = json.loads(line)
        answer = await getattr(peer, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)
    await peer.end()


if __name__ == "__main__":
    asyncio.run(obey(Peer))
