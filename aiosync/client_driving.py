"""A driver's calls to a worker: announce a round, follow it, decide; and a fleet's, for a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiosync.codec import convert
from aiosync.driven import TicketState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiosync.client_protocol import Reply
    from aiosync.copy_order import CopyOrder
    from aiosync.messages import RoundHeader
    from aiosync.ticket import RoundTicket


class DrivingCalls:
    """Part of `HTTPVLLMWeightSyncClient`."""

    _do: Callable[..., Awaitable[Reply]]
    _ask: Callable[..., Awaitable[Reply]]

    async def announce_ticket(
        self, ticket: RoundTicket, *, timeout: float | None = None
    ) -> TicketState:
        """Have the worker expect the ticket's round. May be repeated."""
        body: dict[str, Any] = {"ticket": ticket}
        reply = await self._do("round_ticket", "announce", body, None, timeout, needs="ticket")
        return _state(reply)

    async def commit_ticket(self, id: str, *, timeout: float | None = None) -> TicketState:
        """Let the worker swap in what it has verified; returns when it has, or has failed to."""
        reply = await self._do(
            "round_ticket/commit", "finish", {"id": id}, None, timeout, needs="ticket"
        )
        return _state(reply)

    async def cancel_ticket(
        self, id: str, reason: str = "", *, timeout: float | None = None
    ) -> Reply:
        """End the ticket's round, and refuse it from now on. May be repeated."""
        body = {"id": id, "reason": reason}
        return await self._do("round_ticket/cancel", "abort", body, None, timeout)

    async def send_copy(
        self, order: CopyOrder, *, header: RoundHeader, timeout: float | None = None
    ) -> Reply:
        """Have the worker send its model to another one; returns once that has committed it."""
        body: dict[str, Any] = {"order": order}
        return await self._do("send_weights", "copy", body, header, timeout)

    async def cancel_copy(
        self, id: str, *, header: RoundHeader, timeout: float | None = None
    ) -> Reply:
        """End such a copy; returns once its receiver was let go."""
        return await self._do("send_weights/cancel", "copy", {"id": id}, header, timeout)

    async def ticket_state(
        self,
        id: str,
        *,
        beside: str | None = None,
        wait_s: float = 0.0,
        timeout: float | None = None,
    ) -> TicketState:
        """What became of the ticket there.

        Args:
            beside: Wait for up to `wait_s` seconds (at most five) while its phase is this one.
        """
        query = {"id": id, "wait_ms": int(wait_s * 1000)}
        if beside is not None:
            query["beside"] = beside
        return _state(await self._ask("round_ticket/state", "ticket", timeout, query))


def _state(reply: Reply) -> TicketState:
    return convert(reply.message["ticket"], TicketState, what="reply")
