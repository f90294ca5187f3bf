"""The control plane's server on aiohttp: routes for an application, or on a socket of its own."""

from __future__ import annotations

import asyncio
import functools
import logging
import shutil
import signal
import socket
import tempfile
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, final

import anyio
from aiohttp import web

from aiosync.codec import too_large
from aiosync.defaults import DEFAULTS
from aiosync.errors import PhaseTimeout, Validation
from aiosync.listeners import bind_tcp, bind_unix, identity, remove_unix
from aiosync.messages import RoundHeader
from aiosync.served_sockets import ServedSockets
from aiosync.service import Response, ServedEngine, WeightUpdateService
from aiosync.stop_signals import first_signal
from aiosync.tokens import is_loopback, load_token
from transports.forked import keep_from_children
from transports.lane import Lane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from aiosync.worker import WeightTransferEngine

__all__ = ["Response", "ServedEngine", "Server", "WeightUpdateService", "routes_of", "serve"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
logger = logging.getLogger(__name__)
_LOCAL = "127.0.0.1"
_ANY = ("", "0.0.0.0", "::")
_BUSY = ("updating", "finalizing")
_CLOSING_S = 5 * DEFAULTS.cleanup_s


def routes_of(service: WeightUpdateService) -> list[web.RouteDef]:
    """`WeightUpdateService.routes`."""
    # Every verb, so that the wrong one gets our answer and not aiohttp's text.
    return [
        web.route("*", path, functools.partial(_handle, service, path)) for path in service.paths
    ]


async def _handle(
    service: WeightUpdateService, path: str | None, request: web.Request
) -> web.StreamResponse:
    # Bound to its path: under a prefix the request's own path is another one.
    path = path or request.path
    headers = {name.lower(): value for name, value in request.headers.items()}
    refusal = service.refuse(request.method, path, headers)
    if refusal is not None:
        return _whole(refusal, hang_up=request.can_read_body)
    try:
        body = await _read(request, service.limit_of(path))
    except (Validation, PhaseTimeout) as error:
        return _whole(service.failure(error, headers), hang_up=True)
    except (ConnectionError, web.RequestPayloadError) as error:  # hung up, or garbled chunks
        broken = Validation(f"the body broke off: {type(error).__name__}: {error}")
        return _whole(service.failure(broken, headers), hang_up=True)
    response = await service.dispatch(request.method, path, request.query, headers, body)
    if response.stream is None:
        return _whole(response)
    return await _streamed(request, response)


async def _read(request: web.Request, limit: int) -> bytes:
    body = bytearray()
    with anyio.move_on_after(DEFAULTS.rpc_s) as scope:
        async for data in request.content.iter_any():
            body += data
            if len(body) > limit:
                raise too_large("body", limit)
    if scope.cancelled_caught:
        raise PhaseTimeout(f"the body did not arrive within {DEFAULTS.rpc_s:g} s")
    return bytes(body)


def _whole(response: Response, *, hang_up: bool = False) -> web.Response:
    answer = web.Response(
        status=response.status,
        body=response.body,
        headers=response.headers,
        content_type=response.content_type,
    )
    if hang_up:
        answer.force_close()  # the rest of the body is not waited for
    return answer


async def _streamed(request: web.Request, response: Response) -> web.StreamResponse:
    answer = web.StreamResponse(headers=response.headers)
    answer.content_type = response.content_type
    assert response.stream is not None
    async with aclosing(response.stream) as parts:
        try:
            await answer.prepare(request)
            async for part in parts:
                # A reader that stopped reading is let go like one that hung up.
                with anyio.fail_after(DEFAULTS.lease_s):
                    await answer.write(part)
        except (ConnectionError, TimeoutError) as error:
            logger.debug("an event stream ended: %r", error)
            answer.force_close()
    return answer


@final
class Server:
    """A running server; made by `serve`.

    Attributes:
        url: Where clients on this machine or, with ``advertise=``, elsewhere find it.
        service: The service behind it.
    """

    __slots__ = ("service", "url")

    def __init__(self, url: str, service: WeightUpdateService) -> None:
        self.url = url
        self.service = service

    async def until_signal(
        self, numbers: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)
    ) -> signal.Signals:
        """Wait for one of the signals `numbers`, and return it; for a worker's main task.

        Leave the block of `serve` then: that gives an open round up. A second signal does what
        it does by default: it ends the process at once.

        Raises:
            WrongLoop: Signals arrive in the main thread only, and this loop runs in another.
        """
        return await first_signal(numbers)

    def __repr__(self) -> str:
        return f"<Server {self.url} {self.service!r}>"


@asynccontextmanager
async def serve(
    engine: ServedEngine | WeightTransferEngine[Any, Any],
    *,
    host: str | None = None,
    port: int | None = None,
    path: str | Path | None = None,
    token: str | None = None,
    token_file: str | Path | None = None,
    insecure: bool = False,
    advertise: str | None = None,
    name: str | None = None,
    world_size: int | None = None,
) -> AsyncIterator[Server]:
    """Serve `engine` for the length of the block.

    Leaving the block gives an open round up, ends the event streams and closes the connections;
    it takes a few seconds at most. The engine itself stays open: it is its owner's to close.

    Args:
        host: TCP, on this address (default 127.0.0.1); `port` None takes a free one.
        path: A Unix socket instead. With neither, one in a new private folder.
        token, token_file: Bearer token of every request; needed outside loopback.
        insecure: Listen outside loopback without a token. Logged as a warning.
        advertise: Host name to put into `Server.url`.

    Raises:
        Validation: TCP and Unix at once, no token outside loopback, a port that is none.
        Refused: Another server listens on the Unix socket.
        OSError: The address cannot be bound.
    """
    secret = await load_token(token, token_file)
    is_tcp = host is not None or port is not None
    _check_where(host, port, path, advertise, has_token=secret is not None, insecure=insecure)
    service = WeightUpdateService(engine, token=secret, name=name, world_size=world_size)
    async with AsyncExitStack() as stack:
        if is_tcp:
            listening = _listening_tcp(_LOCAL if host is None else host, port or 0, advertise)
        else:
            listening = _listening_unix(path)
        sock, url = await stack.enter_async_context(listening)
        await stack.enter_async_context(_accepting(service, sock))
        yield Server(url, service)


def _check_where(
    host: str | None,
    port: Any,
    path: object,
    advertise: object,
    *,
    has_token: bool,
    insecure: bool,
) -> None:
    if path is not None and (host is not None or port is not None):
        raise Validation("give host and port, or path, not both")
    for field, value in (("host", host), ("advertise", advertise)):
        if value is not None and not isinstance(value, str):
            raise Validation(f"{field} must be a string, not {value!r}")
    if path is not None and not isinstance(path, str | Path):
        raise Validation(f"path must be a string or a Path, not {path!r}")
    if port is not None and (
        isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 1 << 16
    ):
        raise Validation(f"port must be an int from 0 to 65535, not {port!r}")
    if host is None or is_loopback(host) or has_token:
        return
    if not insecure:
        raise Validation(
            f"{host or 'every address'} can be reached from other machines: a token is needed",
            next_step="pass token= or token_file=, or insecure=True on a network you trust",
        )
    logger.warning("listening on %s without a token: anybody may replace the weights", host)


@asynccontextmanager
async def _listening_tcp(
    host: str, port: int, advertise: str | None
) -> AsyncIterator[tuple[socket.socket, str]]:
    sock = await _beside(bind_tcp, host, port)
    with sock:
        # The address one binds to reach everybody is nobody's address.
        shown = advertise or (socket.gethostname() if host in _ANY else host.strip("[]"))
        bracketed = f"[{shown}]" if ":" in shown else shown
        yield sock, f"http://{bracketed}:{sock.getsockname()[1]}"


@asynccontextmanager
async def _listening_unix(
    path: str | Path | None,
) -> AsyncIterator[tuple[socket.socket, str]]:
    folder = None
    if path is None:
        folder = await _beside(tempfile.mkdtemp, "", "aiosync-")
        path = f"{folder}/control.sock"
    try:
        where = await _beside(_absolute, path)
        sock = await _beside(bind_unix, where)
        with sock:
            made = await _beside(identity, where)
            try:
                yield sock, f"unix://{where}"
            finally:
                # Shielded: a socket file left behind would look like a server.
                with anyio.move_on_after(DEFAULTS.cleanup_s, shield=True):
                    await _beside(remove_unix, where, made)
    finally:
        if folder is not None:
            with anyio.move_on_after(DEFAULTS.cleanup_s, shield=True):  # as above
                await _beside(shutil.rmtree, folder, True)


async def _beside(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """The file system may block: not on the event loop."""
    async with Lane("aiosync-listen") as lane:
        return await lane.run(fn, *args)


def _absolute(path: str | Path) -> str:
    return str(Path(path).absolute())


@asynccontextmanager
async def _accepting(service: WeightUpdateService, sock: socket.socket) -> AsyncIterator[None]:
    app = web.Application()
    app.add_routes(
        [*routes_of(service), web.route("*", "/{_:.*}", functools.partial(_handle, service, None))]
    )
    runner = web.AppRunner(
        app,
        # A client that goes away must not cancel a commit half way.
        handler_cancellation=False,
        access_log=None,
        auto_decompress=False,
        shutdown_timeout=DEFAULTS.shutdown_s,
    )
    await runner.setup()
    assert runner.server is not None
    loop = asyncio.get_running_loop()
    listen = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
    listener = await listen(runner.server, sock=sock)
    keep_from_children(sockets := ServedSockets(sock, runner.server))
    try:
        yield
    finally:
        # Shielded, and bounded: every step below has a limit of its own.
        with anyio.move_on_after(_CLOSING_S, shield=True):
            listener.close()
            await _give_up(service.engine)
            service.close()
            await runner.cleanup()
        del sockets  # until here


async def _give_up(engine: ServedEngine) -> None:
    """End the open round, in its owner's name: nobody can finish it any more."""
    peer = engine.peer_state()
    if peer.state not in _BUSY:
        return
    header = None
    if peer.owner is not None:
        number = peer.detail.get("round", 0)
        header = RoundHeader(owner=peer.owner, epoch=peer.epoch, round=number)
    with anyio.move_on_after(DEFAULTS.cleanup_s):
        try:
            await engine.abort_weight_update("the server is closing", header=header)
        except Exception:  # closing goes on whatever the engine says
            logger.exception("the open round could not be ended")
