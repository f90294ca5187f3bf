"""Anonymous shared memory, and tensors moved into it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from statemachines.errors import Validation
from transports import segments
from transports.errors import OutOfSharedMemory
from transports.segments import Segment, available_memory
from transports.sharing import share_tensors

MAPS = Path("/proc/self/maps")


def fd_count():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def names_in_shm():
    return {path.name for path in Path("/dev/shm").iterdir()}


def mapped_segments() -> int:
    return sum("memfd:aiosync" in line for line in MAPS.read_text().splitlines())


def test_two_mappings_of_one_segment_see_the_same_bytes():
    first = Segment.create(4096)
    second = Segment.attach(os.dup(first.fileno()), nbytes=4096, key=first.key)
    first.tensor[7] = 42
    assert second.tensor[7] == 42
    assert int(first.tensor.sum()) == 42  # the rest begins as zeros
    first.close()
    second.close()


def test_close_frees_the_descriptor_at_once_and_the_mapping_with_the_last_view():
    gc.collect()
    fds, maps = fd_count(), mapped_segments()
    segment = Segment.create(1 << 20)
    view = segment.view(64, 64)
    view.fill_(3)
    segment.close()
    segment.close()
    assert fd_count() == fds
    assert mapped_segments() == maps + 1
    assert int(view.sum()) == 3 * 64
    del view
    assert mapped_segments() == maps
    with pytest.raises(Validation, match="closed"):
        _ = segment.tensor


def test_a_dropped_segment_closes_itself():
    fds = fd_count()
    Segment.create(4096)
    gc.collect()
    assert fd_count() == fds


def test_nobody_can_shrink_a_segment_under_its_readers():
    segment = Segment.create(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fileno(), 0)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fileno(), 1 << 20)
    segment.close()


def test_attach_refuses_what_could_shrink_or_is_no_memory(tmp_path):
    fds = fd_count()
    unsealed = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(Validation, match="sealed"):
        Segment.attach(unsealed)
    read_end, write_end = os.pipe()
    with pytest.raises(Validation, match="no shared memory"):
        Segment.attach(read_end)
    os.close(write_end)
    segment = Segment.create(4096)
    with pytest.raises(Validation, match="announced as 8192"):
        Segment.attach(os.dup(segment.fileno()), nbytes=8192)
    segment.close()
    empty = os.open(tmp_path / "empty", os.O_CREAT | os.O_RDWR)
    with pytest.raises(Validation, match="0 bytes"):
        Segment.attach(empty)
    assert fd_count() == fds  # attach owns, so it closed them all


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 4097), (4096, 1), (1, -1), (2**62, 4)])
def test_view_is_bounds_checked(offset, nbytes):
    segment = Segment.create(4096)
    with pytest.raises(Validation, match="outside"):
        segment.view(offset, nbytes)
    segment.close()


@pytest.mark.parametrize(
    ("offset", "dtype", "shape"),
    [
        (2, torch.float32, (1,)),
        (4092, torch.float64, ()),
        (0, torch.uint8, (4097,)),
        (-8, torch.int64, ()),
    ],
)
def test_typed_views_are_checked(offset, dtype, shape):
    segment = Segment.create(4096)
    with pytest.raises(Validation):
        segment.typed(offset, dtype, shape)
    segment.close()


def test_typed_views_are_contiguous_and_exactly_where_asked():
    segment = Segment.create(4096)
    view = segment.typed(128, torch.bfloat16, (2, 0, 3))
    assert view.shape == (2, 0, 3)
    view = segment.typed(128, torch.complex64, (3, 1, 2))
    assert view.is_contiguous()
    assert view.data_ptr() == segment.address_range[0] + 128
    assert segment.typed(4088, torch.int64, ()).shape == ()
    segment.close()


@pytest.mark.fault("A-LAYOUT-8")
@pytest.mark.parametrize("size", [0, -1, True, 1.5, "64", 2**63])
def test_sizes_that_cannot_be_right(size):
    with pytest.raises(Validation):
        Segment.create(size)


@pytest.mark.fault("A-LIFETIME-8")
def test_too_much_names_need_and_free_and_leaves_nothing():
    fds = fd_count()
    need = 2**46
    with pytest.raises(OutOfSharedMemory, match=str(need)) as caught:
        Segment.create(need)
    assert caught.value.detail["need"] == need
    assert 0 < caught.value.detail["free"] < need
    assert fd_count() == fds


def test_a_long_reservation_can_be_given_up_without_leaking(monkeypatch):
    monkeypatch.setattr(segments, "_RESERVE_STEP", 4096)
    before, steps = fd_count(), []

    def check():
        steps.append(1)
        if len(steps) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        Segment.create(1 << 20, check=check)
    assert len(steps) == 3
    assert fd_count() == before


@pytest.mark.fault("A-LIFETIME-8")
@pytest.mark.parametrize("code", ["ENOSPC", "ENOMEM"])
def test_a_reservation_that_fails_is_an_exception_and_no_bus_error(monkeypatch, code):
    import errno

    def full(_fd, _offset, nbytes):
        raise OSError(getattr(errno, code), "full")

    fds = fd_count()
    monkeypatch.setattr(segments.os, "posix_fallocate", full)
    with pytest.raises(OutOfSharedMemory, match="4096 bytes"):
        Segment.create(4096)
    assert fd_count() == fds


def test_available_memory_heeds_a_control_group(monkeypatch):
    files = {
        "/proc/meminfo": ["MemTotal: 99 kB", "MemAvailable:   1000 kB"],
        "/sys/fs/cgroup/memory.max": ["600000"],
        "/sys/fs/cgroup/memory.current": ["500000"],
        "/sys/fs/cgroup/memory.stat": ["anon 1", "inactive_file 2000"],
    }
    monkeypatch.setattr(segments, "_lines", lambda path: files.get(path, []))
    assert available_memory() == 102_000
    files["/sys/fs/cgroup/memory.max"] = ["max"]
    assert available_memory() == 1_024_000
    files.clear()
    assert available_memory() is None


def test_without_memfd_an_unlinked_file_serves(monkeypatch):
    before = names_in_shm()
    monkeypatch.delattr(os, "memfd_create")
    first = Segment.create(4096)
    second = Segment.attach(os.dup(first.fileno()), nbytes=4096)
    first.tensor[5] = 9
    assert second.tensor[5] == 9
    assert names_in_shm() == before
    first.close()
    second.close()


@pytest.mark.fault("A-LIFETIME-2")
@pytest.mark.slow
def test_a_killed_process_leaves_nothing_in_dev_shm():
    before = names_in_shm()
    code = (
        "import sys; from transports.segments import Segment;"
        "s = Segment.create(1 << 20); print('ready', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"ready\n"
        child.kill()
        child.wait(10)
    assert names_in_shm() == before


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Embedding(11, 6),
        torch.nn.Linear(6, 6),
        torch.nn.LayerNorm(6),
        torch.nn.Linear(6, 11),
    )
    net[3].weight = net[0].weight
    net[2].register_buffer("steps", torch.arange(3))
    return net


def test_parameters_move_without_changing():
    net = model()
    before = {name: (p, p.detach().clone()) for name, p in net.named_parameters()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    storage = share_tensors(net)
    for name, parameter in net.named_parameters():
        old, values = before[name]
        assert parameter is old
        assert parameter.requires_grad
        assert torch.equal(parameter, values)
        segment, offset = storage.locate(parameter)
        assert offset % 64 == 0
        assert segment.address_range[0] + offset == parameter.data_ptr()
    assert net[3].weight is net[0].weight
    net(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    weight = before["1.weight"][0]
    assert not torch.equal(weight, before["1.weight"][1])
    seen = storage.segment.typed(storage.locate(weight)[1], weight.dtype, weight.shape)
    assert torch.equal(seen, weight)  # the optimizer wrote into shared memory
    assert storage.locate(net[2].steps) is None
    assert storage.statistics()["tensors"] == len(before)


def test_buffers_move_on_request():
    net = model()
    storage = share_tensors(net, buffers=True)
    assert storage.locate(net[2].steps) is not None
    assert torch.equal(net[2].steps, torch.arange(3))


def test_tied_tensors_stay_tied_even_as_different_objects():
    base = torch.arange(12.0)
    first, second = torch.nn.Parameter(base), torch.nn.Parameter(base)
    part = base[3:6]
    storage = share_tensors({"first": first, "second": second, "part": part})
    with torch.no_grad():
        first[4] = 99
    assert second[4] == 99
    assert part[1] == 99
    assert storage.locate(part)[1] == storage.locate(first)[1] + 12


def test_lone_views_move_alone_and_become_contiguous():
    big = torch.arange(1000.0).reshape(100, 10)
    column = torch.nn.Parameter(big.T)
    slice_ = torch.arange(1 << 16)[5:8]
    expanded = torch.ones(1).expand(4)
    storage = share_tensors({"column": column, "slice": slice_, "expanded": expanded})
    assert column.is_contiguous()
    assert torch.equal(column, torch.arange(1000.0).reshape(100, 10).T)
    assert slice_.tolist() == [5, 6, 7]
    assert expanded.is_contiguous()
    assert expanded.tolist() == [1.0] * 4
    assert storage.segment.nbytes == 4032 + 64 + 64


def test_bits_survive_the_move():
    bits = torch.tensor([0x7FC1, 0x8000, 0x7F80, 1], dtype=torch.uint16)
    tensor = bits.view(torch.bfloat16).clone()
    zero_d, empty = torch.tensor(5, dtype=torch.int8), torch.empty(0, 3)
    storage = share_tensors({"nan": tensor, "zero_d": zero_d, "empty": empty})
    assert tensor.view(torch.uint16).tolist() == bits.tolist()
    assert zero_d.item() == 5
    assert empty.shape == (0, 3)
    assert storage.locate(empty) is None


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.empty(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "layout"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter"),
    ],
)
def test_what_cannot_be_shared_is_named_and_nothing_moves(tensor, why):
    good = torch.arange(4)
    address = good.data_ptr()
    with pytest.raises(Validation, match=why) as caught:
        share_tensors({"good": good, "layers.bad": tensor})
    assert caught.value.tensor == "layers.bad"
    assert good.data_ptr() == address


def test_inference_tensors_are_refused_by_name():
    with torch.inference_mode():
        tensor = torch.ones(2)
    with pytest.raises(Validation, match="inference mode"):
        share_tensors({"w": tensor})


def test_nothing_to_share():
    with pytest.raises(Validation, match="no tensor"):
        share_tensors({})


def test_locate_wants_contiguous_tensors_that_lie_inside_whole():
    tensor = torch.arange(64.0).reshape(8, 8)
    storage = share_tensors({"w": tensor})
    assert storage.locate(tensor[2:4])[1] == 64
    assert storage.locate(tensor.T) is None
    assert storage.locate(torch.ones(4)) is None
    assert storage.locate(torch.ones(4, device="meta")) is None
    storage.close()
    assert tensor[0, 1] == 1.0  # the memory lives as long as its tensors
    assert storage.locate(tensor) is None
