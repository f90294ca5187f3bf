"""Opening and freeing a channel: one at a time, and no round beside it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import anyio

from aiosync.errors import RoundCancelled

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
        self._owner: str | None = None
        self._scope: anyio.CancelScope | None = None
        self._over: anyio.Event | None = None

    @contextmanager
    def taken(self, what: str, owner: str | None = None) -> Iterator[None]:
        """The channel is being changed for the length of the block.

        Raises:
            RoundCancelled: `give_up` ended it.
        """
        over, scope = anyio.Event(), anyio.CancelScope()
        self.what, self._owner, self._over, self._scope = what, owner, over, scope
        try:
            with scope:
                yield
        finally:
            self.what = self._owner = self._scope = None
            over.set()
        if scope.cancelled_caught:
            raise RoundCancelled(f"{what} was given up by {owner}", phase="init")

    def give_up(self, owner: str | None) -> bool:
        """End what is under way, if `owner` asked for it."""
        if owner is None or owner != self._owner or self._scope is None:
            return False
        self._scope.cancel()
        return True

    async def settled(self, seconds: float) -> None:
        """Wait for the end of what is under way; for `seconds` at most.

        An init whose trainer has just given up ends by itself, and soon: whoever comes next should
        not have to know.
        """
        with anyio.move_on_after(seconds):
            while self.what is not None and self._over is not None:
                await self._over.wait()
