"""One rank of an NCCL group that changes: commands as in `benchmarks.peers.worker`.

Each command that changes the group answers when a first all-reduce over the new one is right, with
the seconds that took here, or with what went wrong. Nothing here gives up by itself but the polls:
who asks waits no longer than it wants, and kills the process.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.peers.worker import obey
from transports.cuda import WorkQueue, poll
from transports.lane import Lane
from transports.nccl_group import bindings, new_unique_id

if TYPE_CHECKING:
    from collections.abc import Callable

_LIMIT_S = 15.0
_NAP_S = 0.0002
_SUCCESS, _IN_PROGRESS = 0, 7  # of ncclResult_t
_STALLED_NBYTES = 64 << 20  # more than fits between two ranks


class Peer:
    """What this process holds between commands."""

    def __init__(self) -> None:
        self._lane = Lane("nccl")
        self._device = torch.device("cuda", 0)
        self._comm: Any = None
        self._old: Any = None  # what the present one was made from, until it is freed
        self._size = 0
        self._data: torch.Tensor | None = None

    async def place(self, *, rank: int) -> dict[str, Any]:
        """Take a GPU."""
        self._device = torch.device("cuda", rank % torch.cuda.device_count())
        return await self._carry_out(self._take_device)

    async def unique_id(self) -> dict[str, Any]:
        return {"id": new_unique_id().hex()}

    async def grow_id(self) -> dict[str, Any]:
        """Of the group that is to grow."""
        found: dict[str, Any] = {}

        def ask() -> None:
            found["id"] = bytes(self._comm.get_unique_id()).hex()

        return await self._carry_out(ask) | found

    async def join(self, *, unique_id: str, rank: int, size: int) -> dict[str, Any]:
        """What `transports.nccl_group` does: end the group there is, and meet in another one."""

        def join() -> None:
            self._end()
            nccl = bindings()
            known = nccl.UniqueId.from_bytes(bytes.fromhex(unique_id))
            self._comm = nccl.Communicator.init(size, rank, known, _non_blocking(nccl))
            self._use(size)

        return await self._carry_out(join)

    async def shrink(self, *, exclude: list[int], how: str) -> dict[str, Any]:
        """Go on without some ranks.

        Args:
            how: ``"plain"``, ``"abort"`` (what the group is doing), or ``"revoke"`` (it first).
        """

        def shrink() -> None:
            nccl = bindings()
            self._old = self._comm
            if how == "revoke":
                self._old.revoke()
                _settle(self._old)
            flag = nccl.CommShrinkFlag.ABORT if how == "abort" else nccl.CommShrinkFlag.DEFAULT
            self._comm = self._old.shrink(exclude, _non_blocking(nccl), flag)
            self._use(self._size - len(exclude))

        return await self._carry_out(shrink)

    async def grow(
        self, *, size: int, unique_id: str | None = None, rank: int | None = None
    ) -> dict[str, Any]:
        """Take in more ranks; a new one has no group yet, and says which rank it will be."""

        def grow() -> None:
            nccl = bindings()
            known = unique_id and nccl.UniqueId.from_bytes(bytes.fromhex(unique_id))
            if rank is not None:
                self._end()
            self._old = nccl.Communicator() if rank is not None else self._comm
            self._comm = self._old.grow(size, known or None, rank, _non_blocking(nccl))
            self._use(size)

        return await self._carry_out(grow)

    async def free(self) -> dict[str, Any]:
        """What the present group was made from."""

        def free() -> None:
            old, self._old = self._old, None
            if old is not None:
                old.abort()

        return await self._carry_out(free)

    async def leave(self) -> dict[str, Any]:
        return await self._carry_out(self._end)

    async def warm(self) -> dict[str, Any]:
        """Make a broadcast, which connects the ranks as later ones need it."""

        def warm() -> None:
            self._broadcast()
            poll(self._queue.record(), lambda: None, limit=_LIMIT_S)

        return await self._carry_out(warm)

    async def stall(self) -> dict[str, Any]:
        """Begin a broadcast, and leave it to the device."""
        return await self._carry_out(self._broadcast)

    async def suspend_and_resume(self) -> dict[str, Any]:
        """Both, and how much device memory was free in between, more than before."""
        freed: dict[str, Any] = {}

        def suspend_and_resume() -> None:
            before, _ = torch.cuda.mem_get_info(self._device)
            self._comm.suspend()
            _settle(self._comm)
            freed["freed"] = torch.cuda.mem_get_info(self._device)[0] - before
            self._comm.resume()
            self._use(self._size)

        return await self._carry_out(suspend_and_resume) | freed

    async def end(self) -> None:
        await self.leave()
        self._lane.close()

    # -- on the lane -----------------------------------------------------------------------------

    async def _carry_out(self, work: Callable[[], None]) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            await self._lane.run(work)
        except Exception as error:  # noqa: BLE001  it is the answer
            return {"error": f"{type(error).__name__}: {error}"[:300]}
        return {"seconds": time.perf_counter() - began}

    def _take_device(self) -> None:
        torch.cuda.set_device(self._device)
        self._queue = WorkQueue(self._device)
        self._data = torch.zeros(_STALLED_NBYTES, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize()

    def _use(self, size: int) -> None:
        """Wait until the group is there, and add up ones."""
        self._size = size
        _settle(self._comm, self._old)
        nccl = bindings()
        with self._queue.active():
            ones = torch.ones(1, dtype=torch.float32, device=self._device)
        self._comm.allreduce(ones, ones, nccl.SUM, stream=self._queue.handle)
        _settle(self._comm)
        poll(self._queue.record(), lambda: None, limit=_LIMIT_S)
        if ones.item() != size:
            raise RuntimeError(f"{size} ranks added up to {ones.item()}")

    def _broadcast(self) -> None:
        self._comm.broadcast(self._data, self._data, 0, stream=self._queue.handle)
        _settle(self._comm)

    def _end(self) -> None:
        old, comm = self._old, self._comm
        self._old = self._comm = None
        for one in (comm, old):
            if one is not None and one.is_valid:
                one.abort()


def _non_blocking(nccl: Any) -> Any:
    return nccl.NCCLConfig(blocking=False)


def _settle(comm: Any, parent: Any = None) -> None:
    """Poll until the communicator is there and at rest; what it is made from goes first."""
    deadline = time.monotonic() + _LIMIT_S
    while True:
        codes = [int(c.get_async_error()) for c in (parent, comm) if c is not None and c.is_valid]
        if comm.is_valid and codes[-1] == _SUCCESS:
            return
        if bad := [code for code in codes if code not in (_SUCCESS, _IN_PROGRESS)]:
            raise RuntimeError(f"NCCL gave up: {bindings().get_error_string(bad[-1])}")
        if time.monotonic() >= deadline:
            raise TimeoutError(f"in progress for {_LIMIT_S:g} s")
        time.sleep(_NAP_S)


if __name__ == "__main__":
    asyncio.run(obey(Peer))
