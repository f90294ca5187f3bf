"""Where a Unix socket's file goes: its whole path has to be short."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Final

from statemachines.errors import Validation

LONGEST: Final = 107 if sys.platform == "linux" else 103  # bytes of a Unix socket's path
_ELSEWHERE: Final = ("/tmp", "/var/tmp", "/dev/shm")


def socket_place(below: str) -> str:
    """A folder for short-lived files in which the path `below` is short enough for a socket.

    The temporary folder (``TMPDIR``) where that will do. Others can write there as well: make a
    private folder in it.

    Raises:
        Validation: There is none.
    """
    places = dict.fromkeys((tempfile.gettempdir(), *_ELSEWHERE))
    for place in places:
        short = len(os.fsencode(Path(place, below))) <= LONGEST
        if short and Path(place).is_dir() and os.access(place, os.W_OK | os.X_OK):
            return place
    raise Validation(
        f"no folder for a Unix socket: {', '.join(places)} cannot be written to, or a path in it is"
        f" longer than {LONGEST} bytes",
        next_step="set TMPDIR to a short path, or say where the socket goes (path=)",
    )
