"""What the demonstration shows on a terminal, repainted in place."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aiosync.demo.view import HEADINGS, LEGEND, View, cells_of
from transports.lane import Lane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from rich.console import RenderableType

    from aiosync.demo.outcome import Options, Row
    from statemachines.events import Transition

_ROWS = 8
_PAINT_S = 0.3
_BARS = "▁▂▃▄▅▆▇█"
_TEXT = ("engine", "state", "last trigger", "weights", "digest", "by")
_FACTS = ("dest", "trigger", "seq", "version", "weights")


class LiveView(View):
    """States, the last rounds and the rewards so far.

    The painting has a thread of its own, since the event loop's lag is being measured.
    """

    def __init__(self, options: Options) -> None:
        self._title = f"aiosync demo, seed {options.seed}"
        self._note = ""
        self._states: dict[str, list[str]] = {}
        self._rows: deque[Row] = deque(maxlen=_ROWS)
        self._rewards: list[float] = []
        self._has_news = True

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with Lane("demo-view") as lane:
            live = Live(auto_refresh=False)
            live.start()
            painting = asyncio.create_task(self._paint_forever(live, lane))
            try:
                yield
            finally:
                painting.cancel()
                await asyncio.wait([painting])
                live.update(self._picture(), refresh=True)
                live.stop()

    async def _paint_forever(self, live: Live, lane: Lane) -> None:
        while True:
            if self._has_news:
                self._has_news = False
                await lane.run(_paint, live, self._picture())
            await asyncio.sleep(_PAINT_S)

    def note(self, text: str) -> None:
        self._note = text
        self._has_news = True

    def trainer(self, transition: Transition) -> None:
        self._show("trainer", (getattr(transition, fact) for fact in _FACTS))

    def worker(self, name: str, event: dict[str, Any]) -> None:
        self._show(name, (event[fact] for fact in _FACTS))

    def round(self, row: Row) -> None:
        self._rows.append(row)
        if row.reward is not None:
            self._rewards.append(row.reward)
        self._has_news = True

    def _show(self, who: str, facts: Iterable[Any]) -> None:
        before = self._states.get(who, [""] * len(_FACTS))
        # What a transition does not mention has not changed.
        self._states[who] = [
            old if fact is None else str(fact) for fact, old in zip(facts, before, strict=True)
        ]
        self._has_news = True

    def _picture(self) -> RenderableType:
        engines = _table("engine", "state", "last trigger", "transitions", "version", "weights")
        for who, facts in sorted(self._states.items(), key=lambda item: item[0] != "trainer"):
            engines.add_row(who, *facts)
        rounds = _table(*HEADINGS)
        for row in self._rows:
            rounds.add_row(*cells_of(row))
        reward = Text(f"reward {sparkline(self._rewards)}", style="green")
        if self._rewards:
            reward.append(f" {self._rewards[-1]:.3f}")
        head = Text(f"{self._title}: {self._note}", style="bold")
        legend = Text(LEGEND, style="dim")
        return Group(head, "", engines, "", rounds, legend, "", reward)


def _paint(live: Live, picture: RenderableType) -> None:
    live.update(picture, refresh=True)


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold underline")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in _TEXT else "right", no_wrap=True)
    return table


def sparkline(values: Sequence[float]) -> str:
    """One bar for each value from 0 to 1."""
    top = len(_BARS) - 1
    return "".join(_BARS[round(min(max(value, 0.0), 1.0) * top)] for value in values)
