"""Tens of thousands of objects made in one go, without garbage collections among them.

The collector looks at what is new after every few hundred objects, and at everything there is when
a quarter was added to it: beside a model of tens of thousands of tensors that takes half a second,
in which no thread of the process runs. What an announcement or a model's views are made of has no
cycles and is there to stay: no look finds anything in it. What is made only on the way there is
gone before the next one.

A pass over a model makes a few hundred objects, but lists of thousands of tensors among them: one
look at those takes a millisecond, at some of the last ten looks' remains several, and the wire
stands still.
"""

from __future__ import annotations

import gc
from typing import Final, final

from aiosync.process_setting import ProcessSetting

OBJECTS: Final = 999_983
"""More new objects than that are looked at even so, whoever made them: what waits is bounded.

A number that nobody else sets: found where it was to be put back, it is ours.
"""


@final
class FewCollections(ProcessSetting):
    """``with few_collections:`` around such work, on any thread; never across an ``await``.

    It raises the threshold of the young generation, one setting of the whole process. The last who
    leaves puts it back, unless somebody else has set it meanwhile. ``gc.disable``, ``gc.enable``,
    ``gc.freeze`` and ``gc.collect`` mean what they always mean, inside as well. A threshold of 0,
    or of more than `OBJECTS`, stays as it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before = gc.get_threshold()

    def _change(self) -> None:
        now = gc.get_threshold()
        if now[0] != OBJECTS:  # else somebody has saved it inside, and put it back since
            self._before = now
        if 0 < self._before[0] < OBJECTS:
            gc.set_threshold(OBJECTS, *self._before[1:])

    def _put_back(self) -> None:
        if gc.get_threshold()[0] == OBJECTS != self._before[0]:
            gc.set_threshold(*self._before)


few_collections: Final = FewCollections()
