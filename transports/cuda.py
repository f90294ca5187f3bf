"""Streams, events and batched copies, so that no thread sits in ``synchronize()``.

A `WorkQueue` is a stream; `record` gives a mark (an event) that other queues wait for on the
device and that the host asks for now and then: `wait_event` on an event loop, `poll` on a lane.
Waiting by asking can be left at any moment, which waiting in the driver cannot: it ends when a
peer does what it may never do. On the CPU everything is done when a call returns, so the same
code runs there, with marks that are always reached.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, final

import anyio
import torch

from statemachines.errors import Validation
from transports.errors import PhaseTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

FIRST_NAP_S = 0.0001
LONGEST_NAP_S = 0.001
_LONGEST_GUESS_S = 0.02
_SHARE = 0.05
_URGENT = -1  # of CUDA's priorities: lower comes first

_DTYPE: Callable[[torch.Tensor], torch.dtype] = attrgetter("dtype")
# What the batched copy moves as it is. Others travel as integers of their size, or as bytes: the
# copy of a floating-point type may quieten a NaN.
_PLAIN = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Mark(Protocol):
    """A point in a queue's work; ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether the work up to it is done; raises what went wrong on the device."""


@final
class _Reached:
    def query(self) -> bool:
        return True


REACHED: Mark = _Reached()


@final
class WorkQueue:
    """A stream of its own on `device`; on the CPU there is nothing to queue.

    Args:
        urgent: Its kernels go first where several queues have some ready.
    """

    def __init__(self, device: torch.device, *, urgent: bool = False) -> None:
        self.device, self.urgent = device, urgent
        self.stream: Any = None
        if device.type == "cuda":
            make: Any = torch.cuda.Stream  # untyped
            self.stream = make(device, priority=_URGENT if urgent else 0)

    @property
    def handle(self) -> int:
        """The ``cudaStream_t``; 0 on the CPU."""
        return 0 if self.stream is None else int(self.stream.cuda_stream)

    def active(self) -> AbstractContextManager[Any]:
        """Makes it the calling thread's current stream for the block, and its device current."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def record(self) -> Mark:
        """Mark everything that was queued so far."""
        if self.stream is None:
            return REACHED
        return _recorded(self.stream)

    def wait(self, mark: Mark) -> None:
        """What is queued from here on begins after `mark`; the host does not wait."""
        if self.stream is not None and mark is not REACHED:
            self.stream.wait_event(mark)


_IDLE: dict[tuple[torch.device, bool], list[WorkQueue]] = {}


def borrow_queue(device: torch.device, *, urgent: bool = False) -> WorkQueue:
    """A queue that nobody uses now. torch keeps memory for each stream: so they are used again."""
    idle = _IDLE.setdefault((device, urgent), [])
    try:
        return idle.pop()
    except IndexError:
        return WorkQueue(device, urgent=urgent)


def return_queue(queue: WorkQueue) -> None:
    """All of its work is done, and nobody will queue more."""
    _IDLE.setdefault((queue.device, queue.urgent), []).append(queue)


def mark_current(device: torch.device) -> Mark:
    """Mark what the calling thread has queued on its current stream of `device`."""
    if device.type != "cuda":
        return REACHED
    return _recorded(torch.cuda.current_stream(device))


def _recorded(stream: Any) -> Mark:
    make: Any = torch.cuda.Event  # untyped
    event: Mark = make()
    stream.record_event(event)
    return event


def cuda_device(device: torch.device | str | int | None = None) -> torch.device:
    """`device` with its index; the current one unless given.

    Raises:
        Validation: There is no CUDA here, or it is another kind of device.
    """
    found = torch.device("cuda" if device is None else device)
    if found.type != "cuda" or not torch.cuda.is_available():
        where = "there is no CUDA device here" if found.type == "cuda" else f"the device is {found}"
        raise Validation(where, phase="init")
    index: int | None = found.index
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


async def wait_event(mark: Mark, *, expected: float = 0.0, limit: float | None = None) -> None:
    """Wait for a mark on the event loop; cancellation ends it at once.

    Args:
        expected: Seconds it will take, as far as known: nothing is asked before.
        limit: Seconds; None: as long as it takes (put a scope around it).

    Raises:
        PhaseTimeout: Not reached within `limit`.
    """
    naps = _Naps(expected, limit)
    while not mark.query():  # noqa: ASYNC110 - nothing on the host is told when a device is done
        await anyio.sleep(naps.next())


def poll(
    mark: Mark,
    check: Callable[[], object],
    *,
    expected: float = 0.0,
    limit: float | None = None,
) -> None:
    """`wait_event` for a lane: `check` is called before each look, and raises to end it."""
    naps = _Naps(expected, limit)
    check()
    while not mark.query():
        time.sleep(naps.next())
        check()


class _Naps:
    def __init__(self, expected: float, limit: float | None) -> None:
        self._limit = limit
        self._end = None if limit is None else time.monotonic() + limit
        self._due = expected
        self._began = time.monotonic()

    def next(self) -> float:
        if self._end is not None and time.monotonic() >= self._end:
            raise PhaseTimeout(f"the device was not done within {self._limit:g} s")
        if self._due > FIRST_NAP_S:
            due, self._due = self._due, 0.0
            return min(due, _LONGEST_GUESS_S)
        # A share of what it took so far: never much later than the device, and seldom asked.
        share = (time.monotonic() - self._began) * _SHARE
        return min(max(share, FIRST_NAP_S), LONGEST_NAP_S)


def copy_form(dtype: torch.dtype, *, aligned: bool = True) -> torch.dtype | None:
    """As what tensors of `dtype` are copied bit by bit: None: as they are; uint8: flat bytes."""
    if not aligned:
        return torch.uint8
    return None if dtype in _PLAIN else _INTEGERS.get(dtype.itemsize, torch.uint8)


def in_form(tensor: torch.Tensor, form: torch.dtype | None) -> torch.Tensor:
    """A view of a contiguous tensor in the form that `copy_form` names."""
    if form is None:
        return tensor
    if form.itemsize == tensor.itemsize:
        return tensor.view(form)
    return tensor.view(-1).view(torch.uint8)


def copy_batch(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target on the current stream: one launch for many of a dtype.

    Sources and targets agree in dtype and shape, pair by pair, and are in their `copy_form`.
    """
    if not targets:
        return
    with torch.no_grad():
        if len(set(map(_DTYPE, targets))) == 1:
            torch._foreach_copy_(list(targets), list(sources))
            return
        batches: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for target, source in zip(targets, sources, strict=True):
            into, out_of = batches.setdefault(target.dtype, ([], []))
            into.append(target)
            out_of.append(source)
        for into, out_of in batches.values():
            torch._foreach_copy_(into, out_of)
