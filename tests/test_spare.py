"""The views of spare memory: where each lies, and what it is."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiosync.metadata import ParamMeta, sizes_of
from aiosync.spare import needed_memory, views_into

KINDS = [
    (torch.float32, (4, 3)),
    (torch.float32, (12,)),
    (torch.bfloat16, (4, 3)),
    (torch.uint8, (65,)),
    (torch.complex128, ()),
    (torch.float64, (0, 5)),
    (torch.bool, (1, 1, 1)),
]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=40))
def test_each_view_lies_behind_the_one_before(kinds):
    metadata = [ParamMeta(str(at), dtype, shape) for at, (dtype, shape) in enumerate(kinds)]
    memory = torch.empty(needed_memory(metadata) + 3, dtype=torch.uint8)
    views = views_into(memory, metadata)
    start = memory.data_ptr()
    for view, (dtype, shape), nbytes in zip(views, kinds, sizes_of(metadata), strict=True):
        assert (view.dtype, tuple(view.shape)) == (dtype, shape)
        assert view.is_contiguous()
        assert not nbytes or view.data_ptr() == start
        start += -(-nbytes // 64) * 64
    assert start == memory.data_ptr() + needed_memory(metadata)


def test_views_are_plain_tensors_whatever_the_mode():
    metadata = [ParamMeta(str(at), torch.float32, (2,)) for at in range(3)]
    memory = torch.zeros(needed_memory(metadata), dtype=torch.uint8)
    views = views_into(memory, metadata)
    views[1].fill_(5)
    assert [view.tolist() for view in views] == [[0, 0], [5, 5], [0, 0]]
    leaf = views[2].requires_grad_()
    with torch.no_grad():
        leaf.add_(1)
    assert leaf.is_leaf
    assert leaf.tolist() == [1, 1]
