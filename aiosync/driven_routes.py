"""The routes by which a driver announces a round to a worker, follows it, and decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, final

import msgspec
from msgspec import Meta

from aiosync.defaults import DEFAULTS
from aiosync.messages import Name
from aiosync.route_types import Answer, Route, whole
from aiosync.ticket import RoundTicket, ticket_of

if TYPE_CHECKING:
    from aiosync.route_types import Request
    from aiosync.worker_cycle import WorkerCycle

_LONGEST_S: Final = DEFAULTS.probe_s / 2


class AnnounceBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``round_ticket``."""

    ticket: RoundTicket


class WordBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``round_ticket/commit`` and ``round_ticket/cancel``."""

    id: Name
    reason: Annotated[str, Meta(max_length=4096)] = ""


def driven_routes(cycle: WorkerCycle) -> dict[str, Route]:
    """Path to route, for the rounds of one worker."""
    handlers = _Handlers(cycle)
    return {
        "/round_ticket": Route("POST", handlers.announce),
        "/round_ticket/commit": Route("POST", handlers.commit),
        "/round_ticket/cancel": Route("POST", handlers.cancel),
        "/round_ticket/state": Route("GET", handlers.state),
    }


@final
class _Handlers:
    def __init__(self, cycle: WorkerCycle) -> None:
        self._cycle = cycle

    async def announce(self, request: Request) -> Answer:
        body = request.read(AnnounceBody, needs_body=True)
        state = self._cycle.driven.announce(ticket_of(body.ticket))
        return Answer({"message": "Ticket announced", "ticket": state})

    async def commit(self, request: Request) -> Answer:
        body = request.read(WordBody, needs_body=True)
        driven = self._cycle.driven
        driven.allow(body.id)
        state = await driven.state_of(body.id, beside="received", seconds=DEFAULTS.commit_s)
        return Answer({"message": "Commit allowed", "ticket": state})

    async def cancel(self, request: Request) -> Answer:
        body = request.read(WordBody, needs_body=True)
        await self._cycle.cancel_driven(body.id, body.reason)
        return Answer({"message": "Ticket withdrawn"})

    async def state(self, request: Request) -> Answer:
        """Answers at once, or once the phase is another than ``beside``, within ``wait_ms``."""
        query = request.query
        seconds = min(whole("wait_ms", query.get("wait_ms", "0")) / 1000, _LONGEST_S)
        state = await self._cycle.driven.state_of(
            query.get("id", ""), beside=query.get("beside"), seconds=seconds
        )
        return Answer({"ticket": state})
