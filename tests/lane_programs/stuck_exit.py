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
    async with anyio.create_task_group() as tg:
        tg.start_soon(lambda: lane.run(sleep_long, abort=abort, grace=0.05))
        while not lane.busy:
            await anyio.sleep(0.001)
        tg.cancel_scope.cancel()
    print("poisoned" if lane.poisoned else "usable", flush=True)
    lane.close()


anyio.run(main, sys.argv[2] == "abort", backend=sys.argv[1])
