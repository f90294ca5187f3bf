"""Who keeps a replica's generation still: callers, the open round, and weights that must not serve.

Callers have names (a trainer's is in its round header), so that nobody lifts another's hold. A
trainer's hold has a lease: one that died does not keep the replica still for ever.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, final

import anyio

from aiosync.defaults import DEFAULTS
from aiosync.errors import Fenced, Torn
from aiosync.generation_table import PauseMode
from statemachines.tables import Weights

if TYPE_CHECKING:
    from aiosync.generation_table import Hold
    from aiosync.messages import RoundHeader
    from aiosync.worker import WeightTransferEngine

NOBODY = "a client without a name"
_WEIGHTS = "weights"
_ROUND = "round"


def patience(info: Any, header: RoundHeader | None) -> float:
    """How long an update may wait for requests, in seconds.

    A little less than the trainer waits for the first byte to be taken, so that it hears what holds
    the round up.
    """
    deadline = None if header is None else header.deadline_s
    limits = [limit for limit in (getattr(info, "stall_s", None), deadline) if limit is not None]
    sooner = [limit - min(limit / 10, DEFAULTS.cleanup_s) for limit in limits]
    return min([DEFAULTS.pause_s, *sooner])


@final
class Pausing:
    """The holds that one worker engine has on its generation gate."""

    def __init__(self, engine: WeightTransferEngine[Any, Any]) -> None:
        self.engine = engine
        self._heard: dict[str, float] = {}
        self._watched: set[str] = set()
        self._round: Hold | None = None
        self._weights: Hold | None = None

    async def pause(
        self,
        mode: str,
        *,
        clear_cache: bool,
        header: RoundHeader | None,
        timeout: float | None,
    ) -> None:
        """Hold generation for this caller; a repeated call replaces its hold."""
        self._check(header, "pause")
        self._check_round(header)
        if timeout is None and header is not None:
            timeout = header.deadline_s
        owner = NOBODY if header is None else header.owner
        gate = self.engine.generation
        before = [hold for hold in gate.holds if hold.owner == owner]
        await gate.pause(
            mode,
            owner=owner,
            timeout=DEFAULTS.pause_s if timeout is None else timeout,
            clear_cache=clear_cache,
        )
        for hold in before:
            hold.release()
        if header is not None:
            self._lease(owner, header.lease_s or DEFAULTS.lease_s)

    def resume(self, *, header: RoundHeader | None) -> dict[str, Any]:
        """Lift this caller's hold, and say whether generation goes on."""
        self._check(header, "resume")
        gate = self.engine.generation
        gate.resume(NOBODY if header is None else header.owner)
        weights = self.engine.weights
        if weights is not Weights.INTACT:
            raise Torn(
                f"generation stays paused: the weights are {weights}",
                replica=self.engine.name,
                phase="resume",
                weights=weights.value,
            )
        return self.standing()

    def standing(self) -> dict[str, Any]:
        """Whether generation stands still, and for whom."""
        gate = self.engine.generation
        holds = [str(hold) for hold in gate.holds]
        return {
            "is_paused": any(hold.mode is not None for hold in gate.holds),
            "held_by": holds,
            "seconds_paused": gate.seconds_paused,
        }

    def renew(self, header: RoundHeader | None) -> None:
        """The caller gave a sign of life."""
        if header is not None and header.owner in self._heard:
            self._heard[header.owner] = time.monotonic()

    async def hold_for_round(self, number: int, limit: float) -> None:
        """Before the first write into a model that requests may be using.

        Raises:
            PhaseTimeout: They did not stop within `limit` seconds; named.
        """
        if self._round is None:
            gate = self.engine.generation
            self._round = await gate.pause(
                gate.update_mode,
                owner=_ROUND,
                reason=f"round {number} writes into the model",
                timeout=limit,
                refuse=False,
            )

    def judge(self) -> None:
        """A round is over: generation goes on if the weights are one version, and only then."""
        weights, gate = self.engine.weights, self.engine.generation
        before, self._weights = self._weights, None
        if weights is not Weights.INTACT:
            self._weights = gate.hold(
                PauseMode.ABORT if weights is Weights.TORN else PauseMode.WAIT,
                owner=_WEIGHTS,
                reason=f"the weights are {weights}",
                refuse=True,
            )
        ended, self._round = self._round, None
        for hold in (before, ended):
            if hold is not None:
                hold.release()

    def judge_again(self) -> None:
        """The weights may have turned out to be intact."""
        if self._weights is not None:
            self.judge()

    def _check(self, header: RoundHeader | None, what: str) -> None:
        """Anybody may pause; only a trainer that was fenced may not."""
        ownership = self.engine.cycle.ownership
        if header is None or header.owner != ownership.owner or header.epoch == ownership.epoch:
            return
        if 0 < header.epoch < ownership.epoch:
            raise Fenced(
                f"{what}: epoch {header.epoch} of {header.owner} is over,"
                f" epoch {ownership.epoch} began",
                detail={"owner": ownership.owner, "epoch": ownership.epoch},
            )

    def _check_round(self, header: RoundHeader | None) -> None:
        """A pause that arrives after its round has ended would keep the replica for nobody."""
        ownership = self.engine.cycle.ownership
        if header is None or (header.owner, header.epoch) != (ownership.owner, ownership.epoch):
            return
        last = ownership.last_round
        if 0 < header.round < last or (header.round == last > 0 and ownership.settled):
            raise Fenced(
                f"pause: round {header.round} is over",
                round=header.round,
                phase="pause",
                detail={"last_round": last},
            )

    def _lease(self, owner: str, lease: float) -> None:
        self._heard[owner] = time.monotonic()
        if owner not in self._watched:
            self._watched.add(owner)
            name = f"{self.engine.name}-pause-lease"
            self.engine.cycle.supervisor.start(self._watch(owner, lease), name=name)

    async def _watch(self, owner: str, lease: float) -> None:
        cycle, gate = self.engine.cycle, self.engine.generation
        try:
            while any(hold.owner == owner for hold in gate.holds):
                if cycle.session is not None and cycle.ownership.owner == owner:
                    self._heard[owner] = time.monotonic()  # the session's own lease counts
                left = self._heard[owner] + lease - time.monotonic()
                if left <= 0:
                    gate.resume(owner)
                    return
                await anyio.sleep(min(left, lease / 4))
        finally:
            self._watched.discard(owner)
            self._heard.pop(owner, None)
