"""A service as an ASGI application: for FastAPI, Starlette, or a server of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeAlias, final
from urllib.parse import parse_qsl

import anyio

from aiosync.codec import too_large
from aiosync.defaults import DEFAULTS
from aiosync.errors import PhaseTimeout, Validation
from aiosync.route_types import read_headers

if TYPE_CHECKING:
    from aiosync.route_types import Response
    from aiosync.service import WeightUpdateService

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
_POLICY_VIOLATION = 1008


class _Gone(Exception):
    """The client hung up."""


@final
class ASGIApp:
    """Made by `WeightUpdateService.asgi`."""

    def __init__(self, service: WeightUpdateService) -> None:
        self.service = service

    def __repr__(self) -> str:
        return f"<ASGIApp {self.service!r}>"

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One connection's scope, as ASGI has it."""
        if scope["type"] == "http":
            with suppress(_Gone):
                await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})

    async def _http(self, scope: Message, receive: Receive, send: Send) -> None:
        service, method = self.service, scope["method"]
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        headers = read_headers(
            (name.decode("latin-1"), value.decode("utf-8", "surrogateescape"))
            for name, value in scope["headers"]
        )
        refusal = service.refuse(method, path, headers)
        if refusal is not None:
            await _whole(refusal, send, hang_up=_has_body(headers))
            return
        try:
            body = await _read(receive, service.limit_of(path))
        except (Validation, PhaseTimeout) as error:
            await _whole(service.failure(error, headers), send, hang_up=True)
            return
        query = scope.get("query_string", b"").decode("utf-8", "replace")
        pairs = dict(reversed(parse_qsl(query, keep_blank_values=True)))  # the first one counts
        response = await service.answer(method, path, pairs, headers, body)
        if response.stream is None:
            await _whole(response, send)
        else:
            await _streamed(response, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            async with self.service.hosted():
                await send({"type": "lifespan.startup.complete"})
                await receive()
        except Exception as error:  # noqa: BLE001  the server reports it, and does not start
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.shutdown.complete"})


def _has_body(headers: dict[str, str]) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


async def _read(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    with anyio.move_on_after(DEFAULTS.rpc_s) as scope:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            body += message.get("body", b"")
            if len(body) > limit:
                raise too_large("body", limit)
            if not message.get("more_body", False):
                break
    if scope.cancelled_caught:
        raise PhaseTimeout(f"the body did not arrive within {DEFAULTS.rpc_s:g} s")
    return bytes(body)


def _head(response: Response, extra: dict[str, str]) -> Message:
    headers = {"Content-Type": response.content_type} | response.headers | extra
    raw = [
        (name.lower().encode("latin-1"), str(v).encode("latin-1")) for name, v in headers.items()
    ]
    return {"type": "http.response.start", "status": response.status, "headers": raw}


async def _whole(response: Response, send: Send, *, hang_up: bool = False) -> None:
    extra = {"Content-Length": str(len(response.body))}
    if hang_up:
        extra["Connection"] = "close"  # the rest of the body is not waited for
    await send(_head(response, extra))
    await send({"type": "http.response.body", "body": response.body})


async def _streamed(response: Response, receive: Receive, send: Send) -> None:
    stream = response.stream
    assert stream is not None
    async with anyio.create_task_group() as group, aclosing(stream) as parts:

        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        group.start_soon(until_gone)
        await send(_head(response, {}))
        async for part in parts:
            # A reader that stopped reading is let go like one that hung up.
            with anyio.move_on_after(DEFAULTS.lease_s) as limit:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            if limit.cancelled_caught:
                break
        else:
            await send({"type": "http.response.body", "body": b""})
        group.cancel_scope.cancel()
