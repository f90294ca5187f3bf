"""Meeting the workers and leaving them: probe, init, shutdown."""

from __future__ import annotations

import os
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any

import anyio

from aiosync.attendance import Attendance
from aiosync.budget import check_seconds
from aiosync.concurrency import collapse, quietly, run_legs, run_to_end
from aiosync.defaults import DEFAULTS
from aiosync.errors import AiosyncError, Busy, PhaseTimeout, ProtocolMismatch, Validation
from aiosync.members import MemberLink, fan_out, opened, unanswered
from aiosync.messages import PROTOCOL, RoundHeader
from aiosync.metadata import first_few
from aiosync.mixture import notice
from aiosync.watchable import BUSY
from statemachines.tables import State, Trigger

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiosync.trainer import TrainerWeightTransferEngine

_JOIN_LINGER_S = 0.1  # for a member's own answer, when the join has failed


def owner_name() -> str:
    """A name for this trainer that no other one has."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


async def open_channel(engine: TrainerWeightTransferEngine[Any], timeout: float | None) -> None:
    """Meet all members in time and flip; whatever goes wrong frees the channel."""
    limit = DEFAULTS.admit_s if timeout is None else check_seconds(timeout, "timeout")
    if engine.is_opening or engine.admission.leaving is not None:
        what = engine.admission.leaving or "an initialize"
        raise Busy(f"{what} of this engine is under way", phase="init", detail=engine.standing())
    engine.is_opening = True
    deadline = time.monotonic() + limit
    try:
        with anyio.move_on_after(limit) as scope:
            await engine.machine.pass_gates(Trigger.INITIALIZE)
        if scope.cancelled_caught:
            raise PhaseTimeout(f"the gates took longer than {limit:g} s", phase="init")
        await _open(engine, max(deadline - time.monotonic(), 0.001))
    finally:
        engine.is_opening = False


async def _open(engine: TrainerWeightTransferEngine[Any], limit: float) -> None:
    try:
        with anyio.move_on_after(limit) as scope:
            if engine.ranks.broken:
                await engine.ranks.regathered(engine.source_lane, grace=DEFAULTS.cleanup_s / 2)
            async with opened(engine.links):
                await meet(engine)
        if scope.cancelled_caught:
            late = unanswered(engine.links, "init")
            text = f"init took longer than its {limit:g} s"
            if late:
                text += f": no answer from {first_few(late)}"
            raise PhaseTimeout(text, replica=late[0] if late else None, phase="init")
        if engine.admission.leaving is not None:
            raise engine.wrong_order("initialize")  # closed meanwhile
        engine.machine.fire(Trigger.INITIALIZE)
    except BaseException as error:
        cause = collapse(error)
        # Or they would wait for this trainer, and keep the next one waiting, as long as it had.
        await run_to_end(lambda: _call_off(engine), seconds=DEFAULTS.cleanup_s / 2)
        engine.dispose()
        if engine.state is State.IDLE:
            engine.machine.fire(Trigger.FAIL, phase="init", error=cause)
        if cause is error:
            raise
        raise cause from cause.__cause__  # not from the group it came in


async def _call_off(engine: TrainerWeightTransferEngine[Any]) -> None:
    """The members that have not answered our init need not go on with it."""

    async def one(link: MemberLink) -> None:
        header = RoundHeader(protocol=PROTOCOL, owner=engine.owner)
        await link.call("abort_weight_update", "the init was given up", header=header)

    waiting = set(unanswered(engine.links, "init"))
    async with opened(engine.links), anyio.create_task_group() as group:
        for link in engine.links:
            if link.name in waiting and link.speaks_ours and link.supports("abort"):
                group.start_soon(quietly, one, link)


async def meet(engine: TrainerWeightTransferEngine[Any]) -> None:
    """Ask every member what it is, then hand all of them the init info at once.

    Each init reply brings the epoch under which this trainer owns the worker from then on.
    """
    fleet = engine.fleet
    if fleet is not None:
        await fleet.give_way()
    roll = Attendance(engine.links) if fleet is None else fleet.attendance(engine.links)
    answered: list[str] = []
    try:
        await roll.call(roll.links, MemberLink.probe, phase="init", linger=DEFAULTS.cleanup_s)
        engine.links = roll.present
        answered += [link.member for link in roll.present]
        notice(engine)
        engine.check_peers()
        await engine.host_rendezvous()
        check_policy(engine)
        payload = engine.get_worker_init_payload() if engine.is_sender else {}

        def info_of(link: MemberLink) -> dict[str, Any]:
            return {**payload, **engine.member_payload(link)}

        async def init() -> None:
            await initialise(roll, info_of, owner=engine.owner, lease_s=engine.lease_s)

        # At once: a member answers when it has joined, and can join when this side does.
        await run_legs(init, engine.join, linger=_JOIN_LINGER_S)
        engine.links = roll.present
    finally:
        if fleet is not None:
            fleet.leave_out(roll.links, roll.lost, answered=answered)


async def initialise(
    roll: Attendance,
    info_of: Callable[[MemberLink], dict[str, Any]],
    *,
    owner: str,
    lease_s: float,
) -> None:
    """Hand every member its init info, as `owner` where it knows owners."""

    async def init(link: MemberLink) -> None:
        header = None
        if link.speaks_ours:
            header = RoundHeader(protocol=PROTOCOL, owner=owner, lease_s=lease_s)
        await _end_open_round(owner, link)
        reply = await link.call("init_weight_transfer_engine", info_of(link), header=header)
        if link.speaks_ours:
            peer = getattr(reply, "peer", None)
            if peer is None:  # without its epoch every call of a round would be fenced
                raise ProtocolMismatch(
                    "init's answer was not handed on: the client has to return it"
                )
            link.epoch, link.incarnations.initialised = peer.epoch, peer.incarnation

    await roll.call(roll.links, init, phase="init", linger=DEFAULTS.cleanup_s)


async def _end_open_round(owner: str, link: MemberLink) -> None:
    """A round of ours whose finish never arrived is still open there, and would refuse an init."""
    peer = link.peer
    if peer is None or peer.owner != owner or peer.state not in BUSY:
        return
    if link.supports("abort"):
        number = peer.detail.get("round", 0)
        header = RoundHeader(protocol=PROTOCOL, owner=owner, epoch=peer.epoch, round=number)
        await link.call("abort_weight_update", "the trainer initialises again", header=header)


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


def check_policy(engine: TrainerWeightTransferEngine[Any]) -> None:
    """A round that may go on without a member needs members that can do without each other.

    Raises:
        Validation: Names the backend, or the member and what it cannot do.
    """
    fleet = engine.fleet
    if fleet is None or not fleet.tolerant:
        return
    if not engine.per_member:
        raise Validation(
            f"policy {fleet.policy}: backend {engine.backend_name} moves its bytes through all"
            " members together, and cannot go on without one",
            phase="init",
            next_step="use policy='all', with retry_without_lost=True if lost members may be left",
        )
    for link in engine.links:
        lacks = [name for name in ("prepare", "abort") if not link.supports(name)]
        if lacks:
            raise Validation(
                f"policy {fleet.policy} needs members that can {' and '.join(lacks)}",
                replica=link.name,
                phase="init",
            )
