"""Spare memory to receive a whole model into: how much is free, and one arena that is kept."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aiosync.errors import Refused
from aiosync.few_collections import few_collections
from aiosync.metadata import sizes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aiosync.metadata import ParamMeta

_ALIGN = 64
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a huge number


def needed_memory(metadata: Sequence[ParamMeta]) -> int:
    """Bytes of an arena for these tensors, alignment included."""
    return sum(map(_rounded, sizes_of(metadata)))


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken on `device`; None where nobody can tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    known = [free for free in (_system_free(), _cgroup_free()) if free is not None]
    return min(known, default=None)


class Arena:
    """One allocation with a view per tensor, kept while dtypes and shapes stay the same.

    It may hold an earlier round's bytes: only tensors that were written since may be read.

    Attributes:
        addresses: Of the views.
    """

    __slots__ = ("_device", "_key", "_metadata", "_views", "addresses")

    def __init__(self, device: torch.device) -> None:
        self.addresses: list[int] = []
        self._device = device
        self._key: tuple[list[torch.dtype], list[tuple[int, ...]]] | None = None
        self._metadata: list[ParamMeta] | None = None
        self._views: list[torch.Tensor] = []

    def views(self, metadata: Sequence[ParamMeta]) -> list[torch.Tensor]:
        """Contiguous tensors of the announced dtypes and shapes, in order.

        Raises:
            Refused: More memory is needed than is free.
        """
        if metadata == self._metadata:  # quick: they are the same objects
            return self._views
        key = ([meta.dtype for meta in metadata], [meta.shape for meta in metadata])
        if key != self._key:
            self.release()  # before asking what is free
            self._views = self._allocate(metadata)
            self.addresses = list(map(torch.Tensor.data_ptr, self._views))
            self._key = key
        self._metadata = list(metadata)
        return self._views

    def release(self) -> None:
        """Give the memory back, once nobody else holds a view."""
        self._key, self._metadata, self._views, self.addresses = None, None, [], []

    def _allocate(self, metadata: Sequence[ParamMeta]) -> list[torch.Tensor]:
        need, free = needed_memory(metadata), free_memory(self._device)
        if free is not None and need > free:
            raise Refused(
                f"staging needs {need} bytes on {self._device}, {free} are free",
                weights="intact",
                next_step='use the sink mode "in_place", which needs no second copy of the model',
                detail={"need": need, "free": free},
            )
        # Never an inference tensor, whatever the lane's mode: transports write from other threads.
        with torch.inference_mode(False):
            memory = torch.empty(need, dtype=torch.uint8, device=self._device)
            return views_into(memory, metadata)


def views_into(memory: torch.Tensor, metadata: Sequence[ParamMeta]) -> list[torch.Tensor]:
    """A contiguous tensor of each announced dtype and shape, in `needed_memory` bytes or more."""
    # Those of one kind at even distances are made at once, which takes a third of the time; and
    # without gradients, which halves it.
    starts = list(accumulate(map(_rounded, sizes_of(metadata)), initial=0))
    alike: dict[tuple[torch.dtype, tuple[int, ...]], list[int]] = {}
    for at, meta in enumerate(metadata):
        alike.setdefault((meta.dtype, meta.shape), []).append(at)
    views: list[Any] = [None] * len(metadata)
    with torch.no_grad(), few_collections:
        for (dtype, shape), places in alike.items():
            whole = len(memory) // dtype.itemsize * dtype.itemsize
            base = memory[:whole].view(dtype)
            for first, end, step in _even_runs([starts[at] for at in places]):
                run = base.as_strided(
                    (end - first, *shape),
                    (step // dtype.itemsize, *contiguous_strides(shape)),
                    starts[places[first]] // dtype.itemsize,
                )
                for at, view in zip(places[first:end], run.unbind(), strict=True):
                    views[at] = view
    return views


def _even_runs(starts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut where the distance changes: first, end, and the distance between neighbours."""
    first = 0
    while first < len(starts):
        end = first + 1
        step = starts[end] - starts[first] if end < len(starts) else 0
        while end < len(starts) and starts[end] - starts[end - 1] == step:
            end += 1
        yield first, end, step
        first = end


@lru_cache(maxsize=1024)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of that shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _system_free() -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_free() -> int | None:
    """What the tightest memory cgroup around this process leaves (v2 and v1)."""
    free: list[int] = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inside = root / path.lstrip("/")
        # A container sees its own group as the root, whatever path it is told.
        for group in {inside, *(p for p in inside.parents if p.is_relative_to(root))}:
            limit, used = (_read(group / name).strip() for name in names)
            if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
                free.append(int(limit) - int(used) + _reclaimable(group))
    return max(min(free), 0) if free else None


def _reclaimable(group: Path) -> int:
    """File cache that the kernel drops before it refuses memory."""
    for line in _read(group / "memory.stat").splitlines():
        if line.startswith(("inactive_file ", "total_inactive_file ")):
            return int(line.split()[1])
    return 0


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
