"""Where the ranks of a group meet: a store that the trainer holds, a fresh prefix per meeting.

The trainer's `StoreHost` keeps its own listening socket, so a port that the OS chose stays taken
from then on. Every rank goes through a `Meeting`: it says what the others need to know
(`announce`) and waits for what they say (`gather`). A wait ends at its deadline with the names of
those who did not come, or at once when another thread calls `abort`.

torch's store enforces no deadline of ours: a connect that fails takes longer than its own
timeout, and a reply of a stopped server never comes. So the way to the store is tried with a plain
socket first, waits are short questions, and `abort` shuts the store's connections down.
"""

from __future__ import annotations

import errno
import secrets
import select
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, final

from torch.distributed import DistError, TCPStore

from statemachines.errors import Validation
from transports.addresses import bare_host, numeric, resolve
from transports.errors import PeerLost, PhaseTimeout, TransportAborted
from transports.open_sockets import SETUP, Endpoints, connected
from transports.waker import Waker, milliseconds_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.01
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


@final
class Meeting:
    """One rank's way into one group.

    Args:
        host, port: Of the `StoreHost`.
        prefix: Of this meeting; the same for all ranks, never used twice.
        rank, size: Among the ranks that meet.
        names: Of all ranks, for errors.

    Attributes:
        local: Address of this host on the way to the store; set by `connect`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        prefix: str,
        *,
        rank: int,
        size: int,
        names: Sequence[str] = (),
    ) -> None:
        if not 0 <= rank < size:
            raise Validation(f"rank {rank} of a group of {size}", rank=rank, phase="init")
        self.prefix, self.rank, self.size = prefix, rank, size
        self.names = tuple(names) or tuple(f"rank {other}" for other in range(size))
        self.local = ""
        self._host, self._port = bare_host(host), port
        self._where = f"the store at {self._host} port {port}"
        self._waker = Waker()
        self._store: TCPStore | None = None
        self._remote: Endpoints | None = None
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()

    @property
    def store(self) -> TCPStore:
        """The connected store, for a group's own set-up; its keys belong under `prefix`."""
        if self._store is None:
            raise PeerLost(f"not connected to {self._where}", phase="init")
        return self._store

    def connect(self, *, deadline: float) -> None:
        """Reach the store by `deadline` (`time.monotonic`).

        Raises:
            PeerLost: Nobody listens there, or no route; names address and port.
            PhaseTimeout, TransportAborted: No answer in time, or `abort` was called.
        """
        with socket.socket(*self._reach(deadline)) as _:
            pass  # pragma: no cover - replaced below
        raise NotImplementedError
