"""vLLM's routes beside the round: pausing, versions, checks, and what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from aiosync.defaults import DEFAULTS
from aiosync.generation_table import PauseMode
from aiosync.messages import (
    AbortRequestsBody,
    CheckerBody,
    PauseBody,
    PlainBody,
    VersionBody,
    read_header,
)
from aiosync.route_types import Answer, Route, bad_query, true_or_false

if TYPE_CHECKING:
    from typing import Any

    from aiosync.route_types import Request, ServedEngine

_NO_LABEL = "default"  # what vLLM answers before the first version


@final
class ControlHandlers:
    """The handlers of one service; `table` maps a path to its route."""

    def __init__(self, engine: ServedEngine, *, world_size: int | None) -> None:
        self.engine = engine
        self._world_size = world_size
        large = DEFAULTS.body_limit_bytes
        self.table: dict[str, Route] = {
            "/pause": Route("POST", self._pause),
            "/resume": Route("POST", self._resume),
            "/is_paused": Route("GET", self._is_paused),
            "/abort_requests": Route("POST", self._abort_requests, DEFAULTS.init_body_bytes),
            "/update_weight_version": Route("POST", self._update_weight_version),
            "/weight_info": Route("GET", self._weight_info),
            "/weight_checker": Route("POST", self._weight_checker, large),
            "/get_world_size": Route("GET", self._get_world_size),
        }

    async def _pause(self, request: Request) -> Answer:
        header = read_header(request.read(PauseBody).checked().aiosync)
        mode = request.query.get("mode", PauseMode.ABORT)
        if mode not in tuple(PauseMode):
            raise bad_query("mode", mode, f"one of {', '.join(PauseMode)}")
        clear_cache = true_or_false("clear_cache", request.query, "true")
        await self.engine.pause_generation(mode=mode, clear_cache=clear_cache, header=header)
        return Answer({"status": "paused"})

    async def _resume(self, request: Request) -> Answer:
        header = read_header(request.read(PlainBody).aiosync)
        standing: dict[str, Any] = await self.engine.resume_generation(header=header)
        return Answer({"status": "resumed", **standing})

    async def _is_paused(self, _request: Request) -> Answer:
        holders = self.engine.peer_state().detail.get("held_by", [])
        return Answer({"is_paused": await self.engine.is_paused(), "held_by": holders})

    async def _abort_requests(self, request: Request) -> Answer:
        ids = request.read(AbortRequestsBody, needs_body=True).request_ids
        return Answer({"status": "aborted", "aborted": await self.engine.abort_requests(ids)})

    async def _update_weight_version(self, request: Request) -> Answer:
        body = request.read(VersionBody)
        header = read_header(body.aiosync)
        await self.engine.update_weight_version(body.new_version, header=header)
        return Answer({"success": True, "new_version": body.new_version})

    async def _weight_info(self, _request: Request) -> Answer:
        peer = self.engine.peer_state()
        version = _NO_LABEL if peer.version is None else peer.version.wire
        return Answer({"weight_version": version})

    async def _weight_checker(self, request: Request) -> Answer:
        body = request.read(CheckerBody)
        header = read_header(body.aiosync)
        return Answer(await self.engine.weight_checker(body.action, body.baseline, header=header))

    async def _get_world_size(self, request: Request) -> Answer:
        include_dp = true_or_false("include_dp", request.query, "true")
        size = self._world_size
        if size is None:
            size = self.engine.peer_state().world_size
        parallel = getattr(self.engine, "parallel_config", None)
        replicas = getattr(parallel, "data_parallel_size", 1)
        several = isinstance(replicas, int) and replicas > 1
        return Answer({"world_size": size * replicas if include_dp and several else size})
