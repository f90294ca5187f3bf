"""``pytest --faults``: runs the tests of known faults and prints each id with its outcome."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from fault_catalogue import FAULTS, NOT_HERE, fault_in_name


def faults_of(item: Any) -> set[str]:
    """The ids a test shows, by its marks and its name."""
    marked = {fault for mark in item.iter_markers("fault") for fault in mark.args}
    own = fault_in_name(item.originalname if hasattr(item, "originalname") else item.name)
    return marked | ({own} if own else set())


class FaultReport:
    """Keeps only the tests of faults, and says in one line each what became of them."""

    def __init__(self) -> None:
        self.ids: dict[str, set[str]] = {}
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.is_whole = True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        self.ids = {item.nodeid: faults_of(item) for item in items}
        others = [item for item in items if not self.ids[item.nodeid]]
        items[:] = [item for item in items if self.ids[item.nodeid]]
        config.hook.pytest_deselected(items=others)
        # Of a selection (-k, one file) nobody expects that it shows every fault.
        self.is_whole = not config.option.keyword and config.args == config.getini("testpaths")

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        return (report.outcome, "", "") if report.outcome in ("passed", "skipped") else None

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            for fault in self.ids.get(report.nodeid, ()):
                self.outcomes[fault][report.outcome] += 1

    def lines(self) -> list[str]:
        """One line per fault."""
        return [f"{fault:<14}{self.outcome(fault)}  ({FAULTS[fault]})" for fault in FAULTS]

    def outcome(self, fault: str) -> str:
        counts = self.outcomes.get(fault)
        if counts is None:
            why = NOT_HERE.get(fault)
            return "not run" if why is None else f"not applicable: {why}"
        if counts["failed"]:
            return f"FAILED in {counts['failed']} of {sum(counts.values())} tests"
        if not counts["passed"]:
            return f"skipped: {counts['skipped']} tests"
        return f"passed in {counts['passed']} tests"

    def unproven(self) -> list[str]:
        """Faults that a whole run should have shown."""
        shown = {fault for fault, counts in self.outcomes.items() if counts["passed"]}
        return [fault for fault in FAULTS if fault not in shown | NOT_HERE.keys()]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and self.is_whole and self.unproven():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self.lines():
            terminalreporter.write_line(line)
