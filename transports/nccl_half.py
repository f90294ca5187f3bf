"""What both halves of a stream over an NCCL group have in common.

The wire is vLLM's: the plan's chunks, one broadcast each, nothing beside them. Between two of ours
one more broadcast may follow, with the digests of all chunks. A chunk of one tensor travels from
and into the tensor's own memory; others are packed into and copied out of a ring
(`transports.ring`), on a queue of their own beside the one of the broadcasts, so that packing,
sending and loading overlap. The host runs ahead by `AHEAD` chunks at most and asks the device now
and then how far it is; it never blocks in a synchronisation.

A half that leaves a round before its end ends the group; the next round makes a new one.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from statemachines.errors import InvalidTransition, Validation
from transports.cuda import borrow_queue, poll, return_queue
from transports.device_digest import DeviceDigests
from transports.digest import WSUM64, chain
from transports.errors import PhaseTimeout
from transports.planning import GRADED
from transports.pointer_copy import pointer_copies
from transports.ring import Ring
from transports.stream import Progress, StreamSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statemachines.errors import AiosyncError
    from transports.cuda import Mark, WorkQueue
    from transports.nccl_group import NcclGroup
    from transports.planning import Plan
    from transports.ring import Described

AHEAD = 8
_DRAIN_S = 2.0
NBYTES: Callable[[torch.Tensor], int] = attrgetter("nbytes")
# What NCCL knows by itself. vLLM sends each tensor of an unpacked round as its own dtype.
_NCCL_DTYPES = frozenset(
    {"int8", "uint8", "int32", "int64", "float16", "float32", "float64", "bfloat16"}
    | {"float8_e4m3fn"}
)


def nccl_knows(dtype: torch.dtype) -> bool:
    """Whether vLLM's unpacked wire has this dtype."""
    return str(dtype).removeprefix("torch.") in _NCCL_DTYPES


def warm_up(device: torch.device) -> None:
    """Have the kernels there that rounds use: loading one may wait for all that runs already."""
    pointer_copies(device)
    DeviceDigests(1, device).update(torch.zeros((8 << 20) + 4101, dtype=torch.uint8, device=device))


class Half:
    """What both halves have in common.

    Args:
        group: Joined before the first round.
        digest: ``"wsum64"``, or None to count only.
        ring_nbytes: Device memory for packed chunks; more is taken where a chunk needs it.
    """

    _takes_early = False
    """Whether the first chunk comes before anybody knows where it goes."""

    def __init__(
        self, group: NcclGroup, *, digest: str | None = None, ring_nbytes: int = 1 << 29
    ) -> None:
        if digest not in (None, WSUM64):
            raise Validation(f"digest {digest!r}: NCCL rounds are verified by {WSUM64}, or counted")
        self.progress = Progress()
        self._group = group
        self._device = group.device
        self._verified = digest is not None
        self._ring_nbytes = ring_nbytes
        self._ring: Ring | None = None
        self._tensors: Sequence[Described] = ()
        self._wire: WorkQueue | None = None  # of the broadcasts
        self._side: WorkQueue | None = None  # of the copies
        self._digests: DeviceDigests | None = None
        self._marks: dict[int, Mark] = {}  # when a chunk's place is free again
        self._under_way: deque[int] = deque()
        self._round = 0
        self._stall = 0.0
        self._is_open = False

    def describe(self, tensors: Sequence[Described]) -> None:
        """What the next rounds carry, in the plan's order; before each of them."""
        self._tensors = tensors

    def close(self) -> None:
        """End a round that is not finished (and the group with it); otherwise nothing."""
        if self._is_open:
            self._is_open = False
            self._group.close()

    def release(self) -> None:
        """End for good; returns at once."""
        self._is_open = False
        self._group.close(self._free)

    def _free(self) -> None:
        """Memory that a kernel of a dead group may still write to is not given to others."""
        queues = [queue for queue in (self._wire, self._side) if queue is not None]
        self._wire = self._side = None
        for queue in queues:
            with suppress(RuntimeError, PhaseTimeout):  # of a broken device; or it hangs
                poll(queue.record(), lambda: None, limit=_DRAIN_S)
                return_queue(queue)
        self._ring = self._digests = None
        self._marks.clear()

    def _begin(self, plan: Plan, round: int, stall: float) -> None:
        if self._is_open:
            raise InvalidTransition(f"round {self._round} is still open", round=self._round)
        if isinstance(stall, bool) or not 0 < stall < float("inf"):
            raise Validation(f"stall must be a finite number of seconds above 0, not {stall!r}")
        if len(self._tensors) != len(plan.sizes):
            raise Validation(f"{len(self._tensors)} tensors described, {len(plan.sizes)} planned")
        ring = self._ring
        if ring is None or ring.plan is not plan or ring.tensors is not self._tensors:
            self._ring = None  # before a new one is taken
            early = self._takes_early and plan.rule == GRADED  # others type what travels alone
            self._ring = Ring(plan, self._tensors, self._ring_nbytes, self._device, early=early)
        if self._wire is None:
            self._wire = borrow_queue(self._device, urgent=True)
            self._side = borrow_queue(self._device)
        if self._verified:
            with self._queues[1].active():
                self._digests = DeviceDigests(len(plan.chunks), self._device)
        self._marks.clear()
        self._under_way.clear()
        self._round, self._stall, self._is_open = round, stall, True

    @property
    def _queues(self) -> tuple[WorkQueue, WorkQueue]:
        """Of the broadcasts and of the copies."""
        if self._wire is None or self._side is None:
            raise InvalidTransition("no round is open", detail={"allowed": ["open"]})
        return self._wire, self._side

    @property
    def _opened(self) -> Ring:
        if self._ring is None or not self._is_open:
            raise InvalidTransition("no round is open", detail={"allowed": ["open"]})
        return self._ring

    def _broadcast(self, data: torch.Tensor) -> None:
        if data.numel():
            self._group.broadcast(data, self._queues[0], timeout=self._stall)

    def _poll(self, mark: Mark) -> None:
        try:
            poll(mark, self._group.look, limit=self._stall)
        except PhaseTimeout as error:
            names = self._group.names
            others = names[1:] if self._group.rank == 0 else names[:1]
            only = others[0] if len(others) == 1 else None
            raise PhaseTimeout(
                f"no chunk moved for {self._stall:g} s; waiting for {', '.join(others)}",
                replica=only if self._group.rank == 0 else None,
                rank=None if only is None else names.index(only),
            ) from error

    def _locate(self, error: AiosyncError, phase: str) -> AiosyncError:
        return error.locate(phase=phase, round=self._round)

    def _summary(self, plan: Plan) -> StreamSummary:
        self._is_open = False
        digests, self._digests = self._digests, None
        return StreamSummary(
            nbytes=plan.total_bytes,
            chunks=len(plan.chunks),
            digest=None if digests is None else chain(digests.read()),
        )
