"""An event loop on a thread of its own, for callers that have none.

The thread is a daemon. One that Python joins at exit (as an executor's, or anyio's portal) keeps a
process for ever whose program ended without leaving the block: a cell of a notebook, a REPL, a
`sys.exit` in a thread. Instead the block is left by an exit handler, which is bounded in time.
"""

from __future__ import annotations

import atexit
import os
import threading
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

import anyio
from anyio.from_thread import BlockingPortal

if TYPE_CHECKING:
    from collections.abc import Iterator

_JOIN_S: Final = 5.0  # the loop is over by then; its executor may still resolve a name


@contextmanager
def loop_thread(name: str) -> Iterator[tuple[BlockingPortal, ExitStack]]:
    """A portal into the loop, and a stack of what ends before the loop does.

    Both end with the block, or at the exit of the interpreter. A forked child has no such thread:
    there leaving the block does nothing.
    """
    pid = os.getpid()
    stack = ExitStack()

    def leave() -> None:
        atexit.unregister(leave)
        if os.getpid() == pid:
            stack.close()

    atexit.register(leave)
    try:
        yield _started(name, stack), stack
    finally:
        leave()


def _started(name: str, stack: ExitStack) -> BlockingPortal:
    started: Future[BlockingPortal] = Future()
    thread = threading.Thread(  # noqa: TID251 - the loop's own thread
        target=_main, args=(started,), name=name, daemon=True
    )
    thread.start()
    portal = started.result()
    stack.callback(thread.join, _JOIN_S)
    stack.callback(lambda: portal.call(portal.stop))
    return portal


def _main(started: Future[BlockingPortal]) -> None:
    async def serve() -> None:
        async with BlockingPortal() as portal:
            started.set_result(portal)
            await portal.sleep_until_stopped()

    try:
        anyio.run(serve, backend="asyncio")
    except BaseException as error:  # raised by the thread that waits for the start
        if started.done():
            raise
        started.set_exception(error)
