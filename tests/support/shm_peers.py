"""What tests of the shared-memory stream have in common: peers in processes and in threads."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

from transports.planning import ALIGNED, plan_chunks

PROGRAMS = Path(__file__).parents[1] / "shm_programs"


class Peer:
    """A process of `shm_programs` that speaks JSON lines."""

    def __init__(self, program, *args):
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / program), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, **command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self):
        line = self.process.stdout.readline()
        assert line, "the process is gone"
        return json.loads(line)

    def join(self, sender, name, **where):
        told = {"address": sender.address, "token": sender.token, "name": name}
        self.tell(new=told | where)

    def kill(self):
        self.process.kill()
        self.process.wait(10)

    def close(self):
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


class Thread(threading.Thread):
    """Runs a function and keeps what it returned or raised."""

    def __init__(self, fn, *args, **kwargs):
        super().__init__(daemon=True)
        self._call = (fn, args, kwargs)
        self.start()

    def run(self):
        fn, args, kwargs = self._call
        self.value = self.error = None
        try:
            self.value = fn(*args, **kwargs)
        except BaseException as error:
            self.error = error

    def result(self):
        self.join(20)
        assert not self.is_alive(), "stuck"
        if self.error is not None:
            raise self.error
        return self.value


def plan_of(tensors, limit):
    return plan_chunks(
        [t.nbytes for t in tensors], [t.itemsize for t in tensors], limit=limit, rule=ALIGNED
    )
