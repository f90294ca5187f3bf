"""The front door for synchronous trainers: the same engine, on an event loop in a thread.

    with aiosync.blocking.connect(model, workers=[url]) as sync:
        sync.send_weights(version=step)

Calls may come from any thread. Ctrl-C during a call cancels the round and is then raised. Inside a
running event loop every call refuses: it would block that loop; `await` the async engine there.
A block that is never left (`connect(...).__enter__()` in a REPL) ends with the interpreter.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import anyio

from aiosync.defaults import DEFAULTS
from aiosync.errors import WrongLoop
from aiosync.front_door import connect as connect_async
from aiosync.loop_thread import loop_thread
from aiosync.round_options import NEXT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from anyio.from_thread import BlockingPortal

    from aiosync.client_protocol import VLLMWeightSyncClient
    from aiosync.fleet import Member
    from aiosync.handle import RoundProgress, WeightUpdate
    from aiosync.report import Report
    from aiosync.round_options import Next
    from aiosync.sources import Source
    from aiosync.ticket import RoundTicket
    from aiosync.trainer import TrainerWeightTransferEngine
    from aiosync.version import Version
    from statemachines.tables import State

T = TypeVar("T")
_AFTER_INTERRUPT_S: Final = 3 * DEFAULTS.cleanup_s


@contextmanager
def connect(
    model: Source,
    *,
    workers: Sequence[str | VLLMWeightSyncClient | Member] | str,
    **options: Any,
) -> Iterator[BlockingSync]:
    """Like `aiosync.connect`, for code without an event loop.

    Raises:
        WrongLoop: Called inside a running event loop.
    """
    refuse_inside_a_loop("connect")
    with loop_thread("aiosync-blocking") as (portal, stack):
        opening = connect_async(model, workers=workers, **options)
        engine = stack.enter_context(portal.wrap_async_context_manager(opening))
        yield BlockingSync(engine, portal)


def refuse_inside_a_loop(what: str) -> None:
    """Raise unless this thread may block."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise WrongLoop(
        f"aiosync.blocking: {what} would block the event loop that runs in this thread",
        next_step="use `async with aiosync.connect(...)` and `await` here",
    )


@final
class BlockingSync:
    """An initialised trainer engine whose calls block. Made by `connect`."""

    def __init__(self, engine: TrainerWeightTransferEngine, portal: BlockingPortal) -> None:
        self.engine = engine
        self._portal = portal

    @property
    def state(self) -> State:
        return self.engine.state

    @property
    def last_report(self) -> Report | None:
        return self.engine.last_report

    def send_weights(self, *, version: int | str | Version | Next = NEXT, **options: Any) -> Report:
        """Bring every worker to the source's present weights; blocks until each has confirmed.

        Takes and raises what `TrainerWeightTransferEngine.send_weights` does.
        """
        return self._call(
            "send_weights", lambda: self.engine.send_weights(version=version, **options)
        )

    def make_ticket(self, **options: Any) -> RoundTicket:
        """A ticket for the next round; takes what the engine's `make_ticket` does."""

        async def make() -> RoundTicket:
            return self.engine.make_ticket(**options)

        return self._call("make_ticket", make)

    def begin_update(
        self, *, version: int | str | Version | Next = NEXT, **options: Any
    ) -> BlockingUpdate:
        """Start a round in the background and return its handle."""

        async def begin() -> WeightUpdate:
            return self.engine.begin_update(version=version, **options)

        return BlockingUpdate(self._call("begin_update", begin), self._call)

    def _call(self, what: str, fn: Callable[[], Awaitable[T]]) -> T:
        refuse_inside_a_loop(what)
        self.engine.admission.check_process()  # a forked child would wait for a thread it lacks
        future: concurrent.futures.Future[T] = self._portal.start_task_soon(fn)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise
        except BaseException:
            if not future.done():  # Ctrl-C, or an exception thrown into this thread
                future.cancel()
                concurrent.futures.wait([future], timeout=_AFTER_INTERRUPT_S)
            raise

    def __repr__(self) -> str:
        return f"<BlockingSync {self.engine!r}>"


@final
class BlockingUpdate:
    """The handle of a round under way, for threads."""

    def __init__(self, update: WeightUpdate, call: Callable[..., Any]) -> None:
        self._update = update
        self._call = call

    @property
    def done(self) -> bool:
        return self._update.done

    @property
    def progress(self) -> RoundProgress:
        return self._update.progress

    def wait_released(self, timeout: float | None = None) -> bool:
        """Wait until the source's tensors may change again; False if `timeout` passed first."""
        return self._timed(self._update.released.wait, timeout) is not _LATE

    def wait(self, timeout: float | None = None) -> Report:
        """Wait for the end of the round; a timeout leaves the round running.

        Raises:
            TimeoutError: Not over within `timeout` seconds.
            AiosyncError: The round failed or was cancelled.
        """
        result = self._timed(self._update.wait, timeout)
        if result is _LATE:
            raise TimeoutError(f"the round is not over after {timeout:g} s")
        report: Report = result
        return report

    def cancel(self) -> None:
        """End the round; `wait` then raises `RoundCancelled`."""

        async def cancel() -> None:
            self._update.cancel()

        self._call("cancel", cancel)

    def _timed(self, fn: Callable[[], Awaitable[Any]], timeout: float | None) -> Any:
        limit = DEFAULTS.total_s if timeout is None else timeout

        async def body() -> Any:
            with anyio.move_on_after(limit):
                return await fn()
            return _LATE

        return self._call("wait", body)

    def __repr__(self) -> str:
        return f"<BlockingUpdate of {self._update!r}>"


_LATE: Final = object()
