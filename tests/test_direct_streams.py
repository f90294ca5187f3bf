"""The shared-memory stream where readers copy from the sender's own memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import mmap
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import shm_peers
import torch
from shm_peers import Thread, plan_of
from torch import nn

from statemachines.errors import Validation
from transports import shm_messages as wire
from transports import shm_receiver
from transports.chunk_copy import PlacedChunk
from transports.errors import (
    DigestMismatch,
    OutOfSharedMemory,
    PeerLost,
    TransportAborted,
)
from transports.foreign_memory import ForeignMemory, OwnMemory
from transports.receiver_memory import ReceiverMemory
from transports.segments import Segment
from transports.shared_memory import ShmReceiver, ShmSender, share_tensors

STALL = 20.0


class Peer(shm_peers.Peer):
    def join(self, sender, name, **where):
        super().join(sender, name, **({"mark": sender.mark} | where))


def reader_process():
    peer = Peer("shm_reader.py")
    assert peer.hear() == {"event": "ready"}
    return peer


@pytest.fixture(scope="module")
def crew():
    """Two reader processes that serve all tests which do not kill them."""
    with contextlib.ExitStack() as stack:
        peers = [reader_process() for _ in range(2)]
        for peer in peers:
            stack.callback(peer.close)
        yield peers


@pytest.fixture
def senders():
    with contextlib.ExitStack() as stack:

        def make(**options):
            sender = ShmSender(**options)
            stack.callback(sender.release)
            return sender

        yield make


@pytest.fixture
def receivers():
    """Readers in this process, which reads its own memory as if it were another's."""
    with contextlib.ExitStack() as stack:

        def make(sender, name="w0", **options):
            where = {"address": sender.address, "token": sender.token, "mark": sender.mark}
            receiver = ShmReceiver(name=name, **(where | options))
            stack.callback(receiver.release)
            return receiver

        yield make


def hash_of(tensor):
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    return hashlib.sha256(bytes(raw.tolist())).hexdigest()


def task(tensors, limit, round=1, *, mode="normal"):
    specs = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    return {"specs": specs, "limit": limit, "round": round, "mode": mode, "stall": STALL}


def begin(sender, tensors, limit, *, readers=1, round=1):
    sender.set_direct([t.data_ptr() for t in tensors])
    sender.open(plan_of(tensors, limit), readers, round=round, stall=STALL)
    sender.write(list(enumerate(tensors)))


def send(sender, tensors, limit, **options):
    begin(sender, tensors, limit, **options)
    return sender.finish()


def receive(receiver, tensors, limit, *, round=1, stall=STALL, landed=lambda _: None, into=None):
    into = into or [torch.empty(t.shape, dtype=t.dtype) for t in tensors]
    plan = plan_of(into, limit)
    receiver.receive(plan, into.__getitem__, landed, round=round, stall=stall)
    return into


def round_trip(sender, receiver, tensors, limit, round):
    other = Thread(receive, receiver, tensors, limit, round=round)
    send(sender, tensors, limit, round=round)
    assert all(map(torch.equal, other.result(), tensors))


def directly(sender, nbytes):
    """Whether that many bytes were read where they are, and no buffer was made for others."""
    seen = sender.statistics()
    found = (seen["bytes_in_place"], seen["bytes_copied"], seen["buffer_nbytes"])
    return found == (nbytes, 0, 0)


def total(tensors):
    return sum(t.nbytes for t in tensors)


def zoo():
    torch.manual_seed(3)
    noise = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    nan = torch.tensor([0x7FC1, 0x8000, 0xFF80, 1], dtype=torch.uint16).view(torch.bfloat16)
    tied = torch.randn(30)
    return [
        torch.tensor([True, False, True]),
        noise[1:8].view(torch.int8),  # where no item of a larger kind could begin
        noise[16:30].view(torch.int16),
        noise[16:32].view(torch.uint16),
        noise[32:64].view(torch.uint32),
        noise[64:128].view(torch.uint64),
        nan,
        noise[:256].view(torch.float8_e4m3fn),
        noise[:256].view(torch.float8_e5m2),
        torch.randn(3, 2, dtype=torch.complex64),
        torch.tensor(5.5),
        torch.tensor(-7, dtype=torch.int64),
        torch.empty(0, 7),
        tied,
        tied,
        tied[5:20],
        nn.Parameter(torch.randn(17, 3)),
        torch.empty(1, 0, 3, dtype=torch.float16),
        torch.randn(1024),  # larger than the smallest buffer of these tests
        torch.randn(300, 301, dtype=torch.float64),  # larger than the next one
        torch.empty(0),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("digest", ["xxh3_64", "wsum64", None])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("limit", "readers"), [(256, 1), (4096, 2), (1 << 20, 1)])
def test_every_bit_arrives_over_several_rounds(crew, senders, packed, digest, limit, readers):
    sender, tensors = senders(buffer_nbytes=limit, packed=packed, digest=digest), zoo()
    for number, peer in enumerate(crew[:readers]):
        peer.join(sender, f"w{number}")
    for round in (1, 2, 3):
        for number, peer in enumerate(crew[:readers]):
            mode = "slow" if number == 1 and round == 2 else "normal"
            peer.tell(receive=task(tensors, limit, round, mode=mode))
        summary = send(sender, tensors, limit, readers=readers, round=round)
        for peer in crew[:readers]:
            answer = peer.hear()
            assert answer["kind"] is None, answer
            assert answer["hashes"] == [hash_of(t) for t in tensors]
            assert answer["landed"] == list(range(len(tensors)))
            assert answer["summary"] == [summary.nbytes, summary.chunks, summary.digest]
            assert answer["statistics"]["segments"] == 0
            assert answer["statistics"]["bytes_copied"] == round * total(tensors)
        assert directly(sender, round * total(tensors))
        if round == 1:
            with torch.no_grad():
                for tensor in (tensors[13], tensors[16], tensors[19]):
                    tensor.add_(1)  # where they are
        else:
            tensors = [t + 1 if t.dtype == torch.float32 else t for t in tensors]  # elsewhere


@pytest.mark.slow
def test_more_pieces_than_a_call_takes_and_more_handles_than_a_frame(crew, senders, monkeypatch):
    monkeypatch.setattr(wire, "HANDLES_PER_FRAME", 700)
    sender = senders(digest=None)
    tensors = [torch.full((1 + k % 4,), float(k)) for k in range(3000)]
    crew[0].join(sender, "w0")
    for round in (1, 2):
        crew[0].tell(receive=task(tensors, 1 << 20, round))
        assert send(sender, tensors, 1 << 20, round=round).chunks == 1
        assert crew[0].hear()["hashes"] == [hash_of(t) for t in tensors]
    assert directly(sender, 2 * total(tensors))


@pytest.mark.slow
@pytest.mark.parametrize("digest", ["xxh3_64", None])
def test_a_reader_that_cannot_read_gets_all_through_a_buffer(crew, senders, digest):
    tensors = [torch.randn(700), torch.randn(30)]
    sender = senders(digest=digest)
    others = [senders() for _ in range(2)]
    wrong = {"none": None, "another's": others[0].mark, "nowhere": 1 << 40, "high": 2**62}
    for round, mark in enumerate(wrong.values()):
        crew[0].join(sender, "w0", mark=mark)
        crew[0].tell(receive=task(tensors, 4096, round))
        send(sender, tensors, 4096, round=round)
        assert crew[0].hear()["hashes"] == [hash_of(t) for t in tensors]
    seen = sender.statistics()
    assert (seen["bytes_in_place"], seen["bytes_copied"]) == (0, 4 * total(tensors))
    assert seen["buffer_nbytes"] >= total(tensors)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_two_readers_of_which_one_cannot(crew, senders, packed):
    """All go through the buffer, until it can, and again when it cannot any more."""
    tensors = [torch.randn(700) for _ in range(4)]
    sender, nbytes, direct = senders(buffer_nbytes=4096, packed=packed), total(tensors), 0
    crew[0].join(sender, "w0")
    for round, can in enumerate([False, True, True, False, False, True]):
        if round in (0, 1, 3, 5):
            crew[1].join(sender, "w1", **({} if can else {"mark": None}))
        for peer in crew:
            peer.tell(receive=task(tensors, 4096, round))
        send(sender, tensors, 4096, readers=2, round=round)
        for peer in crew:
            answer = peer.hear()
            assert answer["hashes"] == [hash_of(t) for t in tensors], (round, answer)
            assert answer["statistics"]["segments"] == (0 if can else 1)
        direct += can
        seen = sender.statistics()
        assert seen["bytes_in_place"] == direct * nbytes
        assert seen["bytes_copied"] == (round + 1 - direct) * nbytes
        assert bool(seen["buffer_nbytes"]) is not can
        tensors[round % 4] = tensors[round % 4] + 1


def test_resident_tensors_come_first(senders, receivers):
    weights = {"a": torch.randn(64)}
    storage = share_tensors(weights)
    tensors = [weights["a"], torch.randn(64)]
    sender = senders(shared=[storage])
    sender.set_resident({0: sender.locate(tensors[0])})
    receiver = receivers(sender)
    round_trip(sender, receiver, tensors, 4096, 1)
    seen = sender.statistics()
    assert (seen["bytes_in_place"], seen["bytes_copied"]) == (256, 256)
    sender.set_resident({})
    round_trip(sender, receiver, tensors, 4096, 2)
    seen = sender.statistics()
    assert (seen["bytes_in_place"], seen["bytes_copied"]) == (256 + 512, 256)


def test_a_sender_that_was_told_no_addresses_copies(senders, receivers):
    sender, tensors = senders(), [torch.randn(64)]
    receiver = receivers(sender)
    round_trip(sender, receiver, tensors, 4096, 1)
    assert directly(sender, 256)
    sender.set_direct([])
    other = Thread(receive, receiver, tensors, 4096, round=2)
    sender.open(plan_of(tensors, 4096), 1, round=2, stall=STALL)
    sender.write([(0, tensors[0])])
    sender.finish()
    assert torch.equal(other.result()[0], tensors[0])
    assert sender.statistics()["bytes_copied"] == 256


@pytest.mark.parametrize("digest", ["xxh3_64", None])
def test_a_tensor_that_is_not_where_it_was_said_to_be_is_refused_by_index(
    senders, receivers, digest
):
    sender, tensors = senders(digest=digest), [torch.randn(8), torch.randn(8)]
    receiver = receivers(sender)
    sender.set_direct([t.data_ptr() for t in tensors])
    other = Thread(receive, receiver, tensors, 4096)
    tensors[1] = tensors[1].clone()
    sender.open(plan_of(tensors, 4096), 1, round=1, stall=STALL)
    with pytest.raises(Validation, match="tensor 1 is not where"):
        sender.write(list(enumerate(tensors)))
    with pytest.raises(PeerLost, match="tensor 1 is not where"):
        other.result()
    round_trip(sender, receiver, tensors, 4096, 2)


class Late:
    """A reader in this process that takes the first chunk, and the others once it is told to."""

    def __init__(self, receiver, tensors, limit, **options):
        self.first, self.goes_on = threading.Event(), threading.Event()
        self.thread = Thread(receive, receiver, tensors, limit, landed=self._landed, **options)

    def _landed(self, indices):
        self.first.set()
        assert self.goes_on.wait(20)

    def result(self):
        self.goes_on.set()
        return self.thread.result()


@pytest.mark.parametrize("digest", ["xxh3_64", None])
def test_what_the_caller_lets_go_stays_until_all_have_it(senders, receivers, digest):
    sender, tensors = senders(digest=digest), [torch.full((1 << 18,), float(k)) for k in range(3)]
    late = Late(receivers(sender), tensors, 1 << 20)
    expected = [t.clone() for t in tensors]
    begin(sender, tensors, 1 << 20)
    assert late.first.wait(20)
    gone = weakref.ref(tensors[2])
    del tensors[:]
    others = [torch.full((1 << 18,), 9.0) for _ in range(4)]  # where they were, if they were freed
    late.goes_on.set()
    sender.finish()
    assert all(map(torch.equal, late.result(), expected))
    assert len(others) == 4
    assert gone() is None


@pytest.mark.parametrize("digest", ["xxh3_64", None])
@pytest.mark.parametrize("index", [1, 2, 3])  # of whole chunks, and of one that takes several
def test_a_storage_that_is_taken_away_meanwhile_costs_the_round(senders, receivers, digest, index):
    sender = senders(digest=digest)
    tensors = [torch.full((n,), 1.0) for n in (1 << 18, 1 << 18, 1 << 19, 10)]
    receiver = receivers(sender)
    late = Late(receiver, tensors, 1 << 20)
    begin(sender, tensors, 1 << 20)
    assert late.first.wait(20)
    kept = tensors[index].detach()  # else what the reader finds may be anything, or nothing
    tensors[index].data = torch.full((5,), 2.0)
    late.goes_on.set()
    with pytest.raises(Validation, match=f"tensor {index} was moved") as caught:
        sender.finish()
    assert caught.value.tensor == str(index)
    assert torch.equal(late.result()[index], kept)  # it knows of nothing; no round counts it
    tensors[index].data = kept
    round_trip(sender, receiver, tensors, 1 << 20, 2)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_round_is_kept(senders, receivers, fails):
    sender, tensors = senders(), [torch.randn(64)]
    receiver = receivers(sender)
    gone = weakref.ref(tensors[0])
    late = Late(receiver, tensors, 4096)
    begin(sender, tensors, 4096)
    assert late.first.wait(20)
    if fails:
        sender.abort()
        with pytest.raises(TransportAborted):
            sender.finish()
        with pytest.raises(PeerLost):
            late.result()
        sender.close()
    else:
        late.goes_on.set()
        sender.finish()
        late.result()
    del tensors[:], late
    gc.collect()
    assert gone() is None


def test_a_changed_byte_is_found(senders, receivers):
    sender, tensors = senders(), [torch.randn(1024) for _ in range(3)]
    receiver = receivers(sender)
    late = Late(receiver, tensors, 4096)
    begin(sender, tensors, 4096)
    assert late.first.wait(20)
    tensors[2].view(torch.uint8)[-1] ^= 1
    late.goes_on.set()
    with pytest.raises(PeerLost, match="DigestMismatch: chunk 2"):
        sender.finish()
    with pytest.raises(DigestMismatch, match="chunk 2"):
        late.result()
    round_trip(sender, receiver, tensors, 4096, 2)


def pages(count):
    """A tensor, and what gives its memory back to the system."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    nbytes = count * mmap.PAGESIZE
    flags, access = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE
    start = libc.mmap(None, nbytes, access, flags, -1, 0)
    room = (ctypes.c_char * nbytes).from_address(start)
    return torch.frombuffer(room, dtype=torch.float32), partial(libc.munmap, start, nbytes)


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 2])
def test_memory_that_is_gone_is_an_error_and_the_next_round_works(crew, senders, at):
    sender = senders(digest=None)  # which does not look at the bytes itself
    tensors = [torch.randn(2048) for _ in range(3)]
    tensors[at], unmap = pages(2)
    tensors[at].fill_(3.0)
    crew[0].join(sender, "w0")
    crew[0].tell(receive=task(tensors, 8192, 1))
    sender.set_direct([t.data_ptr() for t in tensors])
    sender.open(plan_of(tensors, 8192), 1, round=1, stall=STALL)
    assert unmap() == 0
    with pytest.raises(PeerLost, match=r"w0 gave up: .*memory of trainer") as caught:
        sender.write(list(enumerate(tensors)))
        sender.finish()
    assert caught.value.replica == "w0"
    answer = crew[0].hear()
    assert (answer["kind"], answer["replica"]) == ("Validation", "trainer")
    tensors[at] = torch.randn(2048)
    crew[0].tell(receive=task(tensors, 8192, 2))
    send(sender, tensors, 8192, round=2)
    assert crew[0].hear()["hashes"] == [hash_of(t) for t in tensors]
    assert sender.statistics()["bytes_copied"] == 0


def test_memory_that_others_may_not_read_goes_through_a_buffer(senders, receivers, monkeypatch):
    monkeypatch.setattr(OwnMemory, "lends", staticmethod(lambda addresses: False))
    sender, tensors = senders(), [torch.randn(64)]
    round_trip(sender, receivers(sender), tensors, 4096, 1)
    assert sender.statistics()["bytes_copied"] == 256


@pytest.mark.slow
def test_a_trainer_killed_in_the_midst_is_named(receivers):
    """All chunks are announced, the first one is there, and then it is gone."""
    trainer = Peer("shm_trainer.py", "direct")
    receiver = receivers(SimpleNamespace(**trainer.hear()))
    tensors, seen = [torch.empty(1024) for _ in range(4)], []

    def landed(indices):
        if not seen:
            assert trainer.hear() == {"child": 0}  # it has written all
            trainer.kill()
        seen.extend(indices)

    with pytest.raises(PeerLost) as caught:
        receive(receiver, tensors, 4096, landed=landed, into=tensors)
    assert caught.value.replica == "trainer"
    assert seen == [0]
    assert tensors[0].eq(0).all()
    trainer.close()


@pytest.mark.slow
def test_a_killed_reader_is_named_and_another_one_takes_its_name(senders):
    sender, tensors = senders(), [torch.randn(1024) for _ in range(4)]
    with contextlib.ExitStack() as stack:
        dead, fresh = reader_process(), reader_process()
        stack.callback(dead.close)
        stack.callback(fresh.close)
        dead.join(sender, "w0")
        dead.tell(receive=task(tensors, 4096, 1))
        send(sender, tensors, 4096, round=1)
        assert dead.hear()["hashes"] == [hash_of(t) for t in tensors]
        dead.tell(receive=task(tensors, 4096, 2, mode="pause"))
        begin(sender, tensors, 4096, round=2)
        assert dead.hear() == {"event": "landed"}
        dead.kill()
        with pytest.raises(PeerLost) as caught:
            sender.finish()
        assert caught.value.replica == "w0"
        fresh.join(sender, "w0")
        fresh.tell(receive=task(tensors, 4096, 3))
        send(sender, tensors, 4096, round=3)
        assert fresh.hear()["hashes"] == [hash_of(t) for t in tensors]
        assert sender.statistics()["bytes_copied"] == 0


def test_whoever_comes_first_hears_of_the_trainer_while_another_one_is_waited_for(
    senders, receivers, monkeypatch
):
    sender, tensors = senders(), [torch.randn(64)]
    heard, decode = threading.Event(), wire.decode_to_reader

    def noted(payload, *, peer):
        message = decode(payload, peer=peer)
        if isinstance(message, wire.Alive):
            heard.set()
        return message

    monkeypatch.setattr(shm_receiver.wire, "decode_to_reader", noted)
    trainer = Thread(self_paced, sender, tensors)
    early = Thread(receive, receivers(sender, "early"), tensors, 4096)
    assert heard.wait(20)
    late = Thread(receive, receivers(sender, "late"), tensors, 4096)
    trainer.result()
    for reader in (early, late):
        assert torch.equal(reader.result()[0], tensors[0])
    assert directly(sender, 256)


def self_paced(sender, tensors):
    """It speaks up each third of its allowance."""
    sender.set_direct([t.data_ptr() for t in tensors])
    sender.open(plan_of(tensors, 4096), 2, round=1, stall=4.5)
    sender.write(list(enumerate(tensors)))
    return sender.finish()


def test_no_room_for_a_buffer_is_found_once_readers_are_there(senders, receivers, monkeypatch):
    sender, tensors = senders(), [torch.randn(64)]
    receiver = receivers(sender, mark=None)
    create = Segment.create.__func__

    def full(cls, nbytes, **options):
        raise OutOfSharedMemory("no room")

    monkeypatch.setattr(Segment, "create", classmethod(full))
    other = Thread(receive, receiver, tensors, 4096)
    with pytest.raises(OutOfSharedMemory, match="no room"):
        send(sender, tensors, 4096)
    with pytest.raises(PeerLost, match="trainer gave up: OutOfSharedMemory") as caught:
        other.result()
    assert caught.value.replica == "trainer"
    monkeypatch.setattr(Segment, "create", classmethod(create))
    round_trip(sender, receiver, tensors, 4096, 2)


def test_an_abort_while_another_reader_is_waited_for(senders, receivers):
    sender, tensors = senders(), [torch.randn(64)]
    receiver = receivers(sender)
    other = Thread(receive, receiver, tensors, 4096)
    trainer = Thread(send, sender, tensors, 4096, readers=2)
    until = time.monotonic() + 20
    while sender._readers is None or not sender._readers.readers:
        assert time.monotonic() < until
        time.sleep(0.001)
    sender.abort()
    with pytest.raises(TransportAborted):
        trainer.result()
    with pytest.raises(PeerLost):
        other.result()
    sender.close()
    round_trip(sender, receiver, tensors, 4096, 2)


@pytest.mark.slow
@pytest.mark.parametrize("digest", ["xxh3_64", None])
def test_destinations_that_are_not_known_to_be_plain(crew, senders, digest):
    sender = senders(digest=digest)
    tensors = [torch.randn(3000), torch.randn(5), torch.empty(0), torch.ones(3).bfloat16()]
    crew[0].join(sender, "w0")
    crew[0].tell(receive=task(tensors, 4096, mode="odd"))
    send(sender, tensors, 4096)
    assert crew[0].hear()["hashes"] == [hash_of(t) for t in tensors]
    assert directly(sender, total(tensors))


def test_a_sender_cannot_make_a_reader_read_that_did_not_offer_it():
    plan = plan_of([torch.empty(64)], 4096)
    fields = {"round": 1, "plan": plan.digest, "digest": None, "segments": (), "resident": "x"}
    welcome = wire.Welcome(**fields, handles=1, direct=True)
    memory = ReceiverMemory()
    with pytest.raises(Validation, match="memory of trainer cannot be read"):
        memory.prepare(plan, welcome, iter([(0, 0, 4096)]))
    memory.set_process(1)
    for handle in ((0, 1, 4096), (1, 0, 4096), (0, 0, 2**63 - 255)):
        with pytest.raises(Validation):
            memory.prepare(plan, welcome, iter([handle]))
    memory.prepare(plan, welcome, iter([(0, 0, 2**63 - 257)]))
    assert memory.resident_name == "x"
    memory.set_process(2)
    assert memory.resident_name == ""  # those were another process's addresses
    assert memory.chunks == []


def test_a_chunk_that_is_not_all_in_that_memory_goes_through_a_buffer():
    tensors = [torch.empty(16), torch.empty(16)]
    (piece,) = plan_of(tensors, 4096).chunks
    home = ForeignMemory(1, "trainer")
    chunk = PlacedChunk(piece, [64, 64], {0: (home, 4096)})
    assert (chunk.memory, chunk.resident, chunk.copied) == (None, None, True)
    chunk = PlacedChunk(piece, [64, 64], {0: (home, 4096), 1: (home, 8192)})
    assert (chunk.memory, chunk.addresses, chunk.copied) == (home, [4096, 8192], False)


def test_chunks_go_with_their_plan_and_not_with_the_garbage_collection(senders, receivers):
    sender, tensors = senders(), [torch.randn(64)]
    receiver = receivers(sender)
    round_trip(sender, receiver, tensors, 4096, 1)
    gc.collect()
    gc.disable()
    try:
        receiver.release()
        sender.release()
        left = [one for one in gc.get_objects() if type(one) is PlacedChunk]
    finally:
        gc.enable()
    assert left == []


def descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.slow
def test_descriptors_and_threads_stay_flat_whatever_way_rounds_go(crew, senders):
    sender, tensors = senders(buffer_nbytes=4096), [torch.randn(700) for _ in range(4)]
    seen = []
    for round in range(9):
        can = round % 3 > 0
        crew[0].join(sender, "w0", **({} if can else {"mark": None}))
        crew[0].tell(receive=task(tensors, 4096, round))
        send(sender, tensors, 4096, round=round)
        answer = crew[0].hear()
        assert answer["hashes"] == [hash_of(t) for t in tensors]
        if round % 3 == 2:
            seen.append((descriptors(), threading.active_count(), answer["fds"]))
    assert seen[0] == seen[1] == seen[2]
