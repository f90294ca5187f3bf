"""Which form backend ipc takes, and vLLM's own: all that can be seen without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from aiohttp.http_writer import StreamWriter
from torch import nn

import aiosync
from aiosync import ParamMeta
from aiosync.engines.ipc_device import check_devices, own_device, own_gpu
from aiosync.engines.ipc_stock import are_stock, stock_plan
from aiosync.sink_base import Sink
from statemachines.errors import InvalidTransition, Validation
from transports import tuple_sender
from transports.lane_thread import LaneWorker
from transports.planning import EACH, IPC_PACKED, plan_chunks
from transports.tuple_sender import TupleSender


def link(name, *, gpu=None, ours=True, **client):
    peer = SimpleNamespace(detail={} if gpu is None else {"gpu": gpu}) if ours else None
    return SimpleNamespace(name=name, peer=peer, speaks_ours=ours, client=SimpleNamespace(**client))


def test_the_form_follows_the_workers():
    assert check_devices([link("a", gpu="x"), link("b", gpu="y")])
    assert not check_devices([link("a"), link("b")])
    with pytest.raises(aiosync.ProtocolMismatch, match="a is on GPU x, that of b on the CPU"):
        check_devices([link("a", gpu="x"), link("b")])


def test_a_worker_on_the_cpu_has_no_gpu():
    assert own_device(None) == (None, None)
    assert own_device("cpu") == ("cpu", None)
    if not torch.cuda.is_available():
        with pytest.raises(Validation, match="no CUDA device"):
            own_device("cuda")


def test_a_trainer_is_on_the_gpu_that_its_thread_has_chosen(monkeypatch):
    """Not on the lane's, which is always the first one."""
    assert own_gpu("cuda:3") == torch.device("cuda:3")
    assert own_gpu("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert own_gpu(None) is None  # no context is made to find out
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert own_gpu(None) == own_gpu("cuda") == torch.device("cuda:2")


@pytest.mark.asyncio
async def test_a_form_that_does_not_fit_the_model_is_refused():
    config = aiosync.WeightTransferConfig("ipc")
    engine = aiosync.IPCWeightTransferEngine(config, None, "cpu", nn.Linear(2, 2))
    info = {"form": "cuda", "address": "@x", "token": "t", "reader": "r", "buffer_size_bytes": 64}
    async with engine:
        with pytest.raises(Validation, match="form is 'cuda', this worker's model is on the CPU"):
            await engine.init_transfer_engine(info)
        with pytest.raises(Validation, match="form"):
            await engine.init_transfer_engine(info | {"form": "pickle"})


def test_stock_workers_need_a_client_that_lets_pickles_out():
    assert not are_stock([link("a"), link("b")])
    assert are_stock([link("a", ours=False)])
    assert are_stock([link("a", ours=False, allow_pickled_handles=True)])
    with pytest.raises(
        Validation, match=r"check host, port and path; .* handles pickled"
    ) as caught:
        are_stock([link("a", ours=False, allow_pickled_handles=False)])
    assert "allow_pickled_handles=True" in caught.value.next_step
    with pytest.raises(aiosync.ProtocolMismatch, match="b is no aiosync worker"):
        are_stock([link("a"), link("b", ours=False)])


def feed(*metas):
    return SimpleNamespace(metadata=[ParamMeta(n, d, s) for n, d, s in metas])


def test_what_vllm_would_choke_on_is_refused_before_anything_moves():
    odd = feed(("a", torch.bfloat16, (3,)), ("b", torch.float32, (2,)))
    with pytest.raises(Validation, match="b starts at byte 6"):
        stock_plan(odd, 1024, packed=True)
    assert stock_plan(odd, 1024, packed=False).rule == EACH
    with pytest.raises(Validation, match="b has 8 bytes, more than a chunk of 7"):
        stock_plan(feed(("a", torch.int8, (3,)), ("b", torch.float32, (2,))), 7, packed=True)


@pytest.fixture
def handles(monkeypatch):
    monkeypatch.setattr(tuple_sender, "exported", lambda t: {"gpu": (t.data_ptr(), t.nbytes)})


TENSORS = [torch.arange(4.0), torch.zeros(0, 3), torch.arange(12.0).view(3, 4).t(), torch.ones(2)]


def sent(packed, limit=40):
    sizes = [t.nbytes for t in TENSORS]
    rule = IPC_PACKED if packed else EACH
    plan = plan_chunks(sizes, [4] * 4, limit=limit if not packed else max(limit, 48), rule=rule)
    sender, updates = TupleSender(torch.device("cpu"), packed=packed), []

    def post(indices, fields):
        data = sender._buffer.clone() if packed else None
        updates.append((indices, fields, data))

    sender.connect(post, lambda: None)
    sender.open(plan, 1, round=1, stall=1.0)
    for index, tensor in enumerate(TENSORS):
        sender.write([(index, tensor)])
    summary = sender.finish()
    sender.close()
    assert summary.nbytes == sum(sizes)
    return sender, updates


def test_unpacked_is_one_update_with_a_handle_for_each_tensor(handles):
    sender, updates = sent(packed=False)
    ((indices, fields, _),) = updates
    assert indices == [0, 1, 2, 3]
    assert len(fields["ipc_handles"]) == 4
    assert fields["ipc_handles"][0] == {"gpu": (TENSORS[0].data_ptr(), 16)}
    assert set(fields) == {"ipc_handles"}
    assert len(sender._kept) == 4  # until the workers have finished
    sender.forget()
    assert sender._kept == []
    with pytest.raises(InvalidTransition):
        sender.open(plan_chunks([], [], limit=1, rule=EACH), 1, round=2, stall=1.0)


def test_packed_is_an_update_for_each_filling_of_one_buffer(handles):
    _, updates = sent(packed=True)
    assert [indices for indices, _, _ in updates] == [[0, 1], [2], [3]]
    assert [fields["tensor_sizes"] for _, fields, _ in updates] == [[16, 0], [48], [8]]
    assert len({str(fields["ipc_handles"]) for _, fields, _ in updates}) == 1
    for indices, fields, data in updates:
        expected = b"".join(bytes(TENSORS[i].contiguous().numpy().tobytes()) for i in indices)
        assert bytes(data[: sum(fields["tensor_sizes"])].tolist()) == expected


@pytest.mark.asyncio
@pytest.mark.parametrize("early", [False, True])
async def test_a_round_is_verified_once_and_before_it_counts(early, monkeypatch):
    verified = []
    for name in ("verify", "verify_stream"):
        verify = getattr(Sink, name)
        noted = lambda sink, verify=verify: (verified.append(phase()), verify(sink))  # noqa: E731
        monkeypatch.setattr(Sink, name, noted)
    engine = aiosync.IPCWeightTransferEngine(
        aiosync.WeightTransferConfig("ipc"), None, "cpu", nn.Linear(2, 2)
    )
    engine.verifies_early = early

    def phase():
        return engine.state

    async with engine, aiosync.serve(engine) as server:
        async with aiosync.connect(nn.Linear(2, 2), workers=[server.url]) as sync:
            for _ in range(2):
                await sync.send_weights()
    assert verified == ["updating" if early else "finalizing"] * 2


@pytest.mark.asyncio
async def test_workers_are_told_of_an_update_before_the_lane_is_busy_with_it(monkeypatch):
    steps = []
    write, submit = StreamWriter._writelines, LaneWorker.submit

    def noted_write(writer, chunks):
        if b"POST /update_weights" in chunks[0]:
            steps.append("request")
        return write(writer, chunks)

    def noted_submit(worker, call):
        if getattr(call.fn, "__name__", "") == "_drive" and "source" in worker.name:
            steps.append("lane")
        return submit(worker, call)

    monkeypatch.setattr(StreamWriter, "_writelines", noted_write)
    monkeypatch.setattr(LaneWorker, "submit", noted_submit)
    engine = aiosync.IPCWeightTransferEngine(
        aiosync.WeightTransferConfig("ipc"), None, "cpu", nn.Linear(2, 2)
    )
    async with engine, aiosync.serve(engine) as server:
        async with aiosync.connect(nn.Linear(2, 2), workers=[server.url]) as sync:
            for _ in range(2):
                await sync.send_weights()
    assert steps == ["request", "lane"] * 2
