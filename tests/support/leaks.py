"""Many rounds, most of them cancelled at a random moment; then what both processes still hold.

``python tests/support/leaks.py --backend ipc --rounds 1000`` prints one line for each process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import models
import torch
from processes import Replica, replica

import aiosync
from aiosync import Budget

BUDGET = Budget(total=20.0, stall=5.0, cleanup=1.0)
WARM_UP = 30
# gloo cannot be told to leave a set-up whose peer is gone: it tries for half a minute.
SETTLE_S = {"ipc": 10.0, "gloo": 45.0}
GROWTH_KIB = 16 << 10  # of resident memory, over all rounds: allocators keep some
OPTIONS: dict[str, dict[str, Any]] = {
    "ipc": {"packed": True, "packed_buffer_size_bytes": 4096},
    "gloo": {"buffer_size_bytes": 4096},
}


def held_by(pid: int) -> Counter[str]:
    """Threads, descriptors, mappings of shared memory and resident KiB of a process."""
    home = Path(f"/proc/{pid}")
    held: Counter[str] = Counter()
    for link in home.joinpath("fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:  # of this very listing
            continue
        kind = target.partition(":")[0] if ":" in target else "file"
        held["memfd" if target.startswith("/memfd:") else kind] += 1
    held["mappings"] = home.joinpath("maps").read_text().count("/memfd:")
    for line in home.joinpath("status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Threads":
            held["threads"] = int(value)
        if name == "VmRSS":
            held["rss_kib"] = int(value.split()[0])
    return held


async def look(worker: Replica) -> dict[str, Counter[str]]:
    """What both processes hold now."""
    gc.collect()
    trainer = held_by(os.getpid())
    trainer["tasks"] = len(asyncio.all_tasks())
    facts = await worker.facts()
    served = held_by(worker.process.pid)
    served["tasks"] = facts["tasks"]
    return {"trainer": trainer, "worker": served}


def grown(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    """What there is more of."""
    more = {name: after[name] - before[name] for name in after if after[name] > before[name]}
    if more.get("rss_kib", 0) <= GROWTH_KIB:
        more.pop("rss_kib", None)
    return more


async def settled(
    worker: Replica, before: dict[str, Counter[str]], seconds: float
) -> dict[str, Counter[str]]:
    """`look`, of each process once it is down to `before`, or when it has had its time."""
    deadline, calm = time.monotonic() + seconds, {}
    while True:
        now = await look(worker)
        # One process may be down while the other is not; a look's own connection comes and goes.
        calm |= {side: now[side] for side in before if not grown(before[side], now[side])}
        if len(calm) == len(before) or time.monotonic() > deadline:
            return now | calm
        await asyncio.sleep(0.05)


async def disturbed(sync: Any, dice: random.Random, usual: float) -> str:
    """One round that is given up, in one of the ways there are, at some moment of it."""
    moment = dice.uniform(0, 1.3 * usual)
    how = dice.choice(["not at all", "scope", "native", "handle", "timeout"])
    try:
        if how == "scope":
            with anyio.move_on_after(moment) as scope:
                await sync.send_weights(budget=BUDGET)
            return "cancelled" if scope.cancelled_caught else "committed"
        if how == "handle":
            update = sync.begin_update(budget=BUDGET)
            await asyncio.sleep(moment)
            update.cancel()
            await update
        elif how == "native":
            task = asyncio.create_task(sync.send_weights(budget=BUDGET))
            await asyncio.sleep(moment)
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                return "cancelled"
            task.result()
        elif how == "timeout":
            await sync.send_weights(timeout=max(moment, 0.001))
        else:
            await sync.send_weights(budget=BUDGET)
    except aiosync.RoundCancelled:
        return "cancelled"
    except TimeoutError:
        return "timed out"
    return "committed"


async def run(
    backend: str, rounds: int, seed: int, *, each: Callable[[], object] = lambda: None
) -> tuple[str, dict[str, dict[str, int]]]:
    """A line about the rounds, and what each process holds more of afterwards."""
    dice = random.Random(seed)
    outcomes: Counter[str] = Counter()
    model = models.make("small", 1)
    # Nor do cycles keep a transport's threads and descriptors: the worker does not collect.
    async with replica(backend=backend, seed=2, uncollected="yes") as worker:
        async with aiosync.connect(
            model, workers=[worker.url], backend=backend, **OPTIONS[backend]
        ) as sync:
            before: dict[str, Counter[str]] = {}
            began = time.monotonic()
            for number in range(WARM_UP + rounds):
                if number == WARM_UP:
                    usual = (time.monotonic() - began) / WARM_UP
                    await sync.send_weights(budget=BUDGET)
                    before = await look(worker)
                if number < WARM_UP:
                    await disturbed(sync, dice, 0.02)
                else:
                    outcomes[await disturbed(sync, dice, usual)] += 1
                    each()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            await sync.send_weights(budget=BUDGET)
            assert (await worker.facts())["prints"] == models.fingerprint(model)
            after = await settled(worker, before, SETTLE_S[backend])
    counts = ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items()))
    rss = ", ".join(
        f"{side} {(after[side]['rss_kib'] - before[side]['rss_kib']) / 1024:+.1f} MiB"
        for side in before
    )
    line = f"{backend}: {rounds} rounds ({counts}), seed {seed}; resident {rss}"
    return line, {side: grown(before[side], after[side]) for side in before}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=sorted(OPTIONS))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    torch.set_num_threads(1)
    leaked = False
    for backend, rounds in (("ipc", 1000), ("gloo", 500)):
        if options.backend in (None, backend):
            line, more = asyncio.run(run(backend, options.rounds or rounds, options.seed))
            print(line, "leaked:", more if any(more.values()) else "nothing", flush=True)
            leaked |= any(more.values())
    return leaked


if __name__ == "__main__":
    sys.exit(main())
