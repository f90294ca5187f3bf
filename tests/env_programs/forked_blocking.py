"""A blocking trainer whose forked child uses, and then leaves, its parent's block.

Arguments: the URL of a replica.
"""

from __future__ import annotations

import logging
import os
import sys

import models
import torch

import aiosync
import aiosync.blocking


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


logging.getLogger("asyncio").setLevel(logging.ERROR)
torch.set_num_threads(1)
with aiosync.blocking.connect(models.make("small", 7), workers=[sys.argv[1]]) as sync:
    sync.send_weights()
    pid = os.fork()
    if pid == 0:
        try:
            sync.send_weights()
        except aiosync.WrongProcess:
            say("child refused")
        sys.exit(7)  # leaves the block, and runs the exit handlers
    say("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    say("parent", sync.send_weights().outcome)
