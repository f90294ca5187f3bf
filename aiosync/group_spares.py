"""A group whose rounds may go on without some of its members: a gateway's, under a quorum.

The calls of a round go through an `Attendance`, as a trainer's over its fleet do: a member that
fails or is too slow is struck, told to give the round up, and left at its version. Before the next
round whoever answers again is brought back in. What the group says of itself is what enough of its
members say.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, final

import anyio

from aiosync.attendance import Attendance
from aiosync.defaults import DEFAULTS
from aiosync.errors import Fenced, Validation
from aiosync.parts import PartsInfo, facts
from statemachines.tables import State, Weights

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from aiosync.members import MemberLink
    from aiosync.policies import Policy
    from aiosync.version import Version
    from aiosync.worker_group import WorkerGroup
    from aiosync.worker_group_peer import Rank

ROUND_PHASES = ("probe", "init", "start", "update", "prepare", "finish")
_LISTS = ("names", "dtype_names", "shapes")


@final
class Spares:
    """Who takes part in a group's rounds.

    Attributes:
        roll: The members of the round that is open, or was last.
        committed: What the last round committed that counts.
    """

    def __init__(self, group: WorkerGroup, policy: Policy, patience: float) -> None:
        self._group = group
        self._policy = policy
        self._patience = patience
        self._info_of: Callable[[Rank], dict[str, Any]] | None = None
        self._barred: dict[int, str | None] = {}
        self._told: set[str] = set()
        self._announced: dict[str, Any] = {}
        self._knows: dict[int, Any] = {}
        self.committed: Version | None = None
        self.roll = self._roll_of(group.ranks)

    def _roll_of(self, ranks: Iterable[Rank]) -> Attendance:
        self._told = set()
        links = [rank.link for rank in ranks]
        return Attendance(links, self._policy, patience=self._patience)

    # -- who takes part --------------------------------------------------------------------------

    @property
    def present(self) -> list[Rank]:
        """The ranks of the round that have not dropped out; between rounds, all that are well."""
        if self._group.cycle.session is None:
            there_are = [rank for rank in self._group.ranks if rank.lost is None]
            if self._group.state is not State.INITIALIZED:
                return there_are
            return [rank for rank in there_are if rank.trouble is None]
        there = self.roll.present
        return [rank for rank in self._group.ranks if rank.link in there]

    def enough(self, holds: Callable[[Rank], bool]) -> bool:
        """Whether it holds for all ranks of as many members as the policy asks for."""
        members = {rank.link.member for rank in self._group.ranks}
        lacking = {rank.link.member for rank in self._group.ranks if not holds(rank)}
        return len(members - lacking) >= self._policy.needed(len(members))

    def begin_init(self, init_info: Any, info_of: Callable[[Rank], dict[str, Any]]) -> None:
        """The trainer initialises: all are asked.

        Raises:
            Validation: Its data plane cannot do without a member.
        """
        if not isinstance(init_info.get("reader"), str) or "rank_offset" in init_info:
            raise Validation(
                f"policy {self._policy}: the trainer's backend moves its bytes through all members"
                " together, and cannot go on without one",
                phase="init",
                next_step="use policy='all'",
            )
        self._info_of = info_of
        self._knows.clear()
        self._barred.clear()
        self.roll = self._roll_of(self._group.ranks)

    async def gather(self) -> None:
        """Before a round: bring back who is there again; it begins with those that are ready.

        Raises:
            Fenced: A member belongs to somebody else: half a fleet is not taken.
            PeerLost: Too few are there.
        """
        group, rivals = self._group, []

        async def one(rank: Rank) -> None:
            try:
                with anyio.fail_after(DEFAULTS.join_s):
                    await self._rejoin(rank)
            except Fenced as error:
                rivals.append(error)
            except Exception as error:  # noqa: BLE001  its own affair: the others go on
                rank.link.error = f"{type(error).__name__}: {error}"
                self._barred[rank.index] = _incarnation(rank)

        async with anyio.create_task_group() as tasks:
            for rank in group.ranks:
                if rank.lost is not None:
                    self._barred.pop(rank.index, None)  # once it is back, it may be well
                elif not rank.is_ready and self._may_try(rank):
                    tasks.start_soon(one, rank)
        if rivals:
            raise rivals[0]
        out = {rank.link.member for rank in group.ranks if not rank.is_ready}
        self.roll = self._roll_of(rank for rank in group.ranks if rank.link.member not in out)
        self.roll.check()

    def _may_try(self, rank: Rank) -> bool:
        barred = self._barred.get(rank.index, "")
        return self._info_of is not None and barred != _incarnation(rank)

    async def _rejoin(self, rank: Rank) -> None:
        await rank.probe()
        peer = rank.link.peer
        if peer is not None and peer.owner not in (None, rank.owner):
            raise Fenced(f"{rank.title} belongs to {peer.owner} now", replica=rank.link.name)
        assert self._info_of is not None  # `_may_try`
        self._knows.pop(rank.index, None)
        await rank.join(self._info_of(rank), None)

    # -- the calls -------------------------------------------------------------------------------

    async def call(
        self,
        links: Iterable[MemberLink],
        call: Callable[[MemberLink], Awaitable[Any]],
        *,
        phase: str,
    ) -> None:
        """`Attendance.call`; those who were struck are told, and not waited for."""
        taking = [link for link in links if link in self.roll.links]
        try:
            await self.roll.call(taking, call, phase=phase, linger=DEFAULTS.cleanup_s / 4)
        finally:
            for rank in self._group.ranks:
                member, header = rank.link.member, self._group.header_of(rank)
                if member in self.roll.lost and member not in self._told and header is not None:
                    self._group.start(rank.settle("this round goes on without it", header), rank)
            self._told |= self.roll.lost.keys()

    def payload(self, payload: Any, rank: Rank) -> Any:
        """A rank's update info: with the lists that it lacks, if it joined after the others."""
        if not isinstance(payload, dict) or "metadata_digest" not in payload:
            return payload
        digest = payload["metadata_digest"]
        if payload.get("names"):
            self._announced = {"metadata_digest": digest} | {k: payload[k] for k in _LISTS}
        known = self._knows.get(rank.index) == digest
        self._knows[rank.index] = digest
        if known or self._announced.get("metadata_digest") != digest:
            return payload
        return payload | self._announced

    # -- what they are together ------------------------------------------------------------------

    def held(self) -> Version | None:
        """Of the versions that enough members hold whole, the last committed, or the newest.

        Who was left behind holds a later one where a round went back, or began another run.
        """
        found = self._held_by_enough()
        if self.committed is not None and self.committed in found:
            return self.committed
        return max(found, key=_order, default=None)

    def weights(self) -> Weights | None:
        """Intact where enough members hold the same; None: what all of them say counts."""
        return Weights.INTACT if self._held_by_enough() else None

    def _held_by_enough(self) -> list[Version | None]:
        members: dict[str, set[Any]] = {}
        for rank in self._group.ranks:
            whole = rank.weights is Weights.INTACT
            members.setdefault(rank.link.member, set()).add(rank.version if whole else "nothing")
        counts = Counter(held.pop() for held in members.values() if len(held) == 1)
        counts.pop("nothing", None)
        least = self._policy.needed(len(members))
        return [version for version, count in counts.items() if count >= least]

    def facts(self, own_incarnation: str) -> dict[str, Any]:
        """Fields of the group's `PeerState`: one of them may restart without the whole doing so."""
        readers: dict[str, dict[str, int]] = {}
        for rank in self.present:
            readers.setdefault(rank.link.member, {})[str(rank.index)] = rank.link.readers
        needed = self._policy.needed(len({rank.link.member for rank in self._group.ranks}))
        info = PartsInfo(readers=readers, needed=needed)
        there = {link.member for link in self.roll.present}
        behind = {rank.link.member for rank in self._group.ranks} - there
        return {"incarnation": own_incarnation, "parts": facts(info, behind)}


def _incarnation(rank: Rank) -> str | None:
    return None if rank.link.peer is None else rank.link.peer.incarnation


def _order(version: Version | None) -> int:
    return -1 if version is None else version.order
