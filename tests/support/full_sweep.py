"""The cancel sweep to its end: every backend, scene and way, k turns up to where it is over.

``python tests/support/full_sweep.py [--backend NAME] [--most K] [--progress]`` prints a line a
backend; what fails is listed with its point and its error, as it happens.

The first turns are taken one by one. After them a round mostly waits for its threads, and the turns
that the loop makes meanwhile are many and alike, so the steps grow: by an eighth where the turns
are counted from the call, by a half after one of the flips, which the call's turns pass as well.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

import sweep
import torch

SINKS = {"loopback": ("staged", "in_place"), "ipc": ("staged", "in_place"), "gloo": ("staged",)}
WRITING = ("round", "given_up", "close_in_round")  # where it matters what the bytes land in
WAYS = (*sweep.HOW, "session", *sweep.FAULTS)


def turns(scene: sweep.Scene, most: int) -> Iterator[int]:
    """Ever larger steps from 0 to `most`."""
    dense, share = (48, 8) if scene.trigger == "call" else (16, 2)
    turn = 0
    while turn <= most:
        yield turn
        turn += 1 if turn < dense else turn // share


class Patches:
    """What the rig needs of pytest's monkeypatch."""

    def __init__(self) -> None:
        self._old: list[tuple[Any, str, Any]] = []

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        self._old.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._old:
            setattr(*self._old.pop())


async def sweep_backend(backend: str, most: int, progress: bool) -> Counter[str]:
    counts: Counter[str] = Counter()
    for sink in SINKS[backend]:
        for scene in sweep.scenes(backend):
            if sink == "in_place" and scene.name not in WRITING:
                continue
            for how in WAYS:
                what = f"{backend} {sink} {scene} {how}"
                began = time.monotonic()
                patches = Patches()
                workers = 2 if backend == "loopback" else 1
                found: Counter[str] = Counter()
                try:
                    async with sweep.rig(backend, patches, workers=workers, sink=sink) as it:
                        points = turns(scene, most)
                        found = await sweep.sweep(it, scene, how, points, to_the_end=True)
                except Exception as error:
                    found["failed"] += 1
                    point = " ".join(getattr(error, "__notes__", ()))
                    last = traceback.format_exception(error)[-3:]
                    print(f"{point or what}: {last}", file=sys.stderr, flush=True)
                finally:
                    patches.undo()
                counts += found
                if progress:
                    print(f"{what}: {dict(found)}; {time.monotonic() - began:.1f} s", flush=True)
    return counts


def report(backend: str, most: int, progress: bool) -> int:
    began = time.monotonic()
    counts = asyncio.run(sweep_backend(backend, most, progress))
    points = ", ".join(f"{name} {counts[name]}" for name in ("hit", "late", "idle", "failed"))
    took, computed = time.monotonic() - began, time.process_time()
    print(f"{backend}: {points}; {took:.0f} s, {computed:.0f} of them at work", flush=True)
    return bool(counts["failed"])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=sweep.BACKENDS)
    parser.add_argument("--most", type=int, default=20_000)
    parser.add_argument("--progress", action="store_true", help="a line a scene")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()  # what is injected is logged wherever it arrives
    if options.backend:
        return report(options.backend, options.most, options.progress)
    # A process each: a failure of one backend says nothing about the others.
    running = [
        subprocess.Popen([sys.executable, __file__, "--backend", backend, *sys.argv[1:]])
        for backend in sweep.BACKENDS
    ]
    return max(process.wait() for process in running)


if __name__ == "__main__":
    sys.exit(main())
