"""Packing: every dtype and layout, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from statemachines.errors import Validation
from transports.packing import bytes_of, pack_into, settled, unpack, views
from transports.planning import ALIGNED, NCCL_PACKED, Piece, plan_chunks

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
SHAPES = [(), (0,), (1,), (3, 5), (2, 0, 3), (4, 3, 2)]


def any_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bytes as a tensor: NaNs with payloads, bools of any byte."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(bytes_of(tensor).tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_of_is_a_view(dtype, shape):
    tensor = any_bits(dtype, shape)
    data = bytes_of(tensor)
    assert (data.dtype, data.shape) == (torch.uint8, (tensor.nbytes,))
    assert data.data_ptr() == tensor.data_ptr()
    if tensor.nbytes:
        data[-1] ^= 255
        assert bytes_of(tensor)[-1] == data[-1]


def test_bytes_of_parameters_and_slices():
    parameter = torch.nn.Parameter(torch.ones(4))
    assert not bytes_of(parameter).requires_grad
    assert bytes_of(torch.arange(8, dtype=torch.int16)[3:]).data_ptr() % 8 == 6
    with torch.inference_mode():
        made = torch.ones(2)
    assert bytes_of(made).numel() == 8


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 4).t(),
        torch.ones(3, 4)[:, ::2],
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag.contiguous()[0:1]._neg_view(),
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
    ],
    ids=["transposed", "strided", "conj", "neg", "meta", "sparse"],
)
def test_bytes_of_refuses(tensor):
    with pytest.raises(Validation):
        bytes_of(tensor)


def test_settled_copies_only_where_needed():
    plain = torch.ones(3)
    assert settled(plain).data_ptr() == plain.data_ptr()
    conj = torch.tensor([1 + 2j]).conj()
    assert torch.view_as_real(settled(conj)).tolist() == [[1.0, -2.0]]
    bytes_of(settled(conj))


# -- views


def test_views_of_a_buffer():
    buffer = any_bits(torch.uint8, (64,))
    found = views(
        buffer,
        [torch.bfloat16, torch.float32, torch.complex128, torch.int8],
        [(), (2, 3), (1,), (0, 4)],
        [2, 4, 32, 64],
    )
    assert [tuple(view.shape) for view in found] == [(), (2, 3), (1,), (0, 4)]
    assert raw(found[0]) == raw(buffer)[2:4]
    assert raw(found[1]) == raw(buffer)[4:28]
    found[1].view(torch.int32).zero_()
    assert buffer[4:28].sum() == 0


@pytest.mark.fault("A-LAYOUT-1")
@pytest.mark.parametrize("names", [None, ["a", "tensor 1"]])
def test_views_name_the_misaligned_tensor(names):
    # vLLM's own case: 3 bf16 elements followed by fp32
    with pytest.raises(Validation, match="tensor 1") as caught:
        views(
            torch.zeros(64, dtype=torch.uint8),
            [torch.bfloat16, torch.float32],
            [(3,), (2,)],
            [0, 6],
            names=names,
        )
    assert caught.value.tensor == "tensor 1"


def test_views_count_the_offset_of_the_buffer_itself():
    arena = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(Validation, match="aligned"):
        views(arena[2:], [torch.float32], [(2,)], [0])
    assert views(arena[2:], [torch.float32], [(2,)], [2])[0].shape == (2,)


@pytest.mark.parametrize("offset", [-4, 60, 68])
def test_views_outside_of_the_buffer(offset):
    with pytest.raises(Validation, match="not in a buffer of 64"):
        views(torch.zeros(64, dtype=torch.uint8), [torch.float32], [(2,)], [offset])


# -- pack and unpack


def move(tensors: list[torch.Tensor], results: list[torch.Tensor], *, limit: int, rule: str):
    """Through the chunks of a plan, one buffer a chunk."""
    plan = plan_chunks(
        [t.nbytes for t in tensors], [t.itemsize for t in tensors], limit=limit, rule=rule
    )
    for chunk in plan.chunks:
        buffer = torch.full((chunk.nbytes,), 0xA5, dtype=torch.uint8)
        pack_into(buffer, chunk.pieces, tensors)
        unpack(buffer, chunk.pieces, results)


@pytest.mark.fault("A-LAYOUT-1", "A-LAYOUT-2")
@pytest.mark.parametrize("rule", [ALIGNED, NCCL_PACKED])
def test_every_dtype_and_shape_bit_for_bit(rule):
    tensors = [any_bits(d, s, i) for i, (d, s) in enumerate((d, s) for d in DTYPES for s in SHAPES)]
    results = [torch.zeros_like(t) for t in tensors]
    move(tensors, results, limit=64, rule=rule)  # splits, and for nccl misaligned offsets
    assert [raw(t) for t in tensors] == [raw(t) for t in results]


@pytest.mark.fault("A-LAYOUT-6")
def test_bfloat16_nan_payloads():
    tensor = torch.arange(0x7F80, 0x8000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert int(tensor.isnan().sum()) == 127
    result = torch.zeros_like(tensor)
    move([tensor], [result], limit=1024, rule=ALIGNED)
    assert raw(result) == raw(tensor)


@pytest.mark.fault("A-LAYOUT-3")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_contiguous_sources_and_targets(dtype):
    tensor = any_bits(dtype, (6, 8)).t()[1:7:2]
    target = torch.zeros((6, 9), dtype=dtype).t()[0:3]
    for limit in (4096, 64):
        result = torch.zeros(tensor.shape, dtype=dtype)
        move([tensor], [result], limit=limit, rule=ALIGNED)
        assert raw(result) == raw(settled(tensor))
    move([tensor], [target], limit=4096, rule=ALIGNED)
    assert raw(settled(target)) == raw(settled(tensor))


def test_part_of_a_non_contiguous_target_is_refused():
    with pytest.raises(Validation, match="not its values"):
        unpack(torch.zeros(4, dtype=torch.uint8), [Piece(0, 0, 0, 4)], [torch.ones(2, 2).t()])


def test_lazy_conjugation_is_resolved():
    for dtype in (torch.complex64, torch.complex128):
        tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=dtype).conj()
        for limit in (4096, 64):
            result = torch.zeros(2, dtype=dtype)
            move([tensor], [result], limit=limit, rule=ALIGNED)
            assert result.tolist() == [1 - 2j, 3 + 4j]
    with pytest.raises(Validation):
        unpack(
            torch.zeros(8, dtype=torch.uint8),
            [Piece(0, 0, 0, 8)],
            [tensor[:1].to(torch.complex64).conj()],
        )


def test_into_parameters_without_gradients():
    source = torch.nn.Parameter(torch.arange(4.0))
    target = torch.nn.Parameter(torch.zeros(4))
    move([source], [target], limit=64, rule=ALIGNED)
    assert target.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert target.requires_grad
    assert target.grad_fn is None


def test_nothing_to_pack():
    pack_into(torch.empty(0, dtype=torch.uint8), [], [])


@pytest.mark.fault("A-LAYOUT-1")
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), max_size=12),
    st.sampled_from([ALIGNED, NCCL_PACKED]),
    st.integers(64, 300),
)
def test_any_mixture(kinds, rule, limit):
    tensors = [any_bits(d, s, i) for i, (d, s) in enumerate(kinds)]
    results = [torch.zeros_like(t) for t in tensors]
    move(tensors, results, limit=limit, rule=rule)
    assert [raw(t) for t in tensors] == [raw(t) for t in results]
