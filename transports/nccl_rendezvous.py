"""How ranks learn the id of an NCCL group: vLLM's two ways, without unpickling what a peer sent.

Either the trainer hands it to the workers in base64 (``nccl_unique_id_b64``), or all meet at a
TCPStore, where vLLM leaves the pickle of a ctypes struct under one key. That pickle has one form
only, so it is written and read as a fixed frame around 128 bytes.
"""

from __future__ import annotations

import base64
import binascii
import threading
import time
from typing import TYPE_CHECKING, final

from statemachines.errors import Validation
from transports.errors import PeerLost, TransportAborted
from transports.rendezvous import Meeting

if TYPE_CHECKING:
    from transports.store_host import StoreHost

UNIQUE_ID_NBYTES = 128
_KEY = "broadcast_from/0/0"
_PREFIX, _STAGE = "broadcast_from", "0"  # a `Meeting`'s key of rank 0 is then the one above
_AGAIN_S = 0.05

_PROTOCOLS = (b"\x80\x04", b"\x80\x05")  # of Python up to 3.13, and since; the rest is the same
_HEAD = (
    b"\x95\xec\x00\x00\x00\x00\x00\x00\x00\x8c\x07_ctypes\x94\x8c\t_unpickle\x94\x93\x94"
    b"\x8c4vllm.distributed.device_communicators.pynccl_wrapper\x94\x8c\x0cncclUniqueId\x94\x93\x94"
    b"}\x94C\x80"
)
_TAIL = b"\x94\x86\x94\x86\x94R\x94."


def pack_unique_id(unique_id: bytes) -> bytes:
    """What vLLM's trainer puts into the store for this id."""
    return _PROTOCOLS[0] + _HEAD + _checked(unique_id, "the unique id") + _TAIL


def parse_unique_id(stored: bytes) -> bytes:
    """The id in what a trainer put into the store.

    Raises:
        Validation: It is anything but the one form that `pack_unique_id` makes.
    """
    start = len(_PROTOCOLS[0]) + len(_HEAD)
    end = start + UNIQUE_ID_NBYTES
    is_known = (
        stored[:2] in _PROTOCOLS
        and stored[2:start] == _HEAD
        and len(stored) == end + len(_TAIL)
        and stored[end:] == _TAIL
    )
    if not is_known:
        raise Validation(
            f"the store's key {_KEY} holds {len(stored)} bytes that are no NCCL unique id of vLLM's"
            " form; nothing else is read",
            phase="init",
        )
    return stored[start:end]


def encode_unique_id(unique_id: bytes) -> str:
    """As ``nccl_unique_id_b64`` carries it."""
    return base64.b64encode(_checked(unique_id, "the unique id")).decode()


def decode_unique_id(text: str) -> bytes:
    """The id of ``nccl_unique_id_b64``.

    Raises:
        Validation: No base64 of the standard alphabet, or not 128 bytes.
    """
    try:
        raw = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError, ValueError):
        raise Validation(
            "nccl_unique_id_b64 is not base64 of the standard alphabet", phase="init"
        ) from None
    return _checked(raw, "nccl_unique_id_b64")


def publish_unique_id(host: StoreHost, unique_id: bytes) -> None:
    """Leave the id where vLLM's workers look for it; blocking."""
    host.put(_KEY, pack_unique_id(unique_id))


@final
class IdMeeting:
    """A worker's way to the id in the trainer's store.

    Args:
        host, port: Of the store; the trainer may open it later.
        rank, size: In the group.
    """

    def __init__(self, host: str, port: int, *, rank: int, size: int) -> None:
        self._where, self._rank, self._size = (host, port), rank, size
        self._meeting: Meeting | None = None
        self._is_aborted = False
        self._lock = threading.Lock()

    def fetch(self, *, timeout: float) -> bytes:
        """The id; blocking.

        Raises:
            PeerLost: Nobody listens there.
            PhaseTimeout, TransportAborted: No id in time, or `abort` was called.
            Validation: What is there is no id.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            if self._is_aborted:
                raise TransportAborted("told to stop", phase="init")
            # Counted: vLLM's own store does not come up before all ranks are there.
            meeting = self._meeting = Meeting(
                *self._where, _PREFIX, rank=self._rank, size=self._size, is_counted=True
            )
        try:
            while True:
                try:
                    meeting.connect(deadline=deadline)
                    break
                except PeerLost:
                    if time.monotonic() + _AGAIN_S >= deadline:
                        raise
                time.sleep(_AGAIN_S)
            stored = meeting.gather(_STAGE, deadline=deadline, ranks=[0])[0]
        finally:
            meeting.close()
        return parse_unique_id(stored)

    def abort(self) -> None:
        """Make `fetch` raise; from any thread but an event loop's."""
        with self._lock:
            self._is_aborted = True
            if self._meeting is not None:
                self._meeting.abort()


def _checked(raw: bytes, what: str) -> bytes:
    if len(raw) != UNIQUE_ID_NBYTES:
        raise Validation(f"{what} has {len(raw)} bytes, not {UNIQUE_ID_NBYTES}", phase="init")
    return bytes(raw)
