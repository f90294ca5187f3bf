"""One call to a Ray actor: awaited without blocking the loop, cancelled where Ray can do it.

``ray.cancel`` is used for coroutine methods alone. A blocking method that has arrived runs although
its caller is told that it was cancelled; one that is cancelled before it was sent leaves a gap in
the actor's order, for which it waits half a minute and then drops whatever is queued (Ray 2.60).

Ray is imported when the first call is made; whoever has an actor's handle has imported it already.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any, NoReturn, final

from aiosync.connections import Endpoint
from aiosync.errors import PeerLost, PhaseTimeout, ProtocolMismatch
from aiosync.messages import error_info, to_error
from aiosync.replies import RawReply
from transports.lane import Lane

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

REQUEST = "aiosync_request"
_INLINE_BYTES = 64 << 10  # Ray copies what is larger into its object store, which may be full


def ray_module() -> Any:
    """Ray itself.

    Raises:
        ImportError: Says which extra is missing.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError("Ray actors need the extra: pip install 'aiosync[ray]'") from error


async def call_actor(
    handle: Any,
    method: str,
    *args: Any,
    name: str,
    phase: str,
    timeout: float,
    large: bool = False,
    cancels: bool = False,
) -> Any:
    """Call a method of an actor and await its result.

    Cancelling it lets go of the answer.

    Args:
        name: The actor's name in errors.
        large: Hand the arguments over on a thread of its own: their copy may block.
        cancels: Cancel the actor's coroutine, too; for coroutine methods alone.

    Raises:
        PhaseTimeout: No answer within `timeout` seconds.
        PeerLost: The actor is dead, or cannot be reached.
        RemoteError: What the method raised, with its text.
    """
    ray = ray_module()
    remote = getattr(handle, method).remote
    if large:
        async with Lane(f"{name}-call") as lane:
            ref = await lane.run(remote, *args)
    else:
        ref = remote(*args)
    where: dict[str, Any] = {"replica": name, "phase": phase}
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            return await ref
    except (asyncio.CancelledError, TimeoutError) as error:
        if cancels:
            _give_up(ray, ref)
        if isinstance(error, TimeoutError) and limit.expired():
            text = f"{phase}: {name} did not answer {method} within {timeout:g} s"
            raise PhaseTimeout(text, **where) from None
        if isinstance(error, ray.exceptions.RayError):
            _failed(ray, error, method, where)
        raise
    except ray.exceptions.RayError as error:
        _failed(ray, error, method, where)


def _give_up(ray: Any, ref: Any) -> None:
    try:
        ray.cancel(ref, recursive=False)
    except Exception:  # noqa: BLE001  it ended meanwhile, or Ray did
        return


def _failed(ray: Any, error: BaseException, method: str, where: dict[str, Any]) -> NoReturn:
    """What Ray reported, as a kind of ours."""
    kinds = ray.exceptions
    if not isinstance(error, kinds.RayTaskError):
        text = str(error).strip().splitlines()
        reason = text[0] if text else type(error).__name__
        raise PeerLost(f"{where['phase']}: {where['replica']}: {reason}", **where) from error
    cause = getattr(error, "cause", None) or error
    found = to_error(error_info(cause), replica=where["replica"], phase=where["phase"])
    found.add_note(f"raised by the actor's {method}")
    raise found from None


@final
class ActorConnections:
    """Carries the requests of `HTTPVLLMWeightSyncClient` to an actor of class `RayServed`."""

    def __init__(self, handle: Any, name: str) -> None:
        self.endpoint = Endpoint(name, name)
        self._handle = handle

    def __repr__(self) -> str:
        return "by actor calls"

    async def open(self) -> None:
        """Nothing is kept open: Ray has its own connections."""

    async def close(self) -> None:
        """As `open`."""

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
        """One request and its answer, as `aiosync.connections.Connections` does it."""
        data = body or b""
        status, content_type, answer = await call_actor(
            self._handle,
            REQUEST,
            method,
            route,
            dict(query or {}),
            data,
            name=self.endpoint.name,
            phase=phase,
            timeout=timeout,
            large=len(data) > _INLINE_BYTES,
            # Within a round it is the abort that ends things, as over HTTP.
            cancels=phase == "init",
        )
        headers = {"content-type": content_type}
        url = f"{self.endpoint.name}/{route}"
        return RawReply(status=status, headers=headers, body=answer, url=url)

    async def objects(
        self, route: str, *, silence: float, query: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Endless answers do not travel by actor calls.

        Raises:
            ProtocolMismatch: Always.
        """
        del silence, query
        raise ProtocolMismatch(f"{self.endpoint.name}: /{route} cannot be had by actor calls")
        yield {}
