"""A table as text: Mermaid for diagrams, Markdown for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statemachines.tables import Table


def mermaid(table: Table) -> str:
    """A ``stateDiagram-v2``; triggers between the same two states share an arrow."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for rule in table.rules:
        for source in rule.sources:
            arrows.setdefault((source, rule.dest), []).append(rule.trigger)
    lines = ["stateDiagram-v2", f"    [*] --> {table.initial}"]
    lines += [
        f"    {source} --> {dest}: {' / '.join(triggers)}"
        for (source, dest), triggers in arrows.items()
    ]
    lines += [f"    {state} --> [*]" for state in table.final]
    return "\n".join(lines) + "\n"


def table_markdown(table: Table) -> str:
    """One row per rule; a last column says when it is fired, if any rule does."""
    explained = any(rule.fired for rule in table.rules)
    rows = [["trigger", "from", "to", "fired"], ["---"] * 4]
    rows += [
        [f"`{rule.trigger}`", ", ".join(rule.sources), rule.dest, rule.fired]
        for rule in table.rules
    ]
    width = 4 if explained else 3
    return "".join(f"| {' | '.join(row[:width])} |\n" for row in rows)
