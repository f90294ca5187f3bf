"""A trainer process: opens a round for one reader, writes the first tensor, and waits for ever.

With ``direct`` the reader copies from its memory, and all tensors are written.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch

from transports.planning import ALIGNED, plan_chunks
from transports.shared_memory import ShmSender

direct = sys.argv[1:] == ["direct"]
sender = ShmSender(buffer_nbytes=4096, buffers=2)
where = {"address": sender.address, "token": sender.token}
print(json.dumps(where | ({"mark": sender.mark} if direct else {})), flush=True)
tensors = [torch.full((1024,), k, dtype=torch.float32) for k in range(4)]
plan = plan_chunks([4096] * 4, [4] * 4, limit=4096, rule=ALIGNED)
if direct:
    sender.set_direct([tensor.data_ptr() for tensor in tensors])
sender.open(plan, 1, round=1, stall=30)
sender.write(list(enumerate(tensors if direct else tensors[:1])))
child = 0
if sys.argv[1:] == ["fork"]:
    child = os.fork()
    if child == 0:
        signal.pause()
print(json.dumps({"child": child}), flush=True)
signal.pause()
