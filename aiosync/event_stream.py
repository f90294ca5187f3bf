"""Transitions as an endless HTTP body: lines of JSON, or server-sent events."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import anyio
import msgspec

from aiosync.defaults import DEFAULTS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from statemachines.events import Transition
    from statemachines.hub import TransitionHub
    from statemachines.subscription import Subscription

NDJSON = "application/x-ndjson"
SSE = "text/event-stream"


@final
class EventStreams:
    """The open streams of one server, so that closing it can end them."""

    def __init__(self) -> None:
        self._open: set[Subscription] = set()

    def open(
        self, hub: TransitionHub, *, since: int | None, sse: bool
    ) -> AsyncGenerator[bytes, None]:
        """Subscribe now, and give the parts of the body. Ends with the hub or with `close`."""
        subscription = hub.subscribe(size=DEFAULTS.subscription, since=since)
        self._open.add(subscription)
        return self._parts(subscription, sse=sse)

    async def _parts(self, subscription: Subscription, *, sse: bool) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                transition = None
                with anyio.move_on_after(DEFAULTS.heartbeat_s):
                    transition = await subscription.receive()
                yield _sse_part(transition) if sse else _line(transition)
        except anyio.EndOfStream:
            return
        finally:
            self._open.discard(subscription)
            subscription.close()

    def close(self) -> None:
        """End every stream after what it still has."""
        for subscription in tuple(self._open):
            subscription.end()

    def __len__(self) -> int:
        return len(self._open)


def _line(transition: Transition | None) -> bytes:
    # A blank line is the heartbeat: a reader can tell silence from death.
    return b"\n" if transition is None else msgspec.json.encode(transition) + b"\n"


def _sse_part(transition: Transition | None) -> bytes:
    if transition is None:
        return b":\n\n"
    return b"id: %d\ndata: %b\n\n" % (transition.seq, msgspec.json.encode(transition))
