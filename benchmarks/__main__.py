"""``python -m benchmarks``: see README.md beside this file."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Options
from benchmarks.plot import plot

BENCHMARKS = {
    "ipc_cpu": "whole rounds over shared memory, beside plain memcpys",
    "gloo": "whole rounds over gloo, beside raw broadcasts",
    "control": "a round with one tiny tensor, beside its bare HTTP requests",
    "fleet": "a round with one tiny tensor over 1 to 64 members",
    "straggler": "a fleet's round with one member that stands still, beside one without it",
    "loop_lag": "how late the trainer's event loop is, beside its floor",
    "metadata": "37,000 parameters: the first handshake, and later control bytes",
    "events": "one transition with hooks and subscribers",
    "ipc_cuda": "whole rounds between GPU processes, beside copies on the device (needs CUDA)",
    "nccl": "whole rounds between GPU processes, beside raw broadcasts (needs CUDA)",
    "nccl_groups": "an NCCL group made anew, beside shrink and grow (needs CUDA)",
}
_COLUMNS = ("name", "variant", "payload", "ours", "raw", "unit", "ratio", "target")
_WIDTHS = (11, 46, 24, 8, 8, 17, 7, 0)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="names, and what each measures")
    drawn = commands.add_parser("plot", help="draw recorded JSON lines as SVG, to standard output")
    drawn.add_argument("file", type=Path)
    drawn.add_argument("--title", default="Measured")
    run = commands.add_parser("run", help="measure; one line per result")
    run.add_argument("names", nargs="+", choices=["all", *BENCHMARKS], metavar="NAME")
    run.add_argument("--json", action="store_true", help="one JSON object a line, with everything")
    run.add_argument("--bytes", type=_at_least_one, default=Options.nbytes, help="payload")
    run.add_argument("--repeat", type=_at_least_one, default=Options.repeat, help="measurements")
    arguments = parser.parse_args()
    if arguments.command == "list":
        for name, what in BENCHMARKS.items():
            print(f"{name:11} {what}")
        return
    if arguments.command == "plot":
        print(plot(arguments.file.read_text().splitlines(), title=arguments.title), end="")
        return
    chosen = list(BENCHMARKS) if "all" in arguments.names else arguments.names
    options = Options(nbytes=arguments.bytes, repeat=arguments.repeat)
    # One thread on each side: two processes share two cores, and copies need no more.
    torch.set_num_threads(1)
    asyncio.run(_run(chosen, options, as_json=arguments.json))


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


async def _run(names: list[str], options: Options, *, as_json: bool) -> None:
    if not as_json:
        print(_row(dict(zip(_COLUMNS, _COLUMNS, strict=True))))
    for name in names:
        benchmark = importlib.import_module(f"benchmarks.{name}")
        async with aclosing(benchmark.run(options)) as records:
            async for found in records:
                print(json.dumps(found) if as_json else _row(found), flush=True)


def _row(found: dict[str, Any]) -> str:
    cells = (f"{found[key]!s:{width}}" for key, width in zip(_COLUMNS, _WIDTHS, strict=True))
    return "  ".join(cells).rstrip()


if __name__ == "__main__":
    main()
