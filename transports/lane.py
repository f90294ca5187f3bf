"""Blocking calls with an owner: one daemon thread per blocking resource.

Theory of operation
-------------------
NCCL, gloo, CUDA IPC, a TCPStore and a trainer's own gathers block in native code, for ever if a
peer is gone. A `Lane` is the thread such a resource lives on. `Lane.run` has two halves:

* The *thread* takes calls from a queue, first in first out, one at a time. It holds a
  `LaneWorker`, never the `Lane`, so a lane that its owner dropped is collected and its thread ends.
* The *caller* waits for the call's event. Once it is cancelled, a *watch* does, a child task. It is
  a child because a native ``task.cancel()`` goes straight through a shield but ends at a task
  group: whoever cancels the caller again reaches the watch as the cancellation of its scope, and
  nothing else. (Before that there is none: it costs as much as the rest of a short call.)

Every call moves through ``queued -> running -> done`` under one lock, with two exits from
``queued``: ``withdrawn`` (its caller left) and ``refused`` (the lane was poisoned meanwhile).
Who has the result is decided under the same lock: it is *received* in `run`'s last step, which
awaits nothing, or else *discarded*, once, on the lane's thread.

When the caller is cancelled

1. and the call is queued: it is withdrawn. Nothing ran, nothing is aborted.
2. and it is running: `abort` is called once, on a daemon thread of its own, because an abort may
   block for ever as well (`ncclCommAbort` is known to), and a thread of a pool would then keep
   the process alive. The watch waits, shielded, `grace` seconds for the call to return, and for
   the abort, so that it cannot strike the caller's next use of the resource. The error that the
   abort provoked is dropped: the caller sees its own cancellation.
3. and it did not return in time: the lane is poisoned. Calls in the queue and all later ones
   raise `LanePoisoned`. The stuck thread is the reaper of its own call: if it ever comes back it
   discards the result and ends. As a daemon it does not delay the exit of the process.
4. and it had returned already: the result is discarded, the lane stays usable.

Poisoning happens in a ``finally``: a loop that shuts down cancels every task natively, the watch
in its grace period included, possibly before the watch took its first step; and a coroutine may be
closed instead of cancelled.

Results come back through the loop's own thread-safe scheduler (`_post`), which returns at once.
`anyio.from_thread.run_sync` waits until the loop has run the function: a loop that stops in
between leaves the lane's thread waiting for ever. A lane keeps nothing that belongs to a loop
between calls (the event and the token are the call's), so it may serve one loop after another.

Rejected: `anyio.to_thread` (an abandoned call frees its limiter and keeps the process alive; one
that is not abandoned cannot be left), an executor (threads that are joined at exit), an
`anyio.Lock` for order (bound to a loop; the queue is order enough).

Invariants: at most one call runs; `abort` at most once a call, and never for a call that has not
begun; every value `fn` returned is received or discarded, never both; context variables and the
event loop are not visible from the thread.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar, TypeVarTuple, final

import anyio
import anyio.lowlevel
import msgspec

from statemachines.errors import Validation
from transports.lane_thread import LaneCall, LaneWorker

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Lane", "LaneFactory", "LaneLike", "LaneStatistics"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class LaneStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the lane was made.

    Attributes:
        calls: Calls that began.
        failed: Calls whose function raised.
        aborts: Calls that were running when their caller was cancelled.
        discarded: Values that nobody received.
        waiting: Calls in the queue now.
    """

    name: str
    calls: int = 0
    failed: int = 0
    aborts: int = 0
    discarded: int = 0
    waiting: int = 0
    busy: bool = False
    poisoned: bool = False
    closed: bool = False


class LaneLike(Protocol):
    """What engines need of a lane; `transports.loopback.InlineLane` is another one."""

    @property
    def name(self) -> str: ...
    @property
    def poisoned(self) -> bool: ...
    @property
    def busy(self) -> bool: ...

    async def run(
        self,
        fn: Callable[[*Ts], T],
        *args: *Ts,
        abort: Callable[[], object] | None = None,
        grace: float = 1.0,
        discard: Callable[[T], object] | None = None,
    ) -> T: ...

    def close(self) -> None: ...
    def statistics(self) -> LaneStatistics: ...


LaneFactory = Callable[[str], LaneLike]


@final
class Lane:
    """One daemon thread that runs blocking calls in order; starts with the first call.

    Args:
        name: Name of the thread; appears in errors.
        setup: Called on the thread before its first call (device, stream, grad mode). What it
            raises is raised by that call, and the next call tries again.
    """

    __slots__ = ("__weakref__", "_worker")

    def __init__(self, name: str, *, setup: Callable[[], object] | None = None) -> None:
        self._worker = LaneWorker(name, setup)

    async def run(
        self,
        fn: Callable[[*Ts], T],
        *args: *Ts,
        abort: Callable[[], object] | None = None,
        grace: float = 1.0,
        discard: Callable[[T], object] | None = None,
    ) -> T:
        """Run ``fn(*args)`` on the thread, after everything that was queued before.

        Whatever `fn` raises is raised here as it is, `SystemExit` included; `StopIteration` and a
        cancellation exception, which a coroutine cannot pass on, become `RuntimeError`.

        Cancelling a call that has not begun withdraws it. Cancelling one that runs calls `abort`
        and waits up to `grace` seconds, whatever cancels meanwhile, for `fn` and `abort` to
        return; if `fn` does not, the lane is poisoned.

        Args:
            fn: A plain function. It sees neither the event loop nor the context variables.
            abort: Makes `fn` return soon. Called at most once, on a thread of its own; it may
                find that `fn` has just returned, and what it raises is logged only. It must act
                on this call's resource alone: the next call in the queue may have begun.
            grace: Seconds, finite.
            discard: Called on the lane's thread with the value of a call whose caller had left;
                what it raises is logged only.

        Raises:
            LanePoisoned: An earlier call never came back, or this process is a fork of the one
                that started the thread.
            InvalidTransition: The lane is closed.
            Validation: `fn` is a coroutine function, or `grace` is no finite number >= 0.
        """
        if inspect.iscoroutinefunction(fn):
            raise Validation(f"lane {self.name!r} runs plain functions; {fn!r} is a coroutine's")
        if not 0 <= grace < math.inf:
            raise Validation(f"grace must be a finite number of seconds, not {grace!r}")
        await anyio.lowlevel.checkpoint_if_cancelled()
        call = LaneCall(fn, args, abort, discard)
        self._worker.submit(call)
        try:
            try:
                await call.done.wait()
            except anyio.get_cancelled_exc_class():
                if self._worker.abort(call):
                    async with anyio.create_task_group() as group:
                        group.start_soon(self._watch, call, grace)
                        raise
                raise
            value: T = self._worker.receive(call)
            return value
        finally:
            # A loop that shuts down may cancel the watch, before its first step, too.
            self._worker.leave(call)

    async def _watch(self, call: LaneCall, grace: float) -> None:
        # Shielded: the caller's memory is in use until the call has returned.
        with anyio.move_on_after(grace, shield=True):
            await call.done.wait()
            # So that no abort strikes what the caller does next.
            if call.abort_done is not None:
                await call.abort_done.wait()

    @property
    def name(self) -> str:
        return self._worker.name

    @property
    def poisoned(self) -> bool:
        """Whether a call never came back. Stays true even if it does later."""
        return self._worker.poisoned

    @property
    def busy(self) -> bool:
        """Whether a call is on the thread now."""
        return self._worker.running

    def close(self) -> None:
        """Take no further calls; the thread ends after those in the queue. Idempotent."""
        self._worker.close()

    def statistics(self) -> LaneStatistics:
        worker = self._worker
        return LaneStatistics(
            name=worker.name,
            calls=worker.calls,
            failed=worker.failed,
            aborts=worker.aborts,
            discarded=worker.discarded,
            waiting=worker.waiting,
            busy=worker.running,
            poisoned=worker.poisoned,
            closed=worker.closed,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        stats = self.statistics()
        flags = ("poisoned", "closed", "busy")
        state = next((flag for flag in flags if getattr(stats, flag)), "idle")
        return f"<Lane {self.name!r} {state} calls={stats.calls} waiting={stats.waiting}>"

    def __del__(self) -> None:
        worker = self._worker
        if worker.pid == os.getpid() and not worker.closed:
            message = f"lane {worker.name!r} was never closed"
            warnings.warn(message, ResourceWarning, stacklevel=1, source=self)
            if not sys.is_finalizing():  # then its thread stands still, perhaps with the lock
                worker.close()
