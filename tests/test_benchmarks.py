"""Every benchmark runs and says what it measured; how fast anything is, is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
KEYS = {"name", "variant", "payload", "ours", "raw", "unit", "ratio", "target"}
RESULTS = {
    "ipc_cpu": 9,
    "gloo": 4,
    "control": 2,
    "fleet": 4,
    "straggler": 2,
    "loop_lag": 2,
    "metadata": 1,
    "events": 1,
}
ON_GPU = {"ipc_cuda": 5, "nccl": 6, "nccl_groups": 5}
RESULTS |= ON_GPU if torch.cuda.is_available() else dict.fromkeys(ON_GPU, 0)
SECONDS = 500 if torch.cuda.is_available() else 170


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.fixture(scope="module")
def records():
    done = run("run", "all", "--json", "--bytes", "4194304", "--repeat", "1")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 10)
@pytest.mark.parametrize("name", RESULTS)
def test_benchmark_prints_its_records(records, name):
    mine = [record for record in records if record["name"] == name]
    assert len(mine) == RESULTS[name]
    for record in mine:
        assert record.keys() >= KEYS
        assert record["ours"] > 0
        assert record["raw"] > 0
        assert record["repeat"] == 1
        assert record["ratio"] == pytest.approx(record["ours"] / record["raw"], rel=0.01)
        for side in ("ours", "raw"):
            low, high = record[f"{side}_spread"]
            assert low <= record[side] <= high


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 10)
def test_records_say_what_else_was_measured(records):
    by_name = {record["name"]: record for record in records}
    assert by_name["ipc_cpu"]["nbytes"] == 4194304 // 35 // 64 * 64 * 35
    assert isinstance(by_name["ipc_cpu"]["extra_memory_bytes"], int)
    assert any(line.startswith("POST") for line in by_name["control"]["requests"])
    assert by_name["metadata"]["later_control_bytes"] > 0
    assert by_name["events"]["dropped_for_the_dead"] > 0


def test_every_name_is_listed():
    done = run("list")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(RESULTS)


def test_table_and_json_agree_on_the_columns():
    done = run("run", "events", "--repeat", "1")
    assert done.returncode == 0, done.stderr
    head, row = done.stdout.splitlines()
    assert head.split()[0] == "name"
    assert row.startswith("events")
    assert head.index("ours") == row.index(row[head.index("ours") :].lstrip())


def test_unknown_name_is_refused():
    done = run("run", "nothing")
    assert done.returncode == 2
    assert "nothing" in done.stderr


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")))
def test_recorded_results_are_drawn(file):
    done = run("plot", str(file), "--title", "a < b")
    assert done.returncode == 0, done.stderr
    drawn = ET.fromstring(done.stdout)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    bars = [part for part in drawn if part.tag.endswith("rect")]
    assert len(bars) == 2 * len(records)
    assert all(record.keys() >= KEYS for record in records)
    texts = [part.text for part in drawn if part.tag.endswith("text")]
    assert texts[0] == "a < b"
    for record in records:
        assert any(record["variant"] in text for text in texts)
