"""The nccl backend as far as it goes without a GPU: ids, wire bytes, engines over a fake group."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import pickle
import sys
import threading
import time
import types
from collections import deque
from functools import cached_property

import fake_nccl
import models
import nccl_wire
import pytest
import torch
from everything import Everything
from fake_nccl import FakeGroup, Hub
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import PATIENT
from nccl_cases import FIXTURE, Recorder, create, described, tensor_of
from paced import Hold, Paced
from torch.distributed import TCPStore

import aiosync
from aiosync import NCCLTrainerInitInfo, State, Validation, WeightTransferEngineFactory, reading
from aiosync.engines.joining import rank_in_group
from aiosync.engines.nccl_common import NCCLWeightTransferInitInfo
from aiosync.infos import parse_info
from aiosync.metadata import ParamMeta, parse_dtype
from aiosync.testing import DirectClient
from transports.errors import DigestMismatch, PeerLost, PhaseTimeout, TransportAborted
from transports.nccl_receiver import NcclReceiver
from transports.nccl_rendezvous import (
    IdMeeting,
    decode_unique_id,
    encode_unique_id,
    pack_unique_id,
    parse_unique_id,
    publish_unique_id,
)
from transports.nccl_sender import NcclSender
from transports.planning import GRADED, NCCL_PACKED, plan_chunks
from transports.ring import blocks_of
from transports.store_host import StoreHost

ID = bytes(range(128))
VLLM = "vllm.distributed.device_communicators.pynccl_wrapper"
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


# -- the unique id -----------------------------------------------------------------------------


@pytest.fixture
def vllm_struct(monkeypatch):
    """The ctypes struct as vLLM declares it, under vLLM's name."""

    class ncclUniqueId(ctypes.Structure):  # noqa: N801
        _fields_ = [("internal", ctypes.c_byte * 128)]

    ncclUniqueId.__module__, ncclUniqueId.__qualname__ = VLLM, "ncclUniqueId"
    parts = VLLM.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[VLLM].ncclUniqueId = ncclUniqueId
    return ncclUniqueId


def test_the_struct_is_what_pickle_makes_of_vllms(vllm_struct):
    value = vllm_struct.from_buffer_copy(ID)
    assert pack_unique_id(ID) == pickle.dumps(value, protocol=4)
    assert bytes(pickle.loads(pack_unique_id(ID))) == ID
    for protocol in (4, 5):
        assert parse_unique_id(pickle.dumps(value, protocol=protocol)) == ID


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


HOSTILE = [
    b"",
    b"\x80\x04.",
    ID,
    pickle.dumps(Evil(), protocol=4),
    pickle.dumps(ID, protocol=4),
    pack_unique_id(ID) + b".",
    pack_unique_id(ID)[:-1],
    b"x" * 247,
    pack_unique_id(ID)[:-1] + pickle.dumps(Evil(), protocol=4)[2:],
    b"\x80\x04" * (1 << 20),
]


@pytest.mark.parametrize("stored", HOSTILE, ids=range(len(HOSTILE)))
def test_anything_else_is_refused(stored):
    with pytest.raises(Validation, match="no NCCL unique id") as caught:
        parse_unique_id(stored)
    assert caught.value.phase == "init"


def test_a_changed_byte_of_the_frame_is_refused():
    good = pack_unique_id(ID)
    start = good.index(ID)
    for at in [*range(start), *range(start + 128, len(good))]:
        bad = bytearray(good)
        bad[at] ^= 0x5A
        with pytest.raises(Validation):
            parse_unique_id(bytes(bad))


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=128, max_size=128))
def test_every_id_goes_both_ways(unique_id):
    assert parse_unique_id(pack_unique_id(unique_id)) == unique_id
    assert decode_unique_id(encode_unique_id(unique_id)) == unique_id


@pytest.mark.parametrize("text", ["", "AAAA", "*" * 172, "ü", "A" * 171 + "-", "A" * 171])
def test_text_that_is_no_id_is_refused(text):
    with pytest.raises(Validation, match="nccl_unique_id_b64"):
        decode_unique_id(text)


def test_an_id_of_another_length_is_not_sent():
    with pytest.raises(Validation, match="127 bytes"):
        pack_unique_id(ID[1:])


# -- the store -----------------------------------------------------------------------------------


def test_the_id_is_met_in_a_store():
    host = StoreHost()
    try:
        publish_unique_id(host, ID)
        for rank in (1, 2):
            meeting = IdMeeting(host.host, host.port, rank=rank, size=3)
            assert meeting.fetch(timeout=10) == ID
    finally:
        host.close()


def test_vllms_worker_finds_it_in_our_store(vllm_struct):
    host = StoreHost()
    try:
        publish_unique_id(host, ID)
        options = {"world_size": 2, "is_master": False, "use_libuv": False}
        store = TCPStore(host.host, host.port, **options)
        assert bytes(pickle.loads(store.get("broadcast_from/0/0"))) == ID
    finally:
        host.close()


def test_our_worker_finds_it_in_vllms_store_which_may_come_up_later(vllm_struct):
    with StoreHostPort() as port:
        found = []
        meeting = IdMeeting("127.0.0.1", port, rank=1, size=2)
        waiting = threading.Thread(target=lambda: found.append(meeting.fetch(timeout=20)))
        waiting.start()
        time.sleep(0.2)
        # As vLLM makes it: it comes up when both are there.
        store = TCPStore("127.0.0.1", port, 2, is_master=True, use_libuv=False)
        store.set("broadcast_from/0/0", pickle.dumps(vllm_struct.from_buffer_copy(ID)))
        waiting.join(20)
        assert found == [ID]


class StoreHostPort:
    """A port that was free a moment ago."""

    def __enter__(self):
        host = StoreHost()
        port = host.port
        host.close()
        return port

    def __exit__(self, *_):
        return None


def test_a_store_that_is_not_there_is_named():
    with StoreHostPort() as port, pytest.raises(PeerLost, match=f"port {port}"):
        IdMeeting("127.0.0.1", port, rank=1, size=2).fetch(timeout=0.3)


def test_an_id_that_never_comes_ends_in_time_or_by_an_abort():
    host = StoreHost()
    try:
        with pytest.raises(PhaseTimeout):
            IdMeeting(host.host, host.port, rank=1, size=2).fetch(timeout=0.3)
        meeting = IdMeeting(host.host, host.port, rank=1, size=2)
        threading.Timer(0.3, meeting.abort).start()
        with pytest.raises(TransportAborted):
            meeting.fetch(timeout=20)
        with pytest.raises(TransportAborted):
            meeting.fetch(timeout=20)
    finally:
        host.close()


# -- init infos ----------------------------------------------------------------------------------

STORE = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
BY_ID = {"nccl_unique_id_b64": encode_unique_id(ID), "rank_offset": 1, "world_size": 2}


def test_a_worker_has_vllms_defaults():
    info = parse_info(NCCLWeightTransferInitInfo, STORE, what="init_info")
    assert (info.packed, info.packed_buffer_size_bytes, info.packed_num_buffers) == (
        False,
        1 << 30,
        2,
    )
    assert encode_unique_id(ID) not in repr(
        parse_info(NCCLWeightTransferInitInfo, BY_ID, what="init_info")
    )


@pytest.mark.parametrize(
    ("info", "match"),
    [
        (BY_ID | {"master_address": "here"}, "give one way"),
        (BY_ID | {"master_port": 5}, "give one way"),
        ({"rank_offset": 1, "world_size": 2}, "give master_address and master_port"),
        ({k: v for k, v in STORE.items() if k != "master_port"}, "give master_address"),
        (BY_ID | {"nccl_unique_id_b64": "AAAA"}, "not 128"),
        (BY_ID | {"nccl_unique_id_b64": "*"}, "base64"),
        (STORE | {"packed_buffer_size_bytes": 0}, "packed_buffer_size_bytes"),
        (STORE | {"packed_num_buffers": 0}, "packed_num_buffers"),
        (STORE | {"join_s": -1.0}, "join_s"),
        (STORE | {"rank_offset": "1"}, "rank_offset"),
        (STORE | {"baseline": True}, "baseline"),
        ({"master_address": "a", "master_port": 1, "rank_offset": 1}, "world_size"),
    ],
)
def test_a_bad_init_info_names_its_field(info, match):
    with pytest.raises(Validation, match=match):
        parse_info(NCCLWeightTransferInitInfo, info, what="init_info")


def test_the_trainers_info_takes_vllms_positional_arguments():
    info = NCCLTrainerInitInfo("127.0.0.1", 29500, 3, True, 1 << 30, 2, rank=0)
    assert (info.master_port, info.world_size, info.packed_num_buffers) == (29500, 3, 2)
    assert NCCLTrainerInitInfo(rank=1).is_sender is False


@pytest.mark.parametrize(
    "options",
    [{"world_size": 1}, {"packed_num_buffers": 0}, {"packed_buffer_size_bytes": True}],
)
def test_a_bad_trainer_info_is_refused(options):
    with pytest.raises(Validation, match=next(iter(options))):
        NCCLTrainerInitInfo(rank=0, **options)


@without_cuda
def test_the_default_backend_without_cuda_says_what_to_use():
    config = aiosync.WeightTransferConfig()
    assert config.backend == "nccl"
    for device in (None, "cpu", "cuda"):
        with pytest.raises(Validation, match="needs a CUDA device") as caught:
            WeightTransferEngineFactory.create_engine(config, None, device, models.make("small", 1))
        assert '"ipc"' in str(caught.value)
        assert '"gloo"' in str(caught.value)


@without_cuda
@pytest.mark.asyncio
async def test_a_trainer_without_cuda_says_what_to_use():
    with pytest.raises(Validation, match="needs a CUDA device") as caught:
        async with aiosync.connect(models.make("small", 1), workers=["http://x"], backend="nccl"):
            pass
    assert '"gloo"' in str(caught.value)


# -- the ring ------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=60),
    st.integers(1, 4000),
    st.integers(1, 30000),
    st.sampled_from([NCCL_PACKED, GRADED]),
    st.booleans(),
)
def test_a_chunk_waits_for_all_whose_place_it_takes(sizes, limit, nbytes, rule, early):
    plan = plan_chunks(sizes, [1] * len(sizes), limit=limit, rule=rule)
    blocks, size = blocks_of(plan, nbytes, early=early)
    assert [(b.first, b.end) for b in blocks] == [
        (c.pieces[0].tensor, c.pieces[-1].tensor + 1) for c in plan.chunks
    ]
    done = -1  # chunks are waited for in order: a later one needs not say what an earlier one did
    for index, block in enumerate(blocks):
        done = max(done, block.after)
        has_place = early and index == 0 and 0 < block.nbytes <= nbytes
        if block.end - block.first == 1 and not has_place:
            assert block.place == -1
            continue
        assert 0 <= block.place <= block.place + block.nbytes <= size
        assert block.after < index
        for other in blocks[done + 1 : index]:
            if other.place >= 0 and other.nbytes and block.nbytes:
                assert (
                    other.place + other.nbytes <= block.place
                    or block.place + block.nbytes <= other.place
                )
    packed = [b.nbytes for b in blocks if b.place >= 0]
    assert size <= max(nbytes, max(packed, default=0) + 511)


# -- bytes on the wire -----------------------------------------------------------------------------


def test_the_fixture_is_what_its_generator_makes():
    assert nccl_wire.fixture() == FIXTURE


@pytest.mark.parametrize("name", FIXTURE)
def test_the_sender_puts_the_specified_bytes_on_the_wire(name):
    case = FIXTURE[name]
    metas, plan = described(case)
    group = Recorder()
    for ring_nbytes in (1, 1 << 20):
        group.hub = Hub()
        sender = NcclSender(group, ring_nbytes=ring_nbytes)
        sender.describe(metas)
        sender.open(plan, 1, round=1, stall=5)
        pairs = [(i, tensor_of(*t)) for i, t in enumerate(case["tensors"])]
        for start in range(0, len(pairs), 4):
            sender.write(pairs[start : start + 4])
        sender.finish()
        numbers = {parse_dtype(n): k for n, k in nccl_wire.NCCL_TYPE.items()}
        wire = [
            [numbers[dtype], len(raw) // dtype.itemsize, hashlib.sha256(raw).hexdigest()]
            for dtype, raw in group.hub.wire
        ]
        assert wire == case["broadcasts"]


@pytest.mark.parametrize("name", FIXTURE)
@pytest.mark.parametrize("prefetches", [(), (True,), (False,), (False, True)])
def test_the_receiver_takes_the_specified_bytes_from_the_wire(name, prefetches):
    case = FIXTURE[name]
    metas, plan = described(case)
    group = FakeGroup(1, 2)
    group.hub.queues[1] = deque(
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for _, _, data in nccl_wire.broadcasts(
            [tuple(t) for t in case["tensors"]], case["packed"], case["limit"]
        )
    )
    receiver = NcclReceiver(group, ring_nbytes=1 << 20)
    receiver.describe(metas)
    into = [torch.zeros(m.shape, dtype=m.dtype) for m in metas]
    landed = []
    waiting = len(group.hub.queues[1])
    for posts in prefetches:
        receiver.prefetch(plan, round=1, stall=5, posts=posts)
        assert posts or len(group.hub.queues[1]) == waiting
    receiver.receive(plan, into.__getitem__, landed.extend, round=1, stall=5)
    assert landed == list(range(len(metas)))
    for tensor, (tensor_name, dtype, shape) in zip(into, case["tensors"], strict=True):
        sent = nccl_wire.content(tensor_name, dtype, tuple(shape))
        assert bytes(tensor.view(-1).view(torch.uint8).numpy()) == sent, tensor_name
    assert not group.hub.queues[1]


@pytest.mark.parametrize("prefetches", [False, True])
def test_the_receiver_is_ready_for_what_comes_next_as_far_as_its_ring_goes(prefetches):
    count, size = 12, 512
    plan = plan_chunks([size // 2] * 2 * count, [1] * 2 * count, limit=size - 1, rule=NCCL_PACKED)
    assert len(plan.chunks) == count
    group, taken = FakeGroup(1, 2), []

    class Counted(FakeGroup):
        def broadcast(self, data, queue, *, timeout):
            super().broadcast(data, queue, timeout=timeout)
            taken.append(len(data))

    group.__class__ = Counted
    sent = [torch.full((size,), at + 1, dtype=torch.uint8) for at in range(count)]
    group.hub.queues[1] = deque(sent)
    receiver = NcclReceiver(group, ring_nbytes=3 * size)
    receiver.describe([ParamMeta(f"t{at}", torch.uint8, (size // 2,)) for at in range(2 * count)])
    into = [torch.zeros(size // 2, dtype=torch.uint8) for _ in range(2 * count)]
    ready = []

    def destination(index):
        if index % 2 == 0:
            ready.append(len(taken))
        return into[index]

    if prefetches:
        receiver.prefetch(plan, round=1, stall=5)
    receiver.receive(plan, destination, lambda done: None, round=1, stall=5)
    assert ready == [3 if prefetches else 1] + [min(at + 3, count) for at in range(1, count)]
    for at, tensor in enumerate(into):  # nothing was written over before it was taken out
        assert torch.equal(tensor, sent[at // 2][: size // 2])


def test_a_sender_takes_what_is_due_and_nothing_else():
    case = FIXTURE["one chunk"]
    metas, plan = described(case)
    sender = NcclSender(Recorder())
    sender.describe(metas)
    with pytest.raises(Validation, match="2 readers in a group of 2"):
        sender.open(plan, 2, round=1, stall=5)
    sender.open(plan, 1, round=1, stall=5)
    with pytest.raises(Validation, match="tensor 0 is next"):
        sender.write([(1, torch.zeros(3))])
    with pytest.raises(Validation, match="embed has 8 bytes"):
        sender.write([(0, torch.zeros(2))])
    with pytest.raises(Validation, match="embed was not written"):
        sender.finish()


# -- whole rounds over a fake group ----------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch):
    fake_nccl.install(monkeypatch)


def test_bytes_arrive_on_the_device_of_the_engine(fake):
    """NCCL writes straight into what the sink hands out, which must not be on the host."""
    engine = create({"w": torch.zeros(3)})
    engine.device = torch.device("meta")
    assert engine.know_sink().device == torch.device("meta")


def raw_of(tensor):
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


def assert_arrived(source, model):
    for name, tensor in source.tensors.items():
        assert model[name].shape == tensor.shape
        assert torch.equal(raw_of(model[name]), raw_of(tensor)), name


@pytest.mark.asyncio
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("sink", ["staged", "in_place"])
@pytest.mark.parametrize("verify", ["digest", "counts"])
async def test_every_dtype_and_layout_arrives_as_it_was(fake, packed, sink, verify):
    source = Everything()
    options = {"backend": "nccl", "packed": packed, "packed_buffer_size_bytes": 1 << 12}
    models_ = [
        {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in source.tensors.items()}
        for _ in range(2)
    ]
    async with create(models_[0], sink=sink, verify=verify) as one, create(models_[1]) as two:
        clients = [DirectClient(one, name="one"), DirectClient(two, name="two")]
        async with aiosync.connect(source, workers=clients, **options) as sync:
            for version in (1, 2, 3):  # the second begins to take bytes before the sink is ready
                for tensor in source.tensors.values():
                    if tensor.dtype == torch.float32 and tensor.is_contiguous():
                        tensor.add_(1)
                report = await sync.send_weights(version=version, budget=PATIENT)
                assert report.outcome == "committed"
                assert report.verified == (verify == "digest")
                for model in models_:
                    assert_arrived(source, model)
    assert FakeGroup.aborts == 3  # of three groups: closed, none was aborted twice


@pytest.mark.asyncio
async def test_a_corrupted_chunk_is_noticed_and_named(fake, monkeypatch):
    source = Paced(models.make("small", seed=1))
    model = models.make("small", seed=2)
    before = models.fingerprint(model)
    options = {"backend": "nccl", "packed_buffer_size_bytes": 1 << 12}

    def spoil(index, raw):
        if index == 1:
            raw = raw.clone()
            raw[3] ^= 1
        return raw

    async with create(model) as worker:
        clients = [DirectClient(worker)]
        async with aiosync.connect(source, workers=clients, **options) as sync:
            monkeypatch.setattr(FakeGroup, "spoil", spoil)
            with pytest.raises(aiosync.AiosyncError, match="arrived with digest") as caught:
                await sync.send_weights(version=1, budget=PATIENT)
            assert caught.value.code == DigestMismatch.code
            assert models.fingerprint(model) == before
            monkeypatch.setattr(FakeGroup, "spoil", None)
            await sync.send_weights(version=2, budget=PATIENT)
            assert models.fingerprint(model) == models.fingerprint(source.module)


@pytest.mark.asyncio
@pytest.mark.parametrize("at", [0, 3, 6])
async def test_a_cancelled_round_ends_the_group_and_the_next_one_works(fake, at):
    hold = Hold(at)
    source = Paced(models.make("small", seed=1), hold)
    model = models.make("small", seed=2)
    before = models.fingerprint(model)
    async with create(model) as worker:
        options = {"backend": "nccl", "packed_buffer_size_bytes": 1 << 10}
        clients = [DirectClient(worker)]
        async with aiosync.connect(source, workers=clients, **options) as sync:
            round_ = asyncio.create_task(sync.send_weights(version=1, budget=PATIENT))
            async with asyncio.timeout(20):
                while not hold.reached.is_set():
                    await asyncio.sleep(0.005)
            round_.cancel()
            asyncio.get_running_loop().call_later(0.1, hold.released.set)
            await asyncio.wait([round_])
            assert round_.cancelled()
            assert sync.state is State.FAILED
            async with asyncio.timeout(20):  # the worker's end may outlast the trainer's clean-up
                while not all(group.is_aborted for group in FakeGroup.made):
                    await asyncio.sleep(0.005)
            assert models.fingerprint(model) == before
            report = await sync.send_weights(version=2, budget=PATIENT)
            assert report.outcome == "committed"
            assert models.fingerprint(model) == models.fingerprint(source.module)


@pytest.mark.asyncio
async def test_the_first_of_a_fleet_of_stores_serves_all_ranks(fake):
    source = Everything()
    model = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in source.tensors.items()}
    async with create(model) as worker:
        options = {"backend": "nccl", "master_address": "127.0.0.1", "world_size": 2}
        clients = [DirectClient(worker)]
        async with aiosync.connect(source, workers=clients, **options) as sync:
            await sync.send_weights(version=1, budget=PATIENT)
    assert_arrived(source, model)


@pytest.mark.asyncio
async def test_a_wrong_world_size_is_refused(fake):
    async with create(models.make("small", 2)) as worker:
        with pytest.raises(Validation, match="world_size is 3, but this trainer and its"):
            async with aiosync.connect(
                models.make("small", 1),
                workers=[DirectClient(worker)],
                backend="nccl",
                world_size=3,
            ):
                pass


@pytest.mark.asyncio
@pytest.mark.parametrize(("graded", "chunks"), [(True, 20), (False, 9)])
async def test_a_plan_counts_the_ring(fake, graded, chunks):
    source = models.make("large", seed=1)
    async with create(models.make("large", seed=2)) as worker:
        options = {"backend": "nccl", "packed_buffer_size_bytes": 6 << 20, "packed_num_buffers": 2}
        clients = [DirectClient(worker)]
        options |= {"graded": graded}
        async with aiosync.connect(source, workers=clients, **options) as sync:
            plan = await sync.plan()
    assert plan.trainer_bytes == 12 << 20
    assert plan.chunks == chunks


# -- stock peers -----------------------------------------------------------------------------------


class Stock:
    """vLLM's four calls, with the strictness of its bodies, in front of one of our engines."""

    def __init__(self, engine, world_size=1):
        self.engine, self.world_size = engine, world_size
        self.inits, self.updates = [], []

    async def get_world_size(self):
        return self.world_size

    async def init_weight_transfer_engine(self, init_info):
        known = {"master_address", "master_port", "nccl_unique_id_b64", "rank_offset"}
        known |= {"world_size", "packed", "packed_buffer_size_bytes", "packed_num_buffers"}
        assert set(init_info) <= known
        self.inits.append(init_info)
        await self.engine.init_transfer_engine(init_info)

    async def start_weight_update(self):
        await self.engine.start_weight_update()

    async def update_weights(self, update_info):
        assert set(update_info) == {"names", "dtype_names", "shapes"}
        self.updates.append(update_info)
        await self.engine.update_weights(update_info)

    async def finish_weight_update(self, weight_version=None):
        await self.engine.finish_weight_update(weight_version)


@pytest.mark.asyncio
@pytest.mark.parametrize("packed", [True, False])
async def test_a_stock_worker_gets_vllms_fields_only(fake, packed):
    source = models.make("small", seed=1)
    model = models.make("small", seed=2)
    async with create(model) as worker:
        client = Stock(worker)
        options = {"backend": "nccl", "packed": packed, "packed_buffer_size_bytes": 1 << 12}
        async with aiosync.connect(source, workers=[client], **options) as sync:
            for version in (1, 2):
                await sync.send_weights(version=version, budget=PATIENT)
                assert models.fingerprint(model) == models.fingerprint(source)
            hub = FakeGroup.made[0].hub
            assert len(hub.wire) % 2 == 0  # no digest follows
            assert bool(client.updates[0]["names"])
            assert client.updates[1] == {"names": [], "dtype_names": [], "shapes": []}
            assert client.inits[0]["rank_offset"] == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("stock", "graded", "rule"),
    [(False, True, GRADED), (False, False, NCCL_PACKED), (True, True, NCCL_PACKED)],
)
async def test_chunks_are_graded_where_all_workers_know_how(fake, stock, graded, rule):
    source = models.make("many", seed=1)
    sizes = [parameter.nbytes for parameter in source.parameters()]
    sent = [c.nbytes for c in plan_chunks(sizes, [4] * len(sizes), limit=1024, rule=rule).chunks]
    async with create(models.make("many", 2)) as one, create(models.make("many", 3)) as two:
        clients = [DirectClient(one), Stock(two) if stock else DirectClient(two, name="two")]
        options = {"backend": "nccl", "packed_buffer_size_bytes": 1024, "graded": graded}
        async with aiosync.connect(source, workers=clients, **options) as sync:
            await sync.send_weights(version=1, budget=PATIENT)
        for worker in (one, two):
            assert models.fingerprint(worker.model) == models.fingerprint(source)
    wire = [len(raw) for _, raw in FakeGroup.made[0].hub.wire]
    digests = [] if stock else [8 * len(sent)]
    assert wire == sent + digests


@pytest.mark.asyncio
async def test_what_a_stock_worker_cannot_read_is_refused_before_a_byte_moves(fake):
    tensors = {"bias": torch.zeros(3, dtype=torch.bfloat16), "scale": torch.zeros(4)}
    source = Dict(tensors)
    async with create({n: torch.zeros_like(t) for n, t in tensors.items()}) as worker:
        async with aiosync.connect(source, workers=[Stock(worker)], backend="nccl") as sync:
            with pytest.raises(Validation, match="scale starts at byte 6") as caught:
                await sync.send_weights(version=1, budget=PATIENT)
            assert caught.value.tensor == "scale"
            assert sync.state is State.INITIALIZED
            assert FakeGroup.made[0].hub.wire == []


@pytest.mark.asyncio
async def test_an_unpacked_dtype_that_vllm_lacks_is_refused_by_name(fake):
    model = {"w": torch.zeros(3), "mask": torch.zeros(3, dtype=torch.bool)}
    source = Dict({"w": torch.ones(3), "mask": torch.ones(3, dtype=torch.bool)})
    async with create(model) as worker:
        options = {"backend": "nccl", "packed": False}
        async with aiosync.connect(source, workers=[Stock(worker)], **options) as sync:
            with pytest.raises(Validation, match=r"mask: vLLM's unpacked wire has no torch\.bool"):
                await sync.send_weights(version=1, budget=PATIENT)


class Dict(aiosync.WeightSource):
    def __init__(self, tensors):
        self.tensors = tensors

    @cached_property
    def metadata(self):
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

    def iter_full(self):
        yield from self.tensors.items()


@pytest.mark.asyncio
@pytest.mark.parametrize("packed", [True, False])
async def test_a_stock_trainer_drives_our_worker(fake, packed):
    """Rank 0 by hand: ids, calls and bytes as vLLM's trainer has them."""
    case = FIXTURE["unpacked"]
    tensors = [tuple(t) for t in case["tensors"]]
    model = {n: torch.zeros(s, dtype=parse_dtype(d)) for n, d, s in tensors}
    unique_id = fake_nccl.new_unique_id()
    trainer = FakeGroup(0, 2)
    async with create(model) as worker:
        info = {"nccl_unique_id_b64": encode_unique_id(unique_id), "rank_offset": 1}
        info |= {"world_size": 2, "packed": packed, "packed_buffer_size_bytes": 1 << 9}
        joining = asyncio.create_task(asyncio.to_thread(trainer.join, unique_id, timeout=10))
        await worker.init_transfer_engine(info)
        await joining
        full = {
            "names": [n for n, _, _ in tensors],
            "dtype_names": [d for _, d, _ in tensors],
            "shapes": [list(s) for _, _, s in tensors],
        }
        empty = {"names": [], "dtype_names": [], "shapes": []}
        for update in (full, empty):
            for tensor in model.values():
                tensor.zero_()
            await worker.start_weight_update()
            for _, _, data in nccl_wire.broadcasts(tensors, packed, 1 << 9):
                trainer.broadcast(
                    torch.frombuffer(bytearray(data), dtype=torch.uint8), None, timeout=1
                )
            await worker.update_weights(update)
            await worker.finish_weight_update()
            for name, dtype, shape in tensors:
                raw = bytes(raw_of(model[name]).numpy())
                assert raw == nccl_wire.content(name, dtype, shape), name


@pytest.mark.asyncio
async def test_empty_lists_without_an_earlier_update_are_refused(fake):
    unique_id = fake_nccl.new_unique_id()
    trainer = FakeGroup(0, 2)
    async with create(models.make("small", 2)) as worker:
        info = {"nccl_unique_id_b64": encode_unique_id(unique_id), "rank_offset": 1}
        joining = asyncio.create_task(asyncio.to_thread(trainer.join, unique_id, timeout=10))
        await worker.init_transfer_engine(info | {"world_size": 2})
        await joining
        await worker.start_weight_update()
        with pytest.raises(Validation, match="announces nothing"):
            await worker.update_weights({"names": [], "dtype_names": [], "shapes": []})


@pytest.mark.asyncio
@pytest.mark.parametrize(("parallel", "rank"), [((0, 1, 0), 2), ((1, 2, 1), 5)])
async def test_ranks_inside_vllm_are_counted_as_vllm_counts(fake, parallel, rank):
    replica, size, own = parallel
    config = types.SimpleNamespace(data_parallel_index=replica, world_size=size, rank=own)
    vllm = types.SimpleNamespace(parallel_config=config)
    options = aiosync.WeightTransferConfig("nccl")
    engine = WeightTransferEngineFactory.create_engine(options, vllm, None, {})
    info = parse_info(
        NCCLWeightTransferInitInfo, BY_ID | {"rank_offset": 2, "world_size": 6}, what="i"
    )
    assert rank_in_group(engine.parallel_config, info.rank_offset, info.world_size) == rank
    small = parse_info(
        NCCLWeightTransferInitInfo, BY_ID | {"rank_offset": 7, "world_size": 6}, what="i"
    )
    with pytest.raises(Validation, match="is not in a group of 6"):
        rank_in_group(engine.parallel_config, small.rank_offset, small.world_size)
    await engine.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["open", "write", "finish"])
@pytest.mark.parametrize("trained", [slice(None), slice(1, None)])
async def test_a_step_is_noticed_once_the_round_has_begun(fake, monkeypatch, method, trained):
    # A device would write and read in any order what is queued once the round has begun.
    monkeypatch.setattr(reading, "_MOST", 1)  # the first tensor, which may be frozen
    net, theirs = layers(), layers()
    options = {"backend": "nccl", "packed_buffer_size_bytes": 1 << 10}
    async with create(theirs) as worker:
        async with aiosync.connect(net, workers=[DirectClient(worker)], **options) as sync:
            await sync.send_weights(version=1, budget=PATIENT)
            sender = sync.sender
            bare, calls = getattr(sender, method), []

            def stepping(*args, **named):
                calls.append(method)
                if method != "write" or len(calls) == 2:
                    with torch.no_grad():
                        for parameter in [*net.parameters()][trained]:
                            parameter.add_(1)
                return bare(*args, **named)

            setattr(sender, method, stepping)
            with pytest.raises(aiosync.Validation, match="changed while the round was reading"):
                await sync.send_weights(version=2, budget=PATIENT)
            assert calls


def layers():
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
