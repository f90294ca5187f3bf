"""The control plane's server without a web framework: one request in, one response out.

`aiosync.server` puts it on aiohttp and on sockets.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, final

import msgspec

from aiosync import codec
from aiosync.defaults import DEFAULTS
from aiosync.errors import AiosyncError, Unauthorized, Validation
from aiosync.event_stream import EventStreams
from aiosync.messages import ErrorInfo, error_info, error_type
from aiosync.route_types import Request, Response, ServedEngine
from aiosync.routes import Handlers
from aiosync.tokens import check_token, is_authorized

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web

    from aiosync.worker import WeightTransferEngine

__all__ = ["Response", "ServedEngine", "WeightUpdateService"]

logger = logging.getLogger(__name__)
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
        self._routes = Handlers(self.engine, self._streams, world_size=world_size).table

    def __repr__(self) -> str:
        return f"<WeightUpdateService {self.name} streams={len(self._streams)}>"

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self._routes)

    def routes(self) -> list[web.RouteDef]:
        """Routes for an aiohttp application, at its root or under a sub-application's prefix.

        They read bodies up to `DEFAULTS.body_limit_bytes` whatever the application's own limit.
        End the event streams in the application's ``on_shutdown`` with `close`.
        """
        from aiosync.server import routes_of  # here: only this needs a framework

        return routes_of(self)

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
        headers = {name.lower(): value for name, value in headers.items()}
        refusal = self.refuse(method, path, headers)
        if refusal is not None:
            return refusal
        handler = self._routes[path].handler
        try:
            answer = await handler(Request(query=query, headers=headers, body=body))
            if isinstance(answer, Response):
                return answer
            return self._respond(answer.status, answer.reply, headers)
        except Exception as error:  # noqa: BLE001  the peer is told, whatever it was
            return self.failure(error, headers)

    def refuse(self, method: str, path: str, headers: Mapping[str, str]) -> Response | None:
        """What is refused before the body is read; header names in lower case."""
        if path != "/health" and not is_authorized(self._token, headers):
            error = Unauthorized("the token is missing or wrong", replica=self.name)
            body = {"error": error_info(error)}
            return Response(
                status=401,
                body=codec.encode_json(body),
                headers={"WWW-Authenticate": "Bearer"},
            )
        if path not in self._routes:
            return self._no_route(404, f"no route {path}", headers)
        known = self._routes[path].verb
        if method != known and (method, known) != ("HEAD", "GET"):
            text = f"{path} takes {known}, not {method}"
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

    def failure(self, error: Exception, headers: Mapping[str, str]) -> Response:
        """The answer that reports `error`."""
        if not isinstance(error, AiosyncError):
            logger.error("%s: a request failed", self.name, exc_info=error)
        return self._error(error_info(error), headers)

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

    def _respond(
        self,
        status: int,
        reply: dict[str, Any],
        headers: Mapping[str, str],
        extra: dict[str, str] | None = None,
    ) -> Response:
        reply = {**reply, "aiosync": self.engine.peer_state()}
        packed = codec.accepts_msgpack(headers.get("accept"))
        return Response(
            status=status,
            body=codec.encode_msgpack(reply) if packed else codec.encode_json(reply),
            content_type=codec.MSGPACK if packed else codec.JSON,
            headers=extra or {},
        )
