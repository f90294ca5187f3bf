"""The shared-memory stream, mostly over real processes."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import signal
import socket
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from limits import SLACK
from shm_peers import Peer, Thread, plan_of
from torch import nn

from aiosync import ParamMeta
from aiosync.sinks import make_sink
from aiosync.streaming import _Into
from statemachines.errors import InvalidTransition, RemoteError, Validation
from transports import shm_messages as wire
from transports.errors import DigestMismatch, PeerLost, PhaseTimeout, TransportAborted
from transports.links import Link
from transports.planning import ALIGNED, NCCL_PACKED, plan_chunks
from transports.receiver_memory import ReceiverMemory
from transports.segments import Segment
from transports.shared_memory import ShmReceiver, ShmSender, share_tensors
from transports.shm_readers import Readers
from transports.waker import Waker


@pytest.fixture(scope="module")
def crew():
    """Three reader processes that serve all tests which do not kill them."""
    peers = [Peer("shm_reader.py") for _ in range(3)]
    for peer in peers:
        assert peer.hear() == {"event": "ready"}
    yield peers
    for peer in peers:
        peer.close()


@pytest.fixture
def reader():
    """One reader process to be killed or stopped."""
    peer = Peer("shm_reader.py")
    assert peer.hear() == {"event": "ready"}
    yield peer
    peer.close()


@pytest.fixture
def senders():
    """Makes senders that are released afterwards."""
    with contextlib.ExitStack() as stack:

        def make(**options):
            sender = ShmSender(**options)
            stack.callback(sender.release)
            return sender

        yield make


def fd_count():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def names_in_shm():
    return {path.name for path in Path("/dev/shm").iterdir()}


def specs_of(tensors):
    return [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]


def hash_of(tensor):
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(bytes(flat.tolist())).hexdigest()


def task(tensors, limit, round, *, mode="normal", stall=20.0):
    return {
        "specs": specs_of(tensors),
        "limit": limit,
        "round": round,
        "mode": mode,
        "stall": stall,
    }


def send(sender, tensors, limit, *, readers=1, round=1, stall=20.0, batch=3):
    sender.open(plan_of(tensors, limit), readers, round=round, stall=stall)
    pairs = list(enumerate(tensors))
    for at in range(0, len(pairs), batch):
        sender.write(pairs[at : at + batch])
    return sender.finish()


@pytest.fixture
def receivers():
    with contextlib.ExitStack() as stack:

        def make(sender, name="w0", **overrides):
            options = {"address": sender.address, "token": sender.token, "name": name} | overrides
            receiver = ShmReceiver(**options)
            stack.callback(receiver.release)
            return receiver

        yield make


def receive(receiver, tensors, limit, *, round=1, stall=20.0, landed=lambda _: None, into=None):
    into = into if into is not None else [torch.empty(t.shape, dtype=t.dtype) for t in tensors]
    summary = receiver.receive(
        plan_of(into, limit), into.__getitem__, landed, round=round, stall=stall
    )
    return into, summary


def zoo():
    torch.manual_seed(3)
    noise = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    nan = torch.tensor([0x7FC1, 0x8000, 0xFF80, 1], dtype=torch.uint16).view(torch.bfloat16)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    return [
        torch.tensor([True, False, True]),
        noise[:7].view(torch.int8),
        noise[:14].view(torch.int16),
        noise[:16].view(torch.uint16),
        noise[:32].view(torch.uint32),
        noise[:64].view(torch.uint64),
        nan,
        noise[:256].view(torch.float8_e4m3fn),
        noise[:256].view(torch.float8_e5m2),
        torch.randn(3, 2, dtype=torch.complex64),
        torch.randn(3, 2, dtype=torch.complex64).conj(),
        torch.tensor(5.5),
        torch.tensor(-7, dtype=torch.int64),
        torch.empty(0, 7),
        torch.empty(1, 0, 3, dtype=torch.float16),
        torch.arange(35.0).reshape(5, 7).T,
        image,
        torch.arange(3, dtype=torch.int32).reshape(3, 1).expand(3, 40),
        torch.nn.Parameter(torch.randn(17, 3)),
        torch.randn(1024),  # larger than the smallest buffer of these tests
        torch.randn(40, 60).T,  # larger, and not contiguous
        torch.empty(0),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("digest", ["xxh3_64", "wsum64", None])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("limit", "buffers", "readers"), [(256, 2, 1), (4096, 3, 3), (1 << 20, 1, 1)]
)
def test_every_bit_arrives_over_several_rounds(
    crew, senders, packed, digest, limit, buffers, readers
):
    sender = senders(buffer_nbytes=limit, buffers=buffers, packed=packed, digest=digest)
    tensors = zoo()
    for number, peer in enumerate(crew[:readers]):
        peer.join(sender, f"w{number}")
    for round in (1, 2, 3):
        for number, peer in enumerate(crew[:readers]):
            mode = "slow" if number == 2 and round == 2 else "normal"
            peer.tell(receive=task(tensors, limit, round, mode=mode))
        summary = send(sender, tensors, limit, readers=readers, round=round)
        assert summary.nbytes == sum(t.nbytes for t in tensors)
        assert (summary.digest is None) == (digest is None)
        for peer in crew[:readers]:
            answer = peer.hear()
            assert answer["kind"] is None, answer
            assert answer["hashes"] == [hash_of(t) for t in tensors]
            assert answer["landed"] == list(range(len(tensors)))
            assert answer["summary"] == [summary.nbytes, summary.chunks, summary.digest]
        tensors = [t + 1 if t.dtype in (torch.float32, torch.int64) else t for t in tensors]


def test_addresses_that_a_sink_hands_out_again_stay_as_they_are(senders, receivers):
    sender = senders(buffer_nbytes=256, buffers=2)
    receiver = receivers(sender)
    tensors = [torch.arange(300.0), torch.ones(8)]  # the first one takes several chunks
    net = nn.ParameterList(torch.zeros(len(tensor)) for tensor in tensors)
    sink = make_sink(net)
    metadata = [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in net.named_parameters()]
    for round in (1, 2):
        sink.begin(metadata)
        thread = Thread(send, sender, tensors, 256, round=round)
        plan = plan_of(tensors, 256)
        receiver.receive(plan, _Into(sink, lambda: None), sink.landed, round=round, stall=20.0)
        thread.result()
        for indices in ([0], [0, 1], [1]):
            addresses = [sink._views[index].data_ptr() for index in indices]
            assert sink.known_addresses(indices) == addresses
        sink.commit()
        assert all(map(torch.equal, tensors, net))


@pytest.mark.fault("A-LAYOUT-4")
@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [4096, 4095, 4097, 8192, 1])
@pytest.mark.parametrize("packed", [True, False])
def test_tensors_around_the_size_of_a_buffer(crew, senders, packed, nbytes):
    sender = senders(buffer_nbytes=4096, packed=packed)
    tensors = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for _ in range(3)]
    crew[0].join(sender, "w0")
    crew[0].tell(receive=task(tensors, 4096, 1))
    send(sender, tensors, 4096)
    assert crew[0].hear()["hashes"] == [hash_of(t) for t in tensors]


def test_a_plan_without_tensors_is_a_round_too(senders, receivers):
    sender = senders()
    other = Thread(receive, receivers(sender), [], 64)
    assert send(sender, [], 64).chunks == 0
    assert other.result()[1].nbytes == 0


@pytest.mark.parametrize("packed", [True, False])
def test_shared_tensors_are_not_copied_and_follow_the_optimizer(senders, receivers, packed):
    net = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))
    storage = share_tensors(net)
    tensors = list(net.parameters())
    sender = senders(buffer_nbytes=4096, packed=packed, shared=[storage])
    receiver = receivers(sender)
    sender.set_resident({i: sender.locate(t) for i, t in enumerate(tensors)})
    for round in (1, 2):
        other = Thread(receive, receiver, tensors, 4096, round=round)
        send(sender, tensors, 4096, round=round)
        got, _ = other.result()
        assert all(torch.equal(a, b) for a, b in zip(got, tensors, strict=True))
        with torch.no_grad():
            for parameter in tensors:
                parameter.mul_(3)
    statistics = sender.statistics()
    assert statistics["bytes_copied"] == 0
    assert statistics["buffer_nbytes"] == 0  # nothing needed a buffer
    assert statistics["bytes_in_place"] == 2 * sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_the_end_is_waited_for_beside_the_last_copies(senders, receivers, count, monkeypatch):
    """Once, when all destinations are known; not at all where chunks go through buffers."""
    storage = share_tensors({f"{i}": torch.randn(512) for i in range(count)})
    tensors = [storage.segment.typed(i * 2048, torch.float32, (512,)) for i in range(count)]
    sender = senders(buffer_nbytes=2048, shared=[storage], digest=None)
    receiver = receivers(sender)
    for round, table in enumerate(({i: sender.locate(t) for i, t in enumerate(tensors)}, {})):
        sender.set_resident(table)
        into = [torch.zeros_like(t) for t in tensors]
        happened = []

        class Into:
            takes_all = True

            def __call__(self, index, into=into, happened=happened):
                happened.append(index)
                return into[index]

            def meanwhile(self, upto, happened=happened):
                happened.append(upto)

        other = Thread(
            receiver.receive,
            plan_of(tensors, 2048),
            Into(),
            lambda _: None,
            round=round,
            stall=20.0,
        )
        send(sender, tensors, 2048, round=round)
        other.result()
        assert happened == [*range(count), *([None] if table else [])]
        assert all(torch.equal(a, b) for a, b in zip(into, tensors, strict=True))


@pytest.mark.parametrize("takes_all", [False, True])
def test_chunks_are_copied_together_where_their_memory_is_there_anyway(
    senders, receivers, takes_all
):
    """Else each has landed before the next one's is made; and all of it is held until then."""
    storage = share_tensors({f"{i}": torch.randn(512) for i in range(20)})
    tensors = [storage.segment.typed(i * 2048, torch.float32, (512,)) for i in range(20)]
    sender = senders(buffer_nbytes=2048, shared=[storage], digest=None)
    sender.set_resident({i: sender.locate(t) for i, t in enumerate(tensors)})
    receiver, made, most = receivers(sender), {}, []

    class Into:
        def __call__(self, index):
            fresh = torch.zeros(512)
            made[index] = weakref.ref(fresh)  # nobody else has it
            most.append(sum(one() is not None for one in made.values()))
            return fresh

    Into.takes_all = takes_all
    arrived = []

    def landed(indices):
        arrived.extend(torch.equal(made[index](), tensors[index]) for index in indices)
        made[indices[0]] = lambda: None

    plan = plan_of(tensors, 2048)
    other = Thread(receiver.receive, plan, Into(), landed, round=0, stall=20.0)
    sender.open(plan, 1, round=0, stall=20.0)
    sender.write(list(enumerate(tensors)))  # announced at once
    sender.finish()
    other.result()
    assert arrived == [True] * 20
    assert max(most) == 1 or takes_all
    assert max(most) > 1 or not takes_all


def test_a_sign_of_life_does_not_keep_a_reader_from_acknowledging(senders, receivers):
    """It says that the trainer waits, perhaps for just that."""
    weights = {"a": torch.randn(512)}
    storage = share_tensors(weights)
    tensors = [torch.randn(512), torch.randn(512), weights["a"], *map(torch.randn, [512] * 3)]
    sender = senders(buffer_nbytes=2048, buffers=2, shared=[storage], digest=None)
    sender.set_resident({2: sender.locate(weights["a"])})
    receiver, into = receivers(sender), [torch.zeros(512) for _ in tensors]

    class Into:
        takes_all = True

        def __call__(self, index):
            if index == 2:
                time.sleep(1.2)  # the trainer says meanwhile that it is there
            return into[index]

    plan, stall = plan_of(tensors, 2048), 3.0
    other = Thread(receiver.receive, plan, Into(), lambda _: None, round=0, stall=stall)
    sender.open(plan, 1, round=0, stall=stall)
    sender.write(list(enumerate(tensors)))
    sender.finish()
    other.result()
    assert all(torch.equal(a, b) for a, b in zip(into, tensors, strict=True))


@pytest.mark.slow
def test_shared_and_other_tensors_mix_over_processes(crew, senders):
    weights = {"a": torch.randn(3000), "b": torch.randn(20, 20)}
    storage = share_tensors(weights)
    tensors = [torch.randn(300), weights["a"], torch.randn(9, 9).T, weights["b"], torch.empty(0)]
    sender = senders(buffer_nbytes=4096, shared=[storage])
    crew[0].join(sender, "w0")
    tables = [{1: sender.locate(tensors[1]), 3: sender.locate(tensors[3])}]
    tables += [tables[0], {1: tables[0][1]}, {}, tables[0]]
    copied = 0
    for round, table in enumerate(tables):
        sender.set_resident(table)
        crew[0].tell(receive=task(tensors, 4096, round))
        send(sender, tensors, 4096, round=round)
        answer = crew[0].hear()
        assert answer["hashes"] == [hash_of(t) for t in tensors], (round, answer)
        now = sender.statistics()["bytes_copied"]
        assert now - copied == sum(t.nbytes for i, t in enumerate(tensors) if i not in table)
        copied = now
        weights["a"].add_(1)


def test_a_larger_buffer_does_not_cost_the_table_of_handles(senders, receivers):
    weights = {"a": torch.randn(64)}
    storage = share_tensors(weights)
    sender = senders(buffer_nbytes=4096, packed=False, shared=[storage])
    receiver = receivers(sender)
    sender.set_resident({0: sender.locate(weights["a"])})
    for round, size in enumerate([10, 5000, 20]):
        tensors = [weights["a"], torch.randn(size)]
        other = Thread(receive, receiver, tensors, 4096, round=round)
        send(sender, tensors, 4096, round=round)
        assert all(torch.equal(a, b) for a, b in zip(other.result()[0], tensors, strict=True))
        assert receiver.statistics()["segments"] == 2


def test_more_handles_than_fit_one_frame(senders, receivers, monkeypatch):
    monkeypatch.setattr(wire, "HANDLES_PER_FRAME", 7)
    weights = {str(k): torch.full((4,), float(k)) for k in range(50)}
    storage = share_tensors(weights)
    tensors = list(weights.values())
    sender = senders(buffer_nbytes=256, shared=[storage])
    sender.set_resident({i: sender.locate(t) for i, t in enumerate(tensors)})
    other = Thread(receive, receivers(sender), tensors, 256)
    send(sender, tensors, 256)
    assert torch.equal(torch.stack(other.result()[0]), torch.stack(tensors))


def test_a_tensor_that_left_shared_memory_is_refused_by_index(senders, receivers):
    weights = {"a": torch.randn(8), "b": torch.randn(8)}
    storage = share_tensors(weights)
    tensors = list(weights.values())
    sender = senders(buffer_nbytes=4096, shared=[storage])
    sender.set_resident({i: sender.locate(t) for i, t in enumerate(tensors)})
    other = Thread(receive, receivers(sender), tensors, 4096)
    tensors[1] = tensors[1].clone()
    with pytest.raises(Validation, match="tensor 1 is not where"):
        send(sender, tensors, 4096)
    with pytest.raises(PeerLost, match="tensor 1 is not where"):
        other.result()


@pytest.mark.parametrize("handle", [(9, 0), (0, 1 << 20), (0, -64)])
def test_impossible_handles_are_refused_before_anything_moves(senders, handle):
    storage = share_tensors({"a": torch.randn(8)})
    sender = senders()
    index, offset = handle
    sender.set_resident({index: (storage.segment, offset)})
    with pytest.raises(Validation):
        sender.open(plan_of([torch.empty(8)], 4096), 1, round=1, stall=1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda t: [(1, t[1])],
        lambda t: [(0, t[0]), (0, t[0])],
        lambda t: [(0, t[0][:4])],
        lambda t: [*enumerate(t), (2, t[0])],
    ],
)
def test_writes_that_do_not_follow_the_plan(senders, receivers, wrong):
    tensors = [torch.randn(8), torch.randn(8)]
    sender = senders()
    other = Thread(receive, receivers(sender), tensors, 4096)
    sender.open(plan_of(tensors, 4096), 1, round=1, stall=20)
    with pytest.raises(Validation, match="tensor") as caught:
        sender.write(wrong(tensors))
    assert (caught.value.phase, caught.value.round) == ("write", 1)
    with pytest.raises(PeerLost):
        other.result()
    with pytest.raises(InvalidTransition, match="no round"):
        sender.write([])


def test_finish_wants_all_tensors(senders, receivers):
    tensors = [torch.randn(8), torch.randn(8)]
    sender = senders()
    other = Thread(receive, receivers(sender), tensors, 4096)
    sender.open(plan_of(tensors, 4096), 1, round=1, stall=20)
    sender.write([(0, tensors[0])])
    with pytest.raises(Validation, match="tensor 1 and later"):
        sender.finish()
    with pytest.raises(PeerLost, match="tensor 1 and later"):
        other.result()


@pytest.mark.fault("A-LAYOUT-10")
def test_another_dtype_of_the_same_size_is_another_view_not_a_cast(senders, receivers):
    sender = senders()
    receiver = receivers(sender)
    for round, tensor in enumerate([torch.randn(8), torch.arange(8, dtype=torch.int32)]):
        other = Thread(receive, receiver, [tensor], 4096, round=round)
        send(sender, [tensor], 4096, round=round)
        assert torch.equal(other.result()[0][0], tensor)


@pytest.mark.parametrize("bad", [torch.empty(7), torch.empty(8, 2)[:, 0]])
def test_a_destination_that_does_not_fit_is_refused_on_both_sides(senders, receivers, bad):
    tensors = [torch.randn(8)]
    sender, receiver = senders(), None
    receiver = receivers(sender)
    plan = plan_of(tensors, 4096)
    other = Thread(receiver.receive, plan, lambda _: bad, lambda _: None, round=1, stall=20)
    with pytest.raises(PeerLost, match="destination of tensor 0") as caught:
        send(sender, tensors, 4096)
    assert caught.value.replica == "w0"
    assert isinstance(caught.value, RemoteError)
    with pytest.raises(Validation, match="destination of tensor 0"):
        other.result()


@pytest.mark.fault("A-LAYOUT-4")
@pytest.mark.parametrize(
    "options",
    [
        {"buffer_nbytes": 63},
        {"buffer_nbytes": True},
        {"buffer_nbytes": 2**60},
        {"buffers": 0},
        {"digest": "crc32"},
    ],
)
def test_options_that_cannot_be_right(options):
    with pytest.raises(Validation):
        ShmSender(**options)


def test_plans_that_do_not_fit(senders):
    sender = senders(buffer_nbytes=4096)
    with pytest.raises(Validation, match="8192"):
        sender.open(plan_of([torch.empty(8)], 8192), 1, round=1, stall=1)
    packed = plan_chunks([32], [4], limit=64, rule=NCCL_PACKED)
    with pytest.raises(Validation, match="nccl_packed"):
        sender.open(packed, 1, round=1, stall=1)
    for stall in (0, -1, float("inf"), float("nan"), True, "3"):
        with pytest.raises(Validation, match="stall"):
            sender.open(plan_of([torch.empty(8)], 4096), 1, round=1, stall=stall)


def test_out_of_order_calls(senders, receivers):
    sender = senders()
    with pytest.raises(InvalidTransition):
        sender.finish()
    other = Thread(receive, receivers(sender), [], 64)
    sender.open(plan_of([], 64), 1, round=1, stall=20)
    with pytest.raises(InvalidTransition, match="still open"):
        sender.open(plan_of([], 64), 1, round=2, stall=20)
    sender.finish()
    other.result()
    receiver = receivers(sender)
    receiver.release()
    with pytest.raises(InvalidTransition, match="released"):
        receive(receiver, [], 64)
    sender.release()
    with pytest.raises(InvalidTransition, match="released"):
        sender.open(plan_of([], 64), 1, round=2, stall=20)


# --- who may read ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "round", "reason"),
    [
        ({"token": "0" * 32}, 1, "wrong token"),
        ({"token": "schlüssel"}, 1, "wrong token"),
        ({}, 7, "round 7"),
    ],
)
def test_a_refused_reader_learns_why_and_the_round_waits_for_the_right_one(
    senders, receivers, overrides, round, reason
):
    tensors = [torch.randn(8)]
    sender = senders()
    trainer = Thread(send, sender, tensors, 4096)
    stranger = Thread(receive, receivers(sender, "x", **overrides), tensors, 4096, round=round)
    with pytest.raises(Validation, match=reason) as caught:
        stranger.result()
    assert isinstance(caught.value, RemoteError)
    got, _ = receive(receivers(sender), tensors, 4096)
    assert torch.equal(got[0], tensors[0])
    trainer.result()


def test_two_readers_of_one_name(senders, receivers):
    tensors = [torch.randn(8)]
    sender = senders()
    trainer = Thread(send, sender, tensors, 4096, readers=2)
    twins = [Thread(receive, receivers(sender, "same"), tensors, 4096) for _ in range(2)]
    while all(twin.is_alive() for twin in twins):
        twins[0].join(0.01)
    other = Thread(receive, receivers(sender, "other"), tensors, 4096)
    trainer.result()
    other.result()
    errors = [twin.error for twin in twins if twin.join(20) or twin.error]
    assert len(errors) == 1
    assert "connected already" in errors[0].message


def connect(sender):
    return Link.connect(sender.address, waker=Waker(), deadline=time.monotonic() + 10)


def hello(sender, **fields):
    known = {"token": sender.token, "round": 1, "reader": "mallory"}
    return wire.encode(wire.Hello(**(known | fields)))


@pytest.mark.fault("A-INPUT-2")
@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (lambda _: b"\xc1garbage", "malformed"),
        (lambda _: b"", "malformed"),
        (lambda s: hello(s, protocol=2), "protocol 2"),
        (lambda _: wire.encode(wire.Ack(chunk=0)), "begins with hello"),
        (lambda s: hello(s, reader="x" * 300), "malformed"),
        (lambda s: hello(s, segments=("a",) * 300), "malformed"),
        (lambda s: hello(s, round="1"), "malformed"),
    ],
)
def test_malformed_introductions_are_refused(senders, receivers, payload, reason):
    tensors = [torch.randn(8)]
    sender = senders()
    trainer = Thread(send, sender, tensors, 4096)
    link = connect(sender)
    link.send(payload(sender), deadline=time.monotonic() + 10)
    answer, _ = link.recv(deadline=time.monotonic() + 10)
    assert reason in wire.decode_to_reader(answer, peer="").reason
    link.close()
    receive(receivers(sender), tensors, 4096)
    trainer.result()


def test_silent_and_lost_connections_do_not_hold_up_the_others(senders, receivers):
    tensors = [torch.randn(8)]
    sender = senders()
    silent = [connect(sender) for _ in range(80)]
    connect(sender).close()
    trainer = Thread(send, sender, tensors, 4096)
    receive(receivers(sender), tensors, 4096)
    trainer.result()
    for link in silent:
        link.close()


@pytest.mark.parametrize(
    "message",
    [
        wire.Ack(chunk=1),
        wire.Ack(chunk=2**40),
        wire.Complete(chunks=1, digest=None),
        wire.Hello(token="", round=1, reader="again"),
    ],
)
def test_a_reader_that_lies_ends_the_round(senders, message):
    tensors = [torch.randn(8)]
    sender = senders(digest=None)
    trainer = Thread(send, sender, tensors, 4096)
    link = connect(sender)
    link.send(hello(sender), deadline=time.monotonic() + 10)
    _, fds = link.recv(deadline=time.monotonic() + 10, max_fds=4)
    for fd in fds:
        os.close(fd)
    link.send(wire.encode(message), deadline=time.monotonic() + 10)
    with pytest.raises(Validation, match="mallory"):
        trainer.result()
    link.close()


class FakeTrainer:
    """Says to a receiver whatever a test wants."""

    def __init__(self, *answers, segment=None):
        from transports.listener import Listener

        self.listener, self.waker = Listener(), Waker()
        self.address, self.token = self.listener.address, "t"
        self.thread = Thread(self._serve, answers, segment)

    def _serve(self, answers, segment):
        link = self.listener.accept(self.waker, deadline=time.monotonic() + 10)
        try:
            link.recv(deadline=time.monotonic() + 10)
            for at, answer in enumerate(answers):
                fds = [segment.fileno()] if segment is not None and at == 0 else []
                link.send(wire.encode(answer), fds, deadline=time.monotonic() + 10)
            link.recv(deadline=time.monotonic() + 10)
        except PeerLost:
            pass  # the receiver had heard enough
        finally:
            link.close()

    def close(self):
        self.thread.join(20)
        self.listener.close()
        self.waker.close()


def welcome(plan, /, **fields):
    known = {
        "round": 1, "plan": plan.digest, "digest": None, "segments": (), "resident": "",
        "handles": None,
    }  # fmt: skip
    return wire.Welcome(**(known | fields))


@pytest.mark.fault("A-INPUT-2")
@pytest.mark.parametrize(
    "ready",
    [
        wire.Ready(chunk=0, segment=0, offset=64),
        wire.Ready(chunk=0, segment=0, offset=2**62),
        wire.Ready(chunk=0, segment=0, offset=2),
        wire.Ready(chunk=0, segment=1, offset=0),
        wire.Ready(chunk=0, segment=-1, offset=0),
        wire.Ready(chunk=1, segment=0, offset=0),
        wire.Done(chunks=0, nbytes=0, digest=None),
        wire.Refusal(reason="no"),
    ],
)
def test_hostile_places_are_refused(receivers, ready):
    from transports.segments import Segment

    tensors = [torch.randn(1024)]
    plan = plan_of(tensors, 4096)
    segment = Segment.create(4096)
    info = wire.SegmentInfo(key="k", nbytes=4096, attached=True)
    fake = FakeTrainer(welcome(plan, segments=(info,)), ready, segment=segment)
    with pytest.raises(Validation):
        receive(receivers(fake), tensors, 4096)
    fake.close()
    segment.close()


@pytest.mark.fault("A-INPUT-2")
@pytest.mark.parametrize(
    ("fields", "handles"),
    [
        ({"segments": (wire.SegmentInfo(key="k", nbytes=4096, attached=False),)}, None),
        ({"segments": (wire.SegmentInfo(key="k", nbytes=8192, attached=True),)}, None),
        ({"plan": "other"}, None),
        ({"round": 2}, None),
        ({"digest": "md5"}, None),
        ({"resident": "unknown"}, None),
        ({"handles": 1}, (0, 0, 64)),
        ({"handles": 1}, (0, 1, 0)),
        ({"handles": 1}, (5, 0, 0)),
        ({"handles": 1}, None),
    ],
)
def test_hostile_welcomes_are_refused_without_leaking_descriptors(receivers, fields, handles):
    from transports.segments import Segment

    tensors = [torch.randn(1024)]
    plan = plan_of(tensors, 4096)
    segment = Segment.create(4096)
    info = wire.SegmentInfo(key="k", nbytes=4096, attached=True)
    table = () if handles is None else (handles,)
    fake = FakeTrainer(
        welcome(plan, **({"segments": (info,)} | fields)),
        wire.Handles(handles=table),
        segment=segment,
    )
    receiver = receivers(fake)
    gc.collect()
    with pytest.raises(Validation):
        receive(receiver, tensors, 4096)
    fake.close()
    assert receiver.statistics()["segments"] == ("handles" in fields or "resident" in fields)
    segment.close()
    receiver.release()
    gc.collect()
    assert not any("memfd:aiosync" in target for target in fd_targets())


def fd_targets():
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            yield str(path.readlink())


@pytest.mark.fault("A-SILENT-1")
def test_corrupt_bytes_are_found_and_the_chunk_is_named(senders, receivers, monkeypatch):
    tensors = [torch.randn(1024) for _ in range(4)]
    sender = senders(buffer_nbytes=4096)
    announce = Readers.announce

    def corrupting(self, ready):
        if ready.chunk == 2:
            sender._memory.segment.tensor[ready.offset + 99] ^= 1
        announce(self, ready)

    monkeypatch.setattr(Readers, "announce", corrupting)
    landed = []
    other = Thread(receive, receivers(sender), tensors, 4096, landed=landed.extend)
    with pytest.raises(PeerLost, match=r"DigestMismatch.*chunk 2"):
        send(sender, tensors, 4096)
    with pytest.raises(DigestMismatch, match=r"chunk 2 \(tensors 2\.\.2\)") as caught:
        other.result()
    assert caught.value.detail["tensor"] == 2
    assert landed == [0, 1]


# --- abort, close, release ------------------------------------------------------------------


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def round_trip(sender, receiver, round):
    tensors = [torch.randn(4096), torch.arange(9)]
    other = Thread(receive, receiver, tensors, 4096, round=round)
    send(sender, tensors, 4096, round=round)
    got, _ = other.result()
    assert all(torch.equal(a, b) for a, b in zip(got, tensors, strict=True))


@pytest.mark.parametrize("blocked_in", ["open", "write", "finish"])
@pytest.mark.parametrize("twice", [False, True])
def test_abort_frees_a_blocked_sender_and_the_next_round_works(
    senders, receivers, blocked_in, twice
):
    tensors = [torch.randn(1024) for _ in range(6)]
    sender = senders(buffer_nbytes=4096, packed=blocked_in != "finish")
    receiver = receivers(sender)
    hold, holding = threading.Event(), threading.Event()

    def landed(_):
        holding.set()
        hold.wait(20)

    readers = 2 if blocked_in == "open" else 1
    other = Thread(receive, receiver, tensors, 4096, landed=landed)
    trainer = Thread(send, sender, tensors, 4096, readers=readers)
    if blocked_in == "open":
        wait_until(lambda: sender._readers is not None and sender._readers.readers)
    else:
        assert holding.wait(20)
    if blocked_in == "finish":
        wait_until(lambda: sender._writer is not None and sender._writer.chunk == 6)
    sender.abort()
    if twice:
        sender.abort()
    with pytest.raises(TransportAborted) as caught:
        trainer.result()
    assert caught.value.phase == blocked_in
    hold.set()
    with pytest.raises(PeerLost) as lost:
        other.result()
    assert lost.value.replica == "trainer"
    sender.close()
    round_trip(sender, receiver, 2)


def test_abort_stops_a_write_that_is_busy_copying(senders, receivers):
    tensors = [torch.randn(1024) for _ in range(64)]
    sender = senders(buffer_nbytes=1 << 20, digest=None)
    receiver = receivers(sender)
    other = Thread(receive, receiver, tensors, 1 << 20)
    sender.open(plan_of(tensors, 1 << 20), 1, round=1, stall=20)

    class Aborting(list):
        def __iter__(self):
            sender.abort()  # whoever reads the batch is about to copy it
            return super().__iter__()

    with pytest.raises(TransportAborted):
        sender.write(Aborting(enumerate(tensors)))
    with pytest.raises(PeerLost):
        other.result()
    sender.close()
    round_trip(sender, receiver, 2)


@pytest.mark.fault("A-CANCEL-4")
@pytest.mark.parametrize("blocked_in", ["connect", "welcome", "ready", "landed"])
def test_abort_frees_a_blocked_receiver_and_the_next_round_works(senders, receivers, blocked_in):
    tensors = [torch.randn(1024) for _ in range(3)]
    sender = senders(buffer_nbytes=4096)
    receiver = receivers(sender)
    trainer = None
    landed = threading.Event()
    if blocked_in == "connect":
        receiver.abort()  # before it even begins
    elif blocked_in != "welcome":
        trainer = Thread(sender.open, plan_of(tensors, 4096), 1, round=1, stall=20)
    other = Thread(receive, receiver, tensors, 4096, landed=lambda _: landed.set())
    if trainer is not None:
        trainer.result()
        if blocked_in == "landed":
            sender.write([(0, tensors[0])])
            assert landed.wait(20)
    elif blocked_in == "welcome":
        wait_until(lambda: receiver._link is not None)
    receiver.abort()
    receiver.abort()
    with pytest.raises(TransportAborted):
        other.result()
    if trainer is not None:
        with pytest.raises(PeerLost) as caught:
            sender.write(list(enumerate(tensors))[1 if blocked_in == "landed" else 0 :])
            sender.finish()
        assert caught.value.replica == "w0"
    sender.close()
    receiver.close()
    round_trip(sender, receiver, 2)


def test_an_abort_holds_until_close(senders, receivers):
    sender = senders()
    receiver = receivers(sender)
    sender.abort()
    receiver.abort()
    sender.close()
    receiver.close()
    round_trip(sender, receiver, 1)
    sender.abort()
    with pytest.raises(TransportAborted):
        sender.open(plan_of([], 64), 1, round=2, stall=20)
    round_trip(sender, receiver, 3)


@pytest.mark.parametrize("end", ["close", "release"])
def test_closing_under_a_running_call_aborts_it_and_cleans_up_when_it_ends(senders, receivers, end):
    tensors = [torch.randn(1024) for _ in range(3)]
    sender = senders(buffer_nbytes=4096)
    receiver = receivers(sender)
    hold, holding = threading.Event(), threading.Event()

    def landed(_):
        holding.set()
        hold.wait(20)

    other = Thread(receive, receiver, tensors, 4096, landed=landed)
    trainer = Thread(send, sender, tensors, 4096)
    assert holding.wait(20)
    getattr(receiver, end)()  # while `landed` is running
    getattr(sender, end)()
    hold.set()
    with pytest.raises((TransportAborted, PeerLost)):
        trainer.result()
    with pytest.raises(TransportAborted):
        other.result()
    if end == "close":
        round_trip(sender, receiver, 2)
    else:
        wait_until(lambda: receiver.statistics()["segments"] == 0)
        assert sender.statistics()["buffer_nbytes"] == 0


def test_a_second_call_on_another_thread_is_refused(senders, receivers):
    sender = senders()
    receiver = receivers(sender)
    trainer = Thread(sender.open, plan_of([torch.empty(4)], 64), 2, round=1, stall=20)
    other = Thread(receive, receiver, [torch.empty(4)], 64)
    wait_until(lambda: sender._readers is not None and sender._readers.readers)
    with pytest.raises(InvalidTransition, match="still running"):
        receive(receiver, [torch.empty(4)], 64)
    sender.abort()
    for thread in (trainer, other):
        with pytest.raises((TransportAborted, PeerLost)):
            thread.result()


@pytest.mark.fault("A-STATE-4")
def test_a_late_reader_of_an_older_round_is_refused(senders, receivers):
    sender = senders()
    sender.abort()
    with pytest.raises(TransportAborted):
        sender.open(plan_of([torch.empty(4)], 64), 1, round=1, stall=20)
    late = Thread(receive, receivers(sender, "late"), [torch.empty(4)], 64, round=1)
    trainer = Thread(send, sender, [torch.ones(4)], 64, round=2)
    with pytest.raises(Validation, match="round 1 is not open"):
        late.result()
    receive(receivers(sender), [torch.empty(4)], 64, round=2)
    trainer.result()


# --- silence, death, leaks ------------------------------------------------------------------


def test_nobody_comes(senders):
    sender = senders()
    with pytest.raises(PhaseTimeout, match="0 of 2 readers") as caught:
        sender.open(plan_of([], 64), 2, round=1, stall=0.05)
    assert caught.value.phase == "open"


def test_a_silent_trainer_is_named(senders, receivers):
    sender = senders()
    other = Thread(receive, receivers(sender), [torch.empty(4)], 64, stall=0.3)
    sender.open(plan_of([torch.empty(4)], 64), 1, round=1, stall=20)
    with pytest.raises(PhaseTimeout) as caught:
        other.result()
    assert caught.value.replica == "trainer"


def test_readers_that_wait_for_a_slow_one_are_kept_alive(senders, receivers):
    tensors = [torch.randn(1024) for _ in range(3)]
    sender = senders(buffer_nbytes=4096, buffers=1)
    naps = iter([4.5])  # longer than the fast one waits for a trainer that says nothing
    slow = Thread(
        receive,
        receivers(sender, "slow"),
        tensors,
        4096,
        landed=lambda _: time.sleep(next(naps, 0)),
    )
    fast = Thread(receive, receivers(sender, "fast"), tensors, 4096, stall=4.0)
    sender.open(plan_of(tensors, 4096), 2, round=1, stall=6.0)  # it speaks up each third of that
    sender.write(list(enumerate(tensors)))
    sender.finish()
    slow.result()
    fast.result()


@pytest.mark.slow
def test_a_stopped_reader_is_named_within_the_allowance(reader, senders):
    tensors = [torch.randn(1024) for _ in range(8)]
    sender = senders(buffer_nbytes=4096)
    reader.join(sender, "w-stopped")
    reader.tell(receive=task(tensors, 4096, 1, mode="pause"))
    trainer = Thread(send, sender, tensors, 4096, stall=1.5)
    assert reader.hear() == {"event": "landed"}
    reader.process.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(PhaseTimeout) as caught:
        trainer.result()
    assert time.monotonic() - begun < 1.5 + SLACK
    assert caught.value.replica == "w-stopped"
    assert caught.value.phase == "write"


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_a_killed_reader_is_named_and_the_next_round_works_without_it(
    reader, senders, receivers, packed
):
    tensors = [torch.randn(1024) for _ in range(8)]
    sender = senders(buffer_nbytes=4096, packed=packed)
    reader.join(sender, "w-killed")
    reader.tell(receive=task(tensors, 4096, 1, mode="pause"))
    trainer = Thread(send, sender, tensors, 4096)
    assert reader.hear() == {"event": "landed"}
    reader.kill()
    with pytest.raises(PeerLost) as caught:
        trainer.result()
    assert caught.value.replica == "w-killed"
    round_trip(sender, receivers(sender), 2)


@pytest.mark.slow
def test_what_a_reader_raises_reaches_the_trainer_as_text(crew, senders):
    tensors = [torch.randn(1024) for _ in range(8)]
    sender = senders(buffer_nbytes=4096)
    crew[0].join(sender, "w0")
    crew[0].tell(receive=task(tensors, 4096, 1, mode="fail"))
    with pytest.raises(PeerLost, match="disk full while loading") as caught:
        send(sender, tensors, 4096)
    assert caught.value.replica == "w0"
    assert isinstance(caught.value, RemoteError)
    assert crew[0].hear()["kind"] == "RuntimeError"


@pytest.mark.slow
@pytest.mark.parametrize("forked_child", [False, True])
def test_a_killed_trainer_is_noticed_even_when_a_child_of_it_lives(receivers, forked_child):
    trainer = Peer("shm_trainer.py", *(["fork"] if forked_child else []))
    receiver = receivers(type("Trainer", (), trainer.hear()))
    tensors = [torch.empty(1024) for _ in range(4)]
    landed = threading.Event()
    other = Thread(receive, receiver, tensors, 4096, landed=lambda _: landed.set())
    assert landed.wait(20)
    child = trainer.hear()["child"]
    trainer.kill()
    begun = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        other.result()
    assert time.monotonic() - begun < 5
    assert caught.value.replica == "trainer"
    if child:
        os.kill(child, signal.SIGKILL)
    trainer.close()


def sockets_of(address):
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if address in line]


@pytest.mark.fault("A-LIFETIME-2")
@pytest.mark.slow
@pytest.mark.parametrize("dead", ["trainer", "reader", "both"])
def test_kill_nine_leaves_nothing(reader, dead):
    before = names_in_shm()
    trainer = Peer("shm_trainer.py")
    try:
        where = trainer.hear()
        reader.tell(new=where | {"name": "w0"})
        tensors = [torch.empty(1024) for _ in range(4)]
        reader.tell(receive=task(tensors, 4096, 1, mode="pause"))
        assert reader.hear() == {"event": "landed"}
        assert sockets_of(where["address"])
        for peer in {"trainer": [trainer], "reader": [reader], "both": [trainer, reader]}[dead]:
            peer.kill()
        assert not {name for name in names_in_shm() - before if "aiosync" in name}
    finally:
        trainer.close()
        reader.kill()
    assert not sockets_of(where["address"])


@pytest.mark.fault("A-LIFETIME-3")
@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_descriptors_stay_flat_over_many_rounds(crew, senders, packed):
    weights = {str(k): torch.randn(16) for k in range(40)}
    storage = share_tensors(weights)
    tensors = [torch.randn(16) for _ in range(300)] + list(weights.values())
    sender = senders(buffer_nbytes=4096, packed=packed, shared=[storage])
    sender.set_resident({300 + i: sender.locate(t) for i, t in enumerate(weights.values())})
    crew[0].join(sender, "w0")
    counts = set()
    for round in range(50):
        crew[0].tell(receive=task(tensors, 4096, round))
        send(sender, tensors, 4096, round=round, batch=100)
        answer = crew[0].hear()
        assert answer["kind"] is None
        counts.add((fd_count(), answer["fds"]))
        assert answer["statistics"]["segments"] == 2
    assert len(counts) == 1


@pytest.mark.fault("A-LIFETIME-3")
def test_descriptors_stay_flat_over_failing_rounds(senders, receivers):
    tensors = [torch.randn(1024) for _ in range(4)]
    sender = senders(buffer_nbytes=4096)
    receiver = receivers(sender)

    def fail(_):
        raise RuntimeError("no")

    counts = []
    for round in range(10):
        other = Thread(receive, receiver, tensors, 4096, round=round, landed=fail)
        with pytest.raises(PeerLost):
            send(sender, tensors, 4096, round=round)
        with pytest.raises(RuntimeError):
            other.result()
        counts.append(fd_count())
    assert len(set(counts[1:])) == 1


def test_release_leaves_no_descriptor():
    gc.collect()
    before = fd_count()
    sender = ShmSender(buffer_nbytes=4096)
    receiver = ShmReceiver(address=sender.address, token=sender.token, name="w0")
    round_trip(sender, receiver, 1)
    assert "idle" in repr(sender)
    assert "w0" in repr(receiver)
    receiver.release()
    sender.release()
    sender.release()
    sender.abort()
    receiver.abort()
    assert fd_count() == before
    with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + sender.address[1:])


def test_progress_counts_bytes_and_places_are_kept(senders, receivers):
    tensors = [torch.randn(1024) for _ in range(3)]
    sender = senders(buffer_nbytes=4096)
    receiver = receivers(sender)
    places = []
    for round in (1, 2):
        other = Thread(receive, receiver, tensors, 4096, round=round)
        send(sender, tensors, 4096, round=round)
        other.result()
        assert sender.progress.nbytes == receiver.progress.nbytes == round * 3 * 4096
        places.append([chunk.addresses for chunk in receiver._memory.chunks])
    assert all(a is b for a, b in zip(*places, strict=True))


def test_a_table_whose_segment_was_taken_away_is_not_used():
    plan = plan_chunks((64,), [1], limit=1024, rule=ALIGNED)
    memory, segment = ReceiverMemory(), Segment.create(64)

    def enter(segments, handles, table, fds):
        welcome = wire.Welcome(
            round=1, plan=plan.digest, digest=None, segments=segments, resident="t", handles=handles
        )
        memory.map(welcome, fds)
        memory.prepare(plan, welcome, iter(table))

    there = wire.SegmentInfo(key=segment.key, nbytes=64, attached=True)
    enter((there,), 1, [(0, 0, 0)], [os.dup(segment.fileno())])
    with pytest.raises(Validation, match="closed"):
        enter((), None, [], [])
    memory.release()
    segment.close()
