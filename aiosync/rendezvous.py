"""Meeting the workers and leaving them: probe, init, shutdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiosync.defaults import DEFAULTS
from aiosync.errors import AiosyncError
from aiosync.members import MemberLink, fan_out, opened
from aiosync.messages import PROTOCOL, RoundHeader

if TYPE_CHECKING:
    from aiosync.trainer import TrainerWeightTransferEngine


async def meet(engine: TrainerWeightTransferEngine[Any]) -> None:
    """Ask every member what it is, then hand all of them the init info at once.

    Each init reply brings the epoch under which this trainer owns the worker from then on.
    """
    await fan_out(engine.links, MemberLink.probe, phase="init", linger=DEFAULTS.cleanup_s)
    engine.check_peers()
    payload = engine.get_worker_init_payload() if engine.is_sender else {}

    async def init(link: MemberLink) -> None:
        header = None
        if link.speaks_ours:
            header = RoundHeader(protocol=PROTOCOL, owner=engine.owner, lease_s=engine.lease_s)
        info = {**payload, **engine.member_payload(link)}
        await link.call("init_weight_transfer_engine", info, header=header)
        if link.speaks_ours and link.peer is not None:
            link.epoch = link.peer.epoch
            link.known_incarnation = link.peer.incarnation

    await fan_out(engine.links, init, phase="init", linger=DEFAULTS.cleanup_s)


async def say_goodbye(engine: TrainerWeightTransferEngine[Any]) -> None:
    """Tell every member that can be told; one that is gone needs no goodbye."""

    async def leave(link: MemberLink) -> None:
        if not hasattr(link.client, "shutdown_weight_transfer_engine"):
            return
        header = None
        if link.speaks_ours:
            header = RoundHeader(protocol=PROTOCOL, owner=engine.owner, epoch=link.epoch)
        await link.call("shutdown_weight_transfer_engine", header=header)

    async with opened(engine.links):
        try:
            await fan_out(engine.links, leave, phase="shutdown", linger=DEFAULTS.cleanup_s)
        except AiosyncError:
            return
