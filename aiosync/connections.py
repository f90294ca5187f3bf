"""One server's URL, and the aiohttp sessions that reach it: one per event loop, while in use."""

from __future__ import annotations

import asyncio
import io
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, final
from urllib.parse import urlsplit

import aiohttp
import anyio
import msgspec

from aiosync.codec import JSON, decode_json
from aiosync.copy_order import Reach
from aiosync.defaults import DEFAULTS
from aiosync.errors import (
    AiosyncError,
    PeerLost,
    PhaseTimeout,
    ProtocolMismatch,
    Refused,
    RemoteError,
    Validation,
)
from aiosync.replies import RawReply, read_error
from aiosync.tokens import check_token, load_token

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

_EXAMPLES = "http://host:port, http://[::1]:port or unix:///path/to.sock"
_OK = 200
_AS_BYTES = 1 << 16
_REUSE_S = 1.0  # a connection that was idle for longer is not used again


class Endpoint(msgspec.Struct, frozen=True):
    """Where a server is: a base for URLs, and the Unix socket to send them through, if any."""

    name: str
    base: str
    socket_path: str | None = None

    @classmethod
    def of(cls, base_url: str) -> Self:
        """Parse a base URL.

        Raises:
            Validation: Says what is wrong with it.
        """
        if not isinstance(base_url, str):
            raise Validation(f"base_url must be a str such as {_EXAMPLES}, not {base_url!r}")
        name = base_url.strip().rstrip("/")
        try:
            parts = urlsplit(name)
            has_host = bool(parts.hostname) and parts.port != 0
        except ValueError as error:
            raise Validation(f"base_url {base_url!r}: {error}") from error
        if parts.query or parts.fragment or "@" in parts.netloc:
            raise Validation(f"base_url {base_url!r}: no query, fragment or user may be in it")
        if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
            return cls(name, "http://localhost", parts.path)
        if parts.scheme in ("http", "https") and has_host:
            return cls(name, name)
        raise Validation(f"base_url {base_url!r}: must look like {_EXAMPLES}")

    def url(self, route: str) -> str:
        return f"{self.base}/{route}"

    def named(self, url: str) -> str:
        """A URL of this server as its own, where HTTP calls it ``localhost``."""
        return url.replace(self.base, self.name, 1)


class Wire(Protocol):
    """What carries a client's requests: `Connections`, or the actor calls of Ray."""

    endpoint: Endpoint

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def send(
        self,
        method: str,
        route: str,
        *,
        phase: str,
        timeout: float,
        body: bytes | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> RawReply: ...

    def objects(
        self, route: str, *, silence: float, query: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]: ...


class _Scope:
    __slots__ = ("owned", "session", "token", "users")

    def __init__(self, session: aiohttp.ClientSession, *, owned: bool, token: str | None) -> None:
        self.session = session
        self.owned = owned
        self.token = token
        self.users = 0


@final
class Connections:
    """Makes requests, over connections that are kept from one call to the next at most.

    The aiohttp session lives as long as somebody uses it, per event loop; what travels by pickle
    is the endpoint and the way to the token.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        session: aiohttp.ClientSession | None = None,
        token: str | None = None,
        token_file: str | Path | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if token is not None:
            check_token(token)
        self.endpoint = endpoint
        self._given = session
        self._token = token
        self._token_file = token_file
        self._headers = dict(headers or {})
        self._scopes: dict[asyncio.AbstractEventLoop, _Scope] = {}

    @property
    def shares_session(self) -> bool:
        """Whether the session is the caller's, who may have put code into it."""
        return self._given is not None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_given": None, "_scopes": {}}

    def __repr__(self) -> str:
        return f"users={sum(scope.users for scope in self._scopes.values())}"

    async def reach(self) -> Reach:
        """See `HTTPVLLMWeightSyncClient.reach`."""
        if self._given is not None or self._headers:
            how = "a session or headers of its own"
            raise Refused(f"{self.endpoint.name} is reached through {how}")
        token = await load_token(self._token, self._token_file)
        return Reach(url=self.endpoint.name, token=token)

    async def open(self) -> None:
        """Keep the session of this event loop until `close`; may be nested."""
        loop = asyncio.get_running_loop()
        token = None
        if loop not in self._scopes:
            token = await load_token(self._token, self._token_file)
        scope = self._scopes.get(loop)  # again: another task may have opened it meanwhile
        if scope is None:
            scope = self._scopes[loop] = self._new_scope(token)
            for other in [other for other in self._scopes if other.is_closed()]:
                del self._scopes[other]
        scope.users += 1

    async def close(self) -> None:
        """Undo one `open`; the last one closes the session."""
        loop = asyncio.get_running_loop()
        scope = self._scopes[loop]
        scope.users -= 1
        if scope.users:
            return
        del self._scopes[loop]
        if scope.owned:
            # Shielded: a cancelled round must not leave its sockets open.
            with anyio.move_on_after(DEFAULTS.cleanup_s, shield=True):
                await scope.session.close()

    def _new_scope(self, token: str | None) -> _Scope:
        if self._given is not None:
            if self._given.closed:
                raise Validation(f"the aiohttp session given for {self.endpoint.name} is closed")
            return _Scope(self._given, owned=False, token=token)
        path = self.endpoint.socket_path
        # No limit: in a fleet every call may have to be open before the first can end. Reused only
        # at once: a connection that the server is just closing for its idleness looks like a lost
        # peer, and aiohttp sends no POST twice to find out. Nobody closes one so early.
        options: dict[str, Any] = {"limit": 0, "keepalive_timeout": _REUSE_S}
        connector = (
            aiohttp.TCPConnector(**options)
            if path is None
            else aiohttp.UnixConnector(path=path, **options)
        )
        session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        )
        return _Scope(session, owned=True, token=token)

    def _ask(
        self, method: str, route: str, *, read_timeout: float | None, **options: Any
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        scope = self._scopes[asyncio.get_running_loop()]
        headers = {"Accept-Encoding": "identity", **self._headers, **options.pop("headers", {})}
        if scope.token is not None:
            headers["Authorization"] = f"Bearer {scope.token}"
        return scope.session.request(
            method,
            self.endpoint.url(route),
            headers=headers,
            # The whole call is timed by the caller; aiohttp would round it up to a second.
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=DEFAULTS.connect_s, sock_read=read_timeout
            ),
            # A redirected POST would be replayed as a GET, and its 200 taken for ours.
            allow_redirects=False,
            **options,
        )

    async def send(
        self,
        method: str,
        route: str,
        *,
        phase: str,
        timeout: float,
        body: bytes | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> RawReply:
        """One request and its answer, whatever that is, within `timeout` seconds.

        Raises:
            PeerLost, PhaseTimeout: There was no answer.
            ProtocolMismatch: It was not even HTTP.
        """
        options: dict[str, Any] = {"params": query}
        if body is not None:
            # Large ones as a file: aiohttp warns of large bytes.
            data = body if len(body) <= _AS_BYTES else io.BytesIO(body)
            options |= {"data": data, "headers": {"Content-Type": JSON}}
        try:
            async with asyncio.timeout(timeout):
                await self.open()
                try:
                    async with self._ask(method, route, read_timeout=None, **options) as response:
                        return await _read_body(response, self.endpoint)
                finally:
                    await self.close()
        except (aiohttp.ClientError, OSError) as error:
            self._lost(error, phase, route, timeout)

    async def objects(
        self, route: str, *, silence: float, query: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON objects of an endless answer, one per line; blank lines are heartbeats.

        Raises:
            PhaseTimeout: Nothing came for `silence` seconds.
            PeerLost, ProtocolMismatch, RemoteError: As for any call.
        """
        server = self.endpoint.name
        try:
            await self.open()
            try:
                async with self._ask("GET", route, read_timeout=silence, params=query) as response:
                    if response.status != _OK:
                        raise read_error(
                            await _read_body(response, self.endpoint), replica=server, phase=route
                        )
                    async for line in _lines(response.content):
                        yield decode_json(line, dict[str, Any], what="line")
            finally:
                await self.close()
        except Validation as error:
            if isinstance(error, RemoteError):
                raise
            text = f"{server}/{route}: {error.message}"
            raise ProtocolMismatch(text, replica=server, phase=route) from error
        except AiosyncError:
            raise  # some are OSErrors too
        except (aiohttp.ClientError, OSError) as error:
            self._lost(error, route, route, silence)

    def _lost(self, error: Exception, phase: str, route: str, timeout: float) -> NoReturn:
        server = self.endpoint.name
        what = f"{phase}: {server}/{route}"
        where: dict[str, Any] = {"replica": server, "phase": phase}
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            limit = min(timeout, DEFAULTS.connect_s)
            raise PhaseTimeout(f"{what} took no connection within {limit:g} s", **where) from error
        if isinstance(error, TimeoutError):
            raise PhaseTimeout(f"{what} did not answer within {timeout:g} s", **where) from error
        if isinstance(error, aiohttp.ClientResponseError):
            raise ProtocolMismatch(
                f"{what} does not speak HTTP: {error.message}", **where
            ) from error
        # aiohttp says so whatever the scheme, of Unix sockets too.
        text = (str(error) or type(error).__name__).replace(" ssl:default", "")
        if isinstance(error, aiohttp.ClientConnectorError):
            raise PeerLost(f"{what} cannot be reached: {text}", **where) from error
        raise PeerLost(f"{what}: the connection broke: {text}", **where) from error


async def _read_body(response: aiohttp.ClientResponse, server: Endpoint) -> RawReply:
    body = bytearray()
    limit = DEFAULTS.reply_limit_bytes
    truncated = False
    try:
        while not response.content.at_eof():
            body += await response.content.readany()
            if len(body) > limit:
                response.close()  # the rest is neither read nor kept
                break
    except aiohttp.ClientPayloadError:
        truncated = True
    return RawReply(
        status=response.status,
        headers=response.headers,
        body=bytes(body[:limit]),
        url=server.named(str(response.url)),
        cut_off=len(body) > limit,
        truncated=truncated,
    )


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    rest = b""
    async for data in content.iter_any():
        *whole, rest = (rest + data).split(b"\n")
        if max(map(len, (*whole, rest))) > DEFAULTS.event_limit_bytes:
            raise Validation(f"a line is longer than {DEFAULTS.event_limit_bytes} bytes")
        for line in whole:
            if line.strip():
                yield line
