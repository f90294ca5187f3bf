"""A trainer process: opens a round for one reader, writes the first tensor, and waits for ever."""

from __future__ import annotations

import json
import os
import signal
import sys

import torch

from transports.planning import ALIGNED, plan_chunks
from transports.shared_memory import ShmSender

sender = ShmSender(buffer_nbytes=4096, buffers=2)
print(json.dumps({"address": sender.address, "token": sender.token}), flush=True)
tensors = [torch.full((1024,), k, dtype=torch.float32) for k in range(4)]
plan = plan_chunks([4096] * 4, [4] * 4, limit=4096, rule=ALIGNED)
sender.open(plan, 1, round=1, stall=30)
sender.write([(0, tensors[0])])
child = 0
if sys.argv[1:] == ["fork"]:
    child = os.fork()
    if child == 0:
        signal.pause()
print(json.dumps({"child": child}), flush=True)
signal.pause()
