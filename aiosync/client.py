"""The HTTP client of vLLM's weight-transfer routes, and of ours where the server has them."""

from __future__ import annotations

from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Self, final

from aiosync.budget import check_seconds
from aiosync.client_controls import ControlCalls
from aiosync.client_driving import DrivingCalls
from aiosync.client_protocol import (
    Capabilities,
    Readiness,
    Reply,
    SupportsAbort,
    SupportsDraft,
    SupportsPause,
    SupportsPrepare,
    SupportsStatus,
    VLLMWeightSyncClient,
    adapt_client,
    capabilities_of,
    sync_client,
)
from aiosync.codec import encode_json
from aiosync.connections import Connections, Endpoint
from aiosync.defaults import DEFAULTS
from aiosync.errors import Refused, Validation
from aiosync.former_names import KnowsFormerNames
from aiosync.ipc_handles import with_pickled_handles
from aiosync.replies import read_readiness, read_reply

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping
    from pathlib import Path

    import aiohttp

    from aiosync.connections import Wire
    from aiosync.copy_order import Reach
    from aiosync.messages import RoundHeader
    from aiosync.replies import RawReply

__all__ = [
    "Capabilities",
    "HTTPVLLMWeightSyncClient",
    "Readiness",
    "Reply",
    "SupportsAbort",
    "SupportsDraft",
    "SupportsPause",
    "SupportsPrepare",
    "SupportsStatus",
    "VLLMWeightSyncClient",
    "adapt_client",
    "capabilities_of",
    "sync_client",
]

_NO_ROUTE = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)


@final
class HTTPVLLMWeightSyncClient(ControlCalls, DrivingCalls, KnowsFormerNames):
    """One inference server, over TCP or a Unix socket.

    Every method takes ``timeout=`` for this one call, and ``header=`` where a round has one; it
    is sent only when given. Cancelling a call drops the connection, not the work on the server.
    ``async with client:`` around several calls saves setting up a session for each. The client
    can be pickled, and used under one event loop after another.

    Args:
        base_url: ``http(s)://host:port[/prefix]``, ``http://[::1]:port`` or
            ``unix:///path/to.sock``.
        timeout: Seconds for one call that does something; calls that only ask take at most
            `DEFAULTS.probe_s`. ``update_weights`` takes the header's deadline where it has one.
        session: An aiohttp session of the caller's; used, never closed.
        token_file: File with the bearer token, read again for every session.
        token: The bearer token itself.
        headers: Sent with every request.
        allow_pickled_handles: Send CUDA-IPC handles to a stock vLLM the way its own client does:
            pickled. The server must allow it, and will unpickle what it is sent.

    Raises:
        Validation: The URL, the timeout or the token cannot be used.
        PeerLost: Connecting failed, or the connection broke.
        PhaseTimeout: No answer in time.
        ProtocolMismatch: An answer that is not one of this protocol.
        RemoteError: The server reports a failure; its text is in the message.
    """

    def __init__(
        self,
        base_url: str,
        timeout: float = DEFAULTS.rpc_s,
        *,
        session: aiohttp.ClientSession | None = None,
        token_file: str | Path | None = None,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        allow_pickled_handles: bool = False,
    ) -> None:
        self.timeout = check_seconds(timeout, "timeout")
        self.allow_pickled_handles = allow_pickled_handles
        self._connections: Wire = Connections(
            Endpoint.of(base_url),
            session=session,
            token=token,
            token_file=token_file,
            headers=headers,
        )
        self._capabilities: Capabilities | None = None

    @classmethod
    def over(cls, wire: Wire, *, timeout: float = DEFAULTS.rpc_s) -> Self:
        """A client whose requests travel over something else than HTTP."""
        client = cls("http://localhost", timeout)
        client._connections = wire
        return client

    @property
    def name(self) -> str:
        """The base URL: names the server in errors and reports."""
        return self._connections.endpoint.name

    base_url = name

    async def reach(self) -> Reach:
        """URL and token, for another process that is to reach the server.

        Raises:
            Refused: They are not all that it takes: a session or headers were given, or Ray.
        """
        if not isinstance(self._connections, Connections):
            raise Refused(f"{self.name} is no URL that another process can reach")
        return await self._connections.reach()

    @property
    def is_alone(self) -> bool:
        """Whether no code of a caller's has a part in a call: neither a session nor a wire."""
        return isinstance(self._connections, Connections) and not self._connections.shares_session

    def __repr__(self) -> str:
        return f"<HTTPVLLMWeightSyncClient {self.name} {self._connections!r}>"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_capabilities": None}

    async def __aenter__(self) -> Self:
        await self._connections.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._connections.close()

    # -- vLLM's routes ---------------------------------------------------------------------------

    async def init_weight_transfer_engine(
        self,
        init_info: dict[str, Any],
        *,
        header: RoundHeader | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """Have the server join the data plane; returns when it has."""
        body = {"init_info": init_info}
        return await self._do("init_weight_transfer_engine", "init", body, header, timeout)

    async def start_weight_update(
        self, *, header: RoundHeader | None = None, timeout: float | None = None
    ) -> Reply:
        """Open a round."""
        return await self._do("start_weight_update", "start", {}, header, timeout)

    async def update_weights(
        self,
        update_info: dict[str, Any] | list[dict[str, Any]],
        *,
        header: RoundHeader | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """Have the server receive what the payload announces; returns when it has."""
        if self.allow_pickled_handles:
            update_info = with_pickled_handles(update_info)
        if timeout is None and header is not None:
            timeout = header.deadline_s
        body = {"update_info": update_info}
        return await self._do("update_weights", "update", body, header, timeout)

    async def finish_weight_update(
        self,
        weight_version: str | None = None,
        *,
        header: RoundHeader | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """Commit the round. If no answer comes, the server may hold either version."""
        body = {} if weight_version is None else {"weight_version": weight_version}
        return await self._do("finish_weight_update", "finish", body, header, timeout)

    async def shutdown_weight_transfer_engine(
        self, *, header: RoundHeader | None = None, timeout: float | None = None
    ) -> Reply:
        """Have the server leave the data plane; idempotent."""
        return await self._do("shutdown_weight_transfer_engine", "shutdown", {}, header, timeout)

    # -- ours ------------------------------------------------------------------------------------

    async def prepare_weight_update(
        self, *, header: RoundHeader | None = None, timeout: float | None = None
    ) -> Reply:
        """Have the server check that everything arrived; nothing becomes visible."""
        return await self._do("prepare_weight_update", "prepare", {}, header, timeout)

    async def abort_weight_update(
        self,
        reason: str = "",
        *,
        header: RoundHeader | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """Give the open round up; a no-op where there is none."""
        body = {"reason": reason} if reason else {}
        return await self._do("abort_weight_update", "abort", body, header, timeout)

    async def weight_update_status(
        self, *, header: RoundHeader | None = None, timeout: float | None = None
    ) -> Reply:
        """What the server holds and in which state it is; with a header, renews its lease."""
        query = None
        if header is not None:
            query = {"owner": header.owner, "epoch": header.epoch, "round": header.round}
        return await self._ask("weight_update_status", "aiosync", timeout, query)

    async def capabilities(
        self, refresh: bool = False, *, timeout: float | None = None
    ) -> Capabilities:
        """What the server can do beyond vLLM's routes; protocol 0 for a stock one. Remembered."""
        if self._capabilities is None or refresh:
            raw = await self._get("weight_update_status", timeout)
            peer = None
            if raw.status not in _NO_ROUTE:
                peer = read_reply(raw, replica=self.name, phase="status", needs="aiosync").peer
            self._capabilities = Capabilities.of(peer)
        return self._capabilities

    async def health(self, *, timeout: float | None = None) -> None:
        """Return if the server is alive (vLLM answers with an empty body), raise if not."""
        raw = await self._get("health", timeout)
        if raw.status != HTTPStatus.OK:
            read_reply(raw, replica=self.name, phase="health")

    async def ready(self, *, timeout: float | None = None) -> Readiness:
        """Whether the replica may serve: weights intact, not paused."""
        raw = await self._get("ready", timeout)
        return read_readiness(raw, replica=self.name)

    async def events(self, since: int | None = None) -> AsyncGenerator[dict[str, Any], None]:
        """The server's transitions as dicts, first those after `since` that it still has.

        Ends when the server closes; one that is gone is noticed after a lease's time of silence.
        To leave early, ``aclose()`` the iterator.
        """
        query = {} if since is None else {"since": since}
        found = self._connections.objects("events", silence=DEFAULTS.lease_s, query=query)
        async with aclosing(found):
            async for event in found:
                yield event

    # -- one call --------------------------------------------------------------------------------

    async def _do(
        self,
        route: str,
        phase: str,
        body: dict[str, Any],
        header: RoundHeader | None,
        timeout: float | None,
        *,
        query: dict[str, Any] | None = None,
        needs: str | None = None,
        bodied: bool = False,
    ) -> Reply:
        if header is not None:
            body = {**body, "aiosync": header}
        limit = self.timeout if timeout is None else check_seconds(timeout, "timeout")
        try:
            data = encode_json(body) if body or bodied else None
        except Validation as error:
            error.locate(replica=self.name, phase=phase)
            if phase == "update" and not self.allow_pickled_handles:
                error.next_step = (
                    "CUDA-IPC handles for a stock vLLM need allow_pickled_handles=True"
                )
            raise
        raw = await self._connections.send(
            "POST", route, phase=phase, timeout=limit, body=data, query=query
        )
        return read_reply(raw, replica=self.name, phase=phase, needs=needs)

    async def _ask(
        self,
        route: str,
        needs: str,
        timeout: float | None,
        query: dict[str, Any] | None = None,
    ) -> Reply:
        raw = await self._get(route, timeout, query)
        return read_reply(raw, replica=self.name, phase=route, needs=needs)

    async def _get(
        self, route: str, timeout: float | None, query: dict[str, Any] | None = None
    ) -> RawReply:
        limit = min(self.timeout, DEFAULTS.probe_s)
        if timeout is not None:
            limit = check_seconds(timeout, "timeout")
        return await self._connections.send("GET", route, phase=route, timeout=limit, query=query)
