"""The shape of the code: who may import whom, what an import costs, what the wheel contains."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

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


@cache
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

    return Strip().visit(deepcopy(tree))


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


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


def offences(find, modules=MODULES) -> dict[str, Any]:
    """What `find` says about each module, where it says anything."""
    found = {name_of(module): find(module) for module in modules}
    return {name: what for name, what in found.items() if what}


def test_imports_point_down():
    def from_above(module):
        above = set(LAYERS[: LAYERS.index(layer_of(module))])
        return tops(imported(tree_of(module))) & above

    assert offences(from_above) == {}


def test_imports_are_absolute():
    def relative(module):
        return [
            node.lineno
            for node in ast.walk(tree_of(module))
            if isinstance(node, ast.ImportFrom) and node.level
        ]

    assert offences(relative) == {}


def test_nothing_unpickles():
    assert offences(lambda module: tops(imported(tree_of(module))) & UNSAFE) == {
        ONLY_PICKLES: {"pickle"}
    }
    tree = tree_of(ROOT / ONLY_PICKLES)
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and _name(node.value) == "pickle"
    }
    assert used == {"dumps"}
    assert not any(name.startswith("pickle.") for name in imported(tree))


def test_nothing_is_detached_with_shield():
    """``asyncio.shield`` does not wait for what it shields; an anyio scope does."""

    def shielding(module):
        tree = tree_of(module)
        return [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr == "shield"
            and _name(node.value) == "asyncio"
        ] + [name for name in imported(tree) if name == "asyncio.shield"]

    assert offences(shielding) == {}


def test_modules_stay_short():
    def lines_of(module):
        lines = len(module.read_text(encoding="utf-8").splitlines())
        return lines if lines >= MAX_LINES else 0

    assert offences(lines_of) == {}, "split them by purpose"


def test_the_lower_layers_do_not_lean_on_asyncio():
    lower = [path for path in MODULES if layer_of(path) != "aiosync"]
    assert offences(lambda module: "asyncio" in tops(imported(tree_of(module))), lower) == {}


def test_pure_modules_do_without_torch():
    pure = [path for path in MODULES if is_pure(path)]
    loaded = offences(lambda path: "torch" in tops(imported(at_run_time(tree_of(path)))), pure)
    assert loaded == {}


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
