"""Opening and freeing a channel: one at a time, and no round beside it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import anyio

if TYPE_CHECKING:
    from collections.abc import Iterator


@final
class ChannelTurn:
    """Whose turn it is to change the channel.

    Attributes:
        what: What is under way, for messages; None: nothing is.
    """

    def __init__(self) -> None:
        self.what: str | None = None
        self._over: anyio.Event | None = None

    @contextmanager
    def taken(self, what: str) -> Iterator[None]:
        """The channel is being changed for the length of the block."""
        self.what, over = what, anyio.Event()
        self._over = over
        try:
            yield
        finally:
            self.what = None
            over.set()

    async def settled(self, seconds: float) -> None:
        """Wait for the end of what is under way; for `seconds` at most.

        An init whose trainer has just given up ends by itself, and soon: whoever comes next should
        not have to know.
        """
        with anyio.move_on_after(seconds):
            while self.what is not None and self._over is not None:
                await self._over.wait()
