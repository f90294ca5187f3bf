"""Backends that come from somebody else's distribution, through the entry point group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import aiosync
from aiosync.factory import Registry

ROOT = Path(__file__).resolve().parent.parent

GOOD = """
import custom_backend
import aiosync

def register():
    aiosync.WeightTransferTrainerFactory.register_engine(
        "spool", "custom_backend", "SpoolTrainer")
    aiosync.WeightTransferEngineFactory.register_engine("spool", "custom_backend", "SpoolWorker")
"""

ROUND = """
import asyncio, sys, tempfile
import torch
import aiosync
from aiosync.testing import DirectClient

assert "custom_backend" not in sys.modules, "loaded before anybody asked for it"

async def main():
    model, served = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    worker = aiosync.WeightTransferEngineFactory.create_engine(
        aiosync.WeightTransferConfig("spool"), model=served)
    from custom_backend import SpoolInit
    with tempfile.TemporaryDirectory() as folder:
        trainer = await aiosync.WeightTransferTrainerFactory.trainer_init(
            SpoolInit(rank=0, folder=folder), client=DirectClient(worker), source=model)
        async with worker, trainer:
            await trainer.send_weights(version=1)
    assert torch.equal(model.weight, served.weight)
    print(sorted(aiosync.available_backends()["worker"]))

asyncio.run(main())
"""

ASKED_TWICE = """
import aiosync

for _ in range(2):
    try:
        aiosync.WeightTransferEngineFactory.create_engine(aiosync.WeightTransferConfig("nothing"))
    except aiosync.Validation as error:
        print(error)
"""


def _distribution(site: Path, name: str, code: str | None, target: str = "register") -> None:
    module = name.replace("-", "_")
    if code is not None:
        (site / f"{module}.py").write_text(code)
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[aiosync.backends]\n{name} = {module}:{target}\n")


def _python(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    path = f"import sys; sys.path[:0] = [{str(site)!r}, {str(ROOT / 'examples')!r}, {str(ROOT)!r}]"
    return subprocess.run(
        [sys.executable, "-c", f"{path}\n{code}"], capture_output=True, text=True, timeout=50
    )


@pytest.mark.slow
def test_an_installed_distribution_adds_a_backend_that_carries_a_round(tmp_path: Path) -> None:
    _distribution(tmp_path, "spool-backend", GOOD)
    done = _python(tmp_path, ROUND)
    assert done.returncode == 0, done.stderr
    assert "'spool'" in done.stdout
    assert "'ipc'" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "target", "said"),
    [
        (None, "register", "ModuleNotFoundError"),
        ("def register():\n    raise RuntimeError('no licence')", "register", "no licence"),
        (GOOD, "enrol", "AttributeError"),
        (GOOD.replace('"spool"', '"ipc"'), "register", "'ipc' is registered already"),
        ("register = 3", "register", "TypeError"),
    ],
    ids=["absent", "raises", "misspelt", "taken", "no-callable"],
)
def test_a_broken_plugin_is_named_and_takes_no_other_with_it(
    tmp_path: Path, code: str | None, target: str, said: str
) -> None:
    _distribution(tmp_path, "a-broken", code, target)
    _distribution(tmp_path, "b-good", GOOD)
    done = _python(tmp_path, ROUND)
    assert done.returncode == 0, done.stderr
    done = _python(tmp_path, ASKED_TWICE)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "unknown worker backend 'nothing'; available: " in first
    assert "a_broken" in first
    assert said in first
    assert second == first  # asked again, it is not forgotten


@pytest.mark.parametrize(
    ("name", "what", "said"),
    [
        ("", int, "non-empty name"),
        (3, int, "non-empty name, not 3"),
        (None, int, "non-empty name, not None"),
        ("mine", 3, "an engine class or its module path is needed, not 3"),
        ("mine", object(), "an engine class"),
        ("mine", "a.module", "needs a class name"),
    ],
)
def test_what_cannot_be_registered_is_refused(name: object, what: object, said: str) -> None:
    registry: Registry[object] = Registry("worker")
    with pytest.raises(aiosync.Validation, match=said):
        registry.register(name, what)  # type: ignore[arg-type]


def test_a_module_without_the_class_is_named() -> None:
    registry: Registry[object] = Registry("worker")
    registry.register("mine", "aiosync.config", "Nothing")
    with pytest.raises(aiosync.Validation, match=r"module aiosync\.config has no class 'Nothing'"):
        registry.get("mine")
