"""Others who are inside of a setting of the process (`aiosync.process_setting`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiosync.process_setting import ProcessSetting


@contextmanager
def another_inside(setting: ProcessSetting) -> Iterator[None]:
    """A thread that is inside for as long as the block lasts."""
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with setting:
            inside.set()
            leave.wait(5)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert inside.wait(5)
        yield
    finally:
        leave.set()
        thread.join(5)
