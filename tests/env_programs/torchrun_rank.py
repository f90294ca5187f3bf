"""A rank under torchrun: sharded or plain, syncs twice; or waits in a round until it is ended.

Arguments: the URL of a replica, a folder for what each rank reports, and what to do:
``sync``, or ``lose`` (rank 1 dies in the second round).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import models
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import aiosync


class Dying(aiosync.ModuleSource):
    """Rank 1 is killed in the middle of a pass."""

    armed = False

    def iter_groups(self):  # type: ignore[no-untyped-def]
        for number, group in enumerate(super().iter_groups()):
            if self.armed and number == 2 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield group


async def main(url: str, folder: str, what: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = models.make("ranks", 5)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    source = Dying(model)
    said: dict[str, object] = {"reports": []}

    def write() -> None:
        Path(folder, f"rank{rank}.json").write_text(json.dumps(said))

    try:
        async with aiosync.connect(source, workers=[url], rank=rank) as sync:
            said["reports"].append(str(await sync.send_weights()))  # type: ignore[attr-defined]
            source.armed = what == "lose"
            began = time.monotonic()
            try:
                report = await sync.send_weights(budget=aiosync.Budget(total=10, stall=3))
                said["reports"].append(str(report))  # type: ignore[attr-defined]
            except aiosync.AiosyncError as error:
                said["error"] = str(error)
                said["seconds"] = time.monotonic() - began
                write()
                raise
    finally:
        write()
    dist.destroy_process_group()


asyncio.run(main(*sys.argv[1:]))
