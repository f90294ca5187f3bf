"""A synchronous trainer as a process: holds a round until Ctrl-C."""

from __future__ import annotations

import sys

import models
from paced import Hold, Paced

import aiosync.blocking


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


hold = Hold(3)


def before(index: int) -> None:
    if index == hold.at and not hold.released.is_set():
        say("holding")
    hold(index)


source = Paced(models.make("small", 7), before)
try:
    with aiosync.blocking.connect(source, workers=[sys.argv[1]]) as sync:
        sync.send_weights(version=1)
        say("committed")
except KeyboardInterrupt:
    say("interrupted")
