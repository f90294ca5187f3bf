"""Leaves a stuck call (and a stuck abort) behind, then ends: the process must end, too."""

import sys
import time

import anyio

from transports.lane import Lane


def sleep_long() -> None:
    time.sleep(600)


async def main(stuck_abort: bool) -> None:
    lane = Lane("stuck")
    abort = sleep_long if stuck_abort else (lambda: None)
    with anyio.move_on_after(0.05):
        await lane.run(sleep_long, abort=abort, grace=0.05)
    print("poisoned" if lane.poisoned else "usable", flush=True)
    lane.close()


anyio.run(main, sys.argv[2] == "abort", backend=sys.argv[1])
