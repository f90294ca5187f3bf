"""Large copies on several cores, for when nobody else needs them.

One core moves no more than some ten gigabytes a second, whatever the memory could do. The threads
live as long as the call: starting them costs less than they save from a few megabytes on.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transports.copy_batches import Copies

LEAST_NBYTES = 32 << 20
"""Less than this is not shared out."""
_MOST = 4  # more than that saturate no memory that fewer do not


def copy_together(
    batches: Sequence[Copies],
    *,
    note: Callable[[int], None] = lambda _: None,
    beside: Callable[[], None] = lambda: None,
) -> None:
    """Copy from addresses to addresses; the callers hold what lies there.

    Args:
        batches: Each is copied by whoever is free.
        note: Called on this thread with the bytes that it copied, batch by batch; may raise: then
            all of them stop before this does.
        beside: What this thread does first, while others copy already.

    Raises:
        Exception: Of a copy, of `note` or of `beside`; the others have stopped.
    """
    total = sum(batch.nbytes for batch in batches)
    helpers = min(_MOST, _cores()) - 1 if total >= LEAST_NBYTES else 0
    left = iter(batches)  # shared: each takes the next one
    stop = threading.Event()
    failed: list[Exception] = []

    def help_out() -> None:
        try:
            for batch in left:
                if stop.is_set():
                    return
                batch.move()
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            failed.append(error)
            stop.set()

    threads = [
        threading.Thread(  # noqa: TID251 - joined below; a copy cannot block
            target=help_out, name="copy", daemon=True
        )
        for _ in range(helpers)
    ]
    noted, started = 0, []
    with suppress(RuntimeError):  # there is no room for another one: fewer help
        for thread in threads:
            thread.start()
            started.append(thread)
    try:
        beside()
        for batch in left:
            if stop.is_set():
                break
            batch.move()
            noted += batch.nbytes
            note(batch.nbytes)
    except BaseException:
        stop.set()
        raise
    finally:
        for thread in started:
            thread.join()
    if failed:
        raise failed[0]
    note(total - noted)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
