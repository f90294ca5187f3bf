"""Tasks that wait for a version to be committed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

import anyio

from aiosync.budget import check_seconds
from aiosync.errors import InvalidTransition, PhaseTimeout, Validation

if TYPE_CHECKING:
    from aiosync.version import Version


@final
class VersionWatch:
    """The version all members confirmed last, and who waits for a newer one."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self.version: Version | None = None
        self._is_closed = False
        self._waiting: set[anyio.Event] = set()

    async def wait(self, order: int, timeout: float | None = None) -> Version:
        """Return once the version is of at least `order`.

        Raises:
            PhaseTimeout: Not within `timeout` seconds; names the version there is.
            InvalidTransition: It will not come any more: the engine is closed.
            Validation: `order` is no int, or `timeout` no number of seconds.
        """
        if isinstance(order, bool) or not isinstance(order, int):
            raise Validation(f"order must be an int, not {order!r}")
        limit = math.inf if timeout is None else check_seconds(timeout, "timeout")
        with anyio.move_on_after(limit):
            return await self._wait(order)
        version = self.version
        now = "there is none yet" if version is None else f"it is {version} (order {version.order})"
        raise PhaseTimeout(
            f"{self._engine}: no version of order {order} or more within {timeout:g} s; {now}",
            phase="wait",
        )

    async def _wait(self, order: int) -> Version:
        while self.version is None or self.version.order < order:
            if self._is_closed:
                raise InvalidTransition(f"{self._engine}: the engine is closed", phase="wait")
            event = anyio.Event()
            self._waiting.add(event)
            try:
                await event.wait()
            finally:
                self._waiting.discard(event)
        return self.version

    def set(self, version: Version) -> None:
        self.version = version
        self._wake()

    def close(self) -> None:
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        for event in tuple(self._waiting):
            event.set()
