"""An HTTP proxy in front of a replica that answers one route badly, at a moment of its choosing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

Wait = Callable[[], Awaitable[None]]


class Proxy:
    """Forwards everything; `break_route` makes one route fail once `when` has come."""

    def __init__(self, target: str) -> None:
        assert target.startswith("unix://")
        self.target = target
        self.url = ""
        self.calls: list[str] = []
        self._faults: dict[str, tuple[str, Wait]] = {}
        self._answers: dict[str, Any] = {}

    def break_route(self, route: str, how: str, when: Wait) -> None:
        """`how`: ``500``, ``reset``, ``hang``, or ``lost`` (carried out, the reply never comes)."""
        self._faults[f"/{route}"] = (how, when)

    def answer(self, route: str, body: Any) -> None:
        """Answer a route with 200 and `body` instead of carrying it out."""
        self._answers[f"/{route}"] = body

    def heal(self) -> None:
        self._faults.clear()
        self._answers.clear()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(request.path)
        fault = self._faults.get(request.path)
        body = await request.read()
        if request.path in self._answers:
            return web.json_response(self._answers[request.path])
        if fault is None:
            return await self._forward(request, body)
        how, when = fault
        forwarded = asyncio.create_task(self._forward(request, body))
        waiting = asyncio.create_task(when())
        try:
            await asyncio.wait([waiting])
            if how == "lost":
                await asyncio.wait([forwarded])
            if how == "500":
                text = {"error": {"message": "no memory for down_proj", "type": "Boom"}}
                return web.json_response(text, status=500)
            if how in ("reset", "lost"):
                assert request.transport is not None
                request.transport.abort()
            if how == "hang":
                await asyncio.sleep(60)
            return web.Response()
        finally:
            waiting.cancel()
            forwarded.cancel()
            await asyncio.wait([forwarded, waiting])

    async def _forward(self, request: web.Request, body: bytes) -> web.Response:
        connector = aiohttp.UnixConnector(path=self.target.removeprefix("unix://"))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.request(
                request.method,
                f"http://replica{request.rel_url}",
                data=body,
                headers=_kept(request),
            ) as reply,
        ):
            data = await reply.read()
            kind = reply.content_type
            return web.Response(status=reply.status, body=data, content_type=kind)


def _kept(request: web.Request) -> dict[str, str]:
    return {k: v for k, v in request.headers.items() if k.lower() in ("content-type", "accept")}


@asynccontextmanager
async def proxy(target: str) -> AsyncIterator[Proxy]:
    it = Proxy(target)
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", it.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    it.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
    try:
        yield it
    finally:
        await runner.cleanup()
