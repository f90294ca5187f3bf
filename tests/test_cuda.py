"""Waiting for marks, batched copies and digests on a device: what can be seen without one."""

from __future__ import annotations

import math
import time

import anyio
import anyio.lowlevel
import pytest
import torch

from statemachines.errors import Validation
from transports.cuda import (
    REACHED,
    WorkQueue,
    borrow_queue,
    copy_batch,
    copy_form,
    cuda_device,
    in_form,
    mark_current,
    poll,
    return_queue,
    wait_event,
)
from transports.device_digest import DeviceDigests
from transports.digest import ChunkDigest
from transports.errors import PhaseTimeout, TransportAborted

CPU = torch.device("cpu")
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


class After:
    """A mark that is reached at the n-th question."""

    def __init__(self, questions):
        self.left = questions
        self.asked = []

    def query(self):
        self.asked.append(time.monotonic())
        self.left -= 1
        return self.left < 0


@pytest.mark.anyio
async def test_a_mark_is_waited_for_without_blocking_the_loop():
    mark, turns = After(5), 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(count)
        await wait_event(mark)
        group.cancel_scope.cancel()
    assert len(mark.asked) == 6
    assert turns > 1  # none, were the loop blocked


@pytest.mark.anyio
async def test_waiting_for_a_mark_ends_with_its_limit_or_a_cancellation():
    with pytest.raises(PhaseTimeout):
        await wait_event(After(math.inf), limit=0.02)
    with anyio.move_on_after(0.02) as scope:
        await wait_event(After(math.inf))
    assert scope.cancelled_caught


def test_nothing_is_asked_before_it_is_expected():
    mark = After(1)
    poll(mark, lambda: None, expected=0.01)
    assert mark.asked[1] - mark.asked[0] >= 0.01


def test_a_poll_is_ended_by_its_check():
    looks = 0

    def check():
        nonlocal looks
        looks += 1
        if looks == 4:
            raise TransportAborted("told to stop")

    with pytest.raises(TransportAborted):
        poll(After(math.inf), check)
    assert looks == 4


def test_an_error_of_the_device_is_raised():
    class Broken:
        def query(self):
            raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        poll(Broken(), lambda: None)


def test_on_the_cpu_everything_is_done_at_once():
    queue = WorkQueue(CPU)
    with queue.active():
        queue.wait(REACHED)
    assert queue.record() is REACHED
    assert mark_current(CPU) is REACHED
    assert queue.handle == 0


def test_a_queue_that_was_returned_is_used_again():
    first, other = borrow_queue(CPU), borrow_queue(CPU)
    assert first is not other
    return_queue(first)
    assert borrow_queue(CPU, urgent=True) is not first
    assert borrow_queue(CPU) is first


@without_cuda
def test_without_cuda_there_is_no_cuda_device():
    with pytest.raises(Validation, match="no CUDA device"):
        cuda_device()


def test_another_kind_of_device_is_refused():
    with pytest.raises(Validation, match="the device is cpu"):
        cuda_device("cpu")


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("aligned", [True, False])
def test_a_batched_copy_moves_every_bit_of_every_dtype(aligned):
    generator = torch.Generator().manual_seed(3)
    sources, targets = [], []
    for dtype in DTYPES:
        for shape in [(), (0, 3), (5,), (3, 7)]:
            count = torch.Size(shape).numel() * dtype.itemsize
            top = 2 if dtype == torch.bool else 256
            raw = torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator)
            sources.append(raw.view(dtype).view(shape))
            targets.append(torch.zeros(shape, dtype=dtype))
    forms = [copy_form(tensor.dtype, aligned=aligned) for tensor in sources]
    copy_batch(
        [in_form(t, form) for t, form in zip(targets, forms, strict=True)],
        [in_form(t, form) for t, form in zip(sources, forms, strict=True)],
    )
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8))


SIZES = [0, 1, 7, 8, 9, 4096, 4095, 4097, 3 * 4096 + 13, (8 << 20) - 1, 8 << 20, (8 << 20) + 5]


@pytest.mark.parametrize("size", [*SIZES, (17 << 20) + 4101, (80 << 20) + 8])
def test_the_digest_is_the_one_that_is_defined(size):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    digest = ChunkDigest("wsum64")
    digest.update(data)
    digests = DeviceDigests(2, CPU)
    digests.update(data)
    digests.update(data[: size // 16 * 8])
    assert digests.read()[0] == digest.value()
    half = ChunkDigest("wsum64")
    half.update(data[: size // 16 * 8])
    assert digests.read()[1] == half.value()
