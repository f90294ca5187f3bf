"""The control plane's server without a web framework: one request in, one response out.

`aiosync.server` puts it on aiohttp and on sockets.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

import msgspec

from aiosync import codec
from aiosync.defaults import DEFAULTS
from aiosync.errors import AiosyncError, Unauthorized, Validation
from aiosync.event_stream import NDJSON, SSE, EventStreams
from aiosync.messages import (
    AbortBody,
    ErrorInfo,
    FinishBody,
    InitBody,
    PeerState,
    PlainBody,
    RoundHeader,
    UpdateBody,
    check_announced,
    error_info,
    error_type,
    read_header,
)
from aiosync.tokens import check_token, is_authorized

if TYPE_CHECKING:
    from aiohttp import web

    from statemachines.hub import TransitionHub

T = TypeVar("T")
logger = logging.getLogger(__name__)
_NO_LABEL = "default"  # what vLLM answers before the first version
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


class ServedEngine(Protocol):
    """What the server drives: a worker engine, or a group of them."""

    async def init_transfer_engine(
        self, init_info: Any, *, header: RoundHeader | None = None
    ) -> Any: ...
    async def start_weight_update(self, *, header: RoundHeader | None = None) -> Any: ...
    async def update_weights(
        self, update_info: Any, *, header: RoundHeader | None = None
    ) -> Any: ...
    async def prepare_weight_update(self, *, header: RoundHeader | None = None) -> Any: ...
    async def finish_weight_update(
        self, weight_version: str | None = None, *, header: RoundHeader | None = None
    ) -> Any: ...
    async def abort_weight_update(
        self, reason: str = "", *, header: RoundHeader | None = None
    ) -> Any: ...
    async def shutdown(self, *, header: RoundHeader | None = None) -> Any: ...

    @property
    def events(self) -> TransitionHub: ...

    def peer_state(self) -> PeerState:
        """What every reply carries; ``detail["paused"]`` is true while generation is held."""
        ...

    def touch(self, header: RoundHeader | None) -> None:
        """Renew the lease of the round that `header` names."""
        ...


@dataclass(frozen=True, kw_only=True)
class Response:
    """An answer: a whole `body`, or a `stream` of parts that ends when the service closes."""

    status: int = 200
    body: bytes = b""
    content_type: str = codec.JSON
    headers: dict[str, str] = field(default_factory=dict)
    stream: AsyncGenerator[bytes, None] | None = None


@dataclass(frozen=True, kw_only=True)
class _Request:
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    def read(self, type: type[T]) -> T:
        """The body; an absent one counts as an empty object."""
        content_type = self.headers.get("content-type")
        if not self.body:
            return codec.convert({}, type)
        return codec.decode(self.body, type, content_type=content_type)


_Handler = Callable[[_Request], Awaitable["dict[str, Any] | Response"]]


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
        engine: ServedEngine,
        *,
        token: str | None = None,
        name: str | None = None,
        world_size: int | None = None,
    ) -> None:
        self.engine = engine
        self.name = name or str(getattr(engine, "name", "worker"))
        self._token = None if token is None else check_token(token)
        self._world_size = world_size
        self._streams = EventStreams()
        self._routes: dict[str, tuple[str, _Handler]] = {
            "/init_weight_transfer_engine": ("POST", self._init),
            "/shutdown_weight_transfer_engine": ("POST", self._shutdown),
            "/start_weight_update": ("POST", self._start),
            "/update_weights": ("POST", self._update),
            "/prepare_weight_update": ("POST", self._prepare),
            "/finish_weight_update": ("POST", self._finish),
            "/abort_weight_update": ("POST", self._abort),
            "/weight_update_status": ("GET", self._status),
            "/weight_info": ("GET", self._weight_info),
            "/get_world_size": ("GET", self._get_world_size),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/events": ("GET", self._events),
        }

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
        from aiosync.server import routes_of  # noqa: PLC0415  only here is a framework needed

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
        handler = self._routes[path][1]
        try:
            reply = await handler(_Request(query=query, headers=headers, body=body))
            if isinstance(reply, Response):
                return reply
            return self._respond(200, reply, headers)
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
        known = self._routes[path][0]
        if method != known and (method, known) != ("HEAD", "GET"):
            text = f"{path} takes {known}, not {method}"
            return self._no_route(405, text, headers, {"Allow": known})
        if headers.get("content-encoding", "identity").lower() != "identity":
            return self.failure(Validation("compressed bodies are not accepted"), headers)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > DEFAULTS.body_limit_bytes:
            error = codec.too_large("body", DEFAULTS.body_limit_bytes, int(length))
            return self.failure(error, headers)
        return None

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

    # -- vLLM's routes ---------------------------------------------------------------------------

    async def _init(self, request: _Request) -> dict[str, Any]:
        body = request.read(InitBody)
        info, header = _unwrap(body.init_info, body.aiosync, at="$.init_info")
        await self.engine.init_transfer_engine(info, header=header)
        return {"message": "Weight transfer initialized"}

    async def _shutdown(self, request: _Request) -> dict[str, Any]:
        header = read_header(request.read(PlainBody).aiosync)
        await self.engine.shutdown(header=header)
        return {"message": "Weight transfer shut down"}

    async def _start(self, request: _Request) -> dict[str, Any]:
        header = read_header(request.read(PlainBody).aiosync)
        await self.engine.start_weight_update(header=header)
        return {"message": "Weight update started"}

    async def _update(self, request: _Request) -> dict[str, Any]:
        body = request.read(UpdateBody)
        info, header = _unwrap(body.update_info, body.aiosync, at="$.update_info")
        check_announced(info)
        await self.engine.update_weights(info, header=header)
        return {"message": "Weights updated"}

    async def _finish(self, request: _Request) -> dict[str, Any]:
        body = request.read(FinishBody)
        header = read_header(body.aiosync)
        await self.engine.finish_weight_update(body.weight_version, header=header)
        return {"message": "Weight update finished"}

    async def _weight_info(self, _request: _Request) -> dict[str, Any]:
        version = self.engine.peer_state().version
        return {"weight_version": _NO_LABEL if version is None else version.wire}

    async def _get_world_size(self, request: _Request) -> dict[str, Any]:
        include_dp = request.query.get("include_dp", "true").lower()
        if include_dp not in _TRUTH:
            raise _bad_query("include_dp", include_dp, "true or false")
        size = self._world_size
        return {"world_size": self.engine.peer_state().world_size if size is None else size}

    # -- ours ------------------------------------------------------------------------------------

    async def _prepare(self, request: _Request) -> dict[str, Any]:
        header = read_header(request.read(PlainBody).aiosync)
        await self.engine.prepare_weight_update(header=header)
        return {"message": "Weight update prepared"}

    async def _abort(self, request: _Request) -> dict[str, Any]:
        body = request.read(AbortBody)
        header = read_header(body.aiosync)
        await self.engine.abort_weight_update(body.reason, header=header)
        return {"message": "Weight update aborted"}

    async def _status(self, request: _Request) -> dict[str, Any]:
        if "owner" in request.query:
            self.engine.touch(_header_of(request.query))
        return {"state": self.engine.peer_state().state}

    async def _health(self, _request: _Request) -> Response:
        # Open to everybody, so it says nothing else.
        return Response(body=b'{"status":"ok"}')

    async def _ready(self, request: _Request) -> Response:
        peer = self.engine.peer_state()
        reasons = []
        if peer.weights != "intact":
            reasons.append(f"the weights are {peer.weights}")
        if peer.detail.get("paused"):
            reasons.append("generation is paused")
        if peer.state == "closed":
            reasons.append("the engine is closed")
        reply = {"ready": not reasons, "reasons": reasons}
        return self._respond(503 if reasons else 200, reply, request.headers)

    async def _events(self, request: _Request) -> Response:
        since = request.query.get("since", request.headers.get("last-event-id"))
        if since is not None and not since.isdecimal():
            raise _bad_query("since", since, "a whole number")
        sse = SSE in request.headers.get("accept", "")
        stream = self._streams.open(
            self.engine.events, since=None if since is None else int(since), sse=sse
        )
        return Response(
            content_type=SSE if sse else NDJSON,
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
            stream=stream,
        )


def _unwrap(info: Any, outer: Any, *, at: str) -> tuple[Any, RoundHeader | None]:
    """The payload without our object, and the header: outside the payload, or a key of it."""
    codec.refuse_pickles(info, at=at)
    header = read_header(outer)
    payloads = info if isinstance(info, list) else [info]
    for payload in payloads:
        inner = read_header(payload.pop("aiosync", None))
        header = header or inner
    return info, header


def _header_of(query: Mapping[str, str]) -> RoundHeader:
    numbers = {}
    for name in ("epoch", "round"):
        text = query.get(name, "0")
        if not text.isdecimal():
            raise _bad_query(name, text, "a whole number")
        numbers[name] = int(text)
    return codec.convert(
        {"owner": query["owner"], **numbers}, RoundHeader, what="query", at="?"
    )


def _bad_query(name: str, value: str, wanted: str) -> Validation:
    return Validation(
        f"query {name} must be {wanted}, not {value!r}", detail={"path": f"query.{name}"}
    )
