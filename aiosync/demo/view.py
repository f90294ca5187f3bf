"""What the demonstration shows where there is no terminal: plain lines, no control codes."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiosync.demo.outcome import Row
    from statemachines.events import Transition

_PHASES = ("admit", "start", "update", "prepare", "finish", "total")
HEADINGS = ("v", "MB", *_PHASES, "lag", "digest", "reward", "by")
LEGEND = "phases and lag in ms (lag: p99 of the event loop); by: versions that sampled the answers"


def cells_of(row: Row) -> list[str]:
    """The row as text, one cell for each of `HEADINGS`."""
    spent = [f"{row.seconds.get(phase, 0.0) * 1000:.1f}" for phase in _PHASES]
    return [
        str(row.version),
        f"{row.nbytes / 1e6:.2f}",
        *spent,
        f"{row.lag_ms:.1f}",
        "ok" if row.verified else "none",
        "" if row.reward is None else f"{row.reward:.3f}",
        ",".join(map(str, row.sampled_by)),
    ]


class View:
    """What a run tells its view; shows nothing. All calls come from the loop's thread."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Held while the run lasts."""
        yield

    def note(self, text: str) -> None:
        """What is going on."""

    def trainer(self, transition: Transition) -> None:
        """A transition of the trainer's engine; called inside the flip."""

    def worker(self, name: str, event: dict[str, Any]) -> None:
        """A transition of a worker's engine."""

    def round(self, row: Row) -> None:
        """A committed round."""


class PlainView(View):
    """One line for each round.

    Args:
        to_stderr: Keep standard output free.
    """

    def __init__(self, *, to_stderr: bool = False) -> None:
        self._to_stderr = to_stderr
        self._told = False

    def note(self, text: str) -> None:
        click.echo(f"{text} ...", err=self._to_stderr)

    def round(self, row: Row) -> None:
        if not self._told:
            click.echo(LEGEND, err=self._to_stderr)
            self._told = True
        cells = zip(HEADINGS, cells_of(row), strict=True)
        line = "  ".join(f"{heading} {cell}" for heading, cell in cells if cell)
        click.echo(line, err=self._to_stderr)
