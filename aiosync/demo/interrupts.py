"""Ctrl-C, SIGTERM and SIGHUP as one cancellation of the running task."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any, Self, TypeVar, final

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import FrameType

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@final
class Interrupts:
    """Holds the signals from before anything was started until everything is gone.

    The first signal cancels, further ones are ignored: whoever presses Ctrl-C twice must not get
    a clean-up that stops half way. The clean-up is bounded, and SIGKILL works always.

    Attributes:
        received: The first signal, or None.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._task: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            # nohup ignores SIGHUP, and is right. A script's background job ignores SIGINT, and
            # would then go on alone.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.received is not None:
            return  # the process is about to end, and a late signal must not spoil it
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that such a signal ended."""
        return 128 + (self.received or 0)

    async def cancels(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await `coroutine`; the first signal cancels it."""
        task = asyncio.ensure_future(coroutine)
        self._task = (asyncio.get_running_loop(), task)
        if self.received is not None:
            task.cancel()
        try:
            return await task
        finally:
            self._task = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.received is not None:
            return
        self.received = number
        if self._task is not None:
            loop, task = self._task
            loop.call_soon_threadsafe(task.cancel)
