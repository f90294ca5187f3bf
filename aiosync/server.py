"""The control plane's server on aiohttp: routes for an application, or on a socket of its own."""

from __future__ import annotations

import asyncio
import functools
import logging
import shutil
import signal
import socket
import ssl
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, final

import anyio
from aiohttp import web

from aiosync.aiohttp_routes import handle, routes_of
from aiosync.config import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, environment_token
from aiosync.defaults import DEFAULTS
from aiosync.errors import Validation
from aiosync.listeners import bind_tcp, bind_unix, identity, remove_unix
from aiosync.served_sockets import ServedSockets
from aiosync.service import Response, ServedEngine, WeightUpdateService
from aiosync.stop_signals import first_signal
from aiosync.tokens import is_loopback, load_token
from transports.forked import keep_from_children
from transports.lane import Lane
from transports.socket_place import socket_place

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from aiosync.worker import WeightTransferEngine

__all__ = ["Response", "ServedEngine", "Server", "WeightUpdateService", "routes_of", "serve"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
logger = logging.getLogger(__name__)
_LOCAL = "127.0.0.1"
_FOLDER, _SOCKET = "aiosync-", "control.sock"
_ANY = ("", "0.0.0.0", "::")
_CLOSING_S = 5 * DEFAULTS.cleanup_s


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
    certfile: str | Path | None = None,
    keyfile: str | Path | None = None,
    name: str | None = None,
    world_size: int | None = None,
) -> AsyncIterator[Server]:
    """Serve `engine` for the length of the block.

    Leaving the block gives an open round up, ends the event streams and closes the connections;
    it takes a few seconds at most. The engine itself stays open: it is its owner's to close.

    Args:
        host: TCP, on this address (default 127.0.0.1); `port` None takes a free one.
        path: A Unix socket instead. With neither, one in a new private folder: in the temporary
            folder, or in another one where that makes the path too long for a socket.
        token, token_file: Bearer token of every request; needed outside loopback, where the
            environment may give it: ``AIOSYNC_TOKEN`` or ``AIOSYNC_TOKEN_FILE``.
        insecure: Listen outside loopback without a token. Logged as a warning.
        advertise: Host name to put into `Server.url`.
        certfile, keyfile: PEM files: TLS, over TCP.

    Raises:
        Validation: TCP and Unix at once, no token outside loopback, a port that is none.
        Refused: Another server listens on the Unix socket.
        OSError: The address cannot be bound.
    """
    is_tcp = host is not None or port is not None
    if token is None and token_file is None and isinstance(host, str) and not is_loopback(host):
        token, token_file = environment_token()
    secret = await load_token(token, token_file)
    _check_where(host, port, path, advertise, has_token=secret is not None, insecure=insecure)
    service = WeightUpdateService(engine, token=secret, name=name, world_size=world_size)
    # The only generator here: a loop that ends with the block not left closes all generators at
    # once, and those within this one too early.
    async with AsyncExitStack() as stack:
        tls = await _tls(certfile, keyfile, is_tcp=is_tcp)
        if is_tcp:
            scheme = "http" if tls is None else "https"
            place = _LOCAL if host is None else host
            sock, url = await _listen_tcp(stack, place, port or 0, advertise, scheme)
        else:
            sock, url = await _listen_unix(stack, path)
        await _accept(stack, service, sock, tls)
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
            next_step=f"pass token= or token_file=, set {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE},"
            " or say insecure=True on a network you trust",
        )
    logger.warning("listening on %s without a token: anybody may replace the weights", host)


async def _listen_tcp(
    stack: AsyncExitStack, host: str, port: int, advertise: str | None, scheme: str
) -> tuple[socket.socket, str]:
    sock = stack.enter_context(await _beside(bind_tcp, host, port))
    # The address one binds to reach everybody is nobody's address.
    shown = advertise or (socket.gethostname() if host in _ANY else host.strip("[]"))
    bracketed = f"[{shown}]" if ":" in shown else shown
    return sock, f"{scheme}://{bracketed}:{sock.getsockname()[1]}"


async def _listen_unix(stack: AsyncExitStack, path: str | Path | None) -> tuple[socket.socket, str]:
    if path is None:
        folder = await _beside(_private_folder)
        stack.push_async_callback(_removed, functools.partial(shutil.rmtree, folder, True))
        path = f"{folder}/{_SOCKET}"
    where = await _beside(_absolute, path)
    sock = stack.enter_context(await _beside(bind_unix, where))
    made = await _beside(identity, where)
    stack.push_async_callback(_removed, functools.partial(remove_unix, where, made))
    return sock, f"unix://{where}"


async def _removed(remove: Callable[[], object]) -> None:
    # Shielded: a socket file left behind would look like a server.
    with anyio.move_on_after(DEFAULTS.cleanup_s, shield=True):
        await _beside(remove)


async def _tls(certfile: Any, keyfile: Any, *, is_tcp: bool) -> ssl.SSLContext | None:
    if certfile is None:
        if keyfile is not None:
            raise Validation("keyfile needs a certfile")
        return None
    if not is_tcp:
        raise Validation("certfile is for TCP: a Unix socket is for this user only")

    def load() -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certfile, keyfile)
        return context

    try:
        return await _beside(load)
    except OSError as error:  # ssl.SSLError is one
        raise Validation(f"certfile {certfile}: {error}") from error


async def _beside(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """The file system may block: not on the event loop."""
    async with Lane("aiosync-listen") as lane:
        return await lane.run(fn, *args)


def _private_folder() -> str:
    place = socket_place(f"{_FOLDER}01234567/{_SOCKET}")
    return tempfile.mkdtemp("", _FOLDER, place)


def _absolute(path: str | Path) -> str:
    return str(Path(path).absolute())


async def _accept(
    stack: AsyncExitStack,
    service: WeightUpdateService,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
) -> None:
    # No application: the service knows its routes itself, and a request that passes a second
    # router takes noticeably longer.
    server = web.Server(
        functools.partial(handle, service, None),
        # A client that goes away must not cancel a commit half way.
        handler_cancellation=False,
        access_log=None,
        auto_decompress=False,
    )
    runner = web.ServerRunner(server, shutdown_timeout=DEFAULTS.shutdown_s)
    await runner.setup()
    assert runner.server is not None
    loop = asyncio.get_running_loop()
    listen = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
    listener = await listen(runner.server, sock=sock, ssl=tls)
    keep_from_children(sockets := ServedSockets(sock, runner.server))
    stack.push_async_callback(_stop, listener, service, runner, sockets)


async def _stop(
    listener: asyncio.AbstractServer,
    service: WeightUpdateService,
    runner: web.ServerRunner,
    sockets: ServedSockets,
) -> None:
    # Shielded, and bounded: every step below has a limit of its own.
    with anyio.move_on_after(_CLOSING_S, shield=True):
        listener.close()
        await service.stop()
        await runner.cleanup()
    del sockets  # kept until here
