"""Who is inside the generation gate, who waits outside, and the state that follows.

Theory of operation
-------------------
Requests hold the gate together. A *swap* holds it alone; a *pause* (`Hold`) keeps generation still
until its owner resumes. The state follows from three facts, after every change and without an
await: whether anybody holds, whether a swap has its turn, and how many requests compute.

* A request that reaches a checkpoint while it may be frozen is *parked*: still in flight, but not
  computing, so a swap may run. Let go, it counts as computing at once, before its task runs, so
  that nobody can slip in between.
* Neither side starves the other: once a swap waits, new requests queue behind it, and the requests
  that queued (or were parked) go before the next swap.
* Holds are counted one by one and have owners. Admission can be held apart from generation.
* All bookkeeping between two awaits is synchronous: a cancelled waiter leaves nothing behind.

One gate belongs to one event loop.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import anyio

from aiosync.defaults import DEFAULTS
from aiosync.errors import Paused, PhaseTimeout, Validation
from aiosync.generation_cache import CacheTie
from aiosync.generation_table import (
    GENERATION,
    GateState,
    GateTrigger,
    Hold,
    PauseMode,
    WeightsTag,
)
from aiosync.metadata import first_few
from statemachines.machine import StateMachine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aiosync.generation_request import GenerationRequest
    from statemachines import Subscription, Transition, TransitionHub

_NEXT = {
    GateState.RUNNING: GateTrigger.PAUSE,
    GateState.PAUSING: GateTrigger.DRAINED,
    GateState.PAUSED: GateTrigger.RESUME,
}
_ADVICE = {
    PauseMode.KEEP: "a request is let stand at `await request.checkpoint()`: call it between the"
    " steps of a long one; or end them with `generation.abort()`",
    PauseMode.WAIT: "give them longer, or pause with mode keep or abort",
    PauseMode.ABORT: "a request learns that it has to end from `await request.checkpoint()`:"
    " call it between the steps of a long one",
}


class Waiter:
    """Somebody who waits for a turn: a request (admitted or refused), or a swap."""

    __slots__ = ("admitted", "event", "mode", "refused")

    def __init__(self, mode: PauseMode | None = None) -> None:
        self.mode = mode
        self.admitted = False
        self.refused: Paused | None = None
        self.event: anyio.Event | None = None  # there once it queues

    def admit(self) -> None:
        self.admitted = True
        if self.event is not None:
            self.event.set()

    def refuse(self, error: Paused) -> None:
        self.refused = error
        if self.event is not None:
            self.event.set()


class Floor:
    """The bookkeeping of a gate; `GenerationGate` is what its parties use."""

    def __init__(self, name: str, hub: TransitionHub | None) -> None:
        self.machine = StateMachine(GENERATION, name=name, role="generation", hub=hub)
        self.cache = CacheTie()
        self.weights = WeightsTag()
        self.queue_limit = DEFAULTS.queue_limit
        self.retry_after_s = DEFAULTS.retry_after_s
        self._inside: dict[GenerationRequest, None] = {}
        self._active = 0
        self._holds: list[Hold] = []
        self._requests: deque[Waiter] = deque()
        self._swap: Waiter | None = None
        self._swaps: deque[Waiter] = deque()
        self._changed: anyio.Event | None = None
        self._swaps_done = 0
        self._paused_s = 0.0
        self._paused_at: float | None = None

    # -- watching --------------------------------------------------------------------------------

    @property
    def state(self) -> GateState:
        """Paused means that nobody computes but the swap, if there is one."""
        return cast("GateState", self.machine.state)  # the table's own member

    @property
    def in_flight(self) -> int:
        """Requests inside, parked ones included."""
        return len(self._inside)

    @property
    def holds(self) -> tuple[Hold, ...]:
        """What is in force, oldest first."""
        return tuple(self._holds)

    @property
    def seconds_paused(self) -> float:
        """How long nobody could compute since the gate was made; swaps included."""
        since = self._paused_at
        return self._paused_s + (0.0 if since is None else time.monotonic() - since)

    @property
    def events(self) -> TransitionHub:
        """The hub that publishes the gate's transitions."""
        return self.machine.hub

    def on_transition(self, hook: Callable[[Transition], object]) -> Callable[[], None]:
        """Call `hook` inside every flip; returns its remover. It must not block, raise or fire."""
        return self.machine.on_transition(hook)

    def subscribe(self, **options: Any) -> Subscription:
        """A bounded subscription (``size=``, ``since=``) to the gate's transitions."""
        return self.machine.subscribe(**options)

    async def wait_for(self, *states: GateState | str) -> GateState:
        """Wait until the gate is in one of `states`; checks first."""
        return GateState(await self.machine.wait_for(*states))

    def statistics(self) -> dict[str, Any]:
        """Counts as they are now."""
        return {
            "state": self.state.value,
            "in_flight": self.in_flight,
            "parked": self.in_flight - self._active,
            "requests_waiting": len(self._requests),
            "swaps_waiting": len(self._swaps),
            "swaps_done": self._swaps_done,
            "held_by": [str(hold) for hold in self._holds],
            "seconds_paused": self.seconds_paused,
        }

    def __repr__(self) -> str:
        waiting = len(self._requests)
        return f"<GenerationGate {self.state} in_flight={self.in_flight} waiting={waiting}>"

    def abort(self, ids: Iterable[str] | None = None, *, reason: str = "aborted") -> int:
        """Have the requests of these ids (None: all) end with what they have; returns how many."""
        wanted = None if ids is None else set(ids)
        return sum(
            request.abort(reason)
            for request in tuple(self._inside)
            if wanted is None or request.id in wanted
        )

    def check_admission(self) -> None:
        """Raise what a request would be refused with now; for health checks and routers."""
        for hold in self._holds:
            if hold.refuses:
                raise self._refusal(hold.text)

    # -- inside ----------------------------------------------------------------------------------

    async def _enter(self, timeout: float) -> None:
        """Returns once the request counts as computing."""
        if self.state is GateState.RUNNING and not self._holds:
            self._active += 1
            return
        self.check_admission()
        if len(self._requests) >= self.queue_limit:
            raise self._refusal(f"{len(self._requests)} requests are queued already")
        me = Waiter()
        with anyio.move_on_after(timeout) as scope:
            await self._queue(self._requests, me, self._leave)
        if me.refused is not None:
            raise me.refused
        if scope.cancelled_caught:
            raise self._refusal(f"generation did not go on within {timeout:g} s")

    async def _queue(self, queue: deque[Waiter], me: Waiter, hand_back: Callable[[], None]) -> None:
        queue.append(me)
        me.event = anyio.Event()
        try:
            await me.event.wait()
        except BaseException:  # whatever ends the wait: give up the place, or the turn
            if me.admitted:
                hand_back()
            elif me.refused is None:
                queue.remove(me)
            raise

    def _refusal(self, text: str) -> Paused:
        return Paused(
            text, detail={"retry_after_s": self.retry_after_s, "generation": self.state.value}
        )

    def _leave(self, *, computing: bool = True) -> None:
        self._active -= computing
        self._settle()

    async def _park(self, request: GenerationRequest) -> None:
        if not self._freezes():
            return
        request.parked, request.woken = True, anyio.Event()
        self._leave()
        await request.woken.wait()
        # Aborted, it stays parked: it may not compute any more. Let go, it is counted already.

    def _ending(self) -> str | None:
        """Why requests inside have to end, if they have to."""
        return next((hold.text for hold in self._holds if hold.mode is PauseMode.ABORT), None)

    def _freezes(self) -> bool:
        turn = self._swap is not None and self._swap.mode is PauseMode.KEEP
        return turn or any(hold.mode is PauseMode.KEEP for hold in self._holds)

    def _add(
        self,
        owner: str,
        mode: PauseMode | None,
        refuses: bool,
        reason: str,
        clears_cache: bool | None,
    ) -> Hold:
        name: Any = owner  # it may come from anywhere
        if not isinstance(name, str) or not name:
            raise Validation(f"a hold needs an owner, a non-empty string, not {owner!r}")
        hold = Hold(
            owner,
            mode,
            refuses=refuses,
            reason=reason,
            clears_cache=clears_cache,
            lift=self._remove,
        )
        self._holds.append(hold)
        if refuses:
            while self._requests:
                self._requests.popleft().refuse(self._refusal(hold.text))
        self._settle()
        return hold

    def _remove(self, hold: Hold) -> None:
        if hold in self._holds:
            self._holds.remove(hold)
            self._let_in()
            self._settle()

    async def _drain(
        self,
        timeout: float,
        mode: PauseMode,
        *,
        all_gone: bool,
        asked: float | None = None,
        phase: str = "pause",
    ) -> None:
        if not self._active and not (all_gone and self._inside):
            return
        with anyio.move_on_after(timeout):
            while self._active or (all_gone and self._inside):
                if self._changed is None:
                    self._changed = anyio.Event()
                await self._changed.wait()
        still = self.in_flight if all_gone else self._active
        if still:
            limit = timeout if asked is None else asked
            inside = [each.id for each in self._inside if all_gone or not each.parked]
            raise PhaseTimeout(
                f"generation goes on: {still} requests were still running after"
                f" {round(limit, 2):g} s: {first_few(inside)}",
                phase=phase,
                detail={"in_flight": still},
                next_step=_ADVICE[mode],
            )

    def _take_turn(self, swap: Waiter) -> None:
        self._swap = swap
        if swap.mode is PauseMode.ABORT:
            self.abort(reason="the weights change")
        self._settle()

    def _end_turn(self) -> None:
        """End a swap: let the waiting requests in, then hand the gate to the next swap."""
        self._swap = None
        self._let_in()
        if self._swaps:
            successor = self._swaps.popleft()
            successor.admit()
            self._take_turn(successor)
        self._settle()

    def _let_in(self) -> None:
        """Let go whom nothing keeps any more; they compute from here on, whenever they run."""
        if not self._freezes():
            for request in self._inside:
                if request.parked and not request.aborted and request.woken is not None:
                    request.move_to(self.weights, self._salt())
                    request.parked = False
                    self._active += 1
                    request.woken.set()
        if self._swap is None and not self._holds:
            while self._requests:
                self._active += 1
                self._requests.popleft().admit()

    def _salt(self) -> str:
        return self.cache.salt(self.weights.weights_id)

    def _settle(self) -> None:
        """Bring the state in line with the facts; tell whoever waits for a change."""
        held = self._swap is not None or any(hold.mode is not None for hold in self._holds)
        idle = GateState.PAUSING if self._active else GateState.PAUSED
        wanted = idle if held else GateState.RUNNING
        while (state := self.state) is not wanted:
            back = state is GateState.PAUSING and wanted is GateState.RUNNING
            self.machine.fire(GateTrigger.RESUME if back else _NEXT[state])
            self._clock()
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _clock(self) -> None:
        now = time.monotonic()
        if self.state is GateState.PAUSED:
            self._paused_at = now
        elif self._paused_at is not None:
            self._paused_s += now - self._paused_at
            self._paused_at = None
