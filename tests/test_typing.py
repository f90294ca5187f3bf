"""User programs under mypy strict and pyright strict, against the wheel as it is installed.

A program in `typed_programs/mistakes` says in a comment on the line at fault which rule of which
checker finds it, and has to be stopped at run time as well, by one sentence.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from torch import nn

import aiosync
from aiosync import Validation, WrongLoop
from aiosync.former_names import INSTEAD

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "tests" / "typed_programs"
MISTAKES = sorted((PROGRAMS / "mistakes").glob("*.py"))
EXPECTED = re.compile(r"# mypy: (\S+)  pyright: (\S+)$", re.MULTILINE)
PACKAGES = ("aiosync", "statemachines", "transports")

AT_RUN_TIME = {
    "missing_await": (RuntimeWarning, "coroutine '.*send_weights' was never awaited"),
    "blocking_client": (TypeError, "PoolClient is no weight sync client: it lacks finish_weight_"),
    "blocking_front_door": (WrongLoop, "blocking: connect would block the event loop"),
    "former_client_method": (AttributeError, "has no 'init_weight_update_group': use await Engine"),
    "former_function": (
        AttributeError,
        "'aiosync' has no 'trainer_send_weights': use await engine",
    ),
    "former_method": (AttributeError, "has no 'trainer_send_weights': use await engine.send_wei"),
    "handle_version_none": (Validation, "a version is needed: pass version=<int that grows> or"),
    "version_none": (Validation, "a version is needed: pass version=<int that grows> or"),
    "wrong_budget": (Validation, "budget must be a Budget, not 30; for one number of seconds use"),
    "wrong_policy": (Validation, "policy must be 'all', 'quorum(k)' or 'best_effort', not 2"),
}

pytestmark = pytest.mark.timeout(240)


def run(*command, **options):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PYTHONWARNINGS": "error", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=env, **options
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The Python of a new environment that has the wheel, and the dependencies of this one."""
    tmp = tmp_path_factory.mktemp("installed")
    source = tmp / "source"
    source.mkdir()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-W", "ignore", "-m", "pip")  # its own warnings are not ours
    offline = ("--no-build-isolation",) if importlib.util.find_spec("setuptools") else ()
    built = run(*pip, "wheel", "--no-deps", *offline, "-w", tmp / "wheels", ".", cwd=source)
    assert built.returncode == 0, built.stdout + built.stderr

    venv.create(tmp / "venv", with_pip=False, symlinks=True)
    paths = sysconfig.get_paths(scheme="venv", vars={"base": str(tmp / "venv")})
    packages = Path(paths["purelib"])
    (wheel,) = (tmp / "wheels").glob("aiosync-*.whl")
    done = run(*pip, "install", "--no-deps", "--no-compile", "--target", packages, wheel)
    assert done.returncode == 0, done.stdout + done.stderr
    # Later on the path than the wheel, and `.pth` files in there (this checkout) do not count.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Path(paths["scripts"]) / "python"


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A copy: next to the sources a checker would find those first."""
    copy = Path(shutil.copytree(PROGRAMS, tmp_path_factory.mktemp("user") / "programs"))
    lines = ["import aiosync", *(f"reveal_type(aiosync.{name})" for name in aiosync.__all__)]
    (copy / "revealed.py").write_text("\n".join(lines) + "\n")
    return copy


@pytest.fixture(scope="module")
def mypy(installed, programs, request):
    """(file, line, rule, text) of everything that mypy reports."""
    cache = request.config.cache.mkdir("mypy")  # to read torch takes most of the time
    config = programs / "mypy.ini"
    config.write_text("[mypy]\nstrict = True\n")
    options = ("--config-file", config, "--cache-dir", cache, "-O", "json")
    command = ("-m", "mypy", "--python-executable", installed, *options)
    done = run(sys.executable, *command, ".", cwd=programs)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [
        (Path(found["file"]).name, found["line"], found["code"], found["message"])
        for found in map(json.loads, done.stdout.splitlines())
    ]


@pytest.fixture(scope="module")
def pyright(installed, programs):
    """The same of pyright, whose checker basedpyright brings along."""
    config = {"typeCheckingMode": "strict", "include": ["."]}
    (programs / "pyrightconfig.json").write_text(json.dumps(config))
    command = ("-m", "basedpyright", "--pythonpath", installed, "--outputjson", "-p", programs)
    done = run(sys.executable, *command, cwd=programs)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [
        (
            Path(found["file"]).name,
            found["range"]["start"]["line"] + 1,
            found.get("rule"),
            found["message"],
        )
        for found in json.loads(done.stdout)["generalDiagnostics"]
    ]


def expected(checker):
    found = set()
    for program in MISTAKES:
        text = program.read_text()
        matches = list(EXPECTED.finditer(text))
        assert len(matches) == 1, program
        line = text.count("\n", 0, matches[0].start()) + 1
        found.add((program.name, line, matches[0].group(checker)))
    return found


def check(reports, wanted):
    """Nothing but what is wanted; further rules on the same line follow from it."""
    found = {report[:3] for report in reports if report[0] != "revealed.py"}
    assert {place[:2] for place in found} == {place[:2] for place in wanted}
    assert wanted <= found


def revealed(reports):
    """Public names and what the checker knows of each."""
    texts = {line: text for file, line, _, text in reports if file == "revealed.py"}
    assert len(texts) == len(aiosync.__all__)
    return [(name, texts[line]) for line, name in enumerate(aiosync.__all__, start=2)]


def test_mypy_accepts_the_program_and_finds_each_mistake(mypy):
    check(mypy, expected(1))


def test_pyright_accepts_the_program_and_finds_each_mistake(pyright):
    check(pyright, expected(2))


def test_public_names_have_types(mypy, pyright):
    for name, text in revealed(mypy):
        assert text.startswith("Revealed type is"), name
        assert text != 'Revealed type is "Any"', name
    for name, text in revealed(pyright):
        assert text.startswith(f'Type of "aiosync.{name}" is'), name
        assert not re.search(r"\bUnknown\b", text), (name, text)
        assert not text.endswith('is "Any"'), name


def test_the_program_runs_on_the_wheel(installed, programs, free_shm):
    where = run(installed, "-c", "import aiosync; print(aiosync.__file__)", cwd=programs)
    assert Path(where.stdout.strip()).is_relative_to(installed.parents[1]), where.stderr
    done = run(installed, "program.py", cwd=programs)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "version 2 committed" in done.stdout


def test_every_mistake_is_one_of_a_kind():
    assert {program.stem for program in MISTAKES} == set(AT_RUN_TIME)


@pytest.mark.parametrize("name", AT_RUN_TIME)
@pytest.mark.asyncio
async def test_a_mistake_is_stopped_by_one_sentence(name, monkeypatch, free_shm):
    monkeypatch.syspath_prepend(PROGRAMS / "mistakes")
    kind, sentence = AT_RUN_TIME[name]
    module = importlib.import_module(name)
    config = aiosync.WeightTransferConfig("ipc")
    engine = aiosync.WeightTransferEngineFactory.create_engine(config, model=nn.Linear(4, 2))
    async with engine, aiosync.serve(engine) as server:
        if kind is RuntimeWarning:
            with pytest.warns(kind, match=sentence):
                await module.mistake(server.url)
            return
        with pytest.raises(kind) as caught:
            await module.mistake(server.url)
        first, *table = str(caught.value).splitlines()
        assert sentence in first
        assert all(line.startswith("  ") for line in table)


@pytest.mark.parametrize("name", INSTEAD)
def test_former_names_say_what_to_call(name):
    fleet = aiosync.FleetClient(["unix:///nowhere"])
    for owner in (fleet, aiosync, aiosync.HTTPVLLMWeightSyncClient("unix:///nowhere")):
        assert not hasattr(owner, name)
        with pytest.raises(AttributeError, match=f"has no '{name}': use .+"):
            getattr(owner, name)


def test_an_attribute_error_from_within_a_property_is_not_hidden():
    class Engine(aiosync.LoopbackTrainerWeightTransferEngine):
        @property
        def depth(self):
            return self.lane_that_is_not_there

    engine = Engine.__new__(Engine)
    with pytest.raises(AttributeError, match="'lane_that_is_not_there'"):
        _ = engine.depth
    with pytest.raises(AttributeError, match="object has no attribute 'unheard_of'"):
        _ = engine.unheard_of
