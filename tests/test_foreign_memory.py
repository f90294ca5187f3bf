"""Another process's memory: what is read is what is there, and what is not there is an error."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from statemachines.errors import Validation
from transports import foreign_memory
from transports.copy_batches import BLOCK_NBYTES, Batch, SameBatches, batches_of
from transports.copy_team import copy_together
from transports.errors import PeerLost
from transports.foreign_memory import (
    HIGHEST,
    ForeignBatch,
    ForeignMemory,
    OwnMemory,
    readable,
)

LENDER = Path(__file__).parent / "shm_programs" / "lender.py"
MARK = b"the mark"


class Lender:
    """`lender.py` as a process."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(LENDER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        said = self.hear()
        self.pid, self.mark = said["pid"], said["mark"]
        self.memory = ForeignMemory(self.pid, "trainer")

    def hear(self):
        line = self.process.stdout.readline()
        assert line, "the lender is gone"
        return json.loads(line)

    def ask(self, **command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def kill(self, *, reap=True):
        self.process.kill()
        if reap:
            self.process.wait(10)
        else:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def close(self):
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def lender():
    found = Lender()
    yield found
    found.close()


def content(number, nbytes):
    return bytes((number + 3 * k) % 251 for k in range(nbytes))


def text(tensor):
    return bytes(tensor.numpy())


class Landing:
    """Room for pieces, each with guards around it."""

    def __init__(self, sizes):
        self.sizes, self.places, at = sizes, [], 8
        for size in sizes:
            self.places.append(at)
            at += size + 8
        self.room = torch.full((at,), 0xEE, dtype=torch.uint8)

    @property
    def addresses(self):
        return [self.room.data_ptr() + place for place in self.places]

    def holds(self, number):
        at, size = self.places[number], self.sizes[number]
        return text(self.room[at : at + size]) == content(number, size)

    def is_untouched_between(self):
        outside = torch.ones(len(self.room), dtype=torch.bool)
        for at, size in zip(self.places, self.sizes, strict=True):
            outside[at : at + size] = False
        return bool(self.room[outside].eq(0xEE).all())


SIZES = {
    "odd": [1, 2, 7, 4095, 4096, 4097, 0, 13],
    "large": [5 * BLOCK_NBYTES + 3, 3, BLOCK_NBYTES],
    "more than one call takes": [3 + k % 5 for k in range(2500)],
}


@pytest.mark.slow
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("kind", SIZES)
def test_every_byte_arrives_and_nothing_else_is_touched(lender, kind, each):
    sizes = SIZES[kind]
    sources = lender.ask(lend=sizes)
    landing = Landing(sizes)
    made = SameBatches(lambda batch: ForeignBatch(batch, lender.memory))
    batches = made(landing.addresses, sources, sizes)
    assert sum(batch.nbytes for batch in batches) == sum(sizes)
    for batch in batches:
        if each:
            moved = list(batch.move_each())
            assert sum(size for _, _, size in moved) == batch.nbytes
        else:
            batch.move()
    assert all(map(landing.holds, range(len(sizes))))
    assert landing.is_untouched_between()


@pytest.mark.slow
def test_a_piece_is_copied_by_itself_and_as_a_tensor(lender, monkeypatch):
    sizes = [1000, 0, 2500]
    addresses = lender.ask(lend=sizes)
    monkeypatch.setattr(foreign_memory, "_MOST_NBYTES", 1000)  # the last one takes three calls
    for number, size in enumerate(sizes):
        assert text(lender.memory.bytes_at(addresses[number], size)) == content(number, size)
        landing = Landing(sizes)
        lender.memory.copy(landing.addresses[number], addresses[number], size)
        assert landing.holds(number)
        assert landing.is_untouched_between()


@pytest.mark.slow
def test_a_process_is_known_by_its_mark(lender):
    (there,) = lender.ask(lend=[8])
    assert readable(lender.pid, lender.mark, MARK)
    assert not readable(lender.pid, lender.mark, b"the nark")
    assert not readable(lender.pid, lender.mark + 1, MARK)
    assert not readable(lender.pid, there, MARK)
    assert not readable(lender.pid, there + 8, MARK)  # a page that is not there
    assert not readable(os.getpid(), lender.mark, MARK)
    for address in (0, -lender.mark, HIGHEST, HIGHEST - 7, 2**64, 2**80):
        assert not readable(lender.pid, address, MARK)
    assert not readable(None, lender.mark, MARK)
    lender.kill(reap=False)
    assert not readable(lender.pid, lender.mark, MARK)
    lender.kill()
    assert not readable(lender.pid, lender.mark, MARK)


@pytest.mark.slow
def test_without_the_system_call_nothing_is_readable(lender, monkeypatch):
    own = OwnMemory(MARK)
    assert own.lends([own.mark])
    monkeypatch.setattr(foreign_memory, "_read", lambda: None)
    assert not readable(lender.pid, lender.mark, MARK)
    assert not own.lends([own.mark])


@pytest.mark.slow
@pytest.mark.parametrize("gone", [0, 700, 1023, 1024, 1300, 1999])
def test_memory_that_is_gone_is_an_error_wherever_in_the_batch_it_was(lender, gone):
    sizes = [8] * 2000
    sources = lender.ask(lend=sizes)
    lender.ask(unmap=gone)
    landing = Landing(sizes)
    (batch,) = batches_of(landing.addresses, sources, sizes)
    with pytest.raises(Validation, match=r"memory of trainer .* not there any more") as caught:
        ForeignBatch(batch, lender.memory).move()
    assert (caught.value.replica, caught.value.phase) == ("trainer", "update")
    with pytest.raises(Validation, match="not there any more"):
        list(ForeignBatch(batch, lender.memory).move_each())
    with pytest.raises(Validation, match="not there any more"):
        lender.memory.bytes_at(sources[gone], 8)


@pytest.mark.slow
def test_a_piece_that_is_there_in_part_is_an_error(lender):
    (there,) = lender.ask(lend=[4096])
    for address, nbytes in ((there, 4097), (there + 4095, 2), (there + 4000, 1 << 20)):
        with pytest.raises(Validation, match="not there any more"):
            lender.memory.bytes_at(address, nbytes)


@pytest.mark.parametrize("moved", [0, 1, 8, 15])
def test_fewer_bytes_than_asked_for_are_an_error(monkeypatch, moved):
    """Also where the kernel stops between two pieces, or in one."""
    target, source = torch.zeros(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)
    start, there = target.data_ptr(), source.data_ptr()
    batch = Batch([start, start + 8], [there, there + 8], [8, 8], 16)
    memory = ForeignMemory(os.getpid(), "trainer")
    monkeypatch.setattr(foreign_memory, "_read", lambda: lambda *_: moved)
    with pytest.raises(Validation, match="memory of trainer"):
        ForeignBatch(batch, memory).move()


@pytest.mark.slow
@pytest.mark.parametrize("reap", [False, True])
def test_a_process_that_is_gone_is_named(lender, reap):
    (there,) = lender.ask(lend=[64])
    lender.kill(reap=reap)
    with pytest.raises(PeerLost, match=f"trainer is gone: no process {lender.pid}") as caught:
        lender.memory.bytes_at(there, 64)
    assert caught.value.replica == "trainer"


def test_what_the_kernel_forbids_is_told(monkeypatch):
    def forbidden(*_):
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(foreign_memory, "_read", lambda: forbidden)
    with pytest.raises(Validation, match=r"memory of trainer cannot be read: .*permitted"):
        ForeignMemory(1, "trainer").bytes_at(4096, 8)
    assert not readable(1, 4096, MARK)


@pytest.mark.slow
@pytest.mark.parametrize("gone", [0, 30, 63])
def test_a_team_stops_at_what_is_not_there(lender, monkeypatch, gone):
    """Whoever of them finds it."""
    monkeypatch.setattr("transports.copy_team.LEAST_NBYTES", 1)
    monkeypatch.setattr("transports.copy_team._cores", lambda: 4)
    sizes = [4096] * 64
    sources = lender.ask(lend=sizes)
    landing = Landing(sizes)
    each = [
        Batch([to], [at], [4096], 4096) for to, at in zip(landing.addresses, sources, strict=True)
    ]
    batches = [ForeignBatch(batch, lender.memory) for batch in each]
    noted = []
    copy_together(batches, note=noted.append)
    assert sum(noted) == sum(sizes)
    assert all(map(landing.holds, range(64)))
    lender.ask(unmap=gone)
    with pytest.raises(Validation, match="memory of trainer"):
        copy_together(batches)


def test_addresses_that_none_can_have_are_refused():
    for memory in (OwnMemory(MARK), ForeignMemory(1, "trainer")):
        memory.check(HIGHEST - 8, 8)
        memory.check(0, 0)
        for address, nbytes in ((-1, 1), (HIGHEST, 1), (HIGHEST - 7, 8), (2**64, 0)):
            with pytest.raises(Validation, match="in no process's memory"):
                memory.check(address, nbytes)


def test_only_plain_memory_has_an_address():
    own = OwnMemory(MARK)
    tensor = torch.zeros(4, 3, dtype=torch.complex64)
    assert own.locate(tensor) == tensor.data_ptr()
    for other in (tensor.t(), tensor.conj(), tensor.conj().imag, tensor.to("meta")):
        assert own.locate(other) is None
    assert ForeignMemory(os.getpid(), "trainer").locate(tensor) is None


def secret_memory(nbytes):
    """Memory that no other process may read, nor the kernel for it; skips where there is none."""
    memfd_secret = 447
    fd = ctypes.CDLL(None, use_errno=True).syscall(memfd_secret, 0)
    if fd < 0:
        pytest.skip("no secret memory here")
    os.ftruncate(fd, nbytes)
    room = mmap.mmap(fd, nbytes)
    os.close(fd)
    return torch.frombuffer(room, dtype=torch.uint8)


def test_memory_that_nobody_else_may_read_is_not_lent():
    own, plain = OwnMemory(MARK), torch.ones(8)
    assert own.lends([])
    assert own.lends([plain.data_ptr(), 0, own.mark])  # 0: an empty tensor's
    assert own.lends([plain.data_ptr()] * 3000)
    secret = secret_memory(4096)
    assert not own.lends([plain.data_ptr(), secret.data_ptr()])
    assert not own.lends([plain.data_ptr()] * 3000 + [secret.data_ptr()])
