"""Work of a round that is put off: queued while weights arrive, drained before they count."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

from aiosync.defaults import DEFAULTS
from aiosync.overrides import call_step
from transports.deferred import Deferred

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiosync.worker_cycle import WorkerCycle
    from transports.lane import LaneLike

DEFERRED_DEPTH = 2


class Defers:
    """Part of every worker engine; for those that set `defers_processing`."""

    defers_processing: ClassVar[bool] = False

    cycle: WorkerCycle

    if TYPE_CHECKING:

        @property
        def lane(self) -> LaneLike:
            """The engine's lane."""

        def abort_receive(self) -> None:
            """The engine's, too."""

        def wrong_order(self, what: str) -> Exception:
            """Of `Watchable`."""

    async def defer(self, fn: Callable[..., Any], *args: Any) -> None:
        """Queue ``fn(*args)`` behind what the open round deferred before; for `receive_weights`.

        A plain function runs on the lane, a coroutine function on the loop. Waits while
        `DEFERRED_DEPTH` items are queued, so a fast sender is slowed down. The first error ends
        the round, and is raised by later calls and by `drain_pending`.

        Raises:
            InvalidTransition: No round is open, or the class does not set `defers_processing`.
        """
        session = self.cycle.session
        if session is None or session.deferred is None:
            raise self.wrong_order("defer")
        await session.deferred.put(functools.partial(fn, *args))

    async def drain_pending(self) -> None:
        """Wait until everything that was deferred has been applied; idempotent.

        Raises:
            The first error of the deferred work.
        """
        session = self.cycle.session
        if session is not None and session.deferred is not None:
            await session.deferred.drain()

    def new_queue(self) -> Deferred[Callable[[], Any]] | None:
        """The queue of a round that begins, where the class defers its processing."""
        if not self.defers_processing:
            return None
        return Deferred(self._process, depth=DEFERRED_DEPTH)

    async def _process(self, work: Callable[[], Any]) -> None:
        grace = DEFAULTS.cleanup_s / 2
        lane = lambda: self.lane  # noqa: E731  made only where something blocks
        left = self.cycle.left
        await call_step(self, work, lane=lane, abort=self.abort_receive, grace=grace, left=left)
