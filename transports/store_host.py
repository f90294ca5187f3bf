"""The trainer's side of a rendezvous: the store, on a port that stays taken from then on."""

from __future__ import annotations

import errno
import secrets
import socket
from datetime import timedelta
from typing import final

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch lists no names

from statemachines.errors import Validation
from transports.addresses import bare_host, numeric, resolve
from transports.name_servers import hurried_lookups

_SERVER_TIMEOUT = timedelta(seconds=60)  # of the server's own first connection, to itself


@final
class StoreHost:
    """The trainer's store.

    Args:
        host: An address of this host; workers are told this one, and nothing listens elsewhere.
        port: 0 lets the OS choose.

    Attributes:
        host, port: What a `Meeting` needs; `host` is numeric, without brackets.

    Raises:
        Validation: `host` is none of this host's addresses, or the port is taken; named.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        if type(port) is not int or not 0 <= port < 1 << 16:
            raise Validation(f"master_port must be an int from 0 to 65535, not {port!r}")
        family, address = resolve(bare_host(host), port)[0]
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(1024)
            self.host, self.port = numeric(self._socket.getsockname())
            self._token = secrets.token_hex(8)
            self._meetings = 0
            self._store: TCPStore | None = self._open()
        except BaseException as error:
            self._socket.close()
            if isinstance(error, OSError):
                raise _cannot_listen(error, host, port) from error
            raise

    def _open(self) -> TCPStore:
        listening = self._socket.dup()
        with hurried_lookups():
            return TCPStore(
                self.host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=_SERVER_TIMEOUT,
                master_listen_fd=listening.detach(),  # the store closes it
            )

    def new_prefix(self) -> str:
        """Key space of the next meeting: never used before, and not to be guessed."""
        self._meetings += 1
        return f"aiosync/{self._token}/{self._meetings}"

    def put(self, key: str, value: bytes) -> None:
        """Set a key, outside of any meeting's key space; blocking."""
        if self._store is not None:
            self._store.set(key, value)  # type: ignore[arg-type] # bytes too

    def num_keys(self) -> int:
        """Keys that are in the store."""
        return 0 if self._store is None else int(self._store.num_keys())

    def close(self) -> None:
        """Free the port; connected meetings end with `PeerLost`. Idempotent."""
        self._store = None
        self._socket.close()

    def __repr__(self) -> str:
        state = "closed" if self._store is None else f"{self._meetings} meetings"
        return f"<StoreHost {self.host} port {self.port}, {state}>"


def _cannot_listen(error: OSError, host: str, port: int) -> Exception:
    what = {
        errno.EADDRINUSE: f"port {port} on {host} is taken",
        errno.EADDRNOTAVAIL: f"{host} is not an address of this host",
    }.get(error.errno or 0)
    if what is None:
        return error
    return Validation(
        f"cannot listen for the workers: {what}", phase="init", detail={"errno": error.errno}
    )
