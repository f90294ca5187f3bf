"""Every program in examples/ runs, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("program", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(program, free_shm):
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=220
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if program.name == "sync_checkpoint.py":
        assert "equal before the sync: False" in done.stdout
        assert "equal after the sync:  True" in done.stdout


def test_there_are_examples():
    assert EXAMPLES
