"""What each route does, given the engine: read the body, call, say what was done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from aiosync import codec
from aiosync.control_routes import ControlHandlers
from aiosync.defaults import DEFAULTS
from aiosync.errors import Fenced
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
from aiosync.metrics_text import CONTENT_TYPE, metrics_of
from aiosync.route_types import (
    Answer,
    Request,
    Response,
    Route,
    ServedEngine,
    bad_query,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiosync.event_stream import EventStreams

__all__ = ["Answer", "Handlers", "Request", "Response", "Route", "ServedEngine"]


@final
class Handlers:
    """The handlers of one service; `table` maps a path to its verb and handler."""

    def __init__(
        self, engine: ServedEngine, streams: EventStreams, *, world_size: int | None
    ) -> None:
        self.engine = engine
        self._streams = streams
        large = DEFAULTS.body_limit_bytes
        self.table: dict[str, Route] = {
            "/init_weight_transfer_engine": Route("POST", self._init, DEFAULTS.init_body_bytes),
            "/shutdown_weight_transfer_engine": Route("POST", self._shutdown),
            "/start_weight_update": Route("POST", self._start),
            "/start_draft_weight_update": Route("POST", self._start_draft),
            "/update_weights": Route("POST", self._update, large),
            "/prepare_weight_update": Route("POST", self._prepare),
            "/finish_weight_update": Route("POST", self._finish),
            "/abort_weight_update": Route("POST", self._abort),
            "/weight_update_status": Route("GET", self._status),
            "/health": Route("GET", self._health),
            "/ready": Route("GET", self._ready),
            "/metrics": Route("GET", self._metrics),
            "/events": Route("GET", self._events),
            **ControlHandlers(engine, world_size=world_size).table,
        }

    # -- vLLM's routes ---------------------------------------------------------------------------

    async def _init(self, request: Request) -> Answer:
        body = request.read(InitBody)
        info, header = _unwrap(body.init_info, body.aiosync, at="$.init_info")
        await self.engine.init_transfer_engine(info, header=header)
        return Answer({"message": "Weight transfer initialized"})

    async def _shutdown(self, request: Request) -> Answer:
        header = read_header(request.read(PlainBody).aiosync)
        owner = self.engine.peer_state().owner
        if header is None and owner is not None:
            # vLLM has no owners; here a bare call must not cut a trainer's channel.
            raise Fenced(
                f"shutdown: this worker belongs to {owner}; a client without a round header must"
                " initialise first",
                detail={"owner": owner},
            )
        await self.engine.shutdown(header=header)
        return Answer({"message": "Weight transfer shut down"})

    async def _start(self, request: Request) -> Answer:
        header = read_header(request.read(PlainBody).aiosync)
        await self.engine.start_weight_update(header=header)
        return Answer({"message": "Weight update started"})

    async def _start_draft(self, request: Request) -> Answer:
        header = read_header(request.read(PlainBody).aiosync)
        await self.engine.start_draft_weight_update(header=header)
        return Answer({"message": "Draft weight update started"})

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
            holders = peer.detail.get("held_by", [])
            others = [holder for holder in holders if not holder.startswith("weights: ")]
            if others or not holders:
                who = f" ({', '.join(others)})" if others else ""
                reasons.append(f"generation is paused{who}")
        if peer.state == "closed":
            reasons.append("the engine is closed")
        reply = {"ready": not reasons, "reasons": reasons}
        return Answer(reply, 503 if reasons else 200)

    async def _metrics(self, _request: Request) -> Response:
        text = metrics_of(self.engine.peer_state(), streams=len(self._streams))
        return Response(body=text.encode(), content_type=CONTENT_TYPE)

    async def _events(self, request: Request) -> Response:
        since = request.query.get("since", request.headers.get("last-event-id"))
        sse = SSE in request.headers.get("accept", "")
        machine = request.query.get("of", "engine")
        if machine not in ("engine", "generation"):
            raise bad_query("of", machine, "engine or generation")
        watched = self.engine if machine == "engine" else self.engine.generation
        stream = self._streams.open(
            watched.events, since=None if since is None else whole("since", since), sse=sse
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
    numbers = {name: whole(name, query.get(name, "0")) for name in ("epoch", "round")}
    return codec.convert({"owner": query["owner"], **numbers}, RoundHeader, what="query", at="?")
