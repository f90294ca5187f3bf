"""Small pieces of a segment that are copied in one call."""

from __future__ import annotations

import pytest
import torch

from statemachines.errors import Validation
from transports.copy_batches import Batch, batches_of
from transports.segment_batch import segment_batch
from transports.segments import Segment

START = 128  # where the pieces begin in the segment


@pytest.fixture
def segment():
    made = Segment.create(1 << 20)
    made.tensor.copy_(torch.randint(0, 256, (1 << 20,), dtype=torch.uint8))
    yield made
    made.close()


def batch_of(segment, sizes, *, apart=0, start=START):
    """Copies of neighbours in the segment; the memory they go to, and what has to be there."""
    target = torch.zeros(sum(sizes) + (apart + 1) * len(sizes) + 1, dtype=torch.uint8)
    expected = target.clone()
    targets, sources, at, to = [], [], start, 1
    for size in sizes:
        expected[to : to + size] = segment.tensor[at : at + size]
        targets.append(target.data_ptr() + to)
        sources.append(segment.address_range[0] + at)
        at, to = at + size + apart, to + size + 1
    return Batch(targets, sources, list(sizes), sum(sizes)), target, expected


@pytest.mark.parametrize("each", [False, True], ids=["together", "each"])
@pytest.mark.parametrize("sizes", [(3, 5, 7), (1,) * 2500, (100_000, 1, 4096)])
def test_every_byte_arrives_and_nothing_else_is_touched(segment, sizes, each):
    batch, target, expected = batch_of(segment, sizes)
    quiet = segment_batch(batch, segment)
    assert quiet is not batch
    assert quiet.nbytes == sum(sizes)
    if each:
        assert [size for _, _, size in quiet.move_each()] == list(sizes)
    else:
        quiet.move()
    assert torch.equal(target, expected)


def test_large_pieces_and_such_that_are_no_neighbours_are_copied_one_by_one(segment):
    for sizes, apart in (((300_000, 300_000), 0), ((64, 64), 64), ((64,), 0)):
        batch, _, _ = batch_of(segment, sizes, apart=apart)
        assert segment_batch(batch, segment) is batch


def test_batches_of_a_chunk_are_made_of_neighbours(segment):
    """As a receiver has them: in the segment without gaps, elsewhere in the model."""
    _, target, expected = batch_of(segment, (64,) * 40)
    batch, _other, _ = batch_of(segment, (64,) * 40)
    targets = [target.data_ptr() + 1 + at * 65 for at in range(40)]
    for one in batches_of(targets, batch.sources, batch.sizes):
        quiet = segment_batch(one, segment)
        assert quiet is not one
        quiet.move()
    assert torch.equal(target, expected)


def test_without_the_system_call_they_are_copied_one_by_one(segment, monkeypatch):
    batch, _, _ = batch_of(segment, (3, 5))
    monkeypatch.delattr("os.preadv")
    assert segment_batch(batch, segment) is batch


def test_a_segment_that_was_closed_or_ends_early_is_named(segment):
    batch, _target, _ = batch_of(segment, (64, 64))
    quiet, beyond = segment_batch(batch, segment), segment_batch(batch, segment)
    batch.sources[0] = segment.address_range[1] - 100
    with pytest.raises(Validation, match=rf"100 of 128 bytes .* segment {segment.key}"):
        beyond.move()
    segment.close()
    with pytest.raises(Validation, match=rf"segment {segment.key}: Bad file"):
        quiet.move()
