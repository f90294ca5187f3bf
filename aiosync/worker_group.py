"""Several rank processes as one replica: one control endpoint, one state, one version.

A `WorkerGroup` is a worker engine without a model. The life cycle, session, lease, owner and
record of outcomes towards the trainer are those of every worker engine; its steps are calls to
all ranks at once, of which it is the one owner. So a round is fenced twice: the trainer by the
group, the group by each rank.

* Prepare goes to all ranks, finish only after all have prepared. A rank that fails before that
  has every rank give the round up: the old version everywhere.
* Once finish has left, only the ranks' own answers count. If they end apart, the weights are torn
  (or unknown, where a rank cannot be asked), the replica is not ready, and a later complete round
  mends it.
* Each rank's answer is awaited, or the rank is lost (`aiosync.worker_group_peer`): no later call
  ever meets an answer that was left over.
"""

from __future__ import annotations

import functools
import time
from contextlib import AsyncExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, TypeVar, final

import anyio
import msgspec

from aiosync.concurrency import Supervisor, first_line, to_its_end
from aiosync.defaults import DEFAULTS
from aiosync.errors import InvalidTransition, PeerLost, Validation
from aiosync.group_spares import ROUND_PHASES
from aiosync.members import fan_out, opened
from aiosync.messages import RoundHeader
from aiosync.rendezvous import owner_name
from aiosync.staging import give_places, is_shared
from aiosync.weight_targets import MODEL
from aiosync.worker import WeightTransferEngine
from aiosync.worker_group_commit import commit
from aiosync.worker_group_controls import GroupControls
from aiosync.worker_group_payloads import check_payload, info_of, of_rank
from aiosync.worker_group_peer import Rank, watch_all
from aiosync.worker_group_state import merge_states, merge_weights
from statemachines.tables import State, Trigger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence

    from aiosync.group_spares import Spares
    from aiosync.members import MemberLink
    from aiosync.messages import PeerState
    from statemachines.hub import TransitionHub
    from statemachines.tables import Weights

T = TypeVar("T")


@final
class WorkerGroup(GroupControls, WeightTransferEngine[dict[str, Any], Any]):
    """One replica over its rank processes; enter it, then serve it like any worker engine.

    Each rank is an ordinary worker engine behind a server of its own, on a Unix socket as a rule.
    Requests that use all ranks hold ``group.generation.request()``: the ranks swap while nobody
    does. Leaving the block releases the ranks' channels; the processes are their owner's.
    Ranks whose config says ``staging="shared_host"`` receive each round once, for all of them.

    Args:
        ranks: URLs or clients, in the order of the ranks.
        name: Of the replica, in events and errors.
        hub: Watch through a hub of your own.
        init_info_of: ``(init_info, index of the rank) -> init_info``; unless given, ``reader`` is
            made unique and ``rank_offset`` is moved on, which is what the built-in backends need.
        heartbeat_s: Seconds between two heartbeats to each rank.
        misses: Unanswered heartbeats after which a rank counts as lost. A process that has ended
            is noticed with the next one.
        wait_s: How long entering waits for ranks that do not listen yet.

    Raises:
        Validation: No rank was given.
    """

    def __init__(
        self,
        ranks: Sequence[Any],
        *,
        name: str = "group",
        hub: TransitionHub | None = None,
        init_info_of: Callable[[dict[str, Any], int], dict[str, Any]] | None = None,
        heartbeat_s: float = 1.0,
        misses: int = 3,
        wait_s: float = DEFAULTS.connect_s,
    ) -> None:
        if not ranks or isinstance(ranks, str):
            raise Validation("a group needs a list of at least one rank")
        self.owner = f"{name}@{owner_name()}"
        self.ranks = [Rank(n, rank, group=name, owner=self.owner) for n, rank in enumerate(ranks)]
        super().__init__(SimpleNamespace(backend="group"), None, None, None, hub=hub, name=name)
        self._by_link = {rank.link: rank for rank in self.ranks}
        self._info_of = init_info_of
        self._beat, self._wait_s = (heartbeat_s, misses), wait_s
        self._stack = AsyncExitStack()
        self._watching = Supervisor()
        self._entered = False
        self._deadline = 0.0
        self._opening = False
        self.spares: Spares | None = None
        """Who takes part, where a round may go on without some (a gateway's policy)."""

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(opened([rank.link for rank in self.ranks]))
        try:
            waiting = functools.partial(Rank.probe, wait=self._wait_s)
            await self._all(waiting, phase="probe")
        except BaseException:
            await self._stack.aclose()
            raise
        self._count()
        self._entered = True
        watching = watch_all(self.ranks, self.header_of, self._heard, *self._beat)
        self._watching.start(watching, name=f"{self.name}-heartbeats")
        return self

    async def aclose(self) -> None:
        try:
            await super().aclose()
        finally:
            await to_its_end(self._leave_ranks)

    async def _leave_ranks(self) -> None:
        await self._watching.aclose(seconds=DEFAULTS.cleanup_s)
        await self._stack.aclose()

    # -- the steps, each to all ranks ------------------------------------------------------------

    async def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        if not self._entered:
            raise InvalidTransition("enter the group first: async with WorkerGroup(...)")
        with self._changing_channel():
            own = functools.partial(info_of, init_info, custom=self._info_of)
            if self.spares is not None:
                self.spares.begin_init(init_info, own)
            await self._all(Rank.probe, phase="init")
            self._count()
            # With spares nobody may depend on another one's memory.
            places = give_places(self.ranks if self.spares is None else [])

            def join(rank: Rank) -> Awaitable[None]:
                return rank.join(own(rank), places[rank.index] if places else None)

            # The rank that receives for the others has to be there before they look for it.
            lead = 1 if any(places) else 0
            await self._all(join, phase="init", ranks=self.ranks[:lead])
            await self._all(join, phase="init", ranks=self.ranks[lead:])

    async def start_weight_update(self) -> None:
        header = self.cycle.header
        limit = None if header is None else header.deadline_s
        self._deadline = time.monotonic() + (limit or DEFAULTS.total_s)
        if self.spares is not None:
            await self.spares.gather()
        for rank in self.ranks:
            rank.link.note_weights()
        await self._call_all("start_weight_update", phase="start")

    async def receive_weights(self, update_info: Any) -> None:
        def part(rank: Rank) -> Any:
            own = of_rank(update_info, rank)
            return own if self.spares is None else self.spares.payload(own, rank)

        await self._all(
            lambda rank: rank.call("update_weights", part(rank), header=self.header_of(rank)),
            phase="update",
        )

    async def drain_pending(self) -> None:
        await self._call_all("prepare_weight_update", phase="prepare")

    async def finish_weight_update(self) -> None:
        session = self.cycle.session
        assert session is not None  # the life cycle runs this step in one
        self._deadline = min(self._deadline, self.cycle.ending.deadline)
        # The last moment at which a rank that is gone costs nothing but the round.
        await self._call_all("weight_update_status", phase="finish")
        session.holding = True
        await commit(self)

    async def shutdown(self) -> None:
        with self._changing_channel():
            there = [rank for rank in self.ranks if rank.lost is None]
            await self._all(Rank.leave, phase="shutdown", ranks=there)

    async def leave_round(self, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {first_line(error)}"[:500]
        with anyio.move_on_after(DEFAULTS.cleanup_s / 2):
            async with anyio.create_task_group() as group:
                for rank in self.ranks:
                    if (header := self.header_of(rank)) is not None:
                        group.start_soon(rank.settle, reason, header)
        for rank in self.ranks:
            rank.write_off()

    # -- what the ranks hold, as one -------------------------------------------------------------

    @property
    def weights(self) -> Weights:
        """The least that can be said of all ranks: torn, too, where their versions differ.

        With spares: of enough of them.
        """
        enough = None if self.spares is None else self.spares.weights()
        return enough or merge_weights(self.ranks)

    @weights.setter
    def weights(self, value: Weights) -> None:
        pass  # only the ranks' own answers count

    @property
    def reusable_after_abort(self) -> bool:  # type: ignore[override]  # here it depends
        """Whether every rank confirmed that it can carry another round."""
        if self.spares is not None:
            return self.spares.enough(lambda rank: rank.is_ready)
        return all(rank.is_ready for rank in self.ranks)

    def received_bytes(self) -> int:
        peers = [rank.link.peer for rank in self.ranks]
        counts = [peer.detail.get("progress", 0) for peer in peers if peer is not None]
        return sum(count for count in counts if isinstance(count, int))

    def progress_at(self) -> float:
        return max(rank.link.progress_at for rank in self.ranks)

    def peer_state(self) -> PeerState:
        mine = super().peer_state()
        if self.spares is None:
            return msgspec.structs.replace(mine, **merge_states(mine, self.ranks))
        fields = merge_states(mine, self.spares.present)
        facts = self.spares.facts(mine.incarnation)
        fields["detail"] |= facts.pop("parts") | {"ranks": [rank.facts() for rank in self.ranks]}
        return msgspec.structs.replace(mine, **{**fields, **facts})

    def wrong_order(self, what: str) -> InvalidTransition:
        error = super().wrong_order(what)
        troubles = [text for rank in self.ranks if (text := rank.trouble) is not None]
        if self.state is State.FAILED and troubles:
            error.message = f"{error.message}; {'; '.join(troubles)}"
            error.args = (error.message,)
        return error

    # -- payloads --------------------------------------------------------------------------------

    async def update_weights(self, update_info: Any, *, header: RoundHeader | None = None) -> None:
        payload = getattr(update_info, "update_info", update_info)
        await self.receive_weights(payload, header=header)  # type: ignore[call-arg] # wrapped step

    def parse_init_info(self, init_info: Any) -> dict[str, Any]:
        if not isinstance(init_info, dict):
            raise Validation(f"init_info must be a dict, not {type(init_info).__name__}")
        return init_info

    def parse_update_info(self, update_info: Any) -> Any:
        """A dict for all ranks, or a list with one for each; the ranks judge what is in it."""
        return check_payload(update_info, self.ranks)

    def header_of(self, rank: Rank) -> RoundHeader | None:
        """The header of the open round's calls to a rank; None between rounds."""
        session = self.cycle.session
        if session is None:
            return None
        return RoundHeader(
            owner=self.owner,
            epoch=rank.link.epoch,
            round=session.number,
            # This process beats for its session's whole life; when it dies, the ranks are free.
            lease_s=min(session.lease, DEFAULTS.lease_s),
            deadline_s=max(self._deadline - time.monotonic(), 0.001),
            version=self.cycle.target,
            target=None if self.cycle.aim == MODEL else self.cycle.aim,
            rollback=True,  # what may follow what has been judged, for all ranks at once
        )

    # -- inside ----------------------------------------------------------------------------------

    async def _call_all(self, method: str, *, phase: str) -> None:
        await self._all(lambda rank: rank.call(method, header=self.header_of(rank)), phase=phase)

    async def _all(
        self,
        call: Callable[[Rank], Awaitable[T]],
        *,
        phase: str,
        ranks: Sequence[Rank] | None = None,
    ) -> None:
        async def one(link: MemberLink) -> T:
            return await call(self._by_link[link])

        links = [rank.link for rank in (self.ranks if ranks is None else ranks)]
        if self.spares is not None and phase in ROUND_PHASES:
            await self.spares.call(links, one, phase=phase)
            return
        if self.spares is not None:
            links = [link for link in links if self._by_link[link].lost is None]
        await fan_out(links, one, phase=phase, linger=DEFAULTS.cleanup_s / 4)

    def start(self, running: Coroutine[Any, Any, None], rank: Rank) -> None:
        """Go on with something that concerns one rank, beside everything else."""
        self._watching.start(running, name=f"{self.name}-rank-{rank.index}")

    def _count(self) -> None:
        for before, rank in zip(self.ranks, self.ranks[1:], strict=False):
            rank.first = before.first + before.size
            rank.seat = 0 if is_shared(rank.link.peer) else before.seat + before.link.readers

    @contextmanager
    def _changing_channel(self) -> Iterator[None]:
        """Meanwhile a rank that looks odd is no news to the state machine."""
        before, self._opening = self._opening, True
        try:
            yield
        finally:
            self._opening = before
            for rank in self.ranks:
                rank.write_off()

    def _heard(self) -> None:
        """Between rounds, a rank that is gone or no longer ours ends the channel."""
        self.pausing.judge_again()
        if self._opening or self.state is not State.INITIALIZED:
            return
        if self.spares is not None and self.spares.enough(lambda rank: rank.trouble is None):
            return
        for rank in self.ranks:
            if rank.trouble is not None:
                self.machine.fire(
                    Trigger.FAIL,
                    phase="heartbeat",
                    error=PeerLost(rank.trouble, replica=self.name, rank=rank.index),
                    weights=self.weights,
                )
                return
