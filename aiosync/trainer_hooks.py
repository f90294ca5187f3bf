"""What a backend of the trainer side implements, each hook with what it does by default."""

from __future__ import annotations

import math
from abc import ABC
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self

from aiosync.config import TrainerInit as Init
from aiosync.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiosync.feed import SourceFeed
    from aiosync.members import MemberLink
    from aiosync.round import Round
    from aiosync.trainer import TrainerWeightTransferEngine
    from statemachines.hub import TransitionHub
    from transports.planning import Plan
    from transports.stream import Sender, StreamSummary


class TrainerHooks(ABC, Generic[Init]):
    """Called by `aiosync.trainer`, `aiosync.rendezvous` and `aiosync.round`, never by users.

    An engine that overrides `trainer_init` and `send_weights` whole needs none of them.
    """

    init_info_cls: ClassVar[type]
    reusable_after_abort: ClassVar[bool] = False
    """Whether the channel can carry another round after one was given up."""
    looks_late: ClassVar[bool] = False
    """Whether a module is looked at while its tensors are sent (`settling.may_look_late`)."""
    starts_with_update: ClassVar[bool] = False
    """Whether a round may be started by its update (`opening.may_start_with_update`); the round
    makes that call itself then, so there is an `update_payload`."""
    backend_name: str = "custom"
    per_member: bool = False
    """Whether the data plane can go on without some members (its sender is a `PerReader`)."""

    links: list[MemberLink]
    init_payload: dict[str, Any] | None = None
    """What an overridden `trainer_init` handed to the workers."""

    @classmethod
    def from_init_info(
        cls, init_info: Init, *, client: Any, source: Any, hub: TransitionHub | None
    ) -> Self:
        """Construct from the typed init info, without touching a worker."""
        raise NotImplementedError(f"{cls.__name__} must override trainer_init or from_init_info")

    def get_worker_init_payload(self) -> dict[str, Any]:
        """The init info that workers get; an overridden `trainer_init` is remembered."""
        if self.init_payload is not None:
            return self.init_payload
        raise NotImplementedError(f"{type(self).__name__} must say what its workers need")

    def member_payload(self, link: MemberLink) -> dict[str, Any]:
        """What one member's init info has beyond the common part (a rank, a name)."""
        return {}

    def check_peer(self, link: MemberLink) -> None:
        """Judge what a member answered to the probe, before init; raises to refuse."""

    def check_peers(self) -> None:
        """The same for all members, and what they have in common."""
        for link in self.links:
            self.check_peer(link)

    def fits(self, link: MemberLink) -> bool:
        """Whether the channel that there is can take `link` in as it is."""
        return True

    def nudge(self) -> None:
        """A member dropped out of the round: the data plane is to go on without it."""

    async def host_rendezvous(self) -> None:
        """Open what the init payload tells the members of (a port); before every init."""

    async def join(self) -> None:
        """Meet the members, while they get their init infos; cancelled if one of them refuses."""

    def sibling(self, *, client: Any, source: Any) -> TrainerWeightTransferEngine[Any]:
        """Another engine that cuts and checks the same tensors as this one does, for `client`.

        Raises:
            Refused: There can be no second one beside this one.
        """
        del client, source
        raise Refused(
            f"backend {self.backend_name} brings no member up between rounds",
            next_step="catch_up='next_round'",
        )

    def make_plan(self, feed: SourceFeed) -> Plan:
        """Cut the announced tensors into chunks; on the lane, kept until the metadata changes."""
        raise NotImplementedError(f"{type(self).__name__} has no plan")

    def for_ranks(self) -> bytes:
        """What this rank tells the trainer's other ranks when they agree on a round."""
        return b""

    def agreed(self, round: Round, told: Sequence[bytes]) -> None:
        """They have agreed; each rank's `for_ranks`. On the lane: they may meet once more."""

    def co_sender(self, round: Round) -> Sender | None:
        """On a rank that is no sender: what takes the tensors that it iterates, if anything."""
        return None

    def update_payload(self, round: Round) -> dict[str, Any] | None:
        """The update info of this round; None where `transmit` makes the update calls itself."""
        raise NotImplementedError(f"{type(self).__name__} must override send_weights")

    async def beside_start(self, round: Round, start: Callable[[], Awaitable[None]]) -> None:
        """Await ``start()``, which begins the round at its members, and get ahead meanwhile.

        Nothing may leave yet; it raises what `start` raises.
        """
        await start()

    async def transmit(self, round: Round) -> StreamSummary:
        """The data leg: move the round's bytes; cancellation must abort it."""
        raise NotImplementedError(f"{type(self).__name__} must override send_weights")

    def explained(self, error: BaseException) -> BaseException:
        """What ended a round, or what was the reason for it; called once for each that failed."""
        return error

    def dispose(self) -> None:
        """Free the channel; idempotent, must not block."""

    def sent_bytes(self) -> int:
        """Payload bytes of the current round that have been taken so far."""
        return 0

    def progress_at(self) -> float:
        """Monotonic time of the data plane's last progress."""
        return -math.inf
