"""The loop shuts down while a cancelled call is in its grace period."""

import asyncio
import threading
import time

from transports.lane import Lane

lane = Lane("shutdown")
aborted = threading.Event()


async def main() -> None:
    task = asyncio.create_task(lane.run(time.sleep, 600, abort=aborted.set, grace=600))
    while not lane.busy:
        await asyncio.sleep(0.001)
    task.cancel()
    while not aborted.is_set():
        await asyncio.sleep(0.001)


asyncio.run(main())
print("poisoned" if lane.poisoned else "usable", flush=True)
lane.close()
