"""The shape of the code: who may import whom, what an import costs, what the wheel contains."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Downwards: a package may import itself and those to its right.
LAYERS = ("aiosync", "transports", "statemachines")
MODULES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
OTHERS = ("tests", "examples", "benchmarks", "docs")
MAX_LINES = 400

# Anything a peer sends would be code to these.
UNSAFE = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle"}
# vLLM's own CUDA-IPC route wants pickled handles: this client writes them, and reads none.
ONLY_PICKLES = "aiosync/ipc_handles.py"
HEAVY = {"torch", "ray", "vllm", "nccl", "nixl", "cupy", "numba", "cuda", "numpy", "transformers"}
# These plan and wait, and must be testable without the framework.
WITHOUT_TORCH = ("planning", "lane", "deferred", "errors")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(tree: ast.AST) -> set[str]:
    """Full names of all imported modules, wherever the statement stands."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
            names |= {
                argument.value
                for argument in node.args[:1]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            }
    return names


def at_run_time(tree: ast.Module) -> ast.Module:
    """The tree without what only a type checker reads."""

    class Strip(ast.NodeTransformer):
        def visit_If(self, node: ast.If):
            self.generic_visit(node)
            return node.orelse if _name(node.test) == "TYPE_CHECKING" else node

    return Strip().visit(tree)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


every_module = pytest.mark.parametrize("module", MODULES, ids=name_of)


def modules_where(condition):
    return pytest.mark.parametrize("module", list(filter(condition, MODULES)), ids=name_of)


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def is_pure(path: Path) -> bool:
    layer = layer_of(path)
    return layer == "statemachines" or (layer == "transports" and path.stem in WITHOUT_TORCH)


def test_there_are_modules():
    assert {layer_of(path) for path in MODULES} == set(LAYERS)


def test_the_checks_see_what_they_look_for():
    tree = ast.parse(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import torch\nelse:\n    import anyio\n"
        "def f():\n    import pickle as p\n    importlib.import_module('ray.util')\n"
        "from os import path\n"
    )
    assert tops(imported(tree)) >= {"torch", "anyio", "pickle", "ray", "os"}
    assert "torch" not in tops(imported(at_run_time(tree)))
    assert "anyio" in tops(imported(at_run_time(tree)))


@every_module
def test_imports_point_down(module):
    layer = layer_of(module)
    above = set(LAYERS[: LAYERS.index(layer)])
    found = tops(imported(tree_of(module))) & above
    assert not found, f"{name_of(module)} imports {found}, which lies above it"


@every_module
def test_imports_are_absolute(module):
    relative = [
        node.lineno
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative, f"relative imports at lines {relative}"


@every_module
def test_nothing_unpickles(module):
    tree = tree_of(module)
    found = tops(imported(tree)) & UNSAFE
    if name_of(module) != ONLY_PICKLES:
        assert not found
        return
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and _name(node.value) == "pickle"
    }
    assert found == {"pickle"}
    assert used == {"dumps"}
    assert not any(name.startswith("pickle.") for name in imported(tree))


@every_module
def test_nothing_is_detached_with_shield(module):
    """``asyncio.shield`` does not wait for what it shields; an anyio scope does."""
    tree = tree_of(module)
    calls = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "shield"
        and _name(node.value) == "asyncio"
    ]
    assert not calls, f"asyncio.shield at lines {calls}"
    assert "asyncio.shield" not in imported(tree)


@every_module
def test_modules_stay_short(module):
    lines = len(module.read_text(encoding="utf-8").splitlines())
    assert lines < MAX_LINES, f"{name_of(module)} has {lines} lines: split it by purpose"


@modules_where(lambda path: layer_of(path) != "aiosync")
def test_the_lower_layers_do_not_lean_on_asyncio(module):
    assert "asyncio" not in tops(imported(tree_of(module)))


@modules_where(is_pure)
def test_pure_modules_do_without_torch(module):
    assert "torch" not in tops(imported(at_run_time(tree_of(module))))


@pytest.mark.parametrize("package", LAYERS)
def test_import_is_light(package):
    program = f"import sys; import {package}; print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    loaded = tops(set(done.stdout.split()))
    assert package in loaded
    assert not loaded & HEAVY
    if package != "aiosync":
        assert "aiohttp" not in loaded


def test_wheel_contains_the_three_packages_and_nothing_else(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    # The other folders of the repository come along, to see that they are left out.
    for name in (*LAYERS, *filter(lambda name: (ROOT / name).is_dir(), OTHERS)):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=tree, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    expected = {
        path.relative_to(tree).as_posix()
        for layer in LAYERS
        for path in (tree / layer).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert {f"{layer}/py.typed" for layer in LAYERS} <= expected
    assert packed == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
