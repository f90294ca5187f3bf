"""One run of the demonstration as a command: view, signals, temporary folder, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from aiosync.demo.interrupts import Interrupts
from aiosync.demo.live import LiveView
from aiosync.demo.replicas import DemoFailed
from aiosync.demo.run import run
from aiosync.demo.view import PlainView
from aiosync.errors import AiosyncError
from transports.socket_place import socket_place

if TYPE_CHECKING:
    from aiosync.demo.outcome import Options, Outcome, Summary
    from aiosync.demo.view import View

_FAILED = 1


def execute(options: Options, *, as_json: bool) -> int:
    """Run it and print what came of it; returns the process's exit code."""
    with Interrupts() as interrupts:
        try:
            # Removes the folder at exit even if leaving the block fails.
            place = socket_place("aiosync-demo-01234567/worker-99.sock")
            with tempfile.TemporaryDirectory(prefix="aiosync-demo-", dir=place) as folder:
                view = _view(options, as_json=as_json)
                running = run(options, view, Path(folder))
                outcome = asyncio.run(interrupts.cancels(running))
        except (asyncio.CancelledError, KeyboardInterrupt):
            _complain("interrupted; the workers are gone")
            return interrupts.exit_code
        except (DemoFailed, AiosyncError, OSError, ValueError) as error:
            _complain(f"error: {error}")
            return _FAILED
        return _conclude(outcome, as_json=as_json)


def _view(options: Options, *, as_json: bool) -> View:
    if as_json:
        return PlainView(to_stderr=True)
    return LiveView(options) if sys.stdout.isatty() else PlainView()


def _conclude(outcome: Outcome, *, as_json: bool) -> int:
    for failure in outcome.failures:
        _complain(f"failed: {failure}")
    if as_json:
        click.echo(msgspec.json.encode(outcome.summary).decode())
    else:
        click.echo(_in_words(outcome.summary))
    return _FAILED if outcome.failures else 0


def _in_words(summary: Summary) -> str:
    bits = "bit-equal on every worker, and they differed before the last sync"
    return (
        f"{summary.rounds} rounds over {summary.backend} to {summary.workers} worker(s):"
        f" {summary.bytes_per_round} bytes each, median {summary.round_ms_median:.1f} ms\n"
        f"event loop lag p99: {summary.loop_lag_ms_p99:.1f} ms"
        f" (without syncs {summary.loop_lag_floor_ms_p99:.1f} ms)\n"
        f"reward: {summary.reward_first:.2f} at first, {summary.reward_last:.2f} at last\n"
        f"logits: {bits if summary.verified else 'NOT verified'}"
    )


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        click.echo(text, err=True)
