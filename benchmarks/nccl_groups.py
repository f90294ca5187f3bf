"""An NCCL group that loses or wins a member: made anew, or changed by NCCL's own calls.

Ours is what a fleet's change costs now: all members end the group, meet in another one, and add up
ones. Raw is `ncclCommShrink` or `ncclCommGrow` up to the same sum. Three processes, on one GPU or
more. A way that does not work is reported with what went wrong, and with the time after which this
benchmark stopped waiting. Neither way is part of what the engines do beyond the first.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, final

import torch

from benchmarks.measure import alternate, median, record
from benchmarks.processes import peer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from benchmarks.measure import Options
    from benchmarks.processes import Peer

_RANKS = 3
_LIMIT_S = 25.0
_PATIENCE_S = 0.2  # after a kill, as a fleet needs some time to notice it
_KILLS = 2


class _Failure(Exception):
    """A way that does not work."""


async def run(options: Options) -> AsyncIterator[dict[str, Any]]:
    if not torch.cuda.is_available():
        print("nccl_groups: skipped, there is no CUDA device", file=sys.stderr)
        return
    trio = Trio()
    kills = min(options.repeat, _KILLS)
    try:
        for variant, ours, raw, repeat in (
            ("a member leaves; shrink", trio.leave, trio.leave_by_shrink, options.repeat),
            ("a member joins; grow", trio.join, trio.join_by_grow, options.repeat),
            ("nothing changes; suspend and resume", trio.again, trio.suspend, options.repeat),
            ("a member is killed; shrink with abort", trio.lose, trio.lose_by("abort"), kills),
            ("a member is killed; revoke, shrink", trio.lose, trio.lose_by("revoke"), kills),
        ):
            yield await _measure(trio, variant, ours, raw, repeat)
    finally:
        await trio.end()


async def _measure(
    trio: Trio,
    variant: str,
    ours: Callable[[], Awaitable[float]],
    raw: Callable[[], Awaitable[float]],
    repeat: int,
) -> dict[str, Any]:
    errors: dict[str, list[str]] = {"ours": [], "raw": []}
    trio.frees.clear()
    trio.freed.clear()

    def bounded(side: str, way: Callable[[], Awaitable[float]]) -> Callable[[], Awaitable[float]]:
        async def seconds() -> float:
            try:
                return await way()
            except (_Failure, TimeoutError, RuntimeError) as error:
                errors[side].append(str(error) or f"no answer within {_LIMIT_S:g} s")
                await trio.end()  # nobody knows what these processes are in
                return _LIMIT_S

        return seconds

    pairs = await alternate(bounded("ours", ours), bounded("raw", raw), repeat)
    return record(
        "nccl_groups",
        pairs,
        variant=variant,
        payload=f"{_RANKS} ranks on {min(_RANKS, torch.cuda.device_count())} GPU",
        unit="s",
        target="none",
        raw_is=variant.rpartition("; ")[2],
        ours_works=not errors["ours"],
        raw_works=not errors["raw"],
        errors=errors,
        raw_free_s=median(trio.frees) if trio.frees else None,
        freed_bytes=max(trio.freed, default=None),
    )


@final
class Trio:
    """Three ranks, of which the last one comes and goes.

    Attributes:
        frees: Seconds it took to free what a group was made from.
        freed: Device memory that a suspended group left free.
    """

    def __init__(self) -> None:
        self.frees: list[float] = []
        self.freed: list[int] = []
        self._peers: list[Peer] = []
        self._stacks: list[AsyncExitStack] = []
        self._size = 0

    # -- ways to change, each with the seconds that it took --------------------------------------

    async def leave(self) -> float:
        await self._assemble(_RANKS)
        return await self._timed(self._rebuild(_RANKS - 1))

    async def leave_by_shrink(self) -> float:
        await self._assemble(_RANKS)
        seconds = await self._timed(self._shrink("plain"))
        await self._free()
        await self._all([self._peers[-1]], "leave")
        return seconds

    async def join(self) -> float:
        await self._assemble(_RANKS - 1)
        return await self._timed(self._rebuild(_RANKS))

    async def join_by_grow(self) -> float:
        await self._assemble(_RANKS - 1)
        seconds = await self._timed(self._grow())
        await self._free()
        return seconds

    async def again(self) -> float:
        await self._assemble(_RANKS)
        return await self._timed(self._rebuild(_RANKS))

    async def suspend(self) -> float:
        await self._assemble(_RANKS)
        return await self._timed(self._suspend())

    async def lose(self) -> float:
        await self._kill_the_last()
        return await self._timed(self._rebuild(_RANKS - 1))

    def lose_by(self, how: str) -> Callable[[], Awaitable[float]]:
        async def lose() -> float:
            await self._kill_the_last()
            seconds = await self._timed(self._shrink(how))
            await self._free()
            return seconds

        return lose

    # -- inside ----------------------------------------------------------------------------------

    async def _rebuild(self, size: int) -> None:
        staying, going = self._peers[:size], self._peers[size:]
        (answer,) = await self._all(staying[:1], "unique_id")
        options = [{"unique_id": answer["id"], "rank": rank, "size": size} for rank in range(size)]
        await asyncio.gather(self._all(staying, "join", options), self._all(going, "leave"))
        self._size = size

    async def _shrink(self, how: str) -> None:
        staying = self._peers[: _RANKS - 1]
        options = {"exclude": [_RANKS - 1], "how": how}
        await self._all(staying, "shrink", [options] * len(staying))
        self._size = _RANKS - 1

    async def _grow(self) -> None:
        (answer,) = await self._all(self._peers[:1], "grow_id")
        options: list[dict[str, Any]] = [{"size": _RANKS} for _ in range(_RANKS)]
        options[0]["unique_id"] = options[-1]["unique_id"] = answer["id"]
        options[-1]["rank"] = _RANKS - 1
        await self._all(self._peers, "grow", options)
        self._size = _RANKS

    async def _suspend(self) -> None:
        answers = await self._all(self._peers, "suspend_and_resume")
        self.freed += [answer["freed"] for answer in answers]

    async def _free(self) -> None:
        self.frees.append(await self._timed(self._all(self._peers[: self._size], "free")))

    async def _assemble(self, size: int) -> None:
        """A group of that many, in processes that live."""
        await self._start()
        if self._size != size:
            await self._rebuild(size)

    async def _start(self) -> None:
        missing = range(len(self._peers), _RANKS)
        if not missing:
            return
        stacks = [AsyncExitStack() for _ in missing]
        module = "benchmarks.peers.nccl_rank"
        started = await asyncio.gather(*[s.enter_async_context(peer(module)) for s in stacks])
        self._peers += started
        self._stacks += stacks
        await self._all(started, "place", [{"rank": rank} for rank in missing])

    async def _kill_the_last(self) -> None:
        """In a broadcast that it takes no part in, and the others wait in."""
        await self._assemble(_RANKS)
        await self._all(self._peers, "warm")
        staying = self._peers[: _RANKS - 1]
        await self._all(staying, "stall")
        self._peers.pop().kill()
        await self._stacks.pop().aclose()
        await asyncio.sleep(_PATIENCE_S)

    async def _all(
        self, peers: Sequence[Peer], command: str, options: Sequence[dict[str, Any]] = ()
    ) -> list[dict[str, Any]]:
        """Have them carry it out at once."""
        given = options or [{}] * len(peers)
        async with asyncio.timeout(_LIMIT_S):
            answers = await asyncio.gather(
                *[one.do(command, **each) for one, each in zip(peers, given, strict=True)]
            )
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise _Failure(f"{command} on rank {rank}: {answer['error']}")
        return answers

    async def _timed(self, work: Awaitable[Any]) -> float:
        began = time.perf_counter()
        await work
        return time.perf_counter() - began

    async def end(self) -> None:
        """No process is left."""
        for one in self._peers:
            one.kill()
        for stack in self._stacks:
            await stack.aclose()
        self._peers, self._stacks, self._size = [], [], 0
