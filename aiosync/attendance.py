"""Who takes part in one round, and who has dropped out of it.

Under the policy ``all`` every member is needed: the first failure ends the round. Under the others
a member that fails, or that holds the rest up for too long, is struck: its calls are cancelled, the
data plane goes on without it, it is told to give the round up, and it takes no part in the commit.
Once too few would be left, the failure ends the round, and nothing is committed anywhere.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar, final

import anyio

from aiosync.concurrency import collapse, first_line, quietly, raise_ranked, uncancelled
from aiosync.defaults import DEFAULTS
from aiosync.errors import AiosyncError, Busy, Fenced, PeerLost, PhaseTimeout
from aiosync.members import fan_out
from aiosync.parts import Parts
from aiosync.policies import ALL, All

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiosync.members import MemberLink
    from aiosync.policies import Policy

T = TypeVar("T")


@final
class Attendance:
    """The members of one round. `lose`, `is_out`, `missing` and `pace` may be called by a lane.

    Attributes:
        links: All servers that the round began with.
        lost: Members that dropped out, and why.
        nudge: Called when a member was struck by the control plane.
        leave: Tells a server that was struck to give the round up.
    """

    floor = DEFAULTS.patience_s

    def __init__(
        self,
        links: Sequence[MemberLink],
        policy: Policy = ALL,
        *,
        patience: float = DEFAULTS.patience,
    ) -> None:
        self.links = list(links)
        self.patience = patience
        self.lost: dict[str, Exception] = {}
        self.nudge: Callable[[], object] = _nothing
        self.leave: Callable[[MemberLink], Awaitable[None]] | None = None
        self.tolerant = not isinstance(policy, All)
        self._parts = {link.name: Parts(link) for link in links}
        names = {link.member for link in links}
        self._needed = policy.needed(len(names))
        self._names = names
        self._lock = threading.Lock()
        self._calls: dict[str, anyio.CancelScope] = {}
        self._began = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: anyio.Event | None = None
        self._over = False

    @property
    def spares_readers(self) -> bool:
        """Whether the data plane may go on without some readers."""
        return self.tolerant or any(parts.known for parts in self._parts.values())

    @property
    def present(self) -> list[MemberLink]:
        """The servers that are still in."""
        return [link for link in self.links if link.member not in self.lost]

    def check(self) -> None:
        """Raise `PeerLost` unless there are enough members to begin with."""
        if self.tolerant and len(self._names) < self._needed:
            raise PeerLost(
                f"{len(self._names)} members can take part, {self._needed} are needed"
                f" (there: {', '.join(sorted(self._names)) or 'nobody'})",
                phase="admit",
                next_step="`FleetClient.add` more members, or a policy that asks for fewer",
            )

    # -- what the data plane asks (`transports.stream.Roll`) ------------------------------------

    def pace(self) -> int:
        with self._lock:
            present = len(self._names) - len(self.lost)
            more = sum(self._parts[link.name].pace - 1 for link in self.present)
        return max(self._needed, -(-present // 2), 1) + more

    def lose(self, reader: str, error: Exception) -> bool:
        link = self._link_of(reader)
        if link is None:
            return False
        with self._lock:
            if self._parts[link.name].lose(reader):
                return True
        return self.strike(link, error)

    def is_out(self, reader: str) -> bool:
        link = self._link_of(reader)
        if link is None or link.member in self.lost:
            return True
        return self._parts[link.name].is_out(reader)

    def missing(self, present: Sequence[str]) -> list[str]:
        there = [self._link_of(reader) for reader in present]
        found = []
        for link in self.present:
            parts = self._parts[link.name]
            if parts.known:
                found += parts.missing(present)
            elif there.count(link) < link.readers:
                found.append(link.name)
        return found

    def _link_of(self, reader: str) -> MemberLink | None:
        fits = [x for x in self.links if reader == x.name or reader.startswith(f"{x.name}/")]
        return max(fits, key=lambda link: len(link.name), default=None)

    # -- striking --------------------------------------------------------------------------------

    def strike(self, link: MemberLink, error: Exception) -> bool:
        """Go on without the member of `link`; False: the round cannot. From any thread."""
        if not self.tolerant or _is_rivalry(error):
            return False
        with self._lock:
            if link.member in self.lost:
                return True
            if len(self._names) - len(self.lost) - 1 < self._needed:
                return False
            self.lost[link.member] = error
        loop, news = self._loop, self._news
        if loop is not None and news is not None:
            loop.call_soon_threadsafe(news.set)
        return True

    async def hold(self, fn: Callable[[], Awaitable[None]]) -> None:
        """Await ``fn()``; those who are struck meanwhile are told, as far as that goes quickly."""
        if not self.tolerant:
            await fn()
            return
        self._loop, self._news = asyncio.get_running_loop(), anyio.Event()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._say_farewell)
                await fn()
                # One that was struck last may still hear of it.
                group.cancel_scope.deadline = anyio.current_time() + DEFAULTS.cleanup_s / 4
                self._over = True
                self._news.set()
        except BaseExceptionGroup as error:
            raise collapse(error) from None
        finally:
            self._loop = self._news = None

    async def _say_farewell(self) -> None:
        told: set[str] = set()
        async with anyio.create_task_group() as group:
            while self._news is not None:
                new = [name for name in self.lost if name not in told]
                for name in new:
                    told.add(name)
                    self.nudge()
                    for link in [link for link in self.links if link.member == name]:
                        group.start_soon(self._let_go, link)
                if self._over and not new:
                    return
                await self._news.wait()
                self._news = anyio.Event()

    async def _let_go(self, link: MemberLink) -> None:
        link.error = link.error or _text(self.lost[link.member])
        call = self._calls.get(link.name)
        if call is not None:  # its own answer, which says why, may be on its way
            soon = anyio.current_time() + DEFAULTS.cleanup_s / 4
            call.deadline = min(call.deadline, soon)
        if self.leave is not None:
            await quietly(self.leave, link)

    # -- calls that reach all --------------------------------------------------------------------

    async def call(
        self,
        links: Sequence[MemberLink],
        call: Callable[[MemberLink], Awaitable[Any]],
        *,
        phase: str,
        linger: float,
        direct: bool = False,
    ) -> None:
        """One call to each of `links` that is still in; waits for all but those that are struck.

        Args:
            direct: See `fan_out`.

        Raises:
            The root cause, where the round cannot go on without those who failed.
        """
        links = [link for link in links if link.member not in self.lost]
        if self.tolerant:
            await _Calls(self, call, phase, linger).run(links)
        else:
            await fan_out(links, call, phase=phase, linger=linger, direct=direct)

    def elapsed(self) -> float:
        return time.monotonic() - self._began


class _Calls:
    """One call of an `Attendance`, to several servers at once."""

    def __init__(
        self,
        roll: Attendance,
        call: Callable[[MemberLink], Awaitable[Any]],
        phase: str,
        wait: float,
    ) -> None:
        self._roll = roll
        self._call = call
        self._phase = phase
        self._linger = wait
        self._open: dict[str, MemberLink] = {}
        self._owing: dict[str, int] = {}
        """Open calls by member."""
        self._fatal: list[BaseException] = []

    async def run(self, links: Sequence[MemberLink]) -> None:
        self._open = {link.name: link for link in links}
        for link in links:
            self._owing[link.member] = self._owing.get(link.member, 0) + 1
        self._enough = anyio.Event()
        async with anyio.create_task_group() as group:
            self._group = group
            for link in links:
                group.start_soon(self._one, link)
            if links:
                group.start_soon(self._hurry, frozenset(self._owing))
        raise_ranked(self._fatal)

    async def _one(self, link: MemberLink) -> None:
        roll, began = self._roll, time.monotonic()
        link.phase, link.answered = self._phase, None
        scope = roll._calls[link.name] = anyio.CancelScope()  # noqa: SLF001 - its own part
        try:
            with scope:
                await uncancelled(lambda: self._call(link))
                link.error, link.answered = None, self._phase
            if scope.cancelled_caught and link.member not in roll.lost:
                text = f"{self._phase} was given up"
                self._failed(link, PhaseTimeout(text, replica=link.name, phase=self._phase))
        except Exception as error:  # noqa: BLE001  collected; raised as one exception
            self._failed(link, collapse(error))
        finally:
            link.seconds += time.monotonic() - began
            roll._calls.pop(link.name, None)  # noqa: SLF001
            self._open.pop(link.name, None)
            self._owing[link.member] -= 1
            if not self._owing[link.member]:
                del self._owing[link.member]
                self._enough.set()
            if not self._open:
                self._group.cancel_scope.cancel()

    def _failed(self, link: MemberLink, cause: BaseException) -> None:
        if isinstance(cause, AiosyncError):
            cause.replica = link.name
            cause.locate(phase=self._phase)
        else:
            cause.add_note(f"replica {link.name}, phase {self._phase}")
        link.error = _text(cause)
        if isinstance(cause, Exception) and self._roll.strike(link, cause):
            return
        self._fatal.append(cause)
        limit = anyio.current_time() + self._linger
        self._group.cancel_scope.deadline = min(self._group.cancel_scope.deadline, limit)

    async def _hurry(self, members: frozenset[str]) -> None:
        """Once enough have answered, the others get their share of patience."""
        roll = self._roll
        # One that failed has not answered: the others are no slower for that.
        while len(members - self._owing.keys() - roll.lost.keys()) < roll.pace():
            await self._enough.wait()
            self._enough = anyio.Event()
        limit = max(roll.floor, roll.patience * roll.elapsed())
        await anyio.sleep(limit)
        for link in list(self._open.values()):
            text = f"no answer to {self._phase} {limit:.1f} s after the others"
            if roll.strike(link, PhaseTimeout(text, replica=link.name, phase=self._phase)):
                scope = roll._calls.get(link.name)  # noqa: SLF001
                if scope is not None:
                    scope.cancel()
        await anyio.sleep(math.inf)


def _is_rivalry(error: Exception) -> bool:
    """Whether another trainer is at work: going on with the rest would part the fleet in two.

    A process that restarted belongs to nobody. Before a byte has moved that ends the round, too:
    it is initialised and begun again.
    """
    if isinstance(error, Fenced):
        return error.phase == "start" or error.detail.get("owner") is not None
    return isinstance(error, Busy)


def _text(cause: BaseException) -> str:
    return f"{type(cause).__name__}: {getattr(cause, 'message', None) or first_line(cause)}"


def _nothing() -> None:
    return None
