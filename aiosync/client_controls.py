"""Calls to a server beside its rounds: pausing, versions, checks; vLLM's routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiosync.errors import ProtocolMismatch, Validation
from aiosync.generation_table import PauseMode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from aiosync.client_protocol import Reply
    from aiosync.messages import RoundHeader


class ControlCalls:
    """Part of `HTTPVLLMWeightSyncClient`."""

    @property
    def name(self) -> str:
        """Names the server in errors."""
        raise NotImplementedError

    _do: Callable[..., Awaitable[Reply]]
    _ask: Callable[..., Awaitable[Reply]]

    async def pause(
        self,
        mode: str = "abort",
        *,
        clear_cache: bool = True,
        header: RoundHeader | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """Keep generation still until `resume`; returns once it stands still.

        Args:
            mode: ``"abort"`` ends requests with what they have, ``"wait"`` lets them finish,
                ``"keep"`` freezes them and lets them go on after `resume`.
            clear_cache: Empty the KV and prefix caches.
            header: Names who pauses: nobody else's resume lifts it, and it ends by itself when
                the caller is silent for its lease. Without one: the client without a name.
        """
        if mode not in tuple(PauseMode):
            raise Validation(f"mode must be one of {', '.join(PauseMode)}, not {mode!r}")
        query = {"mode": str(mode), "clear_cache": "true" if clear_cache else "false"}
        return await self._do("pause", "pause", {}, header, timeout, query=query, needs="status")

    async def resume(
        self, *, header: RoundHeader | None = None, timeout: float | None = None
    ) -> Reply:
        """Lift this caller's hold; ``message["is_paused"]`` says whether others still hold.

        Raises:
            Torn: Generation stays paused, because the weights are not intact.
        """
        return await self._do("resume", "resume", {}, header, timeout, needs="status")

    async def is_paused(self, *, timeout: float | None = None) -> bool:
        """Whether anybody holds generation."""
        reply = await self._ask("is_paused", "is_paused", timeout)
        return reply.message["is_paused"] is True

    async def abort_requests(
        self, request_ids: Iterable[str] | None = None, *, timeout: float | None = None
    ) -> int:
        """Have these generations (None: all) end with what they have; returns how many."""
        body = {} if request_ids is None else {"request_ids": list(request_ids)}
        reply = await self._do(
            "abort_requests", "pause", body, None, timeout, needs="aborted", bodied=True
        )
        return self._count(reply, "aborted", least=0)

    async def start_draft_weight_update(
        self, *, header: RoundHeader | None = None, timeout: float | None = None
    ) -> Reply:
        """Open a round of the draft model."""
        return await self._do("start_draft_weight_update", "start", {}, header, timeout)

    async def update_weight_version(
        self,
        new_version: str,
        *,
        header: RoundHeader | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """Give the weights that serve another label."""
        body = {"new_version": new_version}
        return await self._do("update_weight_version", "version", body, header, timeout)

    async def weight_info(self, *, timeout: float | None = None) -> Reply:
        """``message["weight_version"]`` is the label of the version that serves."""
        return await self._ask("weight_info", "weight_version", timeout)

    async def weight_checker(
        self,
        action: str,
        baseline: dict[str, str] | None = None,
        *,
        header: RoundHeader | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """``"checksum"`` or ``"compare"`` the parameters that serve, or ``"reset"`` them."""
        needs = {"checksum": "checksums", "compare": "match", "reset": "status"}.get(action)
        if needs is None:
            raise Validation(f"action must be checksum, compare or reset, not {action!r}")
        body: dict[str, Any] = {"action": action}
        if baseline is not None:
            body["baseline"] = baseline
        return await self._do("weight_checker", "check", body, header, timeout, needs=needs)

    async def get_world_size(self, include_dp: bool = True, *, timeout: float | None = None) -> int:
        """Worker ranks behind this server; with data parallelism, all its replicas' or one's."""
        query = {"include_dp": "true" if include_dp else "false"}
        reply = await self._ask("get_world_size", "world_size", timeout, query)
        return self._count(reply, "world_size", least=1)

    def _count(self, reply: Reply, key: str, *, least: int) -> int:
        number = reply.message[key]
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ProtocolMismatch(
                f"{key} must be an int of at least {least}, not {number!r}", replica=self.name
            )
        return number
