"""The routes by which a third process decides about a gateway's rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, final

import anyio
import msgspec
from msgspec import Meta

from aiosync import codec
from aiosync.defaults import DEFAULTS
from aiosync.event_stream import NDJSON
from aiosync.messages import Name
from aiosync.route_types import Answer, Response, Route, whole

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from aiosync.offers import OfferDesk, RoundRecord
    from aiosync.route_types import Request


class DecisionBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``offers/accept`` and ``offers/decline``."""

    offer: Name
    reason: Annotated[str, Meta(max_length=4096)] = ""


def gateway_routes(desk: OfferDesk, rounds: Callable[[int], list[RoundRecord]]) -> dict[str, Route]:
    """Path to route, for the offers of `desk`, and what `rounds` says of the last ones."""
    handlers = _Handlers(desk, rounds)
    return {
        "/offers": Route("GET", handlers.offers),
        "/offers/accept": Route("POST", handlers.accept),
        "/offers/decline": Route("POST", handlers.decline),
        "/rounds": Route("GET", handlers.rounds),
    }


@final
class _Handlers:
    def __init__(self, desk: OfferDesk, rounds: Callable[[int], list[RoundRecord]]) -> None:
        self._desk = desk
        self._rounds = rounds

    async def offers(self, _request: Request) -> Response:
        """Endless: those that wait, then each new one, a line of JSON each."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return Response(content_type=NDJSON, headers=headers, stream=self._lines())

    async def _lines(self) -> AsyncGenerator[bytes, None]:
        seq = 0
        while True:
            record: RoundRecord | None = None
            with anyio.move_on_after(DEFAULTS.heartbeat_s):
                record = await self._desk.next_after(seq)
            # A blank line is the heartbeat: a reader can tell silence from death.
            yield b"\n" if record is None else codec.encode_json(record) + b"\n"
            if record is not None:
                seq = record.seq

    async def accept(self, request: Request) -> Answer:
        body = request.read(DecisionBody, needs_body=True)
        await self._desk.accept(body.offer)
        return Answer({"message": "Offer accepted"})

    async def decline(self, request: Request) -> Answer:
        body = request.read(DecisionBody, needs_body=True)
        await self._desk.decline(body.offer, body.reason)
        return Answer({"message": "Offer declined"})

    async def rounds(self, request: Request) -> Answer:
        last = whole("last", request.query.get("last", "64"))
        return Answer({"rounds": self._rounds(last) if last else []})
