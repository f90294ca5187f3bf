"""The stream through a trainer's device memory, with memory that only looks like a GPU's."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import msgspec
import pytest
import torch
from everything import DTYPES, Everything
from fake_gpu import FakeMemory

from statemachines.errors import Validation
from transports import device_messages as wire
from transports.address_copy import AddressCopy
from transports.device_layout import DeviceLayout
from transports.device_mappings import DeviceMappings
from transports.device_receiver import DeviceReceiver
from transports.device_sender import DeviceSender
from transports.digest import ChunkDigest
from transports.errors import (
    DigestMismatch,
    OutOfSharedMemory,
    PeerLost,
    PhaseTimeout,
    TransportAborted,
)
from transports.links import native_address
from transports.planning import ALIGNED, plan_chunks
from transports.pointer_copy import AddressColumn, tiles_of
from transports.pointer_digest import PointerDigest
from transports.shm_messages import Handles, Hello, encode
from transports.stream import Run

STALL = 5.0


def plan_of(tensors, limit=4096):
    sizes = [tensor.nbytes for tensor in tensors]
    return plan_chunks(sizes, [t.itemsize for t in tensors], limit=limit, rule=ALIGNED)


def raw(tensor):
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)


class Stream:
    """A sender and its readers, all here."""

    def __init__(self, stack, *, readers=1, digest="wsum64", memory=None, views=None, batch=4096):
        self.memory = memory or FakeMemory()
        self.sender = DeviceSender(self.memory, buffers=2, digest=digest)
        stack.callback(self.sender.release)
        views = views or [self.memory] * readers
        self.receivers = [
            DeviceReceiver(
                view,
                address=self.sender.address,
                token=self.sender.token,
                name=f"reader-{at}",
                batch_nbytes=batch,
            )
            for at, view in enumerate(views)
        ]
        for receiver in self.receivers:
            stack.callback(receiver.release)
        self.number = 0
        self.awaited = None

    def stop_after(self, at):
        """The sender is told to stop once reader `at` is through: it would wait for others."""
        self.awaited = at

    def round(self, tensors, targets, stay=None, *, step=7, plan=None, broken=lambda: None):
        """Send; what each side returned or raised: the sender first."""
        self.number += 1
        plan = plan or plan_of(tensors)
        results = [None] * (1 + len(self.receivers))
        landed = [[] for _ in self.receivers]

        def keep(at, act):
            try:
                results[at] = act()
            except Exception as error:
                results[at] = error
            if at - 1 == self.awaited:
                self.sender.abort()

        def send():
            if stay is not None:
                self.sender.set_tensors(stay)
            self.sender.open(plan, len(self.receivers), round=self.number, stall=STALL)
            broken()
            pairs = list(enumerate(tensors))
            for first in range(0, len(pairs), step):
                self.sender.write(pairs[first : first + step])
            return self.sender.finish()

        def receive(at, receiver):
            return receiver.receive(
                plan,
                lambda index: targets[at][index],
                landed[at].extend,
                round=self.number,
                stall=STALL,
            )

        threads = [
            threading.Thread(target=keep, args=(1 + at, lambda a=at, r=receiver: receive(a, r)))
            for at, receiver in enumerate(self.receivers)
        ]
        for thread in threads:
            thread.start()
        keep(0, send)
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        self.sender.close()
        for receiver in self.receivers:
            receiver.close()
        self.landed = landed
        return results


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


def places_for(tensors):
    return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]


def assert_equal(targets, tensors):
    for at, (target, tensor) in enumerate(zip(targets, tensors, strict=True)):
        assert torch.equal(raw(target), raw(tensor)), at


# -- rounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest", ["wsum64", None])
@pytest.mark.parametrize("staying", ["all", "some", "none"])
def test_every_dtype_and_layout_arrives(stack, digest, staying):
    tensors = list(Everything().tensors.values())
    plain = [t.is_contiguous() and not t.is_conj() for t in tensors]
    stream = Stream(stack, readers=2, digest=digest)
    stream.memory.own(*[t for t, is_plain in zip(tensors, plain, strict=True) if is_plain])
    stay = [
        t if p and (staying == "all" or (staying == "some" and at % 3)) else None
        for at, (t, p) in enumerate(zip(tensors, plain, strict=True))
    ]
    for _ in range(3):
        targets = [places_for(tensors), places_for(tensors)]
        results = stream.round(tensors, targets, stay)
        assert [type(result).__name__ for result in results] == ["StreamSummary"] * 3, results
        assert results[0] == results[1] == results[2]
        assert (results[0].digest is not None) == (digest is not None)
        for place in targets:
            assert_equal(place, tensors)
        for landed in stream.landed:
            assert sorted(landed) == list(range(len(tensors)))


def test_what_stays_is_exported_once_and_its_table_sent_once(stack):
    flat = torch.randn(4000)
    tensors = [flat[at * 100 : at * 100 + 100] for at in range(40)]
    stream = Stream(stack)
    stream.memory.own(flat)
    for version in range(3):
        flat.add_(version)
        targets = [places_for(tensors)]
        stream.round(tensors, targets, tensors)
        assert_equal(targets[0], tensors)
    assert len(stream.memory.exported) == 1
    assert stream.sender.statistics()["exported"] == 1
    assert stream.sender.statistics()["buffer_nbytes"] == 0


def test_changed_storage_is_noticed_and_exported_again(stack):
    tensors = [torch.randn(50) for _ in range(6)]
    stream = Stream(stack)
    stream.memory.own(*tensors)
    stream.round(tensors, [places_for(tensors)], tensors)
    table = stream.sender.statistics()["table"]
    tensors[3] = torch.randn(50)
    stream.memory.own(tensors[3])
    targets = [places_for(tensors)]
    stream.round(tensors, targets, tensors)
    assert_equal(targets[0], tensors)
    assert stream.sender.statistics()["table"] != table
    assert stream.receivers[0].statistics()["table"] == stream.sender.statistics()["table"]
    assert len(stream.memory.exported) == 7
    assert stream.receivers[0].statistics()["mapped"] == 6


def test_other_memory_at_the_same_address_is_noticed(stack):
    tensors = [torch.randn(50) for _ in range(3)]
    stream = Stream(stack)
    stream.memory.own(*tensors)
    stream.round(tensors, [places_for(tensors)], tensors)
    stream.memory.freed += 1  # something was freed, none of ours
    stream.round(tensors, [places_for(tensors)], tensors)
    assert len(stream.memory.exported) == 3
    stream.memory.reallocate(tensors[1])
    targets = [places_for(tensors)]
    stream.round(tensors, targets, tensors)
    assert_equal(targets[0], tensors)
    assert len(stream.memory.exported) == 4


def test_buffers_are_as_large_as_two_chunks_and_given_back(stack):
    tensors = [torch.randn(700) for _ in range(9)]  # 2,800 bytes: one in a chunk
    stream = Stream(stack)
    targets = [places_for(tensors)]
    results = stream.round(tensors, targets)
    assert_equal(targets[0], tensors)
    assert results[0].chunks == 10
    assert sum(map(len, stream.memory.taken.values())) == 2 * 3072
    stream.sender.release()
    assert not stream.memory.taken


def test_a_tensor_larger_than_a_buffer_goes_in_parts(stack):
    tensors = [torch.randn(5000), torch.randn(3), torch.randn(2000).t()]
    targets = [places_for(tensors)]
    results = Stream(stack).round(tensors, targets, step=1)
    assert results[0] == results[1]
    assert_equal(targets[0], tensors)


# -- what goes wrong -----------------------------------------------------------------------------


def test_a_reader_that_does_not_see_the_gpu_is_told_which(stack):
    tensors = [torch.randn(5)]
    ours = FakeMemory("gpu-a")
    ours.own(*tensors)
    stream = Stream(stack, memory=ours, views=[FakeMemory("gpu-b", ("gpu-b", "gpu-c"))])
    stream.stop_after(0)
    sent, received = stream.round(tensors, [places_for(tensors)], tensors)
    assert isinstance(sent, TransportAborted)
    assert isinstance(received, Validation)
    assert "GPU gpu-a" in str(received)
    assert "sees gpu-b, gpu-c" in str(received)


def test_no_room_for_the_buffers(stack):
    stream = Stream(stack, memory=FakeMemory(room=100))
    with pytest.raises(OutOfSharedMemory):
        stream.sender.open(plan_of([torch.randn(700)]), 1, round=1, stall=0.1)


def test_a_tensor_that_moved_within_the_round_is_named(stack):
    tensors = [torch.randn(50) for _ in range(3)]
    stream = Stream(stack)
    stream.memory.own(*tensors)
    moved = [*tensors[:2], torch.randn(50)]
    sent, received = stream.round(moved, [places_for(tensors)], tensors)
    assert isinstance(sent, Validation)
    assert "tensor 2 is not where" in str(sent)
    assert isinstance(received, PeerLost)
    assert stream.round(tensors, [places_for(tensors)], tensors)[0].nbytes == 600


@pytest.mark.parametrize("staying", [True, False])
def test_other_bytes_than_were_sent_are_noticed_and_named(stack, monkeypatch, staying):
    tensors = [torch.randn(50) for _ in range(4)]
    stream = Stream(stack)
    stream.memory.own(*tensors)
    targets = [places_for(tensors)]
    copy = AddressCopy.__call__

    def careless(self, to, out_of):
        copy(self, to, out_of)
        targets[0][2][7] += 1

    monkeypatch.setattr(AddressCopy, "__call__", careless)
    sent, received = stream.round(tensors, targets, tensors if staying else None)
    assert isinstance(received, DigestMismatch)
    assert received.tensor == ("2" if staying else "0")  # of buffers the chunk's first
    assert isinstance(sent, PeerLost)
    monkeypatch.undo()
    results = stream.round(tensors, targets, tensors if staying else None)
    assert results[0] == results[1]


def test_a_reader_that_leaves_ends_the_round(stack):
    tensors = [torch.randn(700) for _ in range(9)]
    stream = Stream(stack)

    def boom(index):
        raise ValueError("no memory for down_proj")

    plan = plan_of(tensors)
    sent = []

    def send():
        try:
            stream.sender.open(plan, 1, round=1, stall=STALL)
            stream.sender.write(list(enumerate(tensors)))
            stream.sender.finish()
        except Exception as error:
            sent.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(ValueError, match="down_proj"):
        stream.receivers[0].receive(plan, boom, lambda _: None, round=1, stall=STALL)
    thread.join(10)
    assert isinstance(sent[0], PeerLost)
    assert "down_proj" in str(sent[0])
    assert sent[0].replica == "reader-0"


def test_a_sender_that_waits_for_a_reader_can_be_told_to_stop(stack):
    stream = Stream(stack)
    threading.Timer(0.1, stream.sender.abort).start()
    with pytest.raises(TransportAborted):
        stream.sender.open(plan_of([torch.randn(5)]), 1, round=1, stall=30.0)
    with pytest.raises(PhaseTimeout):
        stream.sender.open(plan_of([torch.randn(5)]), 1, round=2, stall=0.1)


class Never:
    """A mark of training that does not end."""

    def query(self):
        return False


def test_no_reader_begins_before_training_has_written_the_tensors(stack):
    tensors = [torch.randn(5)]
    stream = Stream(stack)
    stream.memory.own(*tensors)
    stream.sender.order_after(Never())
    threading.Timer(0.3, stream.sender.abort).start()
    targets = [places_for(tensors)]
    sent, received = stream.round(tensors, targets, tensors)
    assert isinstance(sent, TransportAborted)
    assert isinstance(received, PeerLost)
    assert not targets[0][0].any()


def test_a_receiver_that_waits_can_be_told_to_stop(stack):
    tensors = [torch.randn(5)]
    stream = Stream(stack)
    stream.sender.order_after(Never())
    stream.memory.own(*tensors)
    threading.Timer(0.3, stream.receivers[0].abort).start()
    stream.stop_after(0)
    began = time.monotonic()
    _, received = stream.round(tensors, [places_for(tensors)], tensors)
    assert isinstance(received, TransportAborted)
    assert time.monotonic() - began < STALL


# -- messages ------------------------------------------------------------------------------------


def info(number=1, nbytes=4096, uuid="gpu-a", address=0x10000, handle=b"\0" * 64):
    return wire.AllocationInfo(
        number=number, handle=handle, uuid=uuid, nbytes=nbytes, address=address
    )


def welcome(**changes):
    fields = {"round": 1, "plan": "p", "digest": None, "table": "t"}
    return wire.DeviceWelcome(**(fields | {"allocations": 1, "places": 1} | changes))


PLAN = plan_chunks([64, 128], [4, 4], limit=4096, rule=ALIGNED)
ONE = wire.Allocations(new=(info(),))


@pytest.mark.parametrize(
    ("greeting", "messages", "text"),
    [
        (welcome(places=None), [], "not ours"),
        (welcome(), [wire.Allocations()], "expected allocations"),
        (welcome(), [wire.Allocations(kept=(7,))], "allocation 7 was not sent"),
        (welcome(), [wire.Allocations(new=(info(), info()))], "named twice"),
        (welcome(), [wire.Allocations(new=(info(1), info(2)))], "2 allocations came"),
        (welcome(), [wire.Allocations(new=(info(nbytes=0),))], "no bytes"),
        (welcome(), [wire.Allocations(new=(info(uuid="gpu-z"),))], "offers memory of GPU gpu-z"),
        (welcome(), [wire.Allocations(new=(info(uuid=""),))], r"GPU \(none\)"),
        (welcome(ring=9), [ONE], "allocation 9 with the buffers was not sent"),
        (welcome(), [ONE, Handles(handles=())], "expected handles"),
        (welcome(), [ONE, Handles(handles=((2, 1, 0),))], "tensor 2 in allocation 1 is impossible"),
        (welcome(), [ONE, Handles(handles=((0, 2, 0),))], "in allocation 2 is impossible"),
        (welcome(places=2), [ONE, Handles(handles=((0, 1, 0), (0, 1, 64)))], "impossible"),
        (welcome(), [ONE, Handles(handles=((1, 1, 4000),))], "lie at byte 4000 of an allocation"),
        (welcome(), [ONE, Handles(handles=((1, 1, 2**62),))], "lie at byte"),
        (welcome(), [ONE, Handles(handles=((0, 1, 0), (1, 1, 64)))], "2 handles came"),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(greeting, messages, text):
    mappings = DeviceMappings(FakeMemory())
    with pytest.raises(Validation, match=text):
        mappings.take(greeting, PLAN, iter(messages).__next__, is_own=True)
    assert not mappings.table
    mappings.take(
        welcome(places=2),
        PLAN,
        iter(
            [
                wire.Allocations(new=(info(number=50),)),
                Handles(handles=((0, 50, 0), (1, 50, 64))),
            ]
        ).__next__,
        is_own=True,
    )
    assert mappings.addresses == [0x10000, 0x10040]
    assert mappings.count() == 1


class Opening(FakeMemory):
    """Opens what others export, at addresses that `allocation` knows to be `held` bytes long."""

    def __init__(self, held):
        super().__init__()
        self.held = held
        self.opened = []

    def open(self, handle, uuid):
        self.opened.append(handle)
        return 0x5000

    def allocation(self, address):
        return super().allocation(address)._replace(nbytes=self.held)

    def close(self, address):
        self.opened.remove(b"\0" * 64)


def test_an_allocation_that_is_shorter_than_announced_is_closed_again():
    memory = Opening(held=100)
    memory._add(0x5000, 100)
    mappings = DeviceMappings(memory)
    with pytest.raises(Validation, match="has 100 bytes, not 4096"):
        mappings.take(welcome(), PLAN, iter([ONE]).__next__, is_own=False)
    assert memory.opened == []
    assert mappings.count() == 0


@pytest.mark.parametrize(
    "change",
    [
        {"handle": b"\0" * 63},
        {"handle": b"\0" * 65},
        {"handle": "x"},
        {"number": 0},
        {"number": 2**40},
        {"nbytes": -1},
        {"nbytes": 2**63},
        {"uuid": "u" * 300},
        {"address": -4},
    ],
)
def test_fields_of_a_handle_are_bounded(change):
    fields = msgspec.to_builtins(info(), builtin_types=(bytes,)) | change
    message = {"type": "allocations", "protocol": 1, "new": [fields]}
    with pytest.raises(Validation, match="malformed"):
        wire.decode_to_reader(msgspec.msgpack.encode(message), peer="trainer")


def test_a_message_that_is_not_for_readers_is_refused():
    hello = encode(Hello(token="t", round=1, reader="r"))
    with pytest.raises(Validation, match="malformed"):
        wire.decode_to_reader(hello, peer="trainer")
    assert wire.decode_to_reader(encode(ONE), peer="trainer") == ONE


def test_both_sides_lay_out_alike():
    plan = plan_chunks([100, 0, 5000, 64, 0], [1] * 5, limit=4096, rule=ALIGNED)
    layout = DeviceLayout(plan, [3])
    assert layout.resident == [1, 3, 4]
    assert layout.streamed == [0, 2]
    assert [chunk.nbytes for chunk in layout.ring.chunks] == [4096, 1032]
    assert layout.slot_nbytes == 4096
    assert [list(run) for run in DeviceLayout(plan, range(5)).batches(5000)] == [[0, 1, 2], [3, 4]]


def test_a_column_of_addresses_is_kept_while_they_are_the_same():
    column = AddressColumn(torch.device("cpu"))
    first = column.of([2**62, 7])
    assert first.tolist() == [2**62, 7]
    assert column.of([2**62, 7]) is first
    assert column.of([7]).tolist() == [7]
    assert column.of([2**62, 7]).tolist() == [2**62, 7]


def test_what_is_read_in_place_comes_in_runs_that_grow_and_shrink():
    plan = plan_chunks([10] * 20, [1] * 20, limit=4096, rule=ALIGNED)
    layout = DeviceLayout(plan, range(20))
    runs = list(layout.batches(10, 40))
    assert [len(run) for run in runs] == [1, 2, 4, 4, 4, 3, 1, 1]
    assert [index for run in runs for index in run] == list(range(20))
    assert [len(run) for run in layout.batches(40)] == [4] * 5
    scattered = DeviceLayout(plan, [0, 1, 5, 6, 7])
    assert [list(run) for run in scattered.batches(30)] == [[0, 1, 5], [6, 7]]


def test_digests_by_address_are_the_defined_ones():
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (9 << 20,), dtype=torch.uint8, generator=generator)
    pieces = [data[:0], data[3:10], data[8:8200], data]
    memory = FakeMemory()
    digest = PointerDigest([len(p) for p in pieces], torch.device("cpu"), bytes_at=memory.bytes_at)
    found = digest.values([p.data_ptr() for p in pieces]).tolist()
    for piece, value in zip(pieces, found, strict=True):
        known = ChunkDigest("wsum64")
        known.update(piece)
        assert value % 2**64 == known.value()


@pytest.mark.parametrize("sizes", [[], [0], [1, 0, 7, 8, 9, 16, 17, 0], [64]])
def test_tiles_cover_every_piece(sizes):
    which, firsts = tiles_of(sizes, 8)
    expected = [(at, start) for at, size in enumerate(sizes) for start in range(0, size, 8)]
    starts = [8 * (tile - firsts[at]) for tile, at in enumerate(which.tolist())]
    assert list(zip(which.tolist(), starts, strict=True)) == expected
    assert (which.dtype, firsts.dtype) == (torch.int32, torch.int32)


def test_every_dtype_of_the_suite_is_there():
    assert torch.float8_e5m2 in DTYPES
    assert torch.complex64 in DTYPES


def test_nothing_is_read_before_it_was_looked_at(stack, monkeypatch):
    tensors = [torch.full((16,), float(at)) for at in range(4)]
    stream = Stream(stack)
    stream.memory.own(*tensors)
    addresses = [tensor.data_ptr() for tensor in tensors]
    plan, sender, receiver = plan_of(tensors), stream.sender, stream.receivers[0]
    copied, copy = threading.Event(), AddressCopy.__call__

    def noted(self, to, out_of):
        copied.set()
        copy(self, to, out_of)

    monkeypatch.setattr(AddressCopy, "__call__", noted)
    for number in (1, 2):
        targets, landed = places_for(tensors), []
        take = targets.__getitem__
        copied.clear()
        if number == 1:
            sender.set_tensors(tensors, addresses)
        else:
            assert sender.knows(addresses)
            sender.set_unseen(addresses)
        thread = threading.Thread(
            target=receiver.receive,
            args=(plan, take, landed.extend),
            kwargs={"round": number, "stall": STALL},
        )
        thread.start()
        sender.open(plan, 1, round=number, stall=STALL)
        sender.write(Run(0, tensors[:2], addresses[:2]))
        assert copied.wait(STALL if number == 1 else 0.3) == (number == 1)
        sender.write(Run(2, tensors[2:], addresses[2:]))
        sender.finish()
        thread.join(STALL)
        sender.close()
        receiver.close()
        assert landed == [0, 1, 2, 3]
        assert_equal(targets, tensors)


def test_a_plan_of_nothing_is_a_round_as_well(stack):
    stream = Stream(stack)
    results = stream.round([], [[]])
    assert [result.nbytes for result in results] == [0, 0]


def send_all(stream, plan, tensors, number):
    sender = stream.sender
    sender.open(plan, 1, round=number, stall=STALL)
    sender.write(Run(0, tensors, [tensor.data_ptr() for tensor in tensors]))
    sender.finish()
    sender.close()


def test_what_is_to_be_looked_at_is_while_readers_are_waited_for(stack):
    tensors = [torch.full((16,), float(at)) for at in range(4)]
    stream = Stream(stack)
    stream.memory.own(*tensors)
    addresses = [tensor.data_ptr() for tensor in tensors]
    plan, sender, receiver = plan_of(tensors), stream.sender, stream.receivers[0]
    looks, all_of_them = [], threading.Event()

    def look():
        looks.append(len(looks))
        if len(looks) == 5:
            all_of_them.set()
        return len(looks) < 5

    for number in (1, 2):
        targets = places_for(tensors)
        if number == 1:
            sender.set_tensors(tensors, addresses)
        else:
            sender.set_unseen(addresses, look)

        def receive(number=number, take=targets.__getitem__):
            if number == 2:
                assert all_of_them.wait(STALL / 10)  # nobody has to come for that
                with socket.socket(socket.AF_UNIX) as stranger:
                    stranger.connect(native_address(sender.address))
            receiver.receive(plan, take, lambda done: None, round=number, stall=STALL)

        thread = threading.Thread(target=receive)
        thread.start()
        send_all(stream, plan, tensors, number)
        thread.join(STALL)
        receiver.close()
        assert_equal(targets, tensors)
    assert len(looks) == 5
    assert sender._look is None


def test_readers_are_let_in_while_there_is_more_to_look_at(stack):
    tensors = [torch.ones(16)]
    stream = Stream(stack)
    stream.memory.own(*tensors)
    addresses = [tensor.data_ptr() for tensor in tensors]
    plan, sender, receiver = plan_of(tensors), stream.sender, stream.receivers[0]
    for number in (1, 2):
        if number == 1:
            sender.set_tensors(tensors, addresses)
        else:
            sender.set_unseen(addresses, lambda: True)
        targets = places_for(tensors)
        thread = threading.Thread(
            target=receiver.receive,
            args=(plan, targets.__getitem__, lambda done: None),
            kwargs={"round": number, "stall": STALL},
        )
        thread.start()
        send_all(stream, plan, tensors, number)
        thread.join(STALL)
        receiver.close()
        assert_equal(targets, tensors)
    sender.set_unseen(addresses, lambda: True)
    with pytest.raises(PhaseTimeout):
        sender.open(plan, 1, round=3, stall=0.2)
