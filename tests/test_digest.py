"""Digests: definition, what they must notice, memory, threads."""

from __future__ import annotations

import os
import random
import struct
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import transports.digest
from statemachines.errors import Validation
from transports.digest import WSUM64, XXH3_64, ChunkDigest, available, chain

KINDS = [XXH3_64, WSUM64]
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def digest(kind: str, *pieces: torch.Tensor) -> int:
    chunk = ChunkDigest(kind)
    for piece in pieces:
        chunk.update(piece)
    return chunk.value()


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else empty()


def empty() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def reference_wsum64(*pieces: bytes) -> int:
    """The definition in the module's docstring, one word at a time."""
    weights, state = [], 0
    for _ in range(2048 + 512):
        state = (state + GOLDEN) & MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        weights.append((z ^ (z >> 31)) | 1)
    rows, columns = weights[:2048], weights[2048:]

    def group_sum(data: bytes) -> int:
        total = 0
        for row in range(0, len(data), 4096):
            part = data[row : row + 4096]
            part += bytes(-len(part) % 8)
            words = struct.unpack(f"<{len(part) // 8}Q", part)
            s = sum(word * weight for word, weight in zip(words, columns, strict=False)) & MASK
            total += (s ^ (s >> 29)) * rows[row // 4096]
        return total & MASK

    result = 0
    for piece in pieces:
        value = 0
        for start in range(0, len(piece), 1 << 23):
            value = (value * GOLDEN + group_sum(piece[start : start + (1 << 23)])) & MASK
        result = (result * GOLDEN + value) & MASK
        result = (result * GOLDEN + len(piece)) & MASK
    return result


def test_both_kinds_are_available_here():
    assert available() == (XXH3_64, WSUM64)


@pytest.mark.parametrize("kind", KINDS)
def test_value_is_unsigned_and_repeatable(kind):
    data = tensor_of(random_bytes(1000))
    assert digest(kind, data) == digest(kind, data.clone())
    assert 0 <= digest(kind, data) < 2**64
    assert 0 <= digest(kind) < 2**64


def test_xxh3_is_the_published_function():
    import xxhash

    data = random_bytes(5000)
    whole = xxhash.xxh3_64_intdigest(data)
    assert digest(XXH3_64, tensor_of(data)) == whole
    assert digest(XXH3_64, tensor_of(data[:77]), empty(), tensor_of(data[77:])) == whole


@pytest.mark.parametrize(
    "nbytes", [0, 1, 7, 8, 9, 4088, 4095, 4096, 4097, 8192, 40_000, (1 << 23) - 3, (1 << 23) + 5]
)
def test_wsum64_is_as_defined(nbytes):
    data = random_bytes(nbytes, nbytes)
    assert digest(WSUM64, tensor_of(data)) == reference_wsum64(data)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=5))
def test_wsum64_of_pieces_is_as_defined(pieces):
    assert digest(WSUM64, *map(tensor_of, pieces)) == reference_wsum64(*pieces)


def test_wsum64_never_changes():
    """Both sides may run different versions: this value is part of the wire."""
    assert digest(WSUM64, tensor_of(bytes(range(256)) * 40)) == 0xCB5FC0952979F715


@pytest.mark.parametrize("offset", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_alignment_does_not_matter(kind, offset):
    data = tensor_of(random_bytes(9000))
    moved = torch.empty(9000 + offset, dtype=torch.uint8)[offset:]
    moved.copy_(data)
    assert digest(kind, moved) == digest(kind, data)


def test_memory_that_begins_at_an_odd_address():
    data = bytearray(random_bytes(9001))
    odd = torch.frombuffer(data, dtype=torch.uint8, offset=1)
    assert digest(WSUM64, odd) == reference_wsum64(bytes(data[1:]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nbytes", [16, 4096, 8192, 1 << 20, 1 << 24])
def test_swapped_halves_are_noticed(kind, nbytes):
    data = tensor_of(random_bytes(nbytes))
    first, second = data[: nbytes // 2], data[nbytes // 2 :]
    assert digest(kind, torch.cat([second, first])) != digest(kind, data)


@pytest.mark.parametrize("kind", KINDS)
def test_every_single_bit_is_noticed(kind):
    data = tensor_of(random_bytes(73))
    before = digest(kind, data)
    for byte in range(73):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert digest(kind, data) != before
            data[byte] ^= 1 << bit


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 20_000), st.data())
def test_any_other_byte_anywhere_is_noticed(seed, nbytes, draws):
    data = tensor_of(random_bytes(nbytes, seed))
    before = [digest(kind, data) for kind in KINDS]
    at = draws.draw(st.integers(0, nbytes - 1))
    data[at] ^= draws.draw(st.integers(1, 255))
    assert all(digest(k, data) != old for k, old in zip(KINDS, before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_lost_data_is_noticed(kind):
    data = tensor_of(random_bytes(1 << 16))
    before = digest(kind, data)
    stale = data.clone()
    stale[1 << 12 : 1 << 13] = 0
    assert digest(kind, stale) != before
    assert digest(kind, data[:-1]) != before
    assert digest(kind, torch.cat([data, data.new_zeros(1)])) != before
    assert digest(kind, torch.zeros_like(data)) != before


def test_zeros_of_different_lengths_differ():
    values = {digest(WSUM64, torch.zeros(n, dtype=torch.uint8)) for n in range(100)}
    assert len(values) == 100


def test_wsum64_depends_on_piece_boundaries_and_order():
    a, b = tensor_of(random_bytes(64, 1)), tensor_of(random_bytes(64, 2))
    assert len({digest(WSUM64, *p) for p in ([a, b], [b, a], [torch.cat([a, b])])}) == 3
    assert digest(WSUM64, a, empty()) != digest(WSUM64, a)


def test_wsum64_does_without_integer_mv(monkeypatch):
    """Devices other than the CPU have no integer mv; their form gives the same value."""

    class Elsewhere:
        device = SimpleNamespace(type="elsewhere")

        def __init__(self, matrix: torch.Tensor) -> None:
            self.matrix = matrix

        def __mul__(self, weights: torch.Tensor) -> torch.Tensor:
            return self.matrix * weights

    data = tensor_of(random_bytes(50_000))
    before = digest(WSUM64, data)
    dot = transports.digest._dot
    monkeypatch.setattr(
        transports.digest, "_dot", lambda matrix, weights: dot(Elsewhere(matrix), weights)
    )
    assert digest(WSUM64, data) == before


@pytest.mark.parametrize("kind", KINDS)
def test_only_bytes_are_taken(kind):
    for wrong in (torch.zeros(4), torch.zeros(2, 2, dtype=torch.uint8), tensor_of(b"abcd")[::2]):
        with pytest.raises(Validation, match="1-d uint8"):
            ChunkDigest(kind).update(wrong)


def test_xxh3_reads_cpu_tensors_only():
    with pytest.raises(Validation, match="wsum64"):
        ChunkDigest(XXH3_64).update(torch.empty(4, dtype=torch.uint8, device="meta"))


def test_unknown_kind_names_the_known_ones():
    with pytest.raises(Validation, match="xxh3_64, wsum64"):
        ChunkDigest("md5")


@pytest.mark.parametrize("missing", ["xxhash", "numpy"])
def test_without_the_optional_packages(monkeypatch, missing):
    real = transports.digest.importlib.util.find_spec
    monkeypatch.setattr(
        transports.digest.importlib.util,
        "find_spec",
        lambda name: None if name == missing else real(name),
    )
    available.cache_clear()
    try:
        assert available() == (WSUM64,)
        with pytest.raises(Validation, match=r"aiosync\[digest\]"):
            ChunkDigest(XXH3_64)
        ChunkDigest(WSUM64).update(empty())
    finally:
        available.cache_clear()


def test_chain_depends_on_values_order_and_count():
    values = [1, 2, 2**64 - 1]
    digests = {chain(values), chain(values[::-1]), chain(values[:2]), chain([]), chain([0])}
    assert len(digests) == 5
    assert all(len(found) == 64 and int(found, 16) >= 0 for found in digests)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_xxh3_lets_other_threads_run():
    """While a large piece is hashed on one thread, this one goes on."""
    data = torch.zeros(1 << 28, dtype=torch.uint8)
    began, ended = threading.Event(), threading.Event()
    turns = 0

    def work() -> None:
        began.set()
        ChunkDigest(XXH3_64).update(data)
        ended.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    began.wait(10)
    while not ended.is_set():
        turns += 1
    thread.join(10)
    assert turns > 1000  # holding the GIL would leave this thread a handful
