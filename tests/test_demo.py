"""The command `aiosync demo` as its users run it: real processes, pipes, a terminal, signals."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aiosync.demo import checkpoint, execute
from aiosync.demo.lag import LagSampler, percentile_ms
from aiosync.demo.learner import Learner
from aiosync.demo.live import sparkline
from aiosync.demo.messages import Logits
from aiosync.demo.outcome import Options, Outcome, Summary
from aiosync.demo.replicas import DemoFailed, Launch, replicas
from aiosync.demo.training import Training
from aiosync.demo.view import View
from aiosync.demo.worker import logit_bits
from transports.lane import Lane

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

KEYS = {
    "rounds",
    "workers",
    "backend",
    "verified",
    "bytes_per_round",
    "round_ms_median",
    "loop_lag_ms_p99",
    "loop_lag_floor_ms_p99",
    "reward_first",
    "reward_last",
}
POLICY_BYTES = sum(p.nbytes for p in Learner().model.parameters())


@pytest.fixture
def folder(monkeypatch):
    """A folder for the command's temporary files; short, since socket paths may not be long."""
    path = tempfile.mkdtemp(prefix="demo-")
    monkeypatch.setenv("TMPDIR", path)
    yield Path(path)
    shutil.rmtree(path)


@pytest.fixture
def tiny_checkpoint(tmp_path):
    """Two files with what checkpoints have: several dtypes, a scalar, nothing at all."""
    first = {
        "layers.0.weight": torch.randn(33, 7).to(torch.bfloat16),
        "layers.0": torch.arange(5),
        "scale": torch.tensor(0.5),
    }
    second = {"mask": torch.tensor([True, False, True]), "empty": torch.zeros(0, 3)}
    save_file(first, tmp_path / "model-1.safetensors")
    save_file(second, tmp_path / "model-2.safetensors")
    return tmp_path, {**first, **second}


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "aiosync", *args]


def start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended while we looked
            continue
        if parent == pid:
            found.append(int(stat.parent.name))
    return found


def leftovers(folder: Path) -> list[Path]:
    """Our folders in it; torch makes a cache of its own there."""
    return list(folder.glob("aiosync*"))


def wait_gone(pids: list[int], folder: Path, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        left = leftovers(folder)
        if not alive and not left:
            return
        assert time.monotonic() < deadline, (alive, left)
        time.sleep(0.05)


# -- whole runs ----------------------------------------------------------------------------------


def test_json_is_one_line_and_complete(folder, free_shm):
    done = subprocess.run(
        command("demo", "--rounds", "3", "--seed", "1", "--json"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    summary = json.loads(line)
    assert set(summary) == KEYS
    assert (summary["rounds"], summary["workers"], summary["backend"]) == (3, 1, "ipc")
    assert summary["verified"] is True
    assert summary["bytes_per_round"] == POLICY_BYTES
    assert summary["round_ms_median"] > 0
    assert summary["loop_lag_ms_p99"] > 0
    assert summary["loop_lag_floor_ms_p99"] > 0
    assert 0 < summary["reward_first"] < 1
    rounds = [line for line in done.stderr.splitlines() if line.startswith("v ")]
    assert [line.split()[1] for line in rounds] == ["0", "1", "2", "3"]
    assert all("digest ok" in line for line in rounds)
    assert "\x1b" not in done.stderr
    assert not leftovers(folder)


def test_two_workers_and_a_checkpoint_on_a_terminal(folder, tiny_checkpoint, free_shm):
    where, tensors = tiny_checkpoint
    args = command("demo", "--rounds", "2", "--workers", "2", "--model", str(where))
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "50"}
    with subprocess.Popen(args, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 65536):
                shown += part
        except OSError:  # EIO: the other end is closed
            pass
        code = process.wait(timeout=60)
    os.close(ours)
    text = shown.decode()
    assert code == 0, text
    assert "\x1b[" in text
    for expected in ("trainer", "worker-0", "worker-1", "initialized", "intact", "reward "):
        assert expected in text
    nbytes = POLICY_BYTES + sum(tensor.nbytes for tensor in tensors.values())
    assert f"2 rounds over ipc to 2 worker(s): {nbytes} bytes" in text
    assert "bit-equal on every worker" in text
    assert not leftovers(folder)


@pytest.mark.parametrize(
    ("moment", "signals"),
    [("starting", [signal.SIGINT]), ("v 1", [signal.SIGINT, signal.SIGINT])],
)
def test_ctrl_c_leaves_nothing(folder, free_shm, moment, signals):
    with start("demo", "--rounds", "500") as process:
        assert process.stdout is not None
        for line in process.stdout:
            assert "\x1b" not in line
            if line.startswith(moment):
                break
        workers = children(process.pid)
        for number in signals:
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == "interrupted; the workers are gone"
    wait_gone(workers, folder, seconds=0)
    if moment != "starting":
        assert workers


def test_workers_end_when_the_trainer_is_killed(folder, free_shm):
    with start("demo", "--rounds", "500") as process:
        assert process.stdout is not None
        assert any(line.startswith("training") for line in process.stdout)
        workers = children(process.pid)
        process.kill()
        process.communicate(timeout=60)
    assert len(workers) == 1
    wait_gone(workers, folder)


# -- without processes, or with one that fails ---------------------------------------------------


@pytest.mark.parametrize("package", ["click", "rich", "safetensors"])
def test_without_the_extra_it_says_what_to_install(package):
    code = f"import sys; sys.modules[{package!r}] = None; import aiosync.cli as c; c.main()"
    args = [sys.executable, "-c", code, "demo"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert "pip install 'aiosync[cli]'" in line


def test_version_help_and_wrong_options():
    def say(*args: str) -> tuple[int, str]:
        done = subprocess.run(command(*args), capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    assert say("--version") == (0, "aiosync, version 0.1.0\n")
    code, text = say("demo", "--help")
    assert code == 0
    assert "SHA-256" in text
    assert "loopback" not in text  # no backend between processes
    for wrong in (["--rounds", "0"], ["--backend", "carrier-pigeon"], ["--model", "/nowhere"]):
        code, text = say("demo", *wrong)
        assert code == 2, text


def outcome(**changes: object) -> Outcome:
    facts = {"rounds": 1, "workers": 1, "backend": "ipc", "verified": True, "bytes_per_round": 1}
    numbers = dict.fromkeys(KEYS - set(facts), 0.0)
    return Outcome(summary=Summary(**{**facts, **numbers}), failures=[], **changes)


def test_what_went_wrong_is_the_exit_code(monkeypatch, capsys):
    async def failed(*args: object) -> Outcome:
        return Outcome(summary=outcome().summary, failures=["worker-1 is not equal"])

    async def gone(*args: object) -> Outcome:
        raise DemoFailed("worker-0: generate: gone")

    async def fine(*args: object) -> Outcome:
        return outcome()

    for run, code, text in (
        (failed, 1, "worker-1 is not"),
        (gone, 1, "generate: gone"),
        (fine, 0, ""),
    ):
        monkeypatch.setattr(execute, "run", run)
        assert execute.execute(Options(), as_json=True) == code
        assert text in capsys.readouterr().err


class FakeReplica:
    def __init__(self, name: str, bits: list[int]) -> None:
        self.name = name
        self.bits = bits

    async def logits(self, tokens: list[list[int]]) -> Logits:
        return Logits(bits=self.bits, version=1)


@pytest.mark.asyncio
async def test_one_bit_of_one_logit_is_a_difference():
    learner = Learner()
    async with Lane("test") as lane:
        training = Training(Options(), View(), engine=None, fleet=[], lane=lane, learner=learner)
        bits = await lane.run(logit_bits, learner.model, training._fixed)
        assert len(bits) == training._fixed.numel() * learner.task.vocabulary
        training._fleet = [FakeReplica("same", bits), FakeReplica("off", [bits[0] ^ 1, *bits[1:]])]
        assert await training._compare() == [("same", True), ("off", False)]


@pytest.mark.asyncio
async def test_a_worker_that_cannot_start_says_why(folder):
    launch = Launch(
        folder=folder,
        backend="nonsense",
        policy=lambda seed: '{"vocabulary":7,"context":9}',
        seed=0,
    )
    with pytest.raises(DemoFailed, match=r"worker-0 ended before it was ready(.|\n)*nonsense"):
        async with replicas(1, launch):
            pass


def test_checkpoints_are_read_whole_and_compared_bit_by_bit(tiny_checkpoint):
    where, tensors = tiny_checkpoint
    loaded = checkpoint.load(where)
    assert set(loaded) == {f"checkpoint.{name}" for name in tensors}
    for name, tensor in tensors.items():
        copy = loaded[f"checkpoint.{name}"]
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
    blank = checkpoint.blank(where)
    assert not any(tensor.any() for tensor in blank.values())
    before = checkpoint.fingerprints(loaded)
    assert checkpoint.fingerprints(blank)["checkpoint.empty"] == before["checkpoint.empty"]
    loaded["checkpoint.layers.0.weight"].view(torch.int16)[32, 6] ^= 1
    after = checkpoint.fingerprints(loaded)
    assert [name for name in before if before[name] != after[name]] == [
        "checkpoint.layers.0.weight"
    ]


def test_folders_that_are_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"no \*\.safetensors in"):
        checkpoint.load(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"not one")
    with pytest.raises(ValueError, match=r"a\.safetensors: "):
        checkpoint.load(tmp_path)
    for file in ("a.safetensors", "b.safetensors"):
        save_file({"twice": torch.zeros(1)}, tmp_path / file)
    with pytest.raises(ValueError, match=r"twice is in a\.safetensors and in b\.safetensors"):
        checkpoint.load(tmp_path)


@pytest.mark.asyncio
async def test_a_blocked_loop_is_seen(blocking_detector):
    blocking_detector.deactivate()
    async with LagSampler().running() as lag:
        await asyncio.sleep(0.03)
        time.sleep(0.2)
        await asyncio.sleep(0.03)
    assert max(lag.samples) > 0.1
    assert percentile_ms(lag.samples, 100) == max(lag.samples) * 1000


def test_percentiles_and_bars():
    samples = [number / 1000 for number in range(1, 101)]
    assert percentile_ms(samples, 99) == 99.0
    assert percentile_ms(samples[:3], 99) == 3.0
    assert percentile_ms([], 99) == 0.0
    assert sparkline([0.0, 0.5, 1.0, 2.0]) == "▁▅██"
