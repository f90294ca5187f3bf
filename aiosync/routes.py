"""What each route does, given the engine: read the body, call, say what was done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, final

from aiosync import codec
from aiosync.errors import Validation
from aiosync.event_stream import NDJSON, SSE
from aiosync.messages import (
    AbortBody,
    FinishBody,
    InitBody,
    PlainBody,
    RoundHeader,
    UpdateBody,
    check_announced,
    read_header,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from aiosync.event_stream import EventStreams
    from aiosync.messages import PeerState
    from statemachines.hub import TransitionHub

T = TypeVar("T")
_NO_LABEL = "default"  # what vLLM answers before the first version
_TRUTH = ("true", "1", "false", "0")
_DIGITS = 18  # a longer number is no 64-bit one, and is not worth converting


Step: TypeAlias = Callable[..., Awaitable[Any]]
"""A step as callers see it: it takes ``header=``."""


class ServedEngine(Protocol):
    """What the server drives: a worker engine, or a group of them."""

    # The steps are properties here because a subclass writes them bare: without `header`, blocking
    # or not. What an engine's instance has is the wrapped, awaitable step (`aiosync.overrides`).
    @property
    def init_transfer_engine(self) -> Step: ...
    @property
    def start_weight_update(self) -> Step: ...
    @property
    def update_weights(self) -> Step: ...
    @property
    def prepare_weight_update(self) -> Step: ...
    @property
    def finish_weight_update(self) -> Step: ...
    @property
    def abort_weight_update(self) -> Step: ...
    @property
    def shutdown(self) -> Step: ...

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
class Request:
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    def read(self, type: type[T]) -> T:
        """The body; an absent one counts as an empty object."""
        content_type = self.headers.get("content-type")
        if not self.body:
            return codec.convert({}, type)
        return codec.decode(self.body, type, content_type=content_type)


@dataclass(frozen=True)
class Answer:
    """What a handler has to say; the service adds the engine's state and encodes it."""

    reply: dict[str, Any]
    status: int = 200


Handler: TypeAlias = Callable[[Request], Awaitable[Answer | Response]]


@final
class Handlers:
    """The handlers of one service; `table` maps a path to its verb and handler."""

    def __init__(
        self, engine: ServedEngine, streams: EventStreams, *, world_size: int | None
    ) -> None:
        self.engine = engine
        self._streams = streams
        self._world_size = world_size
        self.table: dict[str, tuple[str, Handler]] = {
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

    # -- vLLM's routes ---------------------------------------------------------------------------

    async def _init(self, request: Request) -> Answer:
        body = request.read(InitBody)
        info, header = _unwrap(body.init_info, body.aiosync, at="$.init_info")
        await self.engine.init_transfer_engine(info, header=header)
        return Answer({"message": "Weight transfer initialized"})

    async def _shutdown(self, request: Request) -> Answer:
        header = read_header(request.read(PlainBody).aiosync)
        await self.engine.shutdown(header=header)
        return Answer({"message": "Weight transfer shut down"})

    async def _start(self, request: Request) -> Answer:
        header = read_header(request.read(PlainBody).aiosync)
        await self.engine.start_weight_update(header=header)
        return Answer({"message": "Weight update started"})

    async def _update(self, request: Request) -> Answer:
        body = request.read(UpdateBody)
        info, header = _unwrap(body.update_info, body.aiosync, at="$.update_info")
        check_announced(info)
        await self.engine.update_weights(info, header=header)
        return Answer({"message": "Weights updated"})

    async def _finish(self, request: Request) -> Answer:
        body = request.read(FinishBody)
        header = read_header(body.aiosync)
        await self.engine.finish_weight_update(body.weight_version, header=header)
        return Answer({"message": "Weight update finished"})

    async def _weight_info(self, _request: Request) -> Answer:
        version = self.engine.peer_state().version
        return Answer({"weight_version": _NO_LABEL if version is None else version.wire})

    async def _get_world_size(self, request: Request) -> Answer:
        include_dp = request.query.get("include_dp", "true").lower()
        if include_dp not in _TRUTH:
            raise _bad_query("include_dp", include_dp, "true or false")
        size = self._world_size
        return Answer({"world_size": self.engine.peer_state().world_size if size is None else size})

    # -- ours ------------------------------------------------------------------------------------

    async def _prepare(self, request: Request) -> Answer:
        header = read_header(request.read(PlainBody).aiosync)
        await self.engine.prepare_weight_update(header=header)
        return Answer({"message": "Weight update prepared"})

    async def _abort(self, request: Request) -> Answer:
        body = request.read(AbortBody)
        header = read_header(body.aiosync)
        await self.engine.abort_weight_update(body.reason, header=header)
        return Answer({"message": "Weight update aborted"})

    async def _status(self, request: Request) -> Answer:
        if "owner" in request.query:
            self.engine.touch(_header_of(request.query))
        return Answer({"state": self.engine.peer_state().state})

    async def _health(self, _request: Request) -> Response:
        # Open to everybody, so it says nothing else.
        return Response(body=b'{"status":"ok"}')

    async def _ready(self, _request: Request) -> Answer:
        peer = self.engine.peer_state()
        reasons = []
        if peer.weights != "intact":
            reasons.append(f"the weights are {peer.weights}")
        if peer.detail.get("paused"):
            reasons.append("generation is paused")
        if peer.state == "closed":
            reasons.append("the engine is closed")
        reply = {"ready": not reasons, "reasons": reasons}
        return Answer(reply, 503 if reasons else 200)

    async def _events(self, request: Request) -> Response:
        since = request.query.get("since", request.headers.get("last-event-id"))
        sse = SSE in request.headers.get("accept", "")
        stream = self._streams.open(
            self.engine.events, since=None if since is None else _whole("since", since), sse=sse
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
    numbers = {name: _whole(name, query.get(name, "0")) for name in ("epoch", "round")}
    return codec.convert({"owner": query["owner"], **numbers}, RoundHeader, what="query", at="?")


def _whole(name: str, text: str) -> int:
    if not text.isdecimal() or len(text) > _DIGITS:
        raise _bad_query(name, text, "a whole number")
    return int(text)


def _bad_query(name: str, value: str, wanted: str) -> Validation:
    return Validation(
        f"query {name} must be {wanted}, not {value[:40]!r}", detail={"path": f"query.{name}"}
    )
