"""Tasks that wait for a version to be committed."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import anyio

from aiosync.errors import InvalidTransition, Validation

if TYPE_CHECKING:
    from aiosync.version import Version


@final
class VersionWatch:
    """The version all members confirmed last, and who waits for a newer one."""

    def __init__(self) -> None:
        self.version: Version | None = None
        self._is_closed = False
        self._waiting: set[anyio.Event] = set()

    async def wait(self, order: int) -> Version:
        """Return once the version is of at least `order`.

        Raises:
            InvalidTransition: It will not come any more: the engine is closed.
            Validation: `order` is no int.
        """
        if isinstance(order, bool) or not isinstance(order, int):
            raise Validation(f"order must be an int, not {order!r}")
        while self.version is None or self.version.order < order:
            if self._is_closed:
                raise InvalidTransition("the engine is closed", phase="wait")
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
