"""How long a test waits: also on a machine that is slow, or stands still for some seconds."""

from __future__ import annotations

from aiosync import Budget

SLACK = 5.0
"""Seconds that a busy machine may add to a time that is promised."""
PATIENT = Budget(total=40.0, stall=20.0, cleanup=2.0)
"""For rounds that end by themselves, well or badly: the clock is not to end them."""
