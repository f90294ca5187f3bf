"""A reader process that does what it is told, one JSON object a line.

``{"new": {address, token, name}}`` makes a receiver; ``{"receive": {specs, limit, round, stall,
mode}}`` runs a round and answers with a hash per tensor or with the error. Modes: ``pause`` says
so at the first landed chunk and waits for ever, ``fail`` raises there, ``slow`` takes its time,
``odd`` has destinations of a class of its own.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import time
from pathlib import Path

import torch

from statemachines.errors import AiosyncError
from transports.planning import ALIGNED, plan_chunks
from transports.shared_memory import ShmReceiver

torch.set_num_threads(1)


class Odd(torch.Tensor):
    """What is not known to be plain memory."""


def say(**answer):
    print(json.dumps(answer), flush=True)


def hash_of(tensor):
    return hashlib.sha256(bytes(tensor.reshape(-1).view(torch.uint8).tolist())).hexdigest()


def receive(receiver, task):
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in task["specs"]]
    plan = plan_chunks(
        [t.nbytes for t in tensors],
        [t.itemsize for t in tensors],
        limit=task["limit"],
        rule=ALIGNED,
    )
    into = [t.as_subclass(Odd) for t in tensors] if task["mode"] == "odd" else tensors
    indices = []

    def landed(complete):
        indices.extend(complete)
        if task["mode"] == "pause":
            say(event="landed")
            signal.pause()
        if task["mode"] == "fail":
            raise RuntimeError("disk full while loading")
        if task["mode"] == "slow":
            time.sleep(0.01)

    try:
        summary = receiver.receive(
            plan, into.__getitem__, landed, round=task["round"], stall=task["stall"]
        )
    except AiosyncError as error:
        say(kind=error.kind.__name__, message=error.message, replica=error.replica)
        return
    except RuntimeError as error:
        say(kind="RuntimeError", message=str(error))
        return
    say(
        kind=None,
        hashes=[hash_of(tensor) for tensor in tensors],
        landed=indices,
        summary=[summary.nbytes, summary.chunks, summary.digest],
        fds=sum(1 for _ in Path("/proc/self/fd").iterdir()),
        statistics=receiver.statistics(),
    )


def main():
    receiver = None
    say(event="ready")
    for line in sys.stdin:
        command = json.loads(line)
        if "new" in command:
            if receiver is not None:
                receiver.release()
            receiver = ShmReceiver(**command["new"])
        else:
            receive(receiver, command["receive"])


main()
