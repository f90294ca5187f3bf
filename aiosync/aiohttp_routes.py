"""A service's routes for aiohttp: a request of the framework in, a response of it out."""

from __future__ import annotations

import functools
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

import anyio
from aiohttp import web

from aiosync.codec import too_large
from aiosync.defaults import DEFAULTS
from aiosync.errors import PhaseTimeout, Validation
from aiosync.route_types import read_headers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiosync.route_types import Response
    from aiosync.service import WeightUpdateService

logger = logging.getLogger(__name__)


def set_up(app: web.Application, service: WeightUpdateService) -> None:
    """`WeightUpdateService.set_up`."""

    async def stop(_: web.Application) -> None:
        await service.stop()  # before the handlers are waited for: one of them may be receiving

    async def hosted(_: web.Application) -> AsyncIterator[None]:
        async with service.hosted():
            yield

    app.add_routes(routes_of(service))
    app.on_shutdown.append(stop)
    app.cleanup_ctx.append(hosted)


def routes_of(service: WeightUpdateService) -> list[web.RouteDef]:
    """`WeightUpdateService.routes`."""
    # Every verb, so that the wrong one gets our answer and not aiohttp's text.
    return [
        web.route("*", path, functools.partial(handle, service, path)) for path in service.paths
    ]


async def handle(
    service: WeightUpdateService, path: str | None, request: web.BaseRequest
) -> web.StreamResponse:
    # Bound to its path: under a prefix the request's own path is another one.
    served_alone = path is None  # an application asks for the body by itself
    path = path or request.path
    headers = read_headers(request.headers.items())
    refusal = service.refuse(request.method, path, headers)
    if refusal is not None:
        return _whole(refusal, hang_up=request.can_read_body)
    try:
        if served_alone and headers.get("expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer itself has not begun
        body = await _read(request, service.limit_of(path))
    except (Validation, PhaseTimeout) as error:
        return _whole(service.failure(error, headers), hang_up=True)
    except (ConnectionError, web.RequestPayloadError) as error:  # hung up, or garbled chunks
        broken = Validation(f"the body broke off: {type(error).__name__}: {error}")
        return _whole(service.failure(broken, headers), hang_up=True)
    response = await service.answer(request.method, path, request.query, headers, body)
    if response.stream is None:
        return _whole(response)
    return await _streamed(request, response)


async def _read(request: web.BaseRequest, limit: int) -> bytes:
    if request.content.is_eof():  # all of it came with the headers: nothing is waited for
        return await _all_of(request, limit)
    with anyio.move_on_after(DEFAULTS.rpc_s):
        return await _all_of(request, limit)
    raise PhaseTimeout(f"the body did not arrive within {DEFAULTS.rpc_s:g} s")


async def _all_of(request: web.BaseRequest, limit: int) -> bytes:
    body = bytearray()
    while not request.content.at_eof():
        body += await request.content.readany()
        if len(body) > limit:
            raise too_large("body", limit)
    return bytes(body)


def _whole(response: Response, *, hang_up: bool = False) -> web.Response:
    answer = web.Response(
        status=response.status,
        body=response.body,
        headers=response.headers,
        content_type=response.content_type,
    )
    if hang_up:
        answer.force_close()  # the rest of the body is not waited for
    return answer


async def _streamed(request: web.BaseRequest, response: Response) -> web.StreamResponse:
    answer = web.StreamResponse(headers=response.headers)
    answer.content_type = response.content_type
    assert response.stream is not None
    async with aclosing(response.stream) as parts:
        try:
            await answer.prepare(request)
            async for part in parts:
                # A reader that stopped reading is let go like one that hung up.
                with anyio.fail_after(DEFAULTS.lease_s):
                    await answer.write(part)
        except (ConnectionError, TimeoutError) as error:
            logger.debug("an event stream ended: %r", error)
            answer.force_close()
    return answer
