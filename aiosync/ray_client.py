"""Ray actors as workers: one or many handles as one client, or each as a member of a fleet."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from aiosync.budget import check_seconds
from aiosync.client import Capabilities, HTTPVLLMWeightSyncClient
from aiosync.client_protocol import REQUIRED
from aiosync.config import WeightTransferInitRequest, WeightTransferUpdateRequest
from aiosync.defaults import DEFAULTS
from aiosync.errors import Validation
from aiosync.fleet import Member
from aiosync.former_names import KnowsFormerNames
from aiosync.members import MemberLink, fan_out
from aiosync.ray_calls import REQUEST, ActorConnections, call_actor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_FEATURES = {
    "prepare": "prepare_weight_update",
    "abort": "abort_weight_update",
    "status": "weight_update_status",
}


@final
class RayVLLMWeightSyncClient(KnowsFormerNames):
    """One or many Ray actors as one client.

    An actor either hosts a worker engine of ours (its class is a `RayServed`), and then every call
    of `HTTPVLLMWeightSyncClient` reaches it; or it has methods by vLLM's names, blocking or not,
    like an actor around ``vllm.LLM``. A trainer engine takes every actor for a member of its own:
    it calls all of them, waits for all, and its reports name each.

    Cancelling a call lets the caller go at once; what a blocking method has begun it finishes, and
    what is queued behind it still runs. Give an actor with blocking methods a ``max_concurrency``
    above 1, or an abort waits behind the update that it should end.

    Args:
        handles: One actor handle, or a list of them.
        timeout: Seconds for one call that does something.
        requests: Wrap the payloads for vLLM's methods, as its own client does; False: hand them
            the dicts. Actors of class `RayServed` are not asked.
        names: One for each actor; unless given, made from their ids.

    Raises:
        Validation: No handle, or one whose actor lacks a method; names both.
    """

    def __init__(
        self,
        handles: Any,
        timeout: float = DEFAULTS.rpc_s,
        *,
        requests: bool = True,
        names: Sequence[str] | None = None,
    ) -> None:
        found = list(handles) if isinstance(handles, Sequence) else [handles]
        if not found:
            raise Validation("a client needs at least one actor handle")
        called = [_name_of(handle) for handle in found] if names is None else list(names)
        if len(called) != len(found):
            raise Validation(f"{len(called)} names were given for {len(found)} actors")
        self.timeout = check_seconds(timeout, "timeout")
        self.members = tuple(
            Member(name, _client_of(handle, name, self.timeout, requests=requests))
            for name, handle in zip(called, found, strict=True)
        )
        self.name = ", ".join(called)

    def __repr__(self) -> str:
        return f"<RayVLLMWeightSyncClient {self.name}>"

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Any:
        return await self._all("init", "init_weight_transfer_engine", init_info)

    async def start_weight_update(self) -> Any:
        return await self._all("start", "start_weight_update")

    async def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> Any:
        return await self._all("update", "update_weights", update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> Any:
        return await self._all("finish", "finish_weight_update", weight_version)

    async def get_world_size(self, include_dp: bool = True) -> int:
        """Workers of all actors together; an actor that cannot say has one."""

        async def size(link: MemberLink) -> int:
            ask: Callable[..., Awaitable[int]] | None = getattr(link.client, "get_world_size", None)
            return 1 if ask is None else await ask(include_dp)

        return sum((await self._each("world_size", size)).values())

    async def _all(self, phase: str, method: str, *args: Any) -> Any:
        """Call every actor; the answer of the only one, or all by name."""
        replies = await self._each(phase, lambda link: link.call(method, *args))
        return replies if len(replies) > 1 else next(iter(replies.values()))

    async def _each(
        self, phase: str, call: Callable[[MemberLink], Awaitable[Any]]
    ) -> dict[str, Any]:
        links = [MemberLink(member.name, member.client) for member in self.members]
        return await fan_out(links, call, phase=phase, linger=DEFAULTS.cleanup_s)


def RayMember(  # noqa: N802 - reads as the kind of member that it makes
    name: str, handles: Any, timeout: float = DEFAULTS.rpc_s, *, requests: bool = True
) -> Member:
    """A Ray actor as a member of a fleet, beside members that are reached otherwise.

    Args:
        name: Shown in reports and errors; unique in a fleet.
        handles: The actor's handle, or a list of them where one replica is several actors: they
            commit together or not at all.
        timeout, requests: As for `RayVLLMWeightSyncClient`.
    """
    limit = check_seconds(timeout, "timeout")
    if not isinstance(handles, Sequence):
        return Member(name, _client_of(handles, name, limit, requests=requests))
    servers = [
        _client_of(handle, f"{name}#{index}", limit, requests=requests)
        for index, handle in enumerate(handles)
    ]
    return Member(name, servers=servers)


def _name_of(handle: Any) -> str:
    number = getattr(handle, "_actor_id", None)
    return "ray-actor" if number is None else f"ray-{number.hex()[:8]}"


def _client_of(handle: Any, name: str, timeout: float, *, requests: bool) -> Any:
    if hasattr(handle, REQUEST):
        return HTTPVLLMWeightSyncClient.over(ActorConnections(handle, name), timeout=timeout)
    missing = [method for method in REQUIRED if not hasattr(handle, method)]
    if missing:
        raise Validation(
            f"actor {name} is no worker: it lacks {', '.join(missing)}",
            replica=name,
            next_step="derive its class from aiosync.RayServed, or give it vLLM's methods",
        )
    return _NamedMethods(handle, name, timeout, requests=requests)


@final
class _NamedMethods:
    """An actor with vLLM's method names: the four, and what else it has."""

    def __init__(self, handle: Any, name: str, timeout: float, *, requests: bool) -> None:
        self.name = name
        self.timeout = timeout
        self._handle = handle
        self._requests = requests
        others = [*_FEATURES.values(), "shutdown_weight_transfer_engine", "get_world_size"]
        for method in others:
            if hasattr(handle, method):
                # On the instance, so that runtime protocols see what the actor has and no more.
                setattr(self, method, functools.partial(self._other, method))

    def __repr__(self) -> str:
        return f"<Ray actor {self.name} with vLLM's methods>"

    async def capabilities(self, refresh: bool = False) -> Capabilities:
        """What the actor has beyond the four methods; it knows nothing of our headers."""
        del refresh
        return Capabilities(
            features=[name for name, method in _FEATURES.items() if hasattr(self._handle, method)]
        )

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Any:
        request = WeightTransferInitRequest(init_info) if self._requests else init_info
        return await self._call("init", "init_weight_transfer_engine", request)

    async def start_weight_update(self) -> Any:
        return await self._call("start", "start_weight_update")

    async def update_weights(self, update_info: Any) -> Any:
        request = WeightTransferUpdateRequest(update_info) if self._requests else update_info
        return await self._call("update", "update_weights", request, large=True)

    async def finish_weight_update(self, weight_version: str | None = None) -> Any:
        """vLLM's finish takes no version there: it is set by a call of its own."""
        if not hasattr(self._handle, "update_weight_version"):
            return await self._call("finish", "finish_weight_update", weight_version)
        reply = await self._call("finish", "finish_weight_update")
        if weight_version is not None:
            await self._call("finish", "update_weight_version", weight_version)
        return reply

    async def _other(self, method: str, *args: Any, header: Any = None) -> Any:
        del header  # of ours, which it does not know
        phase = method.partition("_")[0]
        if method == "weight_update_status":
            phase = "status"
        return await self._call(phase, method, *args)

    async def _call(self, phase: str, method: str, *args: Any, large: bool = False) -> Any:
        return await call_actor(
            self._handle,
            method,
            *args,
            name=self.name,
            phase=phase,
            timeout=self.timeout,
            large=large,
        )
