"""The control plane's server without a web framework: one request in, one response out.

`aiosync.aiohttp_routes` and `aiosync.asgi` put it on frameworks, `aiosync.server` on sockets.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, final

import anyio
import msgspec

from aiosync import codec
from aiosync.api_processes import Claims
from aiosync.asgi import ASGIApp
from aiosync.defaults import DEFAULTS
from aiosync.errors import AiosyncError, Unauthorized, Validation
from aiosync.event_stream import EventStreams
from aiosync.messages import STARTS, ErrorInfo, RoundHeader, error_info, error_type
from aiosync.route_types import Request, Response, ServedEngine, read_headers
from aiosync.routes import Handlers
from aiosync.tokens import check_token, is_authorized
from aiosync.watchable import BUSY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from aiohttp import web

    from aiosync.messages import PeerState
    from aiosync.worker import WeightTransferEngine

__all__ = ["Response", "ServedEngine", "WeightUpdateService"]

logger = logging.getLogger(__name__)
_SHOWN = 200  # characters of a stranger's text
_INIT = "/init_weight_transfer_engine"
_DIGITS = 18  # of a length; enough to see that it is too large


@final
class WeightUpdateService:
    """vLLM's weight-transfer routes and ours, over one engine.

    Args:
        engine: Driven, never opened or closed.
        token: Bearer token that every request but ``/health`` must carry.
        name: Names the replica in errors.
        world_size: Answer of ``/get_world_size``; None takes what the engine says of itself.
    """

    def __init__(
        self,
        engine: ServedEngine | WeightTransferEngine[Any, Any],
        *,
        token: str | None = None,
        name: str | None = None,
        world_size: int | None = None,
    ) -> None:
        if not callable(getattr(engine, "peer_state", None)):
            raise TypeError(
                f"{engine!r} cannot be served: give a worker engine, or a group of them"
            )
        self.engine: ServedEngine = engine
        self.name = name or str(getattr(engine, "name", "worker"))
        self._token = None if token is None else check_token(token)
        self._streams = EventStreams()
        self._claims: Claims | None = None
        """Of what the host listens on; None where nobody else can."""
        self._routes = Handlers(self.engine, self._streams, world_size=world_size).table
        own_routes = getattr(engine, "own_routes", None)
        if own_routes is not None:
            self._routes |= own_routes()

    def __repr__(self) -> str:
        return f"<WeightUpdateService {self.name} streams={len(self._streams)}>"

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self._routes)

    def routes(self) -> list[web.RouteDef]:
        """Routes for an aiohttp application, at its root or under a sub-application's prefix.

        They read bodies up to their own limits whatever the application's is. Await `stop` in the
        application's ``on_shutdown``; `set_up` does all of it.
        """
        from aiosync.aiohttp_routes import routes_of  # here: only this needs a framework

        self._be_hosted()
        return routes_of(self)

    def set_up(self, app: web.Application) -> None:
        """Serve from an aiohttp application: routes, refusal to start twice, end with it."""
        from aiosync.aiohttp_routes import set_up  # as above

        set_up(app, self)

    def asgi(self) -> ASGIApp:
        """An ASGI application, to be mounted (last, at the root) or run by itself.

        A mounted application is not told of the host's start and end: enter `hosted` in the
        host's lifespan.
        """
        self._be_hosted()
        return ASGIApp(self)

    def _be_hosted(self) -> Claims:
        if self._claims is None:
            self._claims = Claims()
        return self._claims

    @asynccontextmanager
    async def hosted(self) -> AsyncIterator[Self]:
        """For the lifespan of a host that calls the service; leaving it awaits `stop`.

        Raises:
            Refused: Another process serves the same address (``--workers 2``, ``SO_REUSEPORT``): a
                round's calls would reach now the one, now the other. Where the host begins to
                listen only later, requests are refused with this instead.
        """
        claims = self._be_hosted()
        try:
            await claims.hold()
            yield self
        finally:
            with anyio.CancelScope(shield=True):  # bounded: by what stop says
                await self.stop()
            claims.release()

    async def stop(self) -> None:
        """Give the open round up, end the event streams; takes a second or two. Idempotent.

        The engine is left as it is, with the weights it had before the round.
        """
        await give_up(self.engine)
        if self._claims is not None:
            self._claims.release()
        self.close()

    def close(self) -> None:
        """End the event streams. The engine is left as it is."""
        self._streams.close()

    async def dispatch(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: bytes,
    ) -> Response:
        """Answer one request; raises nothing but cancellation.

        Cancelling it cancels the handler, not the round: the engine's session goes on.
        """
        headers = read_headers(headers.items())
        refusal = self.refuse(method, path, headers)
        return refusal or await self.answer(method, path, query, headers, body)

    async def answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: bytes,
    ) -> Response:
        """`dispatch` of a request that `refuse` let pass; headers as `read_headers` gives them."""
        response = await self._answer(path, Request(query=query, headers=headers, body=body))
        response = _tagged(response, headers)
        logger.debug(
            "%s: %s %s answered %d, request %s",
            self.name,
            method,
            ascii(path[:_SHOWN]),
            response.status,
            headers["x-request-id"],
        )
        return response

    async def _answer(self, path: str, request: Request) -> Response:
        try:
            if self._claims is not None and path != "/health":
                await self._claims.check(again=path == _INIT)
            answer = await self._routes[path].handler(request)
            if isinstance(answer, Response):
                return answer
            return self._respond(answer.status, answer.reply, request.headers)
        except Exception as error:  # noqa: BLE001  the peer is told, whatever it was
            return self.failure(error, request.headers)

    def refuse(self, method: str, path: str, headers: Mapping[str, str]) -> Response | None:
        """What is refused before the body is read; headers as `read_headers` gives them."""
        refusal = self._refuse(method, path, headers)
        return None if refusal is None else _tagged(refusal, headers)

    def failure(self, error: Exception, headers: Mapping[str, str]) -> Response:
        """The answer that reports `error`."""
        if not isinstance(error, AiosyncError):
            number = headers.get("x-request-id")
            logger.error("%s: a request failed (%s)", self.name, number, exc_info=error)
        return _tagged(self._error(error_info(error), headers), headers)

    def _refuse(self, method: str, path: str, headers: Mapping[str, str]) -> Response | None:
        if path != "/health" and not is_authorized(self._token, headers):
            error = Unauthorized("the token is missing or wrong", replica=self.name)
            body = {"error": error_info(error)}
            return Response(
                status=401,
                body=codec.encode_json(body),
                headers={"WWW-Authenticate": "Bearer"},
            )
        if path not in self._routes:
            return self._no_route(404, f"no route {path[:_SHOWN]}", headers)
        known = self._routes[path].verb
        if method != known and (method, known) != ("HEAD", "GET"):
            text = f"{path} takes {known}, not {method[:_SHOWN]}"
            return self._no_route(405, text, headers, {"Allow": known})
        if headers.get("content-encoding", "identity").lower() != "identity":
            return self.failure(Validation("compressed bodies are not accepted"), headers)
        length = headers.get("content-length", "")
        limit = self.limit_of(path)
        if length.isdecimal() and int(length[:_DIGITS]) > limit:
            return self.failure(codec.too_large("body", limit), headers)
        return None

    def limit_of(self, path: str) -> int:
        """The largest body that `path` reads, in bytes."""
        route = self._routes.get(path)
        return DEFAULTS.small_body_bytes if route is None else route.limit

    def _no_route(
        self,
        status: int,
        text: str,
        headers: Mapping[str, str],
        extra: dict[str, str] | None = None,
    ) -> Response:
        info = ErrorInfo(
            message=text, type=error_type(status), status=status, code="protocol_mismatch"
        )
        return self._error(info, headers, extra)

    def _error(
        self, info: ErrorInfo, headers: Mapping[str, str], extra: dict[str, str] | None = None
    ) -> Response:
        peer = self.engine.peer_state()
        info = msgspec.structs.replace(
            info,
            replica=info.replica or self.name,
            state=info.state or peer.state,
            allowed=info.allowed or peer.detail.get("allowed", []),
            weights=info.weights or peer.weights,
        )
        return self._respond(info.status, {"error": info}, headers, extra)

    def _peer(self) -> PeerState:
        """What the engine says of itself, as far as it holds for what is served.

        An object of somebody's own in front of it may do more at a start than hand it on.
        """
        peer = self.engine.peer_state()
        start = getattr(type(self.engine), "start_weight_update", None)
        if STARTS not in peer.features or getattr(start, "is_override", False):
            return peer
        features = [name for name in peer.features if name != STARTS]
        return msgspec.structs.replace(peer, features=features)

    def _respond(
        self,
        status: int,
        reply: dict[str, Any],
        headers: Mapping[str, str],
        extra: dict[str, str] | None = None,
    ) -> Response:
        reply = {**reply, "aiosync": self._peer()}
        packed = codec.accepts_msgpack(headers.get("accept"))
        return Response(
            status=status,
            body=codec.encode_msgpack(reply) if packed else codec.encode_json(reply),
            content_type=codec.MSGPACK if packed else codec.JSON,
            headers={} if extra is None else {**extra},
        )


def _tagged(response: Response, headers: Mapping[str, str]) -> Response:
    number = headers.get("x-request-id")
    if number is None or "X-Request-Id" in response.headers:
        return response
    response.headers["X-Request-Id"] = number
    return response


async def give_up(engine: ServedEngine) -> None:
    """End the open round, in its owner's name: nobody can finish it any more."""
    peer = engine.peer_state()
    if peer.state not in BUSY:
        return
    header = None
    if peer.owner is not None:
        number = peer.detail.get("round", 0)
        header = RoundHeader(owner=peer.owner, epoch=peer.epoch, round=number)
    with anyio.move_on_after(DEFAULTS.cleanup_s):
        try:
            await engine.abort_weight_update("the server is closing", header=header)
        except Exception:  # closing goes on whatever the engine says
            logger.exception("the open round could not be ended")
