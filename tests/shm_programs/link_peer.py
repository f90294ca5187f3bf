"""Connects, says "here", prints the pid of a child that keeps the socket (or 0), and waits."""

from __future__ import annotations

import os
import signal
import sys
import time

from transports.links import Link
from transports.waker import Waker

address, mode = sys.argv[1:]
link = Link.connect(address, waker=Waker(), deadline=time.monotonic() + 10)
kept = os.dup(link.fileno())  # the child lets go of the link itself, not of this
child = os.fork() if mode == "fork" else 0
if mode == "fork" and child == 0:
    signal.pause()
link.send(b"here", deadline=time.monotonic() + 10)
print(child, flush=True)
signal.pause()
