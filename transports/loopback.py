"""A data plane within one process, and things that go wrong in it, for tests.

`LoopbackLink` joins one sender and any number of readers through queues that copy bytes. Each side
follows a script of faults, so a test says what happens at which chunk instead of patching code::

    with LoopbackLink(script={"receiver": [Fault.hang_until_aborted(2)]}) as link:
        ...  # the trainer gets link.sender, the worker link.receiver

Both sides block, as real ones do, and belong on two lanes. A link carries one round after another,
also after a round that failed: each side calls `close` when it is done with a round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, TypeVarTuple, final

import anyio
import anyio.lowlevel

from statemachines.errors import InvalidTransition, Validation
from transports.digest import available
from transports.lane import LaneStatistics
from transports.loopback_receiver import LoopbackReceiver
from transports.loopback_rounds import Fault, Hall
from transports.loopback_sender import LoopbackSender

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

__all__ = ["Fault", "InlineLane", "LoopbackLink", "LoopbackReceiver", "LoopbackSender"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@final
class LoopbackLink:
    """One sender and its readers in one process.

    Args:
        readers: How many.
        script: Faults of ``"sender"``, of ``"receiver"`` (every reader has them) and of
            ``"receiver:1"`` (that reader). Each happens once.
        depth: Chunks a reader may be behind before the sender waits.
        digest: ``"auto"`` for the best kind available, a kind of `transports.digest`, or None:
            counts only, so that corrupted bytes pass.

    Attributes:
        sender: A `transports.stream.Sender`.
        receivers: `transports.stream.Receiver` of each reader.
    """

    def __init__(
        self,
        *,
        readers: int = 1,
        script: Mapping[str, Sequence[Fault]] | None = None,
        depth: int = 2,
        digest: str | None = "auto",
    ) -> None:
        if readers < 1 or depth < 1:
            raise Validation(f"at least one reader and one chunk, not {readers} and {depth}")
        names = [f"receiver:{i}" for i in range(readers)]
        faults = dict(script or {})
        for name in faults.keys() - {"sender", "receiver", *names}:
            raise Validation(f"no side {name!r}: sender, receiver, {', '.join(names)}")
        kind = available()[0] if digest == "auto" else digest
        self._hall = Hall(readers)
        sender_faults = faults.get("sender", ())
        self.sender = LoopbackSender(self._hall, sender_faults, depth=depth, digest=kind)
        self.receivers = tuple(
            LoopbackReceiver(
                self._hall, i, [*faults.get("receiver", ()), *faults.get(name, ())], digest=kind
            )
            for i, name in enumerate(names)
        )

    @property
    def receiver(self) -> LoopbackReceiver:
        """The first reader."""
        return self.receivers[0]

    def release(self) -> None:
        """Free every call that hangs by its script, now and later; for the end of a test."""
        with self._hall.changed:
            self._hall.released.set()
            self._hall.changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()
        for half in (self.sender, *self.receivers):
            half.close()


@final
class InlineLane:
    """A lane without a thread: `run` calls the function in place, on the event loop's thread.

    For simulations whose order of events must not depend on threads. The function must not wait
    for anything the loop has to do (the other side of a link, an abort): it would wait for ever.
    Nothing can be cancelled once it runs, so `abort`, `grace` and `discard` are never used, and
    the lane is never poisoned. Give the class itself as ``lane_factory``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.poisoned = False
        self.busy = False
        self._closed = False
        self._calls = self._failed = 0

    async def run(
        self,
        fn: Callable[[*Ts], T],
        *args: *Ts,
        abort: Callable[[], object] | None = None,
        grace: float = 1.0,
        discard: Callable[[T], object] | None = None,
    ) -> T:
        """Call ``fn(*args)`` after one checkpoint; errors as `transports.lane.Lane.run`."""
        await anyio.lowlevel.checkpoint()
        if self._closed:
            detail = {"state": "closed", "allowed": []}
            raise InvalidTransition(f"lane {self.name!r} is closed", detail=detail)
        self._calls += 1
        self.busy = True
        try:
            return fn(*args)
        except BaseException as exc:
            self._failed += 1
            if isinstance(exc, (StopIteration, anyio.get_cancelled_exc_class())):
                message = f"the call on lane {self.name!r} raised {exc!r}"
                raise RuntimeError(message) from exc  # noqa: TRY004 - not an argument's type
            raise
        finally:
            self.busy = False

    def close(self) -> None:
        self._closed = True

    def statistics(self) -> LaneStatistics:
        return LaneStatistics(
            name=self.name,
            calls=self._calls,
            failed=self._failed,
            busy=self.busy,
            closed=self._closed,
        )

    def __repr__(self) -> str:
        return f"<InlineLane {self.name!r} calls={self._calls}>"
