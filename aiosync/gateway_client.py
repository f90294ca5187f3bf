"""Deciding about a gateway's rounds from another process."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self, final

from aiosync.budget import check_seconds
from aiosync.codec import convert, encode_json
from aiosync.connections import Connections, Endpoint
from aiosync.defaults import DEFAULTS
from aiosync.offers import Offer, RoundRecord
from aiosync.replies import read_reply

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path


@final
class GatewayClient:
    """An orchestrator's view of a `FleetGateway` that is served elsewhere.

    It holds nothing: one that died is replaced by another, which gets the offers that still wait
    and asks `rounds` what happened. May be pickled, and used under one event loop after another.

    Args:
        url: Of the gateway's server.
        timeout: Seconds for one call.
        token, token_file: What the server asks for.
    """

    def __init__(
        self,
        url: str,
        timeout: float = DEFAULTS.probe_s,
        *,
        token: str | None = None,
        token_file: str | Path | None = None,
    ) -> None:
        self.timeout = check_seconds(timeout, "timeout")
        self._connections = Connections(Endpoint.of(url), token=token, token_file=token_file)

    @property
    def url(self) -> str:
        return self._connections.endpoint.name

    def __repr__(self) -> str:
        return f"<GatewayClient {self.url}>"

    async def __aenter__(self) -> Self:
        await self._connections.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._connections.close()

    async def offers(self) -> AsyncGenerator[Offer, None]:
        """Every offer that waits for a decision, and then each new one.

        To leave early, ``aclose()`` the iterator.

        Raises:
            PeerLost, PhaseTimeout: The gateway is gone, or silent for a lease's time.
        """
        found = self._connections.objects("offers", silence=DEFAULTS.lease_s, query={})
        async with aclosing(found):
            async for line in found:
                yield Offer(convert(line, RoundRecord, what="offer"), self)

    async def accept(self, id: str) -> None:
        """As `Offer.accept`, for the offer of that id."""
        await self._post("offers/accept", {"offer": id})

    async def decline(self, id: str, reason: str = "") -> None:
        """As `Offer.decline`, for the offer of that id."""
        await self._post("offers/decline", {"offer": id, "reason": reason})

    async def rounds(self, last: int = 64) -> list[RoundRecord]:
        """The last rounds that were offered, oldest first, and what became of them."""
        raw = await self._connections.send(
            "GET", "rounds", phase="rounds", timeout=self.timeout, query={"last": last}
        )
        reply = read_reply(raw, replica=self.url, phase="rounds", needs="rounds")
        return convert(reply.message["rounds"], list[RoundRecord], what="reply")

    async def _post(self, route: str, body: dict[str, Any]) -> None:
        raw = await self._connections.send(
            "POST", route, phase="decide", timeout=self.timeout, body=encode_json(body)
        )
        read_reply(raw, replica=self.url, phase="decide")
