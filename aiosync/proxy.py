"""What a trainer engine sees as its `client`: calls that reach all members and fire the flips.

An engine that overrides `send_weights` whole drives the four methods itself; so its state stays
true.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from aiosync.commit import commit
from aiosync.defaults import DEFAULTS
from aiosync.member_checks import opening_call
from aiosync.members import fan_out, own_info
from aiosync.version import renamed
from statemachines.tables import Trigger, Weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiosync.members import MemberLink
    from aiosync.trainer import TrainerWeightTransferEngine


@final
class ClientProxy:
    """The four methods of `VLLMWeightSyncClient`, over all members of an engine."""

    def __init__(self, engine: TrainerWeightTransferEngine[Any]) -> None:
        self._engine = engine

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        links = self._engine.links
        self._engine.init_payload = init_info

        def infos(link: MemberLink) -> tuple[Any, ...]:
            return (own_info(init_info, link, links),)

        await self._all("init", "init_weight_transfer_engine", infos)

    async def start_weight_update(self) -> None:
        engine = self._engine
        this = engine.admission.current
        if this is not None:
            engine.next_round(this)
        await engine.machine.pass_gates(Trigger.START, **self._facts())
        engine.machine.fire(Trigger.START, **self._facts())
        await self._all("start", None)
        if this is not None:
            this.holds.start_clocks()

    async def update_weights(self, update_info: Any) -> None:
        await self._all("update", "update_weights", (update_info,))
        self._engine.machine.fire(Trigger.UPDATE, **self._facts())

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        engine = self._engine
        this = engine.admission.current
        if this is not None and weight_version is not None:
            this.version = renamed(this.version, weight_version)
        engine.machine.fire(Trigger.FINALIZE, **self._facts())
        await engine.machine.pass_gates(Trigger.COMPLETE, **self._facts())
        if this is None:
            await self._all("finish", "finish_weight_update", (weight_version,))
        else:
            await this.holds.take("swap")
            this.phase, this.sent_finish = "finish", True
            await commit(this)
            engine.committed(this)
        engine.machine.fire(Trigger.COMPLETE, weights=Weights.INTACT, **self._facts())

    async def _all(
        self, phase: str, method: str | None, args: tuple[Any, ...] | Callable[..., Any] = ()
    ) -> None:
        this = self._engine.admission.current
        if this is not None:
            this.phase = phase

        async def call(link: MemberLink) -> None:
            own = args(link) if callable(args) else args
            if this is None:
                await link.call(method or "start_weight_update", *own)
                return
            await link.call(method or opening_call(this, link), *own, header=this.header(link))

        await fan_out(self._engine.links, call, phase=phase, linger=DEFAULTS.cleanup_s)

    def _facts(self) -> dict[str, Any]:
        this = self._engine.admission.current
        if this is None:
            return {}
        return {"round": this.number, "version": str(this.version.label)}
