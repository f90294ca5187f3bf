from __future__ import annotations

import msgspec
import pytest

from aiosync.report import MemberOutcome, Report
from aiosync.version import Version


@pytest.fixture
def report():
    return Report(
        outcome="failed",
        version=Version(42, "run", 42),
        round=3,
        backend="gloo",
        nbytes=1024,
        seconds={"start": 0.25, "transmit": 1.5},
        pause_seconds=0.125,
        members=[
            MemberOutcome(name="w0", outcome="committed"),
            MemberOutcome(
                name="w1", outcome="failed", weights="torn", phase="update", error="boom\nmore"
            ),
        ],
        left_out=["lm_head.weight"],
        notes=["w0 has no fencing"],
        recovered=True,
    )


def test_metrics_are_flat_floats(report):
    metrics = report.metrics("sync")
    assert all(isinstance(value, float) for value in metrics.values())
    assert metrics["sync/bytes"] == 1024
    assert metrics["sync/version_order"] == 42
    assert metrics["sync/seconds/transmit"] == 1.5
    assert metrics["sync/members/failed"] == metrics["sync/members/committed"] == 1
    assert metrics["sync/members/unknown"] == metrics["sync/committed"] == 0
    assert metrics["sync/recovered"] == metrics["sync/left_out"] == 1


def test_a_round_without_version_has_no_order():
    metrics = Report(outcome="committed").metrics()
    assert "aiosync/version_order" not in metrics
    assert metrics["aiosync/committed"] == 1


def test_text_names_what_went_wrong(report):
    text = str(report)
    head, *rows = text.splitlines()
    assert "42" in head
    assert "failed" in head
    assert "not verified" in head
    assert any("w1 failed in update" in row and "torn" in row and "boom" in row for row in rows)
    assert "more" not in text
    assert "lm_head.weight" in text
    assert "no fencing" in text
    assert head.startswith("round 3 version")
    assert str(Report(outcome="failed")).startswith("round without a version")  # no number yet


def test_it_travels(report):
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
