"""Driving the data plane's blocking halves from the protocol: one lane call per round.

The source and the copy share the source lane: a batch is copied out before the source is resumed,
so a source may reuse its buffers between yields.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, cast, final

from aiosync.few_collections import few_collections
from aiosync.foreign import stoppable
from aiosync.passes import CLOSE_SECONDS
from aiosync.short_turns import short_turns

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from aiosync.sinks import Sink
    from aiosync.source_pass import SourcePass
    from transports.lane import LaneLike
    from transports.planning import Plan
    from transports.stream import Holding, Receiver, Sender, StreamSummary


@final
class OutStream:
    """One round's bytes on their way out.

    Args:
        prepare: Blocking; runs on the lane first.
        grace: Seconds that the lane gets to come back once the pass is aborted.
    """

    def __init__(
        self,
        the_pass: SourcePass,
        sender: Sender,
        *,
        plan: Plan,
        readers: int,
        round: int,
        stall: float,
        grace: float,
        lane: LaneLike,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._sender = sender
        self._pass, self._plan, self._readers = the_pass, plan, readers
        self._round, self._stall, self._grace, self._lane = round, stall, grace, lane
        self._prepare = prepare
        self._has_begun = False
        self._failure: Exception | None = None

    async def get_ahead(self) -> None:
        """Make the first chunk ready, before the readers are told of it; nothing leaves.

        For a `Holding` sender, and a source that needs nobody's help. What goes wrong is
        raised by `run`; where no `run` follows, `close`. A cancellation waits for the chunk.
        """
        await self._lane.run(self._get_ahead, grace=self._grace)

    def _get_ahead(self) -> None:
        try:
            self._begin()
            cast("Holding", self._sender).hold()
            self._pass.get_ahead(self._plan.chunks[0].pieces[-1].tensor + 1)
        except Exception as error:  # noqa: BLE001  raised by `run`
            self._failure = error

    def _begin(self) -> None:
        self._has_begun = True
        self._pass.prepare(self._prepare)
        self._sender.open(self._plan, self._readers, round=self._round, stall=self._stall)

    def close(self) -> None:
        """Nobody will `run` it, or it is over."""
        self._failure = None
        self._sender.close()

    async def run(self) -> StreamSummary:
        """Send everything the pass yields; returns once every reader has acknowledged every chunk.

        The source's own code is not run before the readers are there. Cancellation aborts the
        pass.
        """
        the_pass, lane, grace = self._pass, self._lane, self._grace
        try:
            if not the_pass.is_async:
                return await lane.run(self._drive, abort=the_pass.abort, grace=grace)
            await lane.run(self._begin, abort=the_pass.abort, grace=grace)
            await _async_pass(the_pass, lane, grace)
            return await lane.run(self._finish, abort=the_pass.abort, grace=grace)
        finally:
            self.close()

    def _drive(self) -> StreamSummary:
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None  # its traceback holds this frame
        if self._has_begun:
            self._pass.check_ahead()
            cast("Holding", self._sender).go()
        else:
            self._begin()
        self._pass.run()
        return self._finish()

    def _finish(self) -> StreamSummary:
        summary = self._sender.finish()
        self.check_unwritten()
        return summary

    def check_unwritten(self) -> None:
        """See `SourcePass.check_unwritten`."""
        self._pass.check_unwritten()


async def pass_along(the_pass: SourcePass, *, grace: float, lane: LaneLike) -> None:
    """The pass of a rank that does not send: it stays in the source's collectives."""
    if the_pass.is_async:
        await _async_pass(the_pass, lane, grace)
    else:
        await lane.run(the_pass.run, abort=the_pass.abort, grace=grace)


async def _async_pass(the_pass: SourcePass, lane: LaneLike, grace: float) -> None:
    """A source that swallows its cancellation is left behind."""
    passing = functools.partial(the_pass.run_async, lane, grace=grace)
    await stoppable(passing, grace=grace + CLOSE_SECONDS, what="the pass over the async source")


@final
class _Into:
    """A sink's destinations, one by one and many at once.

    Args:
        asked: Called once all have been asked for, and only the end is waited for.
    """

    def __init__(self, sink: Sink, asked: Callable[[], None]) -> None:
        self._sink = sink
        self._asked = asked
        self.takes_all = sink.takes_all
        self.many = sink.destinations
        self.known = sink.known_addresses

    def meanwhile(self, count: int | None) -> None:
        if count is None:
            self._asked()
        self._sink.look_meanwhile(count)

    def __call__(self, index: int) -> torch.Tensor:
        return self._sink.destination(index)


async def stream_in(
    receiver: Receiver,
    sink: Sink,
    *,
    plan: Plan,
    round: int,
    stall: float,
    grace: float,
    lane: LaneLike,
    prepare: Callable[[], None],
    verify: bool = False,
) -> StreamSummary:
    """Receive one round into `sink`; `prepare` (blocking) opens the sink first.

    All of a round is in one stream: with `verify` the sink is checked at its end, not later.
    """

    def abort() -> None:
        receiver.abort()
        sink.interrupt()

    def drive() -> StreamSummary:
        prepare()
        with short_turns if sink.looks_late else nullcontext(), ExitStack() as few:
            if sink.takes_all:  # see `SourcePass.run`
                few.enter_context(few_collections)
            # What waited to be collected has its time while the last bytes come, not after them.
            into = _Into(sink, asked=few.close)
            summary = receiver.receive(plan, into, sink.landed, round=round, stall=stall)
        if verify:
            sink.verify_stream()
        return summary

    try:
        return await lane.run(drive, abort=abort, grace=grace)
    finally:
        receiver.close()
