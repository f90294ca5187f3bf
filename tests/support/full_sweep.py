"""Every point of the cancel sweep: every backend, scene and way, every k up to where it ends.

``python tests/support/full_sweep.py [--backend NAME] [--most K]`` prints one line a backend and one
of all; what fails is listed with its point and its error.
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
from typing import Any

import sweep
import torch

SINKS = {"loopback": ("staged", "in_place"), "ipc": ("staged", "in_place"), "gloo": ("staged",)}
WAYS = (*sweep.HOW, "session", *sweep.FAULTS)


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


async def sweep_backend(backend: str, most: int) -> tuple[Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    failures = []
    for sink in SINKS[backend]:
        for scene in sweep.scenes(backend):
            for how in WAYS:
                patches = Patches()
                workers = 2 if backend == "loopback" else 1
                try:
                    async with sweep.rig(backend, patches, workers=workers, sink=sink) as it:
                        counts += await sweep.sweep(it, scene, how, range(most + 1))
                except Exception as error:
                    counts["failed"] += 1
                    point = " ".join(getattr(error, "__notes__", ()))
                    last = traceback.format_exception(error)[-3:]
                    failures.append(f"{point or f'{backend} {sink} {scene} {how}'}: {last}")
                finally:
                    patches.undo()
    return counts, failures


def report(backend: str, most: int) -> int:
    began = time.monotonic()
    counts, failures = asyncio.run(sweep_backend(backend, most))
    print(*failures, sep="\n", end="\n" if failures else "", file=sys.stderr)
    points = ", ".join(f"{name} {counts[name]}" for name in ("hit", "late", "failed"))
    print(f"{backend}: {points}; {time.monotonic() - began:.0f} s", flush=True)
    return bool(failures)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=sweep.BACKENDS)
    parser.add_argument("--most", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()  # what is injected is logged wherever it arrives
    if options.backend:
        return report(options.backend, options.most)
    # A process each: a failure of one backend says nothing about the others.
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--backend", backend, "--most", str(options.most)]
        )
        for backend in sweep.BACKENDS
    ]
    return max(process.wait() for process in running)


if __name__ == "__main__":
    sys.exit(main())
