"""A sharded rank under torchrun: carries out two tickets that it finds in a folder.

Arguments: the URL of a replica, and the folder, to which each rank writes what it came to.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import models
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import aiosync


class Announcing(aiosync.ModuleSource):
    """Says in the second round how far it is, and waits a little before every further group."""

    where: Path | None = None

    def iter_groups(self):  # type: ignore[no-untyped-def]
        for number, group in enumerate(super().iter_groups()):
            if self.where is not None and number >= 1:
                self.where.touch()
                torch.distributed.barrier()
                threading_wait()
            yield group


def threading_wait() -> None:
    """Long enough for a cancellation to arrive before the pass is through."""
    import time

    time.sleep(1.0)


async def main(url: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, where = dist.get_rank(), Path(folder)
    model = models.make("ranks", 5)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    source = Announcing(model)
    async with aiosync.connect(source, workers=[url], rank=rank) as sync:
        (where / f"connected{rank}").touch()
        for number in (1, 2):
            while not (where / f"ticket{number}").exists():
                await asyncio.sleep(0.02)
            word = (where / f"ticket{number}").read_text()
            if number == 2:
                source.where = where / f"holding2-{rank}"
            try:
                text = (await sync.send_weights(ticket=word)).outcome
            except aiosync.AiosyncError as error:
                text = type(error).__name__
            temporary = where / f"new{rank}"
            temporary.write_text(text)
            temporary.rename(where / f"outcome{number}-{rank}")
    dist.destroy_process_group()


asyncio.run(main(*sys.argv[1:]))
