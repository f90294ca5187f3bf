"""What public signatures mention can be imported from `aiosync`, too."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

import pytest

import aiosync

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("aiosync", "transports", "statemachines")

# What only a backend, or a test of one, has in its hands; imported from where it is defined.
OF_BACKENDS = {
    "ASGIApp",
    "ClientProxy",
    "Deferred",
    "LaneCalls",
    "LaneFactory",
    "LaneLike",
    "LoopbackLink",
    "MemberLink",
    "OutStream",
    "Plan",
    "Rank",
    "Receiver",
    "Round",
    "Route",
    "Segment",
    "Sender",
    "SourceFeed",
    "Step",
    "StreamSummary",
    "StreamUpdateInfo",
    "Wire",
}
# A type alias of `aiosync.sources` by the name of a class elsewhere.
OTHERS = {"Session"}
# Got from a call, never constructed by a user.
MADE_BY_US = {"Offer", "PushSession", "WeightUpdate"}


def of_layers(condition):
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            yield from condition(ast.parse(path.read_text("utf-8")))


def public_types(tree):
    return [n.name for n in tree.body if isinstance(n, ast.ClassDef) and n.name[0] != "_"]


TYPES = set(of_layers(public_types))


def definition(value):
    """The syntax tree of an exported class or function."""
    source = Path(inspect.getsourcefile(sys.modules[value.__module__])).read_text("utf-8")
    for node in ast.parse(source).body:
        if getattr(node, "name", None) == value.__name__:
            return node
    raise AssertionError(f"{value!r} is not defined in its module")


def annotations(node):
    """Every annotation that a user of the class or function reads."""
    if isinstance(node, ast.ClassDef):
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and not part.target.id.startswith("_"):
                yield part.annotation
            elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                if part.name == "__init__" and node.name in MADE_BY_US:
                    continue
                if not part.name.startswith("_") or part.name in ("__init__", "__iter__"):
                    yield from annotations(part)
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        args = node.args
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        yield from (arg.annotation for arg in every if arg is not None and arg.annotation)
        if node.returns is not None:
            yield node.returns


def mentioned(node):
    for annotation in annotations(node):
        for part in ast.walk(annotation):
            if isinstance(part, ast.Name) and part.id in TYPES:
                yield part.id


def exported():
    for name in aiosync.__all__:
        value = getattr(aiosync, name)
        ours = getattr(value, "__module__", "").partition(".")[0] in LAYERS
        if ours and (inspect.isclass(value) or inspect.isfunction(value)):
            yield pytest.param(value, id=name)


@pytest.mark.parametrize("value", list(exported()))
def test_what_a_public_signature_mentions_is_public(value):
    missing = set(mentioned(definition(value))) - set(aiosync.__all__) - OF_BACKENDS - OTHERS
    assert not missing, f"{value.__name__} mentions {missing}: export it from aiosync"


def test_the_walk_sees_what_it_looks_for():
    assert {"Report", "WeightUpdate", "RoundTicket", "RoundOptions"} <= set(
        mentioned(definition(aiosync.TrainerWeightTransferEngine))
    )
    assert {"WeightTransferInitInfo", "PeerState", "Budget"} <= TYPES


def test_every_name_is_where_the_table_says():
    for name in aiosync.__all__:
        assert getattr(aiosync, name).__class__ is not None
    text = Path(aiosync.__file__).read_text("utf-8")
    for name in aiosync._LAZY:
        assert f"{name} as {name}" in text, f"{name}: type checkers do not see it"


def test_infos_of_every_backend_are_public():
    for backend in ("Gloo", "IPC", "Loopback"):
        for part in ("TrainerInitInfo", "WeightTransferInitInfo", "WeightTransferUpdateInfo"):
            assert f"{backend}{part}" in aiosync.__all__
