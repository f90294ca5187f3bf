"""One rank process as its group sees it: its calls, its heartbeat, and whether it is lost."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, final

import anyio

from aiosync.client import HTTPVLLMWeightSyncClient
from aiosync.defaults import DEFAULTS
from aiosync.errors import (
    AiosyncError,
    Fenced,
    PeerLost,
    PhaseTimeout,
    ProtocolMismatch,
    RemoteError,
)
from aiosync.members import MemberLink
from aiosync.messages import RoundHeader
from aiosync.watchable import BUSY
from statemachines.tables import State, Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiosync.staging import StagingPlace
    from aiosync.version import Version

_RETRY_S = 0.05
_NEEDED = ("prepare", "abort", "status")


@final
class Rank:
    """A link to one rank, and what may be said of it now.

    Every call is awaited to its answer. A call that was left without one is noted in `owes`; the
    rank is lost then, unless it has said something since. A rank that is lost refuses further
    calls until it answers a heartbeat or a probe.

    Attributes:
        index: Position in the group.
        title: What errors call it.
        first: Worker ranks before this one (a rank may itself be a group).
        seat: Readers before this one: its place in what the trainer gives out to those.
        lost: Why the rank counts as lost; None while it does not.
        owes: The method whose answer was not waited for.
    """

    def __init__(self, index: int, client: Any, *, group: str, owner: str) -> None:
        if isinstance(client, str):
            client = HTTPVLLMWeightSyncClient(client)
        self.index = index
        self.title = f"rank {index}"
        self.first = self.seat = index
        self.owner = owner
        self.link = MemberLink(f"{group}/rank{index}", client)
        self.lost: str | None = "not met yet"
        self.owes: str | None = None
        self._calls: set[anyio.CancelScope] = set()
        self._missed = 0
        self._answers = 0

    # -- what is known ---------------------------------------------------------------------------

    @property
    def version(self) -> Version | None:
        return self.link.version

    @property
    def size(self) -> int:
        return self.link.world_size

    @property
    def weights(self) -> Weights:
        """What its memory holds; unknown while it is lost."""
        peer = self.link.peer
        if peer is None or self.lost is not None:
            return Weights.UNKNOWN
        return Weights(peer.weights)

    @property
    def is_ready(self) -> bool:
        """Whether it can carry another round of this group's."""
        return self.trouble is None and self.link.peer is not None and self._state == "initialized"

    @property
    def trouble(self) -> str | None:
        """Why the group's channel to it is no longer what init made it."""
        peer = self.link.peer
        if self.lost is not None or peer is None:
            return f"{self.title} is lost: {self.lost}"
        if self.link.restarted:
            return f"{self.title} restarted"
        if peer.owner != self.owner:
            return f"{self.title} belongs to {peer.owner or 'nobody'} now"
        return None

    @property
    def _state(self) -> str:
        return State.CLOSED if self.link.peer is None else self.link.peer.state

    def facts(self) -> dict[str, Any]:
        """One line of the group's state."""
        version = self.version
        return {
            "rank": self.index,
            "state": self._state,
            "weights": self.weights.value,
            "version": None if version is None else version.wire,
            "lost": self.lost,
        }

    # -- calls -----------------------------------------------------------------------------------

    async def call(self, method: str, *args: Any, header: RoundHeader | None = None) -> Any:
        """Call the rank's server and note what became of the answer.

        Raises:
            PeerLost: The rank is lost, or was found to be while the call was out.
            AiosyncError: What it answered, with its rank.
        """
        if self.lost is not None:
            raise self._gone()
        scope = anyio.CancelScope()
        self._calls.add(scope)
        self.owes = method
        try:
            with scope:
                reply = await self.link.call(method, *args, header=header)
                self.owes, self._missed = None, 0
                return reply
        except (PeerLost, PhaseTimeout, ProtocolMismatch) as error:
            if isinstance(error, RemoteError):  # it did answer: its own peer was lost
                self.owes = None
            elif not isinstance(error, ProtocolMismatch):
                self._lose_by(error)
            raise error.locate(rank=self.index)  # noqa: B904  the same error, now with its place
        except AiosyncError as error:
            self.owes, self._missed = None, 0
            raise error.locate(rank=self.index)  # noqa: B904  as above
        finally:
            self._answers += 1
            self._calls.discard(scope)
        raise self._gone()

    async def probe(self, *, wait: float = 0.0) -> None:
        """Ask what it is and what it holds; a lost rank that answers is back.

        Args:
            wait: Seconds to try again for, as long as nobody listens.

        Raises:
            ProtocolMismatch: It is no aiosync worker.
        """
        deadline = time.monotonic() + wait
        while True:
            try:
                await self.link.probe()
                break
            except AiosyncError as error:
                if not isinstance(error, RemoteError):
                    self._lose_by(error)
                if not isinstance(error, PeerLost) or time.monotonic() >= deadline:
                    raise error.locate(rank=self.index)  # noqa: B904  as above
            await anyio.sleep(_RETRY_S)
        lacking = [feature for feature in _NEEDED if not self.link.supports(feature)]
        if lacking:
            raise ProtocolMismatch(
                f"{self.title} of a group must be an aiosync worker; this one knows no"
                f" {', '.join(lacking)}",
                replica=self.link.name,
                rank=self.index,
                phase="init",
            )
        self.found()

    async def join(self, init_info: dict[str, Any], staging: StagingPlace | None) -> None:
        """Become its owner; a round of ours that is still open there is given up first."""
        peer = self.link.peer
        if peer is not None and peer.owner == self.owner and peer.state in BUSY:
            number = peer.detail.get("round", 0)
            header = RoundHeader(owner=self.owner, epoch=peer.epoch, round=number)
            await self.call("abort_weight_update", "the group initialises again", header=header)
        header = RoundHeader(owner=self.owner, lease_s=DEFAULTS.lease_s, staging=staging)
        await self.call("init_weight_transfer_engine", init_info, header=header)
        if self.link.peer is not None:
            self.link.epoch = self.link.peer.epoch
            self.link.incarnations.initialised = self.link.peer.incarnation

    async def leave(self) -> None:
        """Free its channel."""
        header = RoundHeader(owner=self.owner, epoch=self.link.epoch)
        try:
            await self.call("shutdown_weight_transfer_engine", header=header)
        except Fenced:
            return  # somebody else's by now

    async def settle(self, reason: str, header: RoundHeader) -> None:
        """Give its round up; afterwards it has answered, or it is lost."""
        if self.lost is None:
            self.owes = None  # whatever came before: the answer to abort says how it ended
            try:
                await self.call("abort_weight_update", reason, header=header)
            except AiosyncError:
                return  # fenced, or lost: noted above

    def write_off(self) -> None:
        """Count a rank that owes an answer as lost: nobody waits for it any more."""
        if self.owes is not None:
            self.lose(f"its answer to {self.owes} never came")

    def lose(self, why: str) -> None:
        """Count the rank as lost; calls that are out end now."""
        self.lost = why
        for scope in self._calls:
            scope.cancel()

    def found(self) -> None:
        """It answered, so its state is known again."""
        self.lost = self.owes = None
        self._missed = 0

    def _gone(self) -> PeerLost:
        return PeerLost(
            f"{self.title} is lost: {self.lost}",
            replica=self.link.name,
            rank=self.index,
            detail={"lost_rank": self.index},
        )

    def _lose_by(self, error: AiosyncError) -> None:
        error.detail["lost_rank"] = self.index
        self.lose(error.message)

    # -- heartbeat -------------------------------------------------------------------------------

    async def watch(
        self,
        header_of: Callable[[Rank], RoundHeader | None],
        heard: Callable[[], None],
        *,
        every: float,
        misses: int,
    ) -> None:
        """Ask for its state for ever; `heard` is called after each answer and each silence.

        A connection that is refused or breaks loses the rank at once, silence after `misses`
        beats. Renews the lease of an open round.
        """
        while True:
            await anyio.sleep(every)
            with anyio.move_on_after(every) as scope:
                await self._beat(header_of(self))
            if scope.cancelled_caught:
                self._missed += 1
                if self._missed >= misses:
                    self.lose(f"no answer to {self._missed} heartbeats")
            heard()

    async def _beat(self, header: RoundHeader | None) -> None:
        ask, answers = self.link.client.weight_update_status, self._answers
        try:
            try:
                reply = await ask(header=header)
            except RemoteError:  # fenced: it is alive, but not ours
                reply = await ask()
        except Exception as error:  # noqa: BLE001  whatever a client raises is a beat without answer
            if isinstance(error, PeerLost):
                self.lose(error.message)
            return
        self._missed = 0
        if self._answers == answers:  # else it is older news than what is known
            self.link.note(reply.peer)
        if not self._calls:
            self.found()


async def watch_all(
    ranks: Sequence[Rank],
    header_of: Callable[[Rank], RoundHeader | None],
    heard: Callable[[], None],
    every: float,
    misses: int,
) -> None:
    """`Rank.watch` of all of them, side by side."""
    async with anyio.create_task_group() as group:
        for rank in ranks:
            watch = functools.partial(rank.watch, header_of, heard, every=every, misses=misses)
            group.start_soon(watch)
