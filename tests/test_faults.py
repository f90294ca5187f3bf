"""The list of known faults, the tests that show them, and docs/faults.md say the same."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from fault_catalogue import FAULTS, NOT_HERE, fault_in_name, shown_faults
from fault_report import FaultReport

ROOT = Path(__file__).parents[1]
ROW = re.compile(
    r"\| (?P<id>[AB]-[A-Z]+-\d+) \| (?P<title>.*?) \| (?P<does>.*?) \| (?P<tests>.*?) ?\|$"
)


def rows():
    lines = (ROOT / "docs" / "faults.md").read_text().splitlines()
    return [found.groupdict() for line in lines if (found := ROW.match(line))]


def test_every_fault_has_a_test_or_a_reason():
    shown = set(shown_faults(ROOT / "tests"))
    assert shown - FAULTS.keys() == set(), "ids that are not on the list"
    assert shown & NOT_HERE.keys() == set(), "said not to occur, and tested"
    assert FAULTS.keys() - shown == NOT_HERE.keys()


def test_the_page_lists_the_same_faults_and_files():
    found = shown_faults(ROOT / "tests")
    assert [row["id"] for row in rows()] == list(FAULTS)
    for row in rows():
        fault = row["id"]
        assert row["title"] == FAULTS[fault]
        assert set(re.findall(r"`(\w+\.py)`", row["tests"])) == found.get(fault, set()), fault
        if fault in NOT_HERE:
            assert row["does"] == f"cannot occur: {NOT_HERE[fault]}"
        else:
            assert row["does"]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("test_a_hang_3_worker_stopped", "A-HANG-3"),
        ("test_a_layout_12", "A-LAYOUT-12"),
        ("test_b_rdzv_1_x", "B-RDZV-1"),
        ("test_a_worker_that_is_3_late", None),
        ("test_a_hang_3rd_party", None),
    ],
)
def test_ids_in_names(name, fault):
    assert fault_in_name(name) == fault


def reported(*outcomes):
    """What `--faults` says after tests of A-HANG-1 ended so."""
    report = FaultReport()
    report.ids = {"t": {"A-HANG-1"}}
    for outcome in outcomes:
        report.pytest_runtest_logreport(SimpleNamespace(nodeid="t", when="call", outcome=outcome))
    return report


def test_one_line_each_with_the_outcome():
    lines = reported("passed", "passed").lines()
    assert len(lines) == len(FAULTS)
    assert lines[0].startswith("A-HANG-1      passed in 2 tests")
    assert "FAILED in 1 of 2 tests" in reported("passed", "failed").lines()[0]
    assert "skipped" in reported("skipped").lines()[0]
    assert lines[1].startswith("A-HANG-2      not run")
    assert f"not applicable: {NOT_HERE['A-LIFETIME-4']}" in "\n".join(lines)


def test_a_whole_run_that_leaves_a_fault_out_fails():
    report = reported("passed")
    assert "A-HANG-1" not in report.unproven()
    assert "A-HANG-2" in report.unproven()
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    report.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    report.is_whole = False
    session.exitstatus = pytest.ExitCode.OK
    report.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.OK
