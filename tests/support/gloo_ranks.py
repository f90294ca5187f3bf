"""Ranks of one gloo group, each a process, playing a scene; prints JSON lines and exit statuses."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import torch

from statemachines.errors import AiosyncError
from transports import gloo_group
from transports.gloo_group import GlooGroup
from transports.rendezvous import Meeting, StoreHost

NBYTES = 32 << 20  # more than sockets hold: a peer that takes nothing is noticed
LIMIT = 30.0


class Rank:
    def __init__(self, rank: int, size: int, port: int) -> None:
        self.rank, self.size, self.port = rank, size, port

    def say(self, **facts: Any) -> None:
        os.write(1, (json.dumps({"rank": self.rank, **facts}) + "\n").encode())

    def group(self, prefix: str, *, rank: int | None = None, size: int | None = None) -> GlooGroup:
        size = self.size if size is None else size
        rank = self.rank if rank is None else rank
        names = [f"name-{other}" for other in range(size)]
        where = ("127.0.0.1", self.port, prefix)
        return GlooGroup(Meeting(*where, rank=rank, size=size, names=names))

    def joined(self, prefix: str, **options: Any) -> GlooGroup:
        group = self.group(prefix, **options)
        group.join(timeout=LIMIT)
        return group

    def exchange(self, group: GlooGroup, value: int, *, timeout: float = LIMIT) -> int:
        data = torch.full((NBYTES,), value if group.rank == 0 else 0, dtype=torch.uint8)
        group.wait(group.broadcast(data, timeout=timeout), timeout=timeout)
        assert bool((data == data[0]).all())
        return int(data[0])

    def attempt(self, what: str, call: Any) -> None:
        began = time.monotonic()
        try:
            result = call()
        except AiosyncError as error:
            kind, took = type(error).__name__, time.monotonic() - began
            self.say(what=what, error=kind, text=error.message, names=error.replica, took=took)
        else:
            self.say(what=what, result=result)

    def many(self, group: GlooGroup, *, timeout: float = LIMIT) -> None:
        """Exchange until something happens."""
        for _ in range(1000):
            self.exchange(group, 1, timeout=timeout)

    def meet_again(self, *, rank: int | None = None, size: int | None = None) -> None:
        """What counts after a failure: the same processes, a new group."""
        again = self.joined("again", rank=rank, size=size)
        self.say(what="again", result=self.exchange(again, 9))
        self.part(again)

    def part(self, group: GlooGroup) -> None:
        """Close it; rank 0 is the first to go, when it has all that it waited for."""
        group.announce("over", b"")
        if group.rank == 0:
            group.gather("over", ranks=range(1, group.size), timeout=LIMIT)
        while group.rank and group.alive:
            time.sleep(0.01)
        group.close()

    # -- the scenes

    def play_exchange(self, arg: str) -> None:
        group = self.joined("one")
        other = self.joined("two")  # several groups in one process
        self.say(what="one", result=[self.exchange(group, 7), self.exchange(other, 8)])
        group.close()
        self.say(what="two", result=self.exchange(other, 5))
        self.part(other)

    def play_abort(self, arg: str) -> None:
        """Rank `arg` aborts while the last rank holds everybody up."""
        group = self.joined("one")
        if self.rank == int(arg):
            timer = threading.Timer(0.5, group.abort)
            timer.start()
        if self.rank == self.size - 1 and self.rank != int(arg):
            while group.alive:
                time.sleep(0.01)
            self.attempt("held", lambda: self.exchange(group, 1))
        elif self.rank == self.size - 1:
            time.sleep(0.5)
            timer.join()
            self.attempt("held", lambda: self.exchange(group, 1))
        else:
            self.attempt("held", lambda: self.many(group))
        group.close()
        self.meet_again()

    def play_killed(self, arg: str) -> None:
        group = self.joined("one")
        if self.rank == self.size - 1:
            group.broadcast(torch.zeros(NBYTES, dtype=torch.uint8), timeout=LIMIT)
            os.kill(os.getpid(), signal.SIGKILL)
        self.attempt("lost", lambda: self.many(group))
        group.close()
        if self.size > 2:
            self.meet_again(size=self.size - 1)

    def play_stopped(self, arg: str) -> None:
        group = self.joined("one")
        if self.rank == self.size - 1:
            group.broadcast(torch.zeros(NBYTES, dtype=torch.uint8), timeout=LIMIT)
            os.kill(os.getpid(), signal.SIGSTOP)
        self.attempt("stuck", lambda: self.many(group, timeout=1.5))
        group.close()
        self.meet_again()

    def play_left(self, arg: str) -> None:
        """The last rank leaves while nothing is under way."""
        group = self.joined("one")
        self.exchange(group, 1)
        if self.rank == self.size - 1:
            group.close()
        else:
            while group.alive:
                time.sleep(0.01)
            self.attempt("lost", lambda: self.exchange(group, 1))
            group.close()
        self.meet_again()

    def play_absent(self, arg: str) -> None:
        if self.rank < self.size - 1:
            group = self.group("one")
            self.attempt("join", lambda: group.join(timeout=1.5))
            group.close()
            self.meet_again(size=self.size - 1)

    def play_join_aborted(self, arg: str) -> None:
        if self.rank < self.size - 1:
            group = self.group("one")
            threading.Timer(0.5, group.abort).start()
            self.attempt("join", lambda: group.join(timeout=LIMIT))
            group.close()
            self.meet_again(size=self.size - 1)

    def play_stopped_in_join(self, arg: str) -> None:
        """The last rank stops when the others know where it listens."""
        group = self.group("one")
        if self.rank == self.size - 1:
            store = gloo_group.PrefixStore

            def stop(*args: Any) -> Any:
                gloo_group.PrefixStore = store
                os.kill(os.getpid(), signal.SIGSTOP)
                return store(*args)

            gloo_group.PrefixStore = stop
        limit = 1.0 if self.rank == 0 else 2.0  # as the engines do, so that the trainer knows
        # gloo may try for long after the stop: what waits for it has to leave it behind.
        joining = threading.Thread(
            target=self.attempt, args=("join", lambda: group.join(timeout=limit)), daemon=True
        )
        joining.start()
        joining.join(5 if self.rank == self.size - 1 else None)
        group.close()
        self.meet_again()


def main() -> None:
    scene, size, arg = sys.argv[1], int(sys.argv[2]), (sys.argv[3:] or [""])[0]
    torch.set_num_threads(1)
    told, tell = os.pipe()
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        code = 1
        try:
            if rank == 0:
                host = StoreHost()
                os.write(tell, b"%5d" % host.port * size)
            port = int(os.read(told, 5))
            getattr(Rank(rank, size, port), f"play_{scene}")(arg)
            if rank == 0:
                host.close()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(code)
    if scene.startswith("stopped"):
        os.waitpid(pids[-1], os.WUNTRACED)
        time.sleep(2.5)  # the others have given up by then
        os.kill(pids[-1], signal.SIGCONT)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.write(1, (json.dumps({"statuses": statuses}) + "\n").encode())


signal.signal(signal.SIGCHLD, signal.SIG_DFL)
main()
