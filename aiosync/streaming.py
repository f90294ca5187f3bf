"""Driving the data plane's blocking halves from the protocol: one lane call per round.

The source and the copy share the source lane. A batch is copied out before the source is resumed,
so a source may reuse its buffers between yields.
"""

from __future__ import annotations

from contextlib import aclosing, closing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiosync.feed import SourceFeed
    from aiosync.sinks import Sink
    from transports.lane import LaneLike
    from transports.planning import Plan
    from transports.stream import Receiver, Sender, StreamSummary


async def stream_out(
    feed: SourceFeed,
    sender: Sender,
    *,
    plan: Plan,
    readers: int,
    round: int,
    stall: float,
    grace: float,
    lane: LaneLike,
) -> StreamSummary:
    """Send everything `feed` yields; returns once every reader has acknowledged every chunk.

    The source is not touched before the readers are there. Cancellation aborts the sender and
    gives the lane `grace` seconds to come back.
    """

    def drive() -> StreamSummary:
        sender.open(plan, readers, round=round, stall=stall)
        with closing(feed.iter_batches()) as batches:
            for batch in batches:
                sender.write(batch)
        return sender.finish()

    try:
        if not feed.is_async:
            return await lane.run(drive, abort=sender.abort, grace=grace)

        def begin() -> None:
            sender.open(plan, readers, round=round, stall=stall)

        await lane.run(begin, abort=sender.abort, grace=grace)
        async with aclosing(feed.aiter_batches()) as batches:
            async for batch in batches:
                await lane.run(sender.write, batch, abort=sender.abort, grace=grace)
        return await lane.run(sender.finish, abort=sender.abort, grace=grace)
    finally:
        sender.close()


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
) -> StreamSummary:
    """Receive one round into `sink`; `prepare` (blocking) opens the sink first."""

    def drive() -> StreamSummary:
        prepare()
        return receiver.receive(plan, sink.destination, sink.landed, round=round, stall=stall)

    try:
        return await lane.run(drive, abort=receiver.abort, grace=grace)
    finally:
        receiver.close()
