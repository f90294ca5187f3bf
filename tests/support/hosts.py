"""One worker engine behind every kind of host, each in an event loop of another thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

import fastapi
import uvicorn
import uvloop
from aiohttp import web

import aiosync
from aiosync.listeners import bind_tcp

HOSTS = ("stand-alone", "aiohttp", "asgi", "fastapi")
KEY = "x-host-key"


class Hosted:
    """What a test sees of a host: its URL, and a way to run things in its loop."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self._loop = loop

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Await ``fn(*args)`` in the host's loop."""
        return asyncio.run_coroutine_threadsafe(fn(*args), self._loop).result(20)


@contextmanager
def hosting(
    kind: str, engine: Any, *, token: str | None = None, key: str | None = None
) -> Iterator[Hosted]:
    """Serve `engine` behind a host of this kind; leaving stops the host."""
    service = aiosync.WeightUpdateService(engine, token=token, name="replica")
    if kind == "stand-alone":
        open_host = lambda: _alone(engine, token)  # noqa: E731
    elif kind == "aiohttp":
        open_host = lambda: _aiohttp(service)  # noqa: E731
    else:
        app = service.asgi() if kind == "asgi" else fastapi_app(service, key)
        open_host = lambda: _uvicorn(app)  # noqa: E731
    with in_a_loop(open_host, fast=kind in ("asgi", "fastapi")) as hosted:
        yield hosted


@contextmanager
def in_a_loop(
    open_host: Callable[[], AbstractAsyncContextManager[str]], *, fast: bool
) -> Iterator[Hosted]:
    ready: queue.Queue[Any] = queue.Queue()

    async def run() -> None:
        leave = asyncio.Event()
        async with open_host() as url:
            loop = asyncio.get_running_loop()
            ready.put((Hosted(url, loop), lambda: loop.call_soon_threadsafe(leave.set)))
            await leave.wait()

    def main() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop if fast else None) as runner:
                runner.run(run())
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    got = ready.get(timeout=20)
    if isinstance(got, BaseException):
        raise got
    hosted, leave = got
    try:
        yield hosted
    finally:
        leave()
        thread.join(20)
        assert not thread.is_alive()
        if not ready.empty():
            raise ready.get()


@asynccontextmanager
async def _alone(engine: Any, token: str | None) -> AsyncIterator[str]:
    async with aiosync.serve(engine, port=0, token=token, name="replica") as server:
        yield server.url


@asynccontextmanager
async def _aiohttp(service: aiosync.WeightUpdateService) -> AsyncIterator[str]:
    app = web.Application(client_max_size=1000)
    service.set_up(app)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def fastapi_app(service: aiosync.WeightUpdateService, key: str | None = None) -> fastapi.FastAPI:
    """A host with a route, a middleware and (with `key`) an authorisation of its own."""

    @asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        async with service.hosted():
            yield

    app = fastapi.FastAPI(lifespan=lifespan)

    @app.middleware("http")
    async def guard(request: fastapi.Request, call_next: Any) -> Any:
        if key is not None and request.headers.get(KEY) != key:
            return fastapi.responses.JSONResponse({"detail": "who are you"}, status_code=401)
        answer = await call_next(request)
        answer.headers["x-host"] = "fastapi"
        return answer

    @app.get("/own")
    async def own() -> dict[str, str]:
        return {"host": "fastapi"}

    app.mount("/", service.asgi())
    return app


@asynccontextmanager
async def _uvicorn(app: Any) -> AsyncIterator[str]:
    with bind_tcp("127.0.0.1", 0) as sock:
        config = uvicorn.Config(
            app, lifespan="on", log_level="error", timeout_graceful_shutdown=1, ws="none"
        )
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            if running.done():
                await running
                raise RuntimeError("uvicorn did not start")
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        server.should_exit = True
        await running
