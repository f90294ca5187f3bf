"""States, triggers and rules: what is legal, as data.

Theory of operation
-------------------
An engine answers one question here: *can this channel carry another round?* That is its state.
What the replica's memory holds is a second, separate fact (`Weights`), carried by events and
reports and never folded into the state: a failed channel over intact weights keeps serving the
old version, and a healthy channel over torn weights must not serve.

Invariants

1. A flip is synchronous. No ``await`` separates judging a trigger from changing the state, so
   no cancellation can land inside one. Waiting happens before (gates), between (work) and after.
2. Work sits between two flips. Whoever fired the first owes the second: a leg that is left by
   any exception, cancellation included, fires ``fail`` (or ``abort``) before it re-raises. So
   ``fail`` is legal wherever work can be under way, is never gated and never waits. ``idle`` and
   ``initialized`` count: a rendezvous runs in the one, gates and validation in the other.
3. A (state, trigger) pair has one target. A reader can tell the outcome from the table alone.
4. ``initialize`` and ``complete`` are fired after the fact (rendezvous done, weights committed),
   ``start`` before it (no byte has moved yet), so a crash between fact and flip errs towards
   "not done".
5. ``abort`` is a promise, not a wish: weights intact, channel usable, every peer confirmed. A
   party that cannot vouch for all three fires ``fail``.
6. ``failed`` has two exits. ``reset`` disposes of the channel, it does not repair it; the next
   ``initialize`` makes a fresh one under a new epoch, and messages of the old epoch are refused.
7. ``closed`` is final.

Who fires what

* Trainer: the wrapper around ``initialize``/``send_weights`` and the client proxy. ``start`` is
  fired before the start call leaves, ``finalize`` before prepare or finish leaves, ``complete``
  when the peers' answer to finish is in.
* Worker: the request handler fires ``start``, ``update`` and ``finalize``, so that a call in the
  wrong order fails in its caller's hands; the session task fires ``complete``, ``abort`` and
  ``fail``, the last two also when the lease ends without anybody's call.
* ``reset``, ``release`` and ``close`` belong to the owner of the engine.

Rejected

* One flag per phase: the illegal combinations have no name and nothing to observe.
* Retry states: a retry is ``reset`` + ``initialize``, decided by the caller with its budget.
* A ``cancelled`` state: after a cancelled collective the channel is as dead as after an error.
* ``torn`` as a state: it outlives the channel, and `reset` would have to remember it.
* Nested states for update batches: ``update`` loops, the count is a fact of the event.
* Work inside transition callbacks: the flip would have to wait for the work, see invariant 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from statemachines.errors import Validation


class State(StrEnum):
    """Whether an engine's channel can carry a round."""

    IDLE = "idle"
    INITIALIZED = "initialized"
    UPDATING = "updating"
    FINALIZING = "finalizing"
    FAILED = "failed"
    CLOSED = "closed"


class Trigger(StrEnum):
    """What moves an engine from one state to the next."""

    INITIALIZE = "initialize"
    START = "start"
    UPDATE = "update"
    FINALIZE = "finalize"
    COMPLETE = "complete"
    ABORT = "abort"
    FAIL = "fail"
    RELEASE = "release"
    RESET = "reset"
    CLOSE = "close"


class Weights(StrEnum):
    """What a replica's memory holds.

    ``intact``: one version, whole. ``torn``: parts of two. ``unknown``: nobody could ask.
    """

    INTACT = "intact"
    TORN = "torn"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Rule:
    """`trigger` leads from each of `sources` to `dest`; `fired` says when, for readers."""

    trigger: str
    sources: tuple[str, ...]
    dest: str
    fired: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rules that were checked when the table was built.

    Attributes:
        final: States without an exit.
        working: States in which work can be under way: ``fail`` must lead out of each of them.
        busy: The subset of `working` in which a round is under way and one thread owns it.

    Raises:
        Validation: A name that is unknown, doubled or no identifier; two targets for one pair
            of state and trigger; a state nothing leads to; a state that is not final and has no
            way out, or final and has one; a working state without ``fail``.
    """

    name: str
    states: tuple[str, ...]
    initial: str
    rules: tuple[Rule, ...]
    final: tuple[str, ...] = ()
    working: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()
    _targets: dict[tuple[str, str], str] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _allowed: dict[str, tuple[str, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        self._check_names()
        for rule in self.rules:
            for source in rule.sources:
                if (source, rule.trigger) in self._targets:
                    self._refuse(f"two targets for {str(rule.trigger)!r} in state {str(source)!r}")
                self._targets[source, rule.trigger] = rule.dest
        for state in self.states:
            legal = (trigger for trigger in self.triggers if (state, trigger) in self._targets)
            self._allowed[state] = tuple(legal)
        self._check_paths()

    @property
    def triggers(self) -> tuple[str, ...]:
        """All triggers, in the order of the rules."""
        return tuple(dict.fromkeys(rule.trigger for rule in self.rules))

    def target(self, state: str, trigger: str) -> str | None:
        """Where `trigger` leads from `state`, or None if it is not legal there."""
        return self._targets.get((state, trigger))

    def allowed(self, state: str) -> tuple[str, ...]:
        """The triggers that are legal in `state`, in the order of the rules."""
        return self._allowed.get(state, ())

    def _check_names(self) -> None:
        known = set(self.states)
        if len(known) != len(self.states):
            self._refuse("a state is listed twice")
        if odd := [name for name in (*self.states, *self.triggers) if not name.isidentifier()]:
            # Names go into diagrams, logs and JSON as they are.
            self._refuse(f"not an identifier: {str(odd[0])!r}")
        used = {self.initial, *self.final, *self.working, *self.busy}
        for rule in self.rules:
            sources: object = rule.sources
            # A bare string would be read as one state per letter.
            if not isinstance(sources, tuple) or not sources:
                self._refuse(f"{str(rule.trigger)!r} needs a tuple of source states")
            used |= {*rule.sources, rule.dest}
        if unknown := sorted(used - known):
            self._refuse(f"unknown state {str(unknown[0])!r}")

    def _check_paths(self) -> None:
        reached, frontier = {self.initial}, {self.initial}
        while frontier:
            frontier = {d for (s, _), d in self._targets.items() if s in frontier} - reached
            reached |= frontier
        for state in self.states:
            leaves = any(s == state and d != state for (s, _), d in self._targets.items())
            if state not in reached:
                self._refuse(f"nothing leads to state {str(state)!r}")
            if state in self.final and self.allowed(state):
                self._refuse(f"final state {str(state)!r} has a rule")
            if state not in self.final and not leaves:
                self._refuse(f"no way out of state {str(state)!r}")
        for state in self.working:
            if self.target(state, Trigger.FAIL) in (None, *self.working):
                self._refuse(f"'fail' does not lead out of working state {str(state)!r}")
        if loose := [state for state in self.busy if state not in self.working]:
            self._refuse(f"busy state {str(loose[0])!r} is not a working state")

    def _refuse(self, reason: str) -> None:
        raise Validation(f"table {self.name!r}: {reason}", phase="table")


_OPEN = tuple(state for state in State if state is not State.CLOSED)
_WORKING = (State.IDLE, State.INITIALIZED, State.UPDATING, State.FINALIZING)
_BUSY = (State.UPDATING, State.FINALIZING)

ENGINE = Table(
    name="engine",
    states=tuple(State),
    initial=State.IDLE,
    rules=(
        Rule(Trigger.INITIALIZE, (State.IDLE,), State.INITIALIZED, "once the rendezvous succeeded"),
        Rule(Trigger.START, (State.INITIALIZED,), State.UPDATING, "before any byte moves"),
        Rule(Trigger.UPDATE, (State.UPDATING,), State.UPDATING, "for each accepted update"),
        Rule(
            Trigger.FINALIZE,
            (State.UPDATING,),
            State.FINALIZING,
            "input is complete; deferred work drains, digests and coverage are checked",
        ),
        Rule(
            Trigger.COMPLETE,
            (State.FINALIZING,),
            State.INITIALIZED,
            "committed; carries the new version",
        ),
        Rule(
            Trigger.ABORT,
            _BUSY,
            State.INITIALIZED,
            "given up, weights intact, channel usable, every peer confirmed",
        ),
        Rule(Trigger.FAIL, _WORKING, State.FAILED, "every other error or cancellation"),
        Rule(Trigger.RELEASE, (State.INITIALIZED,), State.IDLE, "transport freed"),
        Rule(Trigger.RESET, (State.FAILED,), State.IDLE, "channel disposed of"),
        Rule(Trigger.CLOSE, _OPEN, State.CLOSED, "the engine is closed"),
    ),
    final=(State.CLOSED,),
    working=_WORKING,
    busy=_BUSY,
)

# Which states one trainer and one worker can be in at the same moment. A pair has no history:
# it is legal if *some* run of the protocol gets there. The test explores all runs (lost,
# repeated and late messages, failures, crashes) and arrives at exactly this set.
_WORKER_STATES: dict[State, tuple[State, ...]] = {
    # A worker that is busy under an idle trainer: the trainer failed and was reset, or was
    # restarted, and the lease of its last round has not ended yet.
    State.IDLE: tuple(State),
    # idle: the trainer saw the rendezvous first, or the worker was released or restarted.
    # updating: the round was started on the worker first, by a ticket from a third party.
    #   Not a leftover of an earlier round: `complete` and `abort` wait for the worker's answer,
    #   and a trainer that failed cannot initialise again before the worker takes part.
    # finalizing is excluded: only a trainer that is finalizing lets a worker finalize, and from
    #   there it gets back here by `complete` or `abort` (the worker has answered: it is out),
    #   or by a new rendezvous, which a busy worker refuses. Seeing this pair means that a
    #   round was reported as done while its worker still worked on it.
    State.INITIALIZED: (
        State.IDLE,
        State.INITIALIZED,
        State.UPDATING,
        State.FAILED,
        State.CLOSED,
    ),
    # idle: the worker failed and was reset, or was restarted, and the trainer has yet to notice.
    # initialized: start is on its way, or the worker aborted (its lease ended).
    # finalizing is excluded: the trainer is still sending, so the worker acted on incomplete
    #   input or on a stale finish that its fence should have refused.
    State.UPDATING: (
        State.IDLE,
        State.INITIALIZED,
        State.UPDATING,
        State.FAILED,
        State.CLOSED,
    ),
    # initialized: committed, and the answer is on its way; or the worker aborted.
    State.FINALIZING: tuple(State),
    # A dead end on one side says nothing about the other: it may learn of it much later.
    State.FAILED: tuple(State),
    State.CLOSED: tuple(State),
}

LEGAL_PAIRS: frozenset[tuple[State, State]] = frozenset(
    (trainer, worker) for trainer, workers in _WORKER_STATES.items() for worker in workers
)


def is_legal_pair(trainer: str, worker: str) -> bool:
    """Whether one trainer and one worker can be in these states at the same moment."""
    return (trainer, worker) in LEGAL_PAIRS
