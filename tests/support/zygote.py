"""Forks replicas from a process that has imported torch once: a replica is up in milliseconds.

Reads one JSON line per request from a Unix socket, with the child's stdin and stdout as
descriptors; answers with the child's process id. Children are replicas like any other process:
own memory, own loop, killable.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

HERE = Path(__file__).parent


def child(fds: list[int], script: str, args: list[str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(fds[0], 0)
    os.dup2(fds[1], 1)
    for fd in fds:
        os.close(fd)
    sys.argv = [script, *args]
    code = 0
    try:
        runpy.run_path(str(HERE / script), run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def main() -> None:
    import aiohttp.web  # noqa: F401  the imports are the point
    import models  # noqa: F401
    import torch

    import aiosync
    import aiosync.engines.ipc
    import aiosync.server  # noqa: F401

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    server = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, fds, _, _ = socket.recv_fds(server, 1 << 16, 2)
        if not data:
            return
        request = json.loads(data)
        pid = os.fork()
        if pid == 0:
            server.close()
            child(fds, request["script"], request["args"])
        for fd in fds:
            os.close(fd)
        server.send(json.dumps({"pid": pid}).encode())


main()
