"""What can go wrong while bytes move."""

from __future__ import annotations

from statemachines.errors import AiosyncError


class LanePoisoned(AiosyncError):
    """A native call on this lane never came back; the lane takes no further work.

    The stuck thread is a daemon: the process still exits at once. A new lane (``reset`` and
    ``initialize``) is needed; if the call holds a device, only a new process frees it.
    """

    code = "lane_poisoned"


class PeerLost(AiosyncError, ConnectionError):
    """A peer's connection closed or its process is gone."""

    code = "peer_lost"
    default_retryable = True


class PhaseTimeout(AiosyncError, TimeoutError):
    """A phase of the round made no progress for its whole allowance."""

    code = "phase_timeout"
    default_retryable = True


class DigestMismatch(AiosyncError):
    """The bytes that arrived are not the bytes that were sent."""

    code = "digest_mismatch"
    default_retryable = True


class TransportAborted(AiosyncError):
    """The blocking half was told to stop (`abort`) while it worked."""

    code = "transport_aborted"


class OutOfSharedMemory(AiosyncError, MemoryError):
    """Shared memory could not be reserved; names what was needed and what is free."""

    code = "out_of_shared_memory"
