"""Finish in a group: the point of no return, for all ranks together.

A rank that failed, or whose answer is lost, is asked what it holds; finish is never sent again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio

from aiosync.concurrency import collapse, rank_errors
from aiosync.defaults import DEFAULTS
from aiosync.errors import AiosyncError, OutcomeUnknown, PhaseTimeout, Torn
from aiosync.watchable import BUSY
from aiosync.weight_targets import MODEL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiosync.group_spares import Spares
    from aiosync.members import MemberLink
    from aiosync.worker_group import WorkerGroup
    from aiosync.worker_group_peer import Rank

_ASK_AGAIN_S = 0.05


async def commit(group: WorkerGroup) -> None:
    """Have every rank finish, and agree on what that came to.

    Raises:
        OutcomeUnknown: A rank cannot be asked any more; the others may have committed.
        Torn: Some ranks hold the new version, and some do not.
        AiosyncError: The cause, where no rank committed.
    """
    target = group.cycle.target
    label = None if target is None else target.wire
    done: list[Rank] = []
    failures: list[tuple[Rank, BaseException]] = []

    async def one(rank: Rank) -> None:
        try:
            await rank.call("finish_weight_update", label, header=group.header_of(rank))
        except Exception as error:  # noqa: BLE001  judged below, with the others'
            if not await _did_commit(group, rank):
                failures.append((rank, collapse(error)))
                return
        done.append(rank)

    spares = group.spares
    ranks = group.ranks if spares is None else spares.present
    with anyio.move_on_after(DEFAULTS.finish_s) as scope:
        if spares is None:
            async with anyio.create_task_group() as tasks:
                for rank in ranks:
                    tasks.start_soon(one, rank)
        else:
            await _each(spares, ranks, one, failures)
    for rank in ranks:
        rank.write_off()
    if spares is not None and spares.enough(lambda rank: rank in done):
        return  # the others are left behind
    late = [r for r in ranks if r not in done and all(r is not f for f, _ in failures)]
    if late:  # or its task was cancelled alone, from outside
        text = f"finish took longer than {DEFAULTS.finish_s:g} s"
        if not scope.cancelled_caught:
            text = "finish was cancelled from outside"
        failures += [(rank, PhaseTimeout(text, phase="finish", rank=rank.index)) for rank in late]
    if failures:
        raise _verdict(group, done, failures)


async def _each(
    spares: Spares,
    ranks: Sequence[Rank],
    one: Callable[[Rank], Awaitable[None]],
    failures: list[tuple[Rank, BaseException]],
) -> None:
    """`one` for every rank; those that fail, or hold up enough others for too long, are struck."""
    by_link = {rank.link: rank for rank in ranks}

    async def strict(link: MemberLink) -> None:
        rank = by_link[link]
        await one(rank)
        for failed, error in failures:
            if failed is rank:
                raise error

    with suppress(AiosyncError):  # too few: judged by who is done
        await spares.call(by_link, strict, phase="finish")


async def _did_commit(group: WorkerGroup, rank: Rank) -> bool:
    """Whether a rank that did not confirm holds the new version all the same."""
    with anyio.move_on_after(DEFAULTS.cleanup_s):
        while rank.lost is None:
            try:
                await rank.call("weight_update_status", header=group.header_of(rank))
            except AiosyncError:
                return False
            peer = rank.link.peer
            if peer is not None and peer.state not in BUSY:
                target = group.cycle.target
                # The same version may have been there before, with other bytes.
                is_new = group.cycle.aim != MODEL or not rank.link.holds_the_same
                return target is not None and peer.version == target and is_new
            await anyio.sleep(_ASK_AGAIN_S)
    return False


def _verdict(
    group: WorkerGroup, done: list[Rank], failures: list[tuple[Rank, BaseException]]
) -> BaseException:
    cause = rank_errors([error for _, error in failures])
    first = next(rank for rank, error in failures if error is cause)
    lost = [rank for rank, _ in failures if rank.lost is not None]
    if not lost and not done:
        return cause
    held = ", ".join(str(rank.index) for rank in done) or "no rank"
    place: dict[str, Any] = {
        "replica": group.name,
        "phase": "finish",
        "weights": group.weights.value,
    }
    text = f"ranks that hold the new version: {held}; {getattr(cause, 'message', cause)}"
    error: AiosyncError
    if lost:
        text = f"rank {lost[0].index} was lost during the commit; {text}"
        error = OutcomeUnknown(text, rank=lost[0].index, **place)
    else:
        error = Torn(f"rank {first.index} did not commit; {text}", rank=first.index, **place)
    error.__cause__ = cause
    return error
