"""Tables as text."""

from __future__ import annotations

import re

from statemachines import ENGINE, Rule, Table, mermaid, table_markdown

SMALL = Table(
    name="small",
    states=("a", "b", "z"),
    initial="a",
    rules=(
        Rule("go", ("a",), "b"),
        Rule("skip", ("a",), "b"),
        Rule("stop", ("a", "b"), "z"),
    ),
    final=("z",),
)


def test_mermaid():
    assert mermaid(SMALL) == (
        "stateDiagram-v2\n"
        "    [*] --> a\n"
        "    a --> b: go / skip\n"
        "    a --> z: stop\n"
        "    b --> z: stop\n"
        "    z --> [*]\n"
    )


def test_the_diagram_of_the_engine_says_what_the_table_says():
    drawn = set()
    for line in mermaid(ENGINE).splitlines():
        if match := re.fullmatch(r"    (\w+) --> (\w+): (.+)", line):
            source, dest, triggers = match.groups()
            drawn |= {(source, trigger, dest) for trigger in triggers.split(" / ")}
    assert drawn == {(s, r.trigger, r.dest) for r in ENGINE.rules for s in r.sources}


def test_markdown():
    assert table_markdown(SMALL) == (
        "| trigger | from | to |\n"
        "| --- | --- | --- |\n"
        "| `go` | a | b |\n"
        "| `skip` | a | b |\n"
        "| `stop` | a, b | z |\n"
    )


def test_markdown_of_the_engine_explains_each_trigger():
    header, _, *rows = table_markdown(ENGINE).splitlines()
    assert header == "| trigger | from | to | fired |"
    assert len(rows) == len(ENGINE.rules)
    assert "| `start` | initialized | updating | before any byte moves |" in rows
    assert all(row.count("|") == 5 for row in rows)
