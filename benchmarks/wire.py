"""What a round says on its control connections, seen by a relay in between; and bare requests."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, final
from urllib.parse import urlsplit

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

_BLOCK = 1 << 18


@final
@dataclass(frozen=True)
class Request:
    """One request as it went over the wire: its line, and the sizes of the two bodies."""

    method: str
    target: str
    body: bytes
    reply_nbytes: int


@final
@dataclass
class Relay:
    """Everything that went through, connection by connection, both ways."""

    url: str
    connections: list[tuple[bytearray, bytearray]] = field(default_factory=list)

    def nbytes(self) -> tuple[int, int]:
        """Bytes to the worker and bytes from it, headers included."""
        sent = sum(len(up) for up, _ in self.connections)
        return sent, sum(len(down) for _, down in self.connections)

    def requests(self) -> list[Request]:
        found: list[Request] = []
        for up, down in self.connections:
            asked, answered = _messages(bytes(up)), _messages(bytes(down))
            for (line, body), (_, reply) in zip(asked, answered, strict=True):
                method, target, _ = line.split(" ", 2)
                found.append(Request(method, target, body, len(reply)))
        return found


def _messages(data: bytes) -> list[tuple[str, bytes]]:
    """First line and body of each HTTP message; bodies say their length in these protocols."""
    found: list[tuple[str, bytes]] = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in lines)
        length = int(fields.get("content-length", "0"))
        found.append((first, data[:length]))
        data = data[length:]
    return found


@asynccontextmanager
async def relay(url: str) -> AsyncIterator[Relay]:
    """A Unix socket in front of the server at `url` (``unix://``)."""
    target = urlsplit(url).path
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = str(Path(folder) / "relay.sock")
        seen = Relay(f"unix://{path}")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            up, down = bytearray(), bytearray()
            seen.connections.append((up, down))
            there, back = await asyncio.open_unix_connection(target)
            await asyncio.gather(_pass(reader, back, up), _pass(there, writer, down))

        server = await asyncio.start_unix_server(serve, path)
        async with server:
            yield seen


async def _pass(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: bytearray
) -> None:
    try:
        while data := await reader.read(_BLOCK):
            seen += data
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


def session(url: str, *, keep_alive: bool) -> aiohttp.ClientSession:
    """A client of the kind that a round uses, for a URL of either scheme."""
    parts = urlsplit(url)
    connector: aiohttp.BaseConnector
    if parts.scheme == "unix":
        connector = aiohttp.UnixConnector(path=parts.path, force_close=not keep_alive)
    else:
        connector = aiohttp.TCPConnector(force_close=not keep_alive)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


async def make(client: aiohttp.ClientSession, url: str, requests: Iterable[Request]) -> None:
    """The same requests, one after the other, to a server that does nothing with them."""
    base = "http://localhost" if url.startswith("unix:") else url
    for request in requests:
        headers = {"reply": str(request.reply_nbytes), "Content-Type": "application/json"}
        async with client.request(
            request.method, base + request.target, data=request.body or None, headers=headers
        ) as response:
            await response.read()
