"""The gate between generation and a change of the weights.

Requests hold it together, a swap holds it alone, and a pause keeps generation still until its owner
resumes. `aiosync.generation_floor` has the theory. One gate belongs to one event loop.
"""

from __future__ import annotations

import itertools
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from aiosync.budget import check_seconds
from aiosync.defaults import DEFAULTS
from aiosync.errors import GenerationAborted, PhaseTimeout, Validation
from aiosync.generation_cache import CacheTie
from aiosync.generation_floor import Floor, Waiter
from aiosync.generation_request import GenerationRequest
from aiosync.generation_table import GateState, Hold, PauseMode, Span, WeightsTag

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from statemachines import TransitionHub

__all__ = [
    "GateState",
    "GenerationGate",
    "GenerationRequest",
    "Hold",
    "PauseMode",
    "Span",
    "WeightsTag",
]


class GenerationGate(Floor):
    """Lets requests run side by side, or one swap alone, or nobody while somebody holds it.

    Args:
        name: Of the engine, in events.
        hub: Publish through a hub of your own.
        update_mode: What a change of the weights does to requests inside: those that reach a
            checkpoint are parked (``"keep"``), all are waited for (``"wait"``), or ended
            (``"abort"``).
        new_requests: ``"refuse"`` or ``"queue"`` while a pause is in force; None: as its mode
            says. Behind a swap they always queue.
        queue_limit: Requests that may queue.
        queue_s: Seconds a request queues before it is refused.
        retry_after_s: What a refused request is told.

    Attributes:
        cache: The embedder's KV or prefix cache, once `tie_cache` was called.
        weights: The tag of the weights that serve.
    """

    def __init__(
        self,
        *,
        name: str = "generation",
        hub: TransitionHub | None = None,
        update_mode: str = PauseMode.KEEP,
        new_requests: str | None = None,
        queue_limit: int = DEFAULTS.queue_limit,
        queue_s: float = DEFAULTS.queue_s,
        retry_after_s: float = DEFAULTS.retry_after_s,
    ) -> None:
        if new_requests not in (None, "refuse", "queue"):
            raise Validation(f"new_requests must be refuse, queue or None, not {new_requests!r}")
        super().__init__(name, hub)
        self.update_mode = _mode(update_mode)
        self.new_requests = new_requests
        self.queue_limit = queue_limit
        self.queue_s = check_seconds(queue_s, "queue_s")
        self.retry_after_s = check_seconds(retry_after_s, "retry_after_s")
        self._numbers = itertools.count(1)

    # -- requests --------------------------------------------------------------------------------

    @asynccontextmanager
    async def request(
        self, *, id: str | None = None, timeout: float | None = None
    ) -> AsyncIterator[GenerationRequest]:
        """Hold while one generation runs. Waits while a swap waits or runs.

        Not re-entrant: a request that enters again while a swap waits for it would wait for
        itself, until the swap times out. The block ends early, without an error, when
        `GenerationRequest.checkpoint` or `run` find that it was aborted; look at ``aborted``.

        Args:
            id: Names it for `abort`.
            timeout: Seconds it may queue; None takes the gate's `queue_s`.

        Raises:
            Paused: Generation is held and new requests are refused, the queue is full, or its
                time is over. Retryable: ``detail["retry_after_s"]``.
        """
        await self._enter(self.queue_s if timeout is None else check_seconds(timeout, "timeout"))
        name = id or f"request-{next(self._numbers)}"
        request = GenerationRequest(name, self.weights, salt=self._salt(), park=self._park)
        self._inside[request] = None
        if (ending := self._ending()) is not None:  # it was let in, but had not run yet
            request.abort(ending)
        try:
            yield request
        except GenerationAborted:
            if not request.aborted:
                raise
        finally:
            del self._inside[request]
            self._leave(computing=not request.parked)

    # -- holds -----------------------------------------------------------------------------------

    def hold(
        self,
        mode: str = PauseMode.ABORT,
        *,
        owner: str,
        reason: str = "",
        refuse: bool | None = None,
        clears_cache: bool | None = None,
    ) -> Hold:
        """Hold generation from now on, without waiting until it stands still; see `pause`."""
        kind = _mode(mode)
        if refuse is None:
            rule = self.new_requests or ("queue" if kind is PauseMode.KEEP else "refuse")
            refuse = rule == "refuse"
        hold = self._add(owner, kind, refuse, reason, clears_cache)
        if kind is PauseMode.ABORT:
            self.abort(reason=hold.text)
        return hold

    def hold_admission(self, *, owner: str, reason: str = "", refuse: bool = True) -> Hold:
        """Keep new requests out (refused, or queued) while those inside go on."""
        return self._add(owner, None, refuse, reason, None)

    async def pause(
        self,
        mode: str = PauseMode.ABORT,
        *,
        owner: str,
        timeout: float = DEFAULTS.pause_s,
        reason: str = "",
        refuse: bool | None = None,
        clear_cache: bool | None = None,
    ) -> Hold:
        """Hold generation; returns once it stands still.

        With ``keep`` that is when every request inside is parked or gone, otherwise when all are
        gone. Not lifted by anybody else's resume.

        Args:
            mode: `PauseMode`.
            owner: Who holds.
            timeout: Seconds until it must stand still.
            refuse: Whether new requests are refused; None: as the gate and the mode say.
            clear_cache: True empties the tied cache now, False keeps it over the next update.

        Raises:
            PhaseTimeout: Requests were still running; the hold is lifted again.
            Exception: What emptying the cache raised; the hold is lifted again.
        """
        limit = _limit(timeout)
        hold = self.hold(mode, owner=owner, reason=reason, refuse=refuse, clears_cache=clear_cache)
        try:
            await self._drain(limit, _mode(mode), all_gone=hold.mode is not PauseMode.KEEP)
            if clear_cache:
                await self.cache.empty(self.weights.weights_id)
        except BaseException:  # whatever ended the wait: nobody would lift it
            hold.release()
            raise
        return hold

    def resume(self, owner: str) -> int:
        """Lift all holds of `owner`; returns how many. Others' stay."""
        mine = [hold for hold in self._holds if hold.owner == owner]
        for hold in mine:
            hold.release()
        return len(mine)

    # -- a change of the weights -----------------------------------------------------------------

    @asynccontextmanager
    async def swap(self, *, timeout: float = 30.0, phase: str = "pause") -> AsyncIterator[None]:
        """Hold alone: waits for the requests inside, keeps new ones out.

        Args:
            timeout: Seconds until the body runs, waiting for other swaps included. The body
                itself is not limited.
            phase: Of what the swap is a part, in errors.

        Raises:
            PhaseTimeout: Requests (or another swap) were still inside; the gate is open again.
        """
        me = Waiter(self.update_mode)
        deadline = anyio.current_time() + _limit(timeout)
        if self._swap is None:
            self._take_turn(me)
        else:
            with anyio.move_on_after(timeout) as scope:
                await self._queue(self._swaps, me, self._end_turn)
            if scope.cancelled_caught:
                raise PhaseTimeout(f"another swap is still {self.state}", phase=phase)
        try:
            left = max(deadline - anyio.current_time(), 0)
            await self._drain(left, self.update_mode, all_gone=False, asked=timeout, phase=phase)
            yield
            self._swaps_done += 1
        finally:
            self._end_turn()

    @property
    def swaps_at_once(self) -> bool:
        """Whether a `swap` would have nobody to wait for."""
        is_ours = type(self) is GenerationGate  # else any part of it may wait
        return is_ours and self._swap is None and not self._active

    def adopt(self, tag: WeightsTag) -> None:
        """These weights serve from here on; called under a swap (or a hold)."""
        self.weights = tag

    def tie_cache(self, policy: str, flush: Callable[[str], Any] | None = None) -> None:
        """Tie the embedder's KV or prefix cache to the weights; see `CacheTie`."""
        self.cache = CacheTie(policy, flush)

    async def renew_cache(self, weights_id: str) -> None:
        """Before a swap makes these weights visible: empty the cache where it must not survive."""
        kept = any(hold.clears_cache is False for hold in self._holds)
        if self.cache.flushes and not kept:
            await self.cache.empty(weights_id)


def _mode(value: str) -> PauseMode:
    if value not in tuple(PauseMode):
        raise Validation(f"mode must be one of {', '.join(PauseMode)}, not {value!r}")
    return PauseMode(value)


def _limit(timeout: float) -> float:
    if not timeout >= 0 or math.isinf(timeout):
        raise Validation(f"timeout must be a finite number of seconds, not {timeout!r}")
    return timeout
