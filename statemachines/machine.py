"""A machine: one table, one state, synchronous flips, asynchronous waiting around them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Unpack, final

from statemachines.core import Core
from statemachines.errors import InvalidTransition, ReentrantTransition, Validation, WrongThread
from statemachines.events import Transition, render_facts
from statemachines.gates import GateContext, Gates
from statemachines.hub import TransitionHub
from statemachines.waiting import Watches

if TYPE_CHECKING:
    from collections.abc import Callable

    from statemachines.events import Facts
    from statemachines.gates import Check
    from statemachines.hub import Hook
    from statemachines.subscription import Subscription
    from statemachines.tables import Table, Weights


@final
class StateMachine:
    """The state of one engine (or gate, or fleet member).

    Threads: while the state is one of ``table.busy``, only the thread that made the last
    transition may fire. In every other state any thread may, one at a time: an engine can serve
    its next round under another loop. `rebind_thread` hands over a busy machine.

    Args:
        table: What is legal.
        name: Of the engine, in events and messages.
        role: Such as ``"trainer"`` or ``"worker"``. (name, role) should be unique on a hub.
        hub: Shared with other machines; left out, the machine has its own and closes it with
            itself.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        table: Table,
        *,
        name: str,
        role: str,
        hub: TransitionHub | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        given: object = name  # a config's, perhaps
        if not isinstance(given, str) or not given:
            raise Validation(f"name must be a non-empty string, not {given!r}")
        self.table = table
        self.name = name
        self.role = role
        self.hub = TransitionHub() if hub is None else hub
        self._owns_hub = hub is None
        self._states = {str(state): state for state in table.states}
        self._core = Core(table, self._record)
        self._clock = clock
        self._entered = clock()
        self._seq = 0
        self._last: Transition | None = None
        self._gates = Gates()
        self._watches = Watches()
        # Only ever tried, never waited for: it tells a second flip from the first, atomically.
        self._flip = threading.Lock()
        self._thread: int | None = None

    def __repr__(self) -> str:
        return f"<StateMachine {self.name} ({self.role}) {self.state} seq={self._seq}>"

    @property
    def state(self) -> str:
        """The state, as the table's own member."""
        return self._states[self._core.state]

    @property
    def seq(self) -> int:
        """`seq` of the last transition; 0 before the first."""
        return self._seq

    def allowed(self) -> tuple[str, ...]:
        """The triggers that are legal now."""
        return self.table.allowed(self._core.state)

    def may(self, trigger: str) -> bool:
        """Whether `trigger` is legal now."""
        return self.table.target(self._core.state, trigger) is not None

    def fire(
        self,
        trigger: str,
        *,
        phase: str | None = None,
        error: BaseException | str | None = None,
        round: int | None = None,
        version: int | str | None = None,
        nbytes: int = 0,
        weights: Weights | str | None = None,
    ) -> Transition:
        """Flip now, then tell waiters, subscriptions and hooks; asks no gate.

        Nothing in here waits, so it works in a cancelled scope. If it raises, state, `seq` and
        history are what they were (but Ctrl-C inside a hook passes through after the flip).

        Raises:
            InvalidTransition: Not legal in this state; ``detail`` has ``state`` and ``allowed``.
            ReentrantTransition: Called from a hook of this machine's own transition.
            WrongThread: Another thread owns the machine's round, or is flipping it right now.
            Validation: `weights` is not one of `Weights`.
        """
        facts = render_facts(
            phase=phase, error=error, round=round, version=version, nbytes=nbytes, weights=weights
        )
        if not self._flip.acquire(blocking=False):
            if self._thread == threading.get_ident():
                raise ReentrantTransition(
                    f"{self._who()}: {str(trigger)!r} fired from inside a hook"
                )
            raise WrongThread(
                f"{self._who()}: {str(trigger)!r} fired while another thread flips it"
            )
        try:
            return self._flip_to(trigger, facts)
        finally:
            self._flip.release()

    def rebind_thread(self) -> None:
        """Make the calling thread the owner, even of a busy machine.

        For when the loop that ran the round is gone and the machine must still be closed.
        """
        self._thread = threading.get_ident()

    def gate(self, trigger: str, check: Check, *, timeout: float = 30.0) -> Callable[[], None]:
        """Ask `check` before `trigger` whenever the machine is moved by `advance`.

        Args:
            trigger: ``initialize``, ``start`` or ``complete``.
            check: Sync or async, gets a `GateContext`. Returning False or raising vetoes. The
                state may change while it waits; legality is judged again afterwards.
            timeout: Seconds an async check may take; longer is a veto.

        Returns:
            What removes the gate again.

        Raises:
            Validation: This trigger takes no gates, or the arguments cannot be right.
        """
        if trigger not in self.table.triggers:
            raise Validation(f"table {self.table.name!r} has no trigger {str(trigger)!r}")
        return self._gates.add(trigger, check, timeout)

    def is_gated(self, trigger: str) -> bool:
        """Whether there are gates before `trigger`."""
        return self._gates.has(trigger)

    async def pass_gates(
        self, trigger: str, *, round: int | None = None, version: int | str | None = None
    ) -> bool:
        """Ask the gates of `trigger`, in order; the state does not change here.

        Returns:
            Whether there was any to ask.

        Raises:
            GateRejected: One vetoed, raised, or did not answer in time.
        """
        if not len(self._gates):
            return False
        context = GateContext(
            engine=self.name,
            role=self.role,
            trigger=str(trigger),
            state=str(self.state),
            round=round,
            version=version,
        )
        return await self._gates.ask(context)

    async def advance(self, trigger: str, **facts: Unpack[Facts]) -> Transition:
        """Pass the gates, then `fire`; cancelled while it waits, nothing has changed.

        Raises:
            InvalidTransition: Not legal, before or after waiting. Any transition in between
                counts, even if the state came back: what the gates agreed to is over.
            GateRejected: A gate vetoed.
        """
        if not self.may(trigger):
            raise self._illegal(trigger)
        seq = self._seq
        await self.pass_gates(trigger, round=facts.get("round"), version=facts.get("version"))
        if self._seq != seq:
            raise self._illegal(trigger, "the machine moved on while its gates were asked")
        return self.fire(trigger, **facts)

    async def wait_for(self, *states: str, timeout: float | None = None) -> str:
        """Return as soon as one of `states` is reached, at once if it is the state now.

        A state that is left again before this task runs counts as reached.

        Returns:
            The state that was reached.

        Raises:
            InvalidTransition: The machine has ended in a state that was not asked for.
            TimeoutError: `timeout` seconds have passed.
            Validation: No states, or one that the table does not have.
        """
        wanted = tuple(str(state) for state in states)
        if not wanted or not set(wanted) <= set(self._states):
            raise Validation(f"table {self.table.name!r} cannot reach {states!r}")
        if self._core.state in wanted:
            return self.state
        if not self._ended():
            try:
                reached = await self._watches.wait(wanted, timeout)
            except TimeoutError:
                raise TimeoutError(
                    f"{self._who()}: not {' or '.join(wanted)} within {timeout} s but {self.state}"
                ) from None
            if reached is not None:
                return self._states[reached]
        raise self._illegal(f"wait for {' or '.join(wanted)}", "it has ended")

    def on_transition(self, hook: Hook) -> Callable[[], None]:
        """Call `hook` inside this machine's flips; see `TransitionHub.on_transition`."""
        return self.hub.on_transition(hook, only=(self.name, self.role))

    def subscribe(self, *, size: int = 256, since: int | None = None) -> Subscription:
        """This machine's transitions, ending with it; see `TransitionHub.subscribe`."""
        subscription = self.hub.subscribe(size=size, since=since, only=(self.name, self.role))
        if self._ended():
            self.hub.forget(subscription)
            subscription.end()
        return subscription

    def _flip_to(self, trigger: str, facts: dict[str, Any]) -> Transition:
        thread = threading.get_ident()
        if self.state in self.table.busy and thread != self._thread:
            raise WrongThread(
                f"{self._who()}: {str(trigger)!r} fired from a thread that does not run the round",
                next_step="Fire from the loop that started the round, or rebind_thread() first.",
            )
        if not self._core.flip(trigger, facts):
            raise self._illegal(trigger)
        assert self._last is not None
        return self._last

    def _record(self, trigger: str, source: str, dest: str, facts: dict[str, Any]) -> None:
        now = self._clock()
        self._thread = threading.get_ident()
        self._seq += 1
        self._last = Transition(
            engine=self.name,
            role=self.role,
            seq=self._seq,
            trigger=trigger,
            source=source,
            dest=dest,
            wall_time=time.time(),
            monotonic=now,
            seconds_in_source=now - self._entered,
            **facts,
        )
        if dest != source:
            self._entered = now
        self._watches.notice(dest, ended=self._ended())
        try:
            self.hub.publish(self._last)
        finally:
            if self._ended():
                self._end_streams()

    def _end_streams(self) -> None:
        if self._owns_hub:
            self.hub.close()
        else:
            self.hub.end(self.name, self.role)

    def _ended(self) -> bool:
        return self._core.state in self.table.final

    def _who(self) -> str:
        return f"{self.name} ({self.role})"

    def _illegal(self, action: str, reason: str = "") -> InvalidTransition:
        allowed = [str(trigger) for trigger in self.allowed()]
        why = f" ({reason})" if reason else ""
        return InvalidTransition(
            f"{self._who()}: cannot {action} in state {self.state}{why}; "
            f"allowed: {', '.join(allowed) or 'nothing'}",
            detail={"state": str(self.state), "allowed": allowed, "trigger": str(action)},
        )
