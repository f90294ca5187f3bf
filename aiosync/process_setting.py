"""A setting of the whole process that is another one while somebody is at some work."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod


class ProcessSetting(ABC):
    """``with setting:`` around the work, on any thread; the last who leaves puts it back.

    A forked child begins with nobody inside.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come in between
        self._users = 0
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.begin_anew)

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._change()

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._put_back()

    def begin_anew(self) -> None:
        """In a forked child: whoever was inside, or at the door, is not there."""
        self._lock = threading.RLock()
        self._users = 0
        self._put_back()

    @abstractmethod
    def _change(self) -> None:
        """The first is inside."""

    @abstractmethod
    def _put_back(self) -> None:
        """Nobody is inside; does nothing where somebody else has set it meanwhile."""
