"""Large copies on several cores, for when nobody else needs them.

One core moves no more than some ten gigabytes a second, whatever the memory could do. The threads
live as long as the call: starting them costs less than they save from a few megabytes on.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from transports.plain_memory import blocks, spans

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LEAST_NBYTES = 32 << 20
"""Less than this is not shared out."""
_MOST = 4  # more than that saturate no memory that fewer do not


def copy_together(
    targets: Sequence[int],
    sources: Sequence[int],
    nbytes: Sequence[int],
    *,
    note: Callable[[int], None] = lambda _: None,
) -> None:
    """Copy from addresses to addresses; the callers hold what lies there.

    Args:
        note: Called on this thread with the bytes that it copied, block by block; may raise: then
            all of them stop before this does.
    """
    total = sum(nbytes)
    helpers = min(_MOST, _cores()) - 1 if total >= LEAST_NBYTES else 0
    shares = _shares(list(spans(targets, sources, nbytes)), total, helpers + 1)
    stop = threading.Event()

    def help_with(share: list[tuple[int, int, int]]) -> None:
        for _ in blocks(*zip(*share, strict=True)):
            if stop.is_set():
                return

    threads = [
        threading.Thread(  # noqa: TID251 - joined below; a copy cannot block and raises nothing
            target=help_with, args=(share,), name="copy", daemon=True
        )
        for share in shares[1:]
    ]
    for thread in threads:
        thread.start()
    try:
        if shares:
            for _, _, size in blocks(*zip(*shares[0], strict=True)):
                note(size)
    except BaseException:
        stop.set()
        raise
    finally:
        for thread in threads:
            thread.join()
    note(sum(size for share in shares[1:] for _, _, size in share))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _shares(
    copies: list[tuple[int, int, int]], total: int, count: int
) -> list[list[tuple[int, int, int]]]:
    """The copies in order, cut into at most `count` parts of about equal size, none empty."""
    size = max(1, -(-total // count))
    shares: list[list[tuple[int, int, int]]] = [[]]
    room = size
    for target, source, length in copies:
        start = 0
        while start < length:
            part = min(room, length - start)
            shares[-1].append((target + start, source + start, part))
            start, room = start + part, room - part
            if not room:
                shares.append([])
                room = size
    return [share for share in shares if share]
