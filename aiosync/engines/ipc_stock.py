"""Backend ``ipc`` towards a stock vLLM: what its workers want to hear, and in which calls."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import torch

from aiosync.engines.ipc_device import gpu_of
from aiosync.engines.ipc_ranks import InStep, find_exporters
from aiosync.errors import ProtocolMismatch, Validation
from aiosync.lane_calls import LaneCalls
from aiosync.members import fan_out
from aiosync.metadata import meta_nbytes, to_wire
from transports.cuda import mark_current
from transports.planning import EACH, IPC_PACKED, check_alignment, plan_chunks
from transports.tuple_sender import TupleSender

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiosync.engines.ipc import IPCTrainerWeightTransferEngine
    from aiosync.feed import SourceFeed
    from aiosync.members import MemberLink
    from aiosync.ranks import TrainerRanks
    from aiosync.round import Round
    from transports.planning import Plan

_IN_USE: Final = b"vllm"


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


@final
class StockSide:
    """What a trainer rank knows and does for vLLM's own workers.

    Args:
        packed: One buffer that is filled again and again.
        limit: Its size.

    Attributes:
        in_use: Whether the workers are such ones. Rank 0 sees it, and tells the others.
    """

    def __init__(self, *, packed: bool, limit: int) -> None:
        self.in_use = False
        self._packed, self._limit = packed, limit
        self._here: torch.device | None = None
        self._exporters: dict[int, str] = {}
        self._plan: tuple[SourceFeed, Plan] | None = None

    def open(self, device: torch.device, ranks: TrainerRanks) -> TupleSender | InStep:
        """A sender of what is on `device`, or is copied there."""
        inner = TupleSender(device, packed=self._packed)
        return inner if ranks.size == 1 else InStep(inner, ranks, packed=self._packed)

    def plan(self, feed: SourceFeed) -> Plan:
        """`stock_plan`, made again only when the metadata changed."""
        if self._plan is None or self._plan[0] is not feed:
            self._plan = (feed, stock_plan(feed, self._limit, packed=self._packed))
        return self._plan[1]

    def for_ranks(self, device: torch.device | None) -> bytes:
        """What the other ranks are told; `device` is where this one is."""
        self._here = device
        return _IN_USE if self.in_use else b""

    def agreed(self, engine: IPCTrainerWeightTransferEngine, round: Round, told: bytes) -> None:
        """Settle with the other ranks who exports; blocking.

        Args:
            told: By rank 0.

        Raises:
            Validation: They cannot export the same; names the rank.
        """
        feed, _ = round.validated()
        if not engine.is_sender:
            self.in_use = told == _IN_USE
            if not self.in_use:
                engine.dispose()  # of what it exported for others
        if not self.in_use:
            return
        settings: dict[str, object] = {"packed": self._packed}
        if self._packed:
            settings["packed_buffer_size_bytes"] = self._limit
        gpu = gpu_of(self._here)
        self._exporters = find_exporters(engine.ranks, feed, gpu, settings)
        if not engine.is_sender:
            round.plan = self.plan(feed)
            if engine.sender is None:
                engine.sender = self.open(self._here or torch.device("cpu"), engine.ranks)

    def prepare(self, sender: TupleSender | InStep, feed: SourceFeed) -> None:
        """Before a pass, on the caller's thread: its current stream is the one that trained."""
        sender.order_after(mark_current(sender.device))
        if isinstance(sender, InStep):
            sender.share_out(self._exporters, feed.metadata)


def connect(sender: TupleSender | InStep, round: Round, feed: SourceFeed) -> None:
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
