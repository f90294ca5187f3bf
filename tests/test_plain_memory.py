"""Copies by address: the same bytes as tensor by tensor, and only of what is plain memory."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from statemachines.errors import Validation
from transports.copy_batches import (
    BLOCK_NBYTES,
    SameBatches,
    batches_of,
    spans,
)
from transports.copy_team import LEAST_NBYTES, copy_together
from transports.plain_memory import addresses_of, bytes_at


def pieces(*sizes: int, apart: int = 0) -> list[torch.Tensor]:
    memory = torch.randint(0, 256, (sum(sizes) + apart * len(sizes) + 1,), dtype=torch.uint8)
    found, at = [], 0
    for size in sizes:
        found.append(memory[at : at + size])
        at += size + apart
    return found


def sizes_of(tensors):
    return [tensor.nbytes for tensor in tensors]


def addresses(tensors):
    found = addresses_of(tensors, sizes_of(tensors))
    assert found is not None
    return found


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("apart", [0, 1], ids=["side by side", "apart"])
@pytest.mark.parametrize(
    "sizes",
    [(3, 5, 7), (0, 4, 0, 0, 9), (BLOCK_NBYTES,) * 19, (BLOCK_NBYTES * 2 + 1, 1), (1,) * 100],
    ids=["small", "with empty ones", "blocks", "large", "many"],
)
def test_everything_arrives_and_nothing_else_is_touched(sizes, apart, together):
    sources, targets = pieces(*sizes), pieces(*sizes, apart=apart)
    around = targets[0]._base.clone()
    batches = batches_of(addresses(targets), addresses(sources), sizes)
    if together:
        for batch in batches:
            batch.move()
    else:
        written = [one for batch in batches for one in batch.move_each()]
        assert sum(size for _, _, size in written) == sum(sizes)
        assert max(size for _, _, size in written) <= BLOCK_NBYTES
    assert sum(batch.nbytes for batch in batches) == sum(sizes)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)
    after = targets[0]._base.clone()
    for target in targets:  # what lies between and behind them
        start = target.storage_offset()
        after[start : start + len(target)] = around[start : start + len(target)] = 0
    assert torch.equal(after, around)


def test_only_what_is_adjacent_on_both_sides_moves_as_one():
    assert list(spans([0, 4, 8], [100, 104, 108], [4, 4, 4])) == [(0, 100, 12)]
    assert list(spans([0, 4, 9], [100, 104, 108], [4, 4, 4])) == [(0, 100, 8), (9, 108, 4)]
    assert list(spans([0, 4], [104, 100], [4, 4])) == [(0, 104, 4), (4, 100, 4)]
    assert list(spans([0, 77, 4], [100, 0, 104], [4, 0, 4])) == [(0, 100, 8)]
    assert list(spans([], [], [])) == []


class Other(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 4).t(),
        torch.zeros(1).expand(4),
        torch.zeros(4, dtype=torch.complex64).conj(),
        torch.zeros(4, dtype=torch.complex64).conj().imag[::2],
        torch._neg_view(torch.zeros(4)),
        torch.zeros(4, device="meta"),
        torch.zeros(4).to_sparse(),
        torch.zeros(4).as_subclass(Other),
    ],
    ids=["turned", "expanded", "conjugated", "strided", "negated", "meta", "sparse", "subclass"],
)
def test_what_is_not_plain_has_no_address(tensor):
    good = torch.zeros(4)
    assert addresses_of([good], [16]) == [good.data_ptr()]
    assert addresses_of([good, tensor], [16, tensor.numel() * tensor.itemsize]) is None


def test_a_tensor_of_another_size_has_no_address():
    assert addresses_of([torch.zeros(4), torch.zeros(3)], [16, 16]) is None


@pytest.mark.parametrize("known", [False, True])
def test_a_tensor_whose_storage_was_freed_is_refused(known):
    tensors, empty = [torch.zeros(4), torch.zeros(4)], torch.zeros(0)
    found = addresses_of([*tensors, empty], [16, 16, 0])
    assert found == [*addresses(tensors), 0]
    tensors[1].untyped_storage().resize_(0)
    with pytest.raises(Validation, match="freed"):
        addresses_of([*tensors, empty], [16, 16, 0], found if known else None)


def test_bytes_at_an_address_are_the_tensors_own():
    tensor = torch.arange(4, dtype=torch.int32)
    raw = bytes_at(tensor.data_ptr(), tensor.nbytes)
    raw[4] = 9
    assert tensor.tolist() == [0, 9, 2, 3]
    assert bytes_at(0, 0).numel() == 0


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
@pytest.mark.parametrize("apart", [0, 1], ids=["side by side", "apart"])
def test_several_cores_copy_what_one_does(monkeypatch, cores, apart):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    sizes = (LEAST_NBYTES // 2 + 13, 0, 5, LEAST_NBYTES // 2, 7)
    sources, targets = pieces(*sizes), pieces(*sizes, apart=apart)
    noted = []
    copy_together(batches_of(addresses(targets), addresses(sources), sizes), note=noted.append)
    assert sum(noted) == sum(sizes)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)


def test_helpers_have_ended_when_a_copy_is_given_up(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    sources, targets = pieces(LEAST_NBYTES), pieces(LEAST_NBYTES)

    def give_up(_):
        raise RuntimeError("told to stop")

    batches = batches_of(addresses(targets), addresses(sources), (LEAST_NBYTES,))
    with pytest.raises(RuntimeError, match="told to stop"):
        copy_together(batches, note=give_up)
    assert not [thread for thread in threading.enumerate() if thread.name == "copy"]


def test_a_helper_that_cannot_be_had_is_done_without(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    sources, targets = pieces(LEAST_NBYTES), pieces(LEAST_NBYTES)
    start, begun = threading.Thread.start, []

    def start_one(thread):
        begun.append(thread)
        if len(begun) > 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    copy_together(batches_of(addresses(targets), addresses(sources), (LEAST_NBYTES,)))
    assert len(begun) == 2
    assert not begun[0].is_alive()
    assert torch.equal(sources[0], targets[0])


@pytest.mark.parametrize("cores", [1, 2])
def test_what_is_done_beside_does_not_wait_for_the_others(monkeypatch, cores):
    """Where there are any; the calling thread copies what is left then."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    sources, targets = pieces(2 * LEAST_NBYTES), pieces(2 * LEAST_NBYTES)
    there, deadline = [], time.monotonic() + 20

    def beside():
        assert threading.current_thread() is threading.main_thread()
        while cores > 1 and not torch.equal(sources[0], targets[0]):
            assert time.monotonic() < deadline
        there.append(bool(torch.equal(sources[0], targets[0])))

    batches = batches_of(addresses(targets), addresses(sources), (2 * LEAST_NBYTES,))
    copy_together(batches, beside=beside)
    assert there == [cores > 1]
    assert torch.equal(sources[0], targets[0])


def test_an_error_of_what_is_done_beside_ends_the_copy(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    sources, targets = pieces(LEAST_NBYTES), pieces(LEAST_NBYTES)

    def beside():
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        copy_together(
            batches_of(addresses(targets), addresses(sources), (LEAST_NBYTES,)), beside=beside
        )
    assert not [thread for thread in threading.enumerate() if thread.name == "copy"]


def test_nothing_to_copy_is_fine():
    copy_together(batches_of([], [], []))
    copy_together(batches_of([1], [2], [0]))


def test_the_same_copies_are_made_ready_once():
    same = SameBatches()
    first = same([0, 8], [100, 200], [4, 4])
    assert same([0, 8], [100, 200], [4, 4]) is first
    for other in (([0, 4], [100, 200], [4, 4]), ([0, 8], [100, 104], [4, 4]), ([0], [1], [2])):
        assert same(*other) == batches_of(*other) != first
