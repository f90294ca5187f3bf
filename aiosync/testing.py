"""What tests need: a client that drives a worker engine of this process without a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import msgspec

from aiosync.client import Capabilities, Reply
from aiosync.errors import AiosyncError
from aiosync.messages import error_info, to_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiosync.messages import RoundHeader
    from aiosync.worker import WeightTransferEngine


@final
class DirectClient:
    """Calls a worker engine's methods; errors come back as a server would report them.

    Args:
        engine: The worker engine.
        before: Awaited with the method's name before each call: delay it, count it, or raise.
        after: The same after the engine has answered, before the caller learns of it.
    """

    def __init__(
        self,
        engine: WeightTransferEngine[Any, Any],
        *,
        name: str = "worker",
        before: Callable[[str], Awaitable[None]] | None = None,
        after: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self.engine = engine
        self.name = name
        self._before = before
        self._after = after

    async def capabilities(self, *, refresh: bool = False) -> Capabilities:
        peer = self.engine.peer_state()
        return Capabilities(
            protocol=peer.protocol, features=peer.features, digests=peer.digests, peer=peer
        )

    async def init_weight_transfer_engine(
        self, init_info: dict[str, Any], *, header: RoundHeader | None = None
    ) -> Reply:
        return await self._call("init_transfer_engine", init_info, header=header)

    async def start_weight_update(self, *, header: RoundHeader | None = None) -> Reply:
        return await self._call("start_weight_update", header=header)

    async def update_weights(self, update_info: Any, *, header: RoundHeader | None = None) -> Reply:
        return await self._call("update_weights", update_info, header=header)

    async def prepare_weight_update(self, *, header: RoundHeader | None = None) -> Reply:
        return await self._call("prepare_weight_update", header=header)

    async def finish_weight_update(
        self, weight_version: str | None = None, *, header: RoundHeader | None = None
    ) -> Reply:
        return await self._call("finish_weight_update", weight_version, header=header)

    async def abort_weight_update(
        self, reason: str = "", *, header: RoundHeader | None = None
    ) -> Reply:
        return await self._call("abort_weight_update", reason, header=header)

    async def shutdown_weight_transfer_engine(self, *, header: RoundHeader | None = None) -> Reply:
        return await self._call("shutdown", header=header)

    async def start_draft_weight_update(self, *, header: RoundHeader | None = None) -> Reply:
        return await self._call("start_draft_weight_update", header=header)

    async def pause(
        self, mode: str = "abort", *, clear_cache: bool = True, header: RoundHeader | None = None
    ) -> Reply:
        options = {"mode": mode, "clear_cache": clear_cache}
        return await self._call("pause_generation", header=header, **options)

    async def resume(self, *, header: RoundHeader | None = None) -> Reply:
        return await self._call("resume_generation", header=header)

    async def update_weight_version(
        self, new_version: str, *, header: RoundHeader | None = None
    ) -> Reply:
        return await self._call("update_weight_version", new_version, header=header)

    async def weight_checker(
        self,
        action: str,
        baseline: dict[str, str] | None = None,
        *,
        header: RoundHeader | None = None,
    ) -> Reply:
        return await self._call("weight_checker", action, baseline, header=header)

    async def weight_update_status(self, *, header: RoundHeader | None = None) -> Reply:
        if self._before is not None:
            await self._before("weight_update_status")
        self.engine.touch(header)
        return Reply({}, peer=self.engine.peer_state())

    async def _call(self, method: str, *args: Any, **options: Any) -> Reply:
        if self._before is not None:
            await self._before(method)
        try:
            answer = await getattr(self.engine, method)(*args, **options)
        except AiosyncError as error:
            raise self._reported(error) from None
        except Exception as error:
            raise self._reported(error) from error
        if self._after is not None:
            await self._after(method)
        message = answer if isinstance(answer, dict) else {}
        return Reply(message, peer=self.engine.peer_state())

    def _reported(self, error: Exception) -> AiosyncError:
        info = error_info(error)
        weights = info.weights or self.engine.weights.value
        reported = to_error(msgspec.structs.replace(info, weights=weights), replica=self.name)
        reported.detail["incarnation"] = self.engine.peer_state().incarnation
        return reported
