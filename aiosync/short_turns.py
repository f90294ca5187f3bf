"""Long work in Python that does not keep the event loop waiting for the interpreter.

A thread that only computes keeps the interpreter for 5 ms while others wait for it. One that lets
go by itself takes it back before another has woken up, unless it sleeps; one that is told to let go
waits until it was taken, and it is told only where somebody waits.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Final, final

TURN_S: Final = 1.03e-4
"""How long a thread then keeps the interpreter while another waits for it.

About 0.1 ms, but a number that nobody else sets: found where it was to be put back, it is ours.

Whenever it is let go of, as by each write to a socket, that wait begins anew: it has to be a
fraction of what lies between two such calls.
"""
_ROUNDS_DOWN_S = 5e-7  # what is set is cut to whole microseconds


@final
class ShortTurns:
    """``with short_turns:`` around the work, on any thread, for as short as it can be.

    When a thread is told is one setting of the whole process (`sys.setswitchinterval`). The last
    who leaves puts it back, unless somebody else has set it meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = self._ours = 0.0  # seconds

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                now = sys.getswitchinterval()
                if now != self._ours:  # else somebody has saved it inside, and put it back since
                    self._before = now
                self._ours = now
                if self._before > TURN_S:
                    sys.setswitchinterval(TURN_S)
                    self._ours = sys.getswitchinterval()

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._put_back()

    def begin_anew(self) -> None:
        """In a forked child: whoever was inside, or at the door, is not there."""
        self._lock = threading.Lock()
        self._users = 0
        self._put_back()

    def _put_back(self) -> None:
        if self._ours != self._before and sys.getswitchinterval() == self._ours:
            sys.setswitchinterval(self._before + _ROUNDS_DOWN_S)


short_turns: Final = ShortTurns()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=short_turns.begin_anew)
