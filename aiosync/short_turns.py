"""Long work in Python that does not keep the event loop waiting for the interpreter.

A thread that only computes keeps the interpreter for 5 ms while others wait for it. One that lets
go by itself takes it back before another has woken up, unless it sleeps; one that is told to let go
waits until it was taken, and it is told only where somebody waits.
"""

from __future__ import annotations

import sys
from typing import Final, final

from aiosync.process_setting import ProcessSetting

TURN_S: Final = 1.03e-4
"""How long a thread then keeps the interpreter while another waits for it.

About 0.1 ms, but a number that nobody else sets: found where it was to be put back, it is ours.

Whenever it is let go of, as by each write to a socket, that wait begins anew: it has to be a
fraction of what lies between two such calls.
"""
_ROUNDS_DOWN_S = 5e-7  # what is set is cut to whole microseconds


@final
class ShortTurns(ProcessSetting):
    """``with short_turns:`` around the work, on any thread, for as short as it can be.

    When a thread is told is one setting of the whole process (`sys.setswitchinterval`). The last
    who leaves puts it back, unless somebody else has set it meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before = self._ours = 0.0  # seconds

    def _change(self) -> None:
        now = sys.getswitchinterval()
        if now != self._ours:  # else somebody has saved it inside, and put it back since
            self._before = now
        self._ours = now
        if self._before > TURN_S:
            sys.setswitchinterval(TURN_S)
            self._ours = sys.getswitchinterval()

    def _put_back(self) -> None:
        if self._ours != self._before and sys.getswitchinterval() == self._ours:
            sys.setswitchinterval(self._before + _ROUNDS_DOWN_S)


short_turns: Final = ShortTurns()
