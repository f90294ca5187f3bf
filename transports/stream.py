"""The data plane's contract: two blocking halves that run on lanes.

A stream carries one round's tensors as the chunks of a shared plan (`transports.planning`). Both
halves know the plan; only readiness, acknowledgements and digests travel beside the bytes.
`abort` may be called from any thread, at any time, more than once, and returns at once: a half
that is blocked then raises `TransportAborted`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from transports.planning import Plan


class StreamSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one half moved in a round.

    Attributes:
        nbytes: Payload bytes, padding not counted.
        chunks: Chunks of the plan that were carried.
        digest: Chained digest of all chunks in hex, or None when only counts are checked.
    """

    nbytes: int
    chunks: int
    digest: str | None = None


class Progress:
    """Written by the lane's thread, read by the loop: plain attributes, no lock needed."""

    __slots__ = ("at", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self.at = time.monotonic()

    def step(self, nbytes: int) -> None:
        """Note that `nbytes` more payload bytes went through (0 counts as a sign of life)."""
        self.nbytes += nbytes
        self.at = time.monotonic()


class Columns(NamedTuple):
    """A batch, as lists side by side.

    Attributes:
        addresses: See `Run`.
    """

    indices: Sequence[int]
    tensors: Sequence[torch.Tensor]
    addresses: list[int] | None

    def are_from(self, first: int) -> bool:
        """Whether these are `first` and those behind it."""
        due = range(first, first + len(self.tensors))
        return self.indices == due or list(self.indices) == list(due)

    def part(self, first: int, end: int) -> Columns:
        """Those from `first` up to `end`."""
        addresses = None if self.addresses is None else self.addresses[first:end]
        return Columns(self.indices[first:end], self.tensors[first:end], addresses)


@final
class Run(Sequence["tuple[int, torch.Tensor]"]):
    """A batch of neighbours in the plan, without an object for each of thousands.

    Args:
        first: Index of the first.
        tensors: All of them, in plan order.
        addresses: Where they lay when they were looked at, contiguous and of the planned sizes;
            None: nobody has looked.
    """

    __slots__ = ("columns",)

    def __init__(
        self, first: int, tensors: Sequence[torch.Tensor], addresses: list[int] | None = None
    ) -> None:
        self.columns = Columns(range(first, first + len(tensors)), tensors, addresses)

    def part(self, first: int, end: int) -> Run:
        """Those at `first` up to `end`, as a batch of their own."""
        indices, tensors, addresses = self.columns.part(first, end)
        return Run(indices[0] if indices else 0, tensors, addresses)

    def __len__(self) -> int:
        return len(self.columns.tensors)

    def __getitem__(self, at: Any) -> Any:
        indices, tensors, _ = self.columns
        if isinstance(at, slice):
            return list(zip(indices[at], tensors[at], strict=True))
        return indices[at], tensors[at]


def columns_of(batch: Sequence[tuple[int, torch.Tensor]]) -> Columns:
    """What `Sender.write` gets, as lists side by side."""
    if isinstance(batch, Run):
        return batch.columns
    return Columns([index for index, _ in batch], [tensor for _, tensor in batch], None)


def targets_of(
    destination: Callable[[int], torch.Tensor], indices: Sequence[int]
) -> list[torch.Tensor]:
    """``destination(i)`` for all of these, at once where it has a method `many`."""
    many: Callable[[Sequence[int]], list[torch.Tensor]] | None = getattr(destination, "many", None)
    return list(map(destination, indices)) if many is None else many(indices)


def run_of(indices: Sequence[int]) -> range | None:
    """The same indices, if each is the one before and one more."""
    if isinstance(indices, range) and indices.step == 1:
        return indices or None
    # The count first: what the last one is may be anything.
    if not indices or indices[-1] - indices[0] + 1 != len(indices):
        return None
    run = range(indices[0], indices[-1] + 1)
    return run if list(indices) == list(run) else None


@final
class Pieces:
    """Parts of a long list: the same objects again while it is the same list.

    Numbers that nobody has looked at for a while are not in the processor's cache, and a copy of a
    list counts each of them.
    """

    def __init__(self) -> None:
        self._whole: Sequence[int] | None = None
        self._parts: dict[range, list[int]] = {}

    def of(self, whole: Sequence[int], run: range) -> list[int]:
        """``whole[run.start:run.stop]``; not to be changed."""
        if whole is not self._whole:
            self._whole, self._parts = whole, {}
        part = self._parts.get(run)
        if part is None:
            part = self._parts[run] = list(whole[run.start : run.stop])
        return part


def known_of(
    destination: Callable[[int], torch.Tensor], indices: Sequence[int]
) -> list[int] | None:
    """Where these destinations lay when they were looked at, if it has a method `known`."""
    known: Callable[[Sequence[int]], list[int] | None] | None
    known = getattr(destination, "known", None)
    return None if known is None else known(indices)


def meanwhile_of(destination: Callable[[int], torch.Tensor]) -> Callable[[int | None], None]:
    """What to call before a wait (`Receiver.receive`)."""
    found: Callable[[int | None], None] = getattr(destination, "meanwhile", lambda _: None)
    return found


class Roll(Protocol):
    """Which readers a round still counts on, where it may go on without some of them."""

    patience: float
    """How long, as a share of their own time, the others may be held up by a slow reader."""
    floor: float
    """Seconds that a slow reader gets in any case."""

    def pace(self) -> int:
        """How many readers have to be through before those behind them count as slow."""

    def lose(self, reader: str, error: Exception) -> bool:
        """Strike `reader`; False: the round cannot go on without it. On the lane."""

    def is_out(self, reader: str) -> bool:
        """Whether `reader` was struck, here or elsewhere."""

    def missing(self, present: Sequence[str]) -> list[str]:
        """The readers that are counted on beside those that are `present`."""


class PerReader(Protocol):
    """A sender whose readers do not depend on each other.

    Attributes:
        roll: Set before `Sender.open`; None: every reader is needed.
    """

    roll: Roll | None

    def nudge(self) -> None:
        """The roll was changed: look at it. From any thread."""


class Sender(Protocol):
    """The trainer's half.

    One that also takes tensors which require gradients (it only reads them) has an attribute
    ``takes_parameters = True``: a model's tensors then reach it without a new object for each. One
    that reads nothing before it is written has ``reads_when_written = True``.
    """

    progress: Progress

    def open(self, plan: Plan, readers: int, *, round: int, stall: float) -> None:
        """Wait until all readers of this round are connected.

        Raises:
            PhaseTimeout: A reader did not come within `stall` seconds.
            TransportAborted: `abort` was called.
        """

    def write(self, batch: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Take ``(index in the plan, tensor)`` pairs in plan order.

        The bytes are copied out before the call returns, except where tensors already live in
        memory the readers see: those must not change before `finish` returns.
        """

    def finish(self) -> StreamSummary:
        """Return when every reader has acknowledged every chunk."""

    def abort(self) -> None:
        """Unblock whatever is running; from any thread."""

    def close(self) -> None:
        """Drop this round's connections. What outlives rounds (segments, address) stays."""


class Holding(Sender, Protocol):
    """A sender that can take the first chunk of a round before the readers are told of it."""

    def hold(self) -> None:
        """After `open`: take the first chunk, and no more, but put it on the wire with `go`."""

    def go(self) -> None:
        """The readers are told: what was held leaves. Nothing, where nothing is held."""


class Receiver(Protocol):
    """The worker's half."""

    progress: Progress

    def receive(
        self,
        plan: Plan,
        destination: Callable[[int], torch.Tensor],
        landed: Callable[[Sequence[int]], None],
        *,
        round: int,
        stall: float,
    ) -> StreamSummary:
        """Fill ``destination(i)`` for every tensor `i` of the plan.

        `destination` may have a method ``many(indices)``, which does the same for many of them,
        and whose tensors may require gradients: nothing is recorded of what is written. And it may
        have ``known(indices)``: the addresses that those had when they were last looked at, each
        contiguous and of its tensor's size; None where nobody has. A receiver that asks for all of
        them shortly before it writes to them, in plan order, has an attribute
        ``asks_late = True``. One that has to wait until that many tensors, or all (None), are
        there may call ``meanwhile(count)``, if there is that method, which does what else is due.

        `landed` is called with the indices that are complete (and verified, where digests are
        on), in plan order, each once.

        Raises:
            PeerLost: The sender's connection closed.
            PhaseTimeout: Nothing arrived for `stall` seconds.
            DigestMismatch: A chunk's bytes differ from what was sent.
            TransportAborted: `abort` was called.
        """

    def abort(self) -> None:
        """Unblock whatever is running; from any thread."""

    def close(self) -> None:
        """Drop this round's connection."""
