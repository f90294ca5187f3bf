"""What may be announced, and that every difference in it is noticed."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
import types

import pytest
import torch

from aiosync.errors import Validation
from aiosync.grouping import layerwise_groups
from aiosync.metadata import (
    ParamMeta,
    Replicate,
    Shard,
    Validated,
    dtype_name,
    first_few,
    from_wire,
    is_sendable,
    materialize_full_tensor,
    meta_nbytes,
    metadata_digest,
    parse_dtype,
    plain_metas,
    to_wire,
    validate_metadata,
)

F32 = torch.float32


def meta(name="w", dtype=F32, shape=(4, 6), **kwargs):
    return ParamMeta(name, dtype, shape, **kwargs)


def test_shape_is_a_tuple_and_the_dataclass_is_frozen():
    made = meta(shape=[4, 6])
    assert made.shape == (4, 6)
    assert meta(shape=torch.Size([4, 6])) == made
    with pytest.raises(AttributeError):
        made.name = "x"


@pytest.mark.parametrize(
    "bad",
    [
        {"mesh_shape": (2,)},
        {"placements": (Replicate(),)},
        {"owners": ()},
        {"owners": (True,)},
        {"owners": (-1,)},
        {"owners": (1.0,)},
        {"owners": (0, 0)},
        {"owners": (0, 1), "mesh_shape": (3,)},
        {"owners": (0, 1), "mesh_shape": (-1, -2)},
        {"owners": (0, 1), "mesh_shape": (0, 2)},
        {"owners": (0, 1), "placements": (Shard(0), Shard(1))},
        {"owners": (0, 1), "placements": (Shard(2),)},
        {"owners": (0, 1), "placements": (Shard(-1),)},
        {"owners": (0, 1), "placements": (Shard(True),)},
    ],
)
def test_contradictions_are_value_errors_with_the_name(bad):
    with pytest.raises(Validation, match=r"^w: ") as caught:
        meta(**bad)
    assert isinstance(caught.value, ValueError)
    assert caught.value.tensor == "w"


def test_a_foreign_placement_is_a_type_error():
    with pytest.raises(TypeError, match="'x'"):
        meta(owners=(0,), placements=("x",))


def test_owners_give_the_mesh_and_replication_is_no_placement():
    made = meta(owners=[3, 1])
    assert (made.owners, made.mesh_shape, made.placements) == ((3, 1), (2,), None)
    assert meta(owners=(0, 1), placements=(Replicate(),)).placements is None
    kept = meta(owners=range(4), mesh_shape=[2, 2], placements=[Shard(0), Replicate()])
    assert kept.placements == (Shard(0), Replicate())


def test_layerwise_groups_by_outermost_index():
    names = [
        "embed", "b.10.x.0", "b.2.x", "b.10.y", "norm", "a.0.w", "0.w", "b.02.z",
    ]  # fmt: skip
    assert layerwise_groups(names) == [
        ["embed"], ["b.2.x", "b.02.z"], ["b.10.x.0", "b.10.y"], ["a.0.w"], ["0.w"], ["norm"],
    ]  # fmt: skip
    assert layerwise_groups([]) == []
    assert layerwise_groups(["a.v2.w", "²"]) == [["a.v2.w", "²"]]
    assert layerwise_groups(["a.3", "a.3b.1", "4", "\n.5.w", "6.7.w"]) == [
        ["a.3"], ["a.3b.1"], ["4"], ["6.7.w"], ["\n.5.w"],
    ]  # fmt: skip


def test_many_are_made_as_one_is():
    names, shapes = ["a", "b"], [(4, 6), ()]
    one_by_one = [ParamMeta(name, F32, shape) for name, shape in zip(names, shapes, strict=True)]
    at_once = plain_metas(names, [F32] * 2, shapes)
    assert at_once == one_by_one
    assert list(map(hash, at_once)) == list(map(hash, one_by_one))
    assert repr(at_once) == repr(one_by_one)


def test_it_stays_as_it_was_made():
    one = meta(owners=[0, 1], placements=[Shard(0)])
    with pytest.raises(AttributeError):
        one.name = "other"
    assert dataclasses.replace(one, name="other").owners == one.owners
    assert pickle.loads(pickle.dumps(one)) == copy.copy(one) == one
    assert hash(copy.deepcopy(one)) == hash(one)
    with pytest.raises(TypeError):
        ParamMeta("w", F32, (4, 6), (0, 1))


def test_materialize():
    plain = torch.ones(2)
    assert materialize_full_tensor(plain) is plain
    assert materialize_full_tensor(types.SimpleNamespace(full_tensor=lambda: plain)) is plain


def test_every_torch_dtype_goes_there_and_back_or_is_refused():
    dtypes = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    sendable = {d for d in dtypes if is_sendable(d)}
    for dtype in sendable:
        assert parse_dtype(dtype_name(dtype)) is dtype
    for dtype in dtypes - sendable:
        with pytest.raises(Validation):
            parse_dtype(dtype_name(dtype))
        with pytest.raises(Validation, match="w"):
            validate_metadata([meta(dtype=dtype)])
    wanted = "bool int16 uint16 uint32 uint64 bfloat16 complex64 complex128 float8_e4m3fn"
    wanted += " float8_e5m2 float8_e8m0fnu float4_e2m1fn_x2 float64 uint8"
    assert {getattr(torch, name) for name in wanted.split()} <= sendable


@pytest.mark.parametrize("name", ["nn", "__class__", "", "Tensor", "torch.float32", None, ["x"]])
def test_names_that_are_no_dtype(name):
    with pytest.raises(Validation):
        parse_dtype(name)


def test_nbytes():
    assert meta_nbytes(meta(dtype=torch.bfloat16, shape=(3, 5))) == 30
    assert meta_nbytes(meta(dtype=torch.complex64, shape=())) == 8
    assert meta_nbytes(meta(shape=(7, 0))) == 0
    assert meta_nbytes(meta(dtype=torch.uint8, shape=(2**63 - 1,))) == 2**63 - 1


@pytest.mark.fault("A-INPUT-2")
@pytest.mark.parametrize(
    "shape",
    [(-1,), (2.0,), (True,), ("2",), (1,) * 65, (2**62,), (2**31, 2**31, 2), (2**62, 2**62, 0)],
)
def test_impossible_sizes(shape):
    with pytest.raises(Validation, match="w: ") as caught:
        meta_nbytes(meta(shape=shape))
    assert caught.value.tensor == "w"


@pytest.mark.fault("A-NAMES-5")
def test_validate_metadata_names_what_is_wrong():
    with pytest.raises(Validation, match=r"metadata\[2\] repeats 'a'"):
        validate_metadata([meta("a"), meta("b"), meta("a")])
    with pytest.raises(Validation, match="no tensor"):
        validate_metadata([])
    with pytest.raises(TypeError, match=r"metadata\[1\] must be a ParamMeta, not str"):
        validate_metadata([meta("a"), "b"])
    for name in ("", 3, "\ud800"):
        with pytest.raises(Validation, match=r"metadata\[0\]"):
            validate_metadata([meta(name)])
    with pytest.raises(Validation, match="dtype"):
        validate_metadata([meta(dtype="float32")])


@pytest.mark.fault("A-NAMES-5")
def test_names_that_differ_in_any_byte_are_different():
    names = ["w", "W", "caf\u00e9", "cafe\u0301"]
    assert [m.name for m in validate_metadata(meta(n) for n in names)] == names


def test_upstream_metadata_is_converted():
    class Shard:  # vLLM's own, by name
        def __init__(self, dim):
            self.dim = dim

    class Replicate:
        pass

    theirs = types.SimpleNamespace(
        name="w", dtype=F32, shape=(4, 6), owners=(0, 1, 2, 3), mesh_shape=(2, 2),
        placements=(Shard(1), Replicate()),
    )  # fmt: skip
    (ours,) = validate_metadata([theirs])
    assert isinstance(ours, ParamMeta)
    assert ours.placements[0].dim == 1


def test_digest_sees_every_field_and_the_order():
    base = meta(owners=(0, 1, 2, 3), mesh_shape=(2, 2), placements=(Shard(0), Shard(1)))
    other = meta("v")
    variants = [
        [base, other],
        [other, base],
        [base],
        [meta("w2"), other],
        [meta(dtype=torch.int32), other],
        [meta(shape=(6, 4)), other],
        [meta(), other],
        [meta(owners=(0, 1, 3, 2)), other],
        [meta(owners=(0, 1, 2, 3)), other],
        [meta(owners=(0, 1, 2, 3), mesh_shape=(2, 2)), other],
        [meta(owners=range(4), mesh_shape=(2, 2), placements=(Shard(0), Replicate())), other],
        [meta(owners=range(4), mesh_shape=(2, 2), placements=(Shard(1), Shard(0))), other],
    ]
    digests = [metadata_digest(v) for v in variants]
    assert len(set(digests)) == len(variants)
    assert digests[0] == metadata_digest([base, meta("v")])
    assert len(bytes.fromhex(digests[0])) == 16


def test_wire_round_trip():
    metas = [meta("a", torch.bfloat16, (2, 3)), meta("b", torch.bool, ()), meta("c", F32, (0, 7))]
    wire = to_wire(metas)
    assert wire == (["a", "b", "c"], ["bfloat16", "bool", "float32"], [[2, 3], [], [0, 7]])
    assert from_wire(*wire) == metas


@pytest.mark.parametrize(
    ("lists", "text"),
    [
        ((["a"], [], [[1]]), "1, 0, 1"),
        ((["a"], ["nn"], [[1]]), "'nn'"),
        ((["a"], ["float32"], [[-1]]), "a: bad dimension"),
        ((["a", "b"], ["float32"] * 2, [[1], [True]]), "b: bad dimension"),
        ((["a", "b", "c"], ["float32", "nn", "nn"], [[1]] * 3), "'nn'"),
        ((["a"], ["float32"], [3]), "a: shape must be a list"),
        ((["a", "a"], ["float32"] * 2, [[1], [1]]), "repeats"),
        (([], [], []), "no tensor"),
    ],
)
def test_wire_lists_from_a_peer_are_checked(lists, text):
    with pytest.raises(Validation, match=text):
        from_wire(*lists)


def test_first_few():
    assert first_few(["a", "b"]) == "a, b"
    assert first_few(list("abcdef"), 2) == "a, b (+4 more)"


def test_importing_it_needs_no_torch():
    code = "import aiosync.metadata, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_was_validated_once_is_known_by_its_tuple(monkeypatch):
    validated, metas = Validated(), (meta("a"), meta("b"))
    first = validated(metas)
    assert first == [*metas]
    with monkeypatch.context() as patch:
        patch.setattr("aiosync.metadata.is_", None)  # no entry is looked at
        assert validated(metas) is first
    assert validated([*metas, meta("c")]) == [*metas, meta("c")]
    assert validated(metas) == [*metas]


def test_a_tuple_of_what_may_change_is_looked_at_each_time():
    theirs = types.SimpleNamespace(
        name="w", dtype=torch.float32, shape=(2,), owners=None, mesh_shape=None, placements=None
    )
    validated, metas = Validated(), (theirs,)
    assert validated(metas)[0].shape == (2,)
    theirs.shape = (3,)
    assert validated(metas)[0].shape == (3,)
