"""Backend ``ipc`` towards a stock vLLM: what its workers want to hear, and in which calls."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from aiosync.errors import ProtocolMismatch, Validation
from aiosync.lane_calls import LaneCalls
from aiosync.members import fan_out
from aiosync.metadata import meta_nbytes, to_wire
from transports.planning import EACH, IPC_PACKED, check_alignment, plan_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiosync.feed import SourceFeed
    from aiosync.members import MemberLink
    from aiosync.ranks import TrainerRanks
    from aiosync.round import Round
    from transports.planning import Plan
    from transports.tuple_sender import TupleSender


def are_stock(links: Sequence[MemberLink]) -> bool:
    """Whether the workers are vLLM's own: all of them or none.

    Raises:
        ProtocolMismatch: Some are and some are not.
        Validation: A client that would not let pickled handles out.
    """
    stock = [link for link in links if not link.speaks_ours]
    if stock and len(stock) < len(links):
        raise ProtocolMismatch(
            f"{stock[0].name} is no aiosync worker, others are: one trainer of backend 'ipc' sends"
            " to one kind",
            replica=stock[0].name,
            phase="init",
        )
    for link in stock:
        if getattr(link.client, "allow_pickled_handles", True) is False:
            raise Validation(
                f"{link.name} is no aiosync worker: check host, port and path; if it is a stock"
                " vLLM, it takes CUDA IPC handles pickled",
                replica=link.name,
                phase="init",
                next_step="if the URL is right: give its client allow_pickled_handles=True, or use"
                " backend 'nccl'",
            )
    return bool(stock)


def check_ranks(ranks: TrainerRanks) -> None:
    """Several trainer ranks would each have to export for the worker on their own GPU."""
    if ranks.size > 1:
        raise Validation(
            f"this trainer has {ranks.size} ranks: a stock vLLM is reached by one rank over"
            " CUDA IPC",
            phase="init",
            next_step="use backend 'nccl'",
        )


def stock_plan(feed: SourceFeed, limit: int, *, packed: bool) -> Plan:
    """The chunks of vLLM's packed form, or one for each tensor.

    Raises:
        Validation: A tensor that its workers could not take; named, before anything moves.
    """
    names = [meta.name for meta in feed.metadata]
    itemsizes = [meta.dtype.itemsize for meta in feed.metadata]
    plan = plan_chunks(
        [meta_nbytes(meta) for meta in feed.metadata],
        itemsizes,
        limit=limit,
        rule=IPC_PACKED if packed else EACH,
        names=names,
    )
    if packed:
        check_alignment(plan, itemsizes, names)
    return plan


def connect(sender: TupleSender, round: Round, feed: SourceFeed) -> None:
    """Let the sender's updates reach all members as calls of this round; on the loop."""
    calls = LaneCalls()
    names, dtypes, shapes = to_wire(feed.metadata)

    def post(indices: list[int], fields: dict[str, Any]) -> None:
        info = {
            "names": [names[i] for i in indices],
            "dtype_names": [dtypes[i] for i in indices],
            "shapes": [shapes[i] for i in indices],
        }
        calls.run(partial(_update, round, info | fields))

    sender.connect(post, calls.abort)


async def _update(round: Round, info: dict[str, Any]) -> None:
    await fan_out(
        round.links,
        lambda link: link.call("update_weights", info, header=round.header(link)),
        phase="update",
        linger=round.budget.cleanup / 4,
    )
