"""Positions and parts of lists that a stream of many tensors is described by."""

from __future__ import annotations

import pytest

from transports.stream import Pieces, run_of


@pytest.mark.parametrize(
    ("indices", "run"),
    [
        ([3, 4, 5], range(3, 6)),
        ((0,), range(1)),
        (range(2, 9), range(2, 9)),
        ([], None),
        (range(4, 4), None),
        (range(0, 6, 2), None),
        ([0, 2, 1, 3], None),
        ([0, 0, 2], None),
        ([5, 4], None),
        ([0, 2**70], None),  # a list up to there would not fit into any memory
    ],
)
def test_indices_that_follow_each_other_are_a_run(indices, run):
    assert run_of(indices) == run


def test_pieces_are_the_same_while_the_list_is():
    pieces, whole = Pieces(), [10, 11, 12, 13]
    first = pieces.of(whole, range(1, 3))
    assert first == [11, 12]
    assert pieces.of(whole, range(1, 3)) is first
    assert pieces.of(whole, range(3)) == [10, 11, 12]
    assert pieces.of([0, 1, 2, 3], range(1, 3)) == [1, 2]
    assert pieces.of(whole, range(1, 3)) == first
