"""What a client of an inference server is, and how to make one out of what people have."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Protocol, Self, cast, final, runtime_checkable

import msgspec

from aiosync.defaults import DEFAULTS

# At run time too: msgspec resolves the annotations of a Struct when it is first decoded.
from aiosync.messages import PeerState
from transports.lane import Lane

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

REQUIRED = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)
_OPTIONAL = (
    "prepare_weight_update",
    "abort_weight_update",
    "weight_update_status",
    "shutdown_weight_transfer_engine",
    "capabilities",
    "pause",
    "resume",
    "is_paused",
    "abort_requests",
    "start_draft_weight_update",
    "update_weight_version",
    "weight_checker",
    "weight_info",
    "get_world_size",
    "health",
    "ready",
)


@runtime_checkable
class VLLMWeightSyncClient(Protocol):
    """vLLM's four calls, awaitable. Each reaches every replica and raises on any failure."""

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Any: ...

    async def start_weight_update(self) -> Any: ...

    async def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> Any: ...

    async def finish_weight_update(self, weight_version: str | None = None) -> Any: ...


@runtime_checkable
class SupportsPrepare(Protocol):
    """The peer commits in two phases: prepare checks, finish only swaps."""

    async def prepare_weight_update(self) -> Any: ...


@runtime_checkable
class SupportsAbort(Protocol):
    """A round can be given up by a call; the call is idempotent."""

    async def abort_weight_update(self, reason: str = "") -> Any: ...


@runtime_checkable
class SupportsStatus(Protocol):
    """The peer can be asked what it holds and in which state it is."""

    async def weight_update_status(self) -> Any: ...


@runtime_checkable
class SupportsPause(Protocol):
    """Generation can be held and let go on, whoever drives the round."""

    async def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> Any: ...

    async def resume(self) -> Any: ...


@runtime_checkable
class SupportsDraft(Protocol):
    """A round can update the draft model."""

    async def start_draft_weight_update(self) -> Any: ...


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer can do beyond the four calls.

    Attributes:
        protocol: 0 for a stock vLLM server or a plain four-method client: no fencing, no lease.
        features: As `PeerState.features`.
        digests: As `PeerState.digests`.
        peer: What it said about itself.
    """

    protocol: int = 0
    features: list[str] = []
    digests: list[str] = []
    peer: PeerState | None = None

    @classmethod
    def of(cls, peer: PeerState | None) -> Self:
        """What a peer that described itself can do; None is a stock one."""
        if peer is None:
            return cls()
        return cls(protocol=peer.protocol, features=peer.features, digests=peer.digests, peer=peer)


class Reply(msgspec.Struct, frozen=True):
    """A successful answer: the decoded object, and what the peer said about itself (if ours)."""

    message: dict[str, Any]
    peer: PeerState | None = None


class Readiness(msgspec.Struct, frozen=True):
    """Answer of ``/ready``: whether the replica may serve, and if not, why."""

    ready: bool
    reasons: list[str] = []


async def capabilities_of(client: Any) -> Capabilities:
    """What `client`'s peer can do; a client that cannot be asked is a plain one."""
    ask = getattr(client, "capabilities", None)
    if ask is None:
        return Capabilities()
    return cast("Capabilities", await ask())


def adapt_client(client: Any) -> VLLMWeightSyncClient:
    """`client` itself if its methods are coroutine functions, else `sync_client` of it.

    Raises:
        TypeError: A method of the four is missing; names all that are.
    """
    missing = [name for name in REQUIRED if not callable(getattr(client, name, None))]
    if missing:
        raise TypeError(
            f"{type(client).__name__} is no weight sync client: it lacks {', '.join(missing)}"
        )
    if all(_is_async(getattr(client, name)) for name in REQUIRED):
        return cast("VLLMWeightSyncClient", client)
    return sync_client(client)


def sync_client(client: Any) -> VLLMWeightSyncClient:
    """An awaitable client over one whose methods block.

    Every call runs on a daemon thread of its own, so that an abort is not queued behind the call
    it should end. Cancelling a call cannot stop the blocking method: the caller is let go after
    the clean-up second, the thread is left behind. Methods that are coroutine functions already
    are awaited as they are, and an awaitable that a plain method returns is awaited too.
    """
    return cast("VLLMWeightSyncClient", _SyncClient(client))


@final
class _SyncClient:
    def __init__(self, client: Any) -> None:
        self.client = client
        self.name = str(getattr(client, "name", None) or type(client).__name__)
        for name in (*REQUIRED, *_OPTIONAL):
            method = getattr(client, name, None)
            if callable(method):
                # On the instance, so that runtime protocols see what the client has and no more.
                setattr(self, name, method if _is_async(method) else self._awaitable(method))

    def _awaitable(self, method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(method)
        async def call(*args: Any, **kwargs: Any) -> Any:
            bound = functools.partial(method, *args, **kwargs)
            async with Lane(f"{self.name}-{getattr(method, '__name__', 'call')}") as lane:
                result = await lane.run(bound, grace=DEFAULTS.cleanup_s)
            return await result if inspect.isawaitable(result) else result

        return call

    def __getstate__(self) -> Any:
        return self.client

    def __setstate__(self, client: Any) -> None:
        self.__init__(client)  # the wrappers cannot travel, the client can

    def __repr__(self) -> str:
        return f"sync_client({self.client!r})"


def _is_async(method: Any) -> bool:
    while isinstance(method, functools.partial):
        method = method.func
    return inspect.iscoroutinefunction(method) or inspect.iscoroutinefunction(
        getattr(method, "__call__", None)  # noqa: B004  an object with an async __call__
    )
