"""Waiting for the signal that ends a program."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiosync.errors import WrongLoop

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence


async def first_signal(numbers: Sequence[signal.Signals]) -> signal.Signals:
    """The first of `numbers` that arrives; afterwards they do what they do by default.

    Raises:
        WrongLoop: Signals arrive in the main thread only, and this loop runs in another.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[signal.Signals] = loop.create_future()

    def arrive(number: signal.Signals) -> None:
        if not arrived.done():
            arrived.set_result(number)

    handled = []
    try:
        for number in numbers:
            try:
                loop.add_signal_handler(number, arrive, number)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                raise WrongLoop(f"signals cannot be waited for here: {error}") from error
            handled.append(number)
        return await arrived
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
