"""The protocol as a state space: a trainer, its workers, a channel that loses things, and crashes.

Every flip goes through the table that is being checked, so a changed table changes what the parties
do. The rest of a party is what `aiosync` does around the flips: rounds, epochs and fences, the
two-phase commit, the status query, the abort, the lease. What each trigger *means* (a channel
opened, a round begun, weights swapped) is kept beside the state, and both must agree.

``python tests/support/protocol_model.py`` explores it and prints how many states there are.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from statemachines.tables import ENGINE, LEGAL_PAIRS, State, Table, Trigger

NONE, OPEN, DEAD, GONE = range(4)  # a channel
# Plain strings: hashing an Enum's member is slow.
IDLE, INITIALIZED, UPDATING, FINALIZING, FAILED, CLOSED = map(str, State)
BUSY = (UPDATING, FINALIZING)
WAITING = ("init", "start", "update", "prepare", "finish", "ask", "abort")
# Only a third party's ticket lets a worker begin before its trainer; nobody holds one here.
TICKET = (INITIALIZED, UPDATING)


class Violation(Exception):
    """The protocol and the table do not fit, or a promise is broken."""


Request = tuple[str, int, int, int]  # kind, epoch, round, and how many calls have followed
Reply = tuple[str, int, int, str]  # kind, epoch, round, and what it says


class Member(NamedTuple):
    """A worker, what the trainer knows of it, and what is on the way between them."""

    state: str = IDLE
    channel: int = NONE
    round: int = 0  # the open one
    seen: int = 0  # the last one of this epoch
    whole: bool = False  # all data of the open round is here
    version: int = 0  # the round whose weights it holds
    epoch: int = 0
    view: str = ""  # of the trainer: "", ok, no, aborted, committed, failed, unknown
    known: int = 0  # the epoch that the trainer was told
    up: tuple[Request, ...] = ()
    down: tuple[Reply, ...] = ()


class World(NamedTuple):
    members: tuple[Member, ...]
    state: str = IDLE  # the trainer's, as all of these
    channel: int = NONE
    round: int = 0
    complete: bool = False  # all input has been sent
    phase: str = ""
    attempt: int = 0
    asked_finish: bool = False
    reported: tuple[int, str] = (0, "")  # the last round, and what its caller was told
    last: int = 0  # rounds so far
    inits: int = 0
    accidents: int = 0  # messages lost or repeated, crashes, errors and cancellations


@dataclass(frozen=True)
class Protocol:
    """What the parties do; each field can be switched off to see that it is needed."""

    lease: bool = True
    two_phases: bool = True  # finish is sent when all have prepared
    asks: bool = True  # a lost answer to finish is asked for
    fenced: bool = True  # calls of another epoch or round are refused
    remembers_aborts: bool = True  # a start that comes after its abort is refused
    later_epochs: bool = True  # those of a restarted worker are later than all before
    timers: bool = True


@dataclass
class Model:
    table: Table = ENGINE
    pairs: frozenset[tuple[State, State]] = LEGAL_PAIRS
    protocol: Protocol = Protocol()
    workers: int = 2
    rounds: int = 1
    inits: int = 2
    accidents: int = 1
    overtaken: int = 1  # by how many later calls one may be overtaken
    fired: Counter[tuple[str, str]] = field(default_factory=Counter)
    reached: set[tuple[str, str]] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)
    states: int = 0

    # -- flips, and what they mean

    def flip(self, state: str, trigger: str) -> str:
        target = self.table.target(state, trigger)
        if target is None:
            raise Violation(f"{trigger} is needed in state {state}")
        self.fired[state, str(trigger)] += 1
        return str(target)

    def may(self, state: str, trigger: str) -> bool:
        return self.table.target(state, trigger) is not None

    def worker(self, member: Member, trigger: str, **changes: object) -> Member:
        _check_channel(trigger, member.channel)
        return member._replace(state=self.flip(member.state, trigger), **changes)

    def trainer(self, world: World, trigger: str, **changes: object) -> World:
        _check_channel(trigger, world.channel)
        return world._replace(state=self.flip(world.state, trigger), **changes)

    # -- the trainer

    def send(self, world: World, kind: str, only: Callable[[Member], bool] | None = None) -> World:
        """Call every member; what is still on the way back belongs to nobody."""
        members = []
        for member in world.members:
            if only is not None and not only(member):
                members.append(member._replace(down=()))
                continue
            about = world.attempt if kind == "init" else world.round
            view = "unknown" if kind in ("finish", "ask") else ""
            # Overtaken often enough, a call is lost.
            older = tuple((k, e, n, age + 1) for k, e, n, age in member.up if age < self.overtaken)
            up = (*older, (kind, member.known, about, 0))
            members.append(member._replace(up=up, down=(), view=view))
        return world._replace(members=tuple(members))

    def trainer_moves(self, world: World) -> Iterator[tuple[str, World]]:
        phase, state = world.phase, world.state
        if not phase:
            yield from self.owner_moves(world)
            return
        if state != CLOSED and world.accidents < self.accidents:
            members = tuple(member._replace(view="", down=()) for member in world.members)
            closed = world._replace(
                members=members, phase="", round=0, complete=False, accidents=world.accidents + 1
            )
            yield "close", self.trainer(closed, Trigger.CLOSE, channel=GONE)
        if self.protocol.timers:
            yield "timer", self.give_up(world, "timer")
        if world.accidents < self.accidents and phase != "abort":
            yield "error", self.give_up(world._replace(accidents=world.accidents + 1), "error")
        views = [member.view for member in world.members]
        if phase in ("init", "start", "update", "prepare") and "no" in views:
            yield "refused", self.give_up(world, "no")
        elif phase in ("finish", "ask"):
            if all(view in ("committed", "failed") for view in views):
                yield "settled", self.settle(world)
        elif phase == "abort":
            if all(views):
                yield "told", self.end(world)
        elif phase == "prepare" and not self.protocol.two_phases:
            if "ok" in views:  # the mutant commits as soon as anybody is ready
                yield "next", self.next_phase(world)
        elif all(view == "ok" for view in views):
            yield "next", self.next_phase(world)
        if state not in BUSY and phase != "init":
            raise Violation(f"in {phase} while {state}")

    def owner_moves(self, world: World) -> Iterator[tuple[str, World]]:
        """Whatever the engine's owner may call now."""
        state = world.state
        if self.may(state, Trigger.INITIALIZE) and world.inits < self.inits:
            fresh = world._replace(inits=world.inits + 1, attempt=world.inits + 1, phase="init")
            yield "initialize", self.send(fresh, "init")
        if self.may(state, Trigger.START) and world.last < self.rounds:
            number = world.last + 1
            begun = self.trainer(
                world,
                Trigger.START,
                round=number,
                last=number,
                phase="start",
                complete=False,
                asked_finish=False,
                reported=(0, ""),
            )
            yield "start", self.send(begun, "start")
        if self.may(state, Trigger.RELEASE):
            told = self.send(world, "bye", lambda m: m.epoch == m.known)
            yield "release", self.trainer(told, Trigger.RELEASE, channel=NONE)
        if self.may(state, Trigger.RESET):
            yield "reset", self.trainer(world, Trigger.RESET, channel=NONE)
        if state != CLOSED and world.accidents < self.accidents:
            closed = world._replace(accidents=world.accidents + 1, channel=GONE)
            yield "close", self.trainer(closed, Trigger.CLOSE)
        if state == INITIALIZED and world.accidents < self.accidents:
            failed = world._replace(accidents=world.accidents + 1, channel=DEAD)
            yield "error", self.trainer(failed, Trigger.FAIL)

    def next_phase(self, world: World) -> World:
        match world.phase:
            case "init":
                members = tuple(member._replace(view="") for member in world.members)
                opened = world._replace(phase="", members=members)
                return self.trainer(opened, Trigger.INITIALIZE, channel=OPEN)
            case "start":
                return self.send(world._replace(phase="update"), "update")
            case "update":
                done = self.trainer(world, Trigger.UPDATE)
                return self.send(
                    self.trainer(done, Trigger.FINALIZE, phase="prepare", complete=True), "prepare"
                )
            case _:
                return self.send(world._replace(phase="finish", asked_finish=True), "finish")

    def settle(self, world: World) -> World:
        if all(member.view == "committed" for member in world.members):
            return self.report(
                self.trainer(world, Trigger.COMPLETE, round=0, phase="", complete=False),
                world.round,
                "committed",
            )
        return self.give_up(world, "no")

    def give_up(self, world: World, why: str) -> World:
        match world.phase:
            case "init":
                return self.trainer(world, Trigger.FAIL, phase="", channel=DEAD)
            case "abort":
                return self.end(world)
            case "finish" if why == "timer" and self.protocol.asks:
                return self.send(world._replace(phase="ask"), "ask", lambda m: m.view == "unknown")
        if world.phase == "finish" and not self.protocol.asks:
            # The mutant takes silence for a no.
            lost = tuple(
                m._replace(view="failed") if m.view == "unknown" else m for m in world.members
            )
            world = world._replace(members=lost)
        settled = {m: m.view for m in world.members if m.view in ("committed", "failed")}
        told = self.send(world._replace(phase="abort"), "abort", lambda m: m not in settled)
        if world.asked_finish:  # what was unknown stays so, whatever they answer to the abort
            kept = tuple(
                m if old in settled else m._replace(view="unknown")
                for m, old in zip(told.members, world.members, strict=True)
            )
            told = told._replace(members=kept)
        return told

    def end(self, world: World) -> World:
        """The abort has been answered, or its time is up: flip and report."""
        views = [member.view for member in world.members]
        outcome = "failed"
        if world.asked_finish and {"committed", "unknown"} & set(views):
            outcome = "unknown"
        cleared = world._replace(phase="", round=0, complete=False)
        if all(view == "aborted" for view in views):
            after = self.trainer(cleared, Trigger.ABORT)
        else:
            after = self.trainer(cleared, Trigger.FAIL, channel=DEAD)
        return self.report(after, world.round, outcome)

    def report(self, world: World, number: int, outcome: str) -> World:
        self.outcomes[outcome] += 1
        members = tuple(member._replace(view="", down=()) for member in world.members)
        return world._replace(reported=(number, outcome), asked_finish=False, members=members)

    # -- a worker

    def worker_moves(self, world: World, member: Member) -> Iterator[tuple[str, World, Member]]:
        state = member.state
        if state in BUSY and self.protocol.lease:
            yield "lease", world, self.give_back(member)
        if state != CLOSED and world.accidents < self.accidents:
            closed = self.worker(member, Trigger.CLOSE, channel=GONE, round=0, whole=False, up=())
            yield "close", world._replace(accidents=world.accidents + 1), closed
        if state in self.table.working and world.accidents < self.accidents:
            failed = self.worker(member, Trigger.FAIL, channel=DEAD, round=0, whole=False)
            yield "error", world._replace(accidents=world.accidents + 1), failed
        for place, request in enumerate(member.up):
            if request[0] == "update" and world.accidents < self.accidents:
                spoilt = self.arrive(member, request)
                if spoilt.whole:  # the bytes are all there, and some are wrong
                    spoilt = spoilt._replace(up=member.up[:place] + member.up[place + 1 :])
                    more = world._replace(accidents=world.accidents + 1)
                    yield "spoilt", more, spoilt._replace(whole=False)
            # A repeated call is answered to somebody else.
            rest = member._replace(up=member.up[:place] + member.up[place + 1 :])
            if state != CLOSED:
                yield "arrives", world, self.arrive(rest, request)
                if world.accidents < self.accidents:
                    again = world._replace(accidents=world.accidents + 1)
                    yield "arrives", again, self.arrive(member, request)._replace(down=member.down)
            if world.accidents < self.accidents or state == CLOSED:
                lost = world.accidents + (state != CLOSED)
                yield "lost", world._replace(accidents=lost), rest

    def give_back(self, member: Member) -> Member:
        return self.worker(member, Trigger.ABORT, round=0, whole=False)

    def arrive(self, member: Member, request: Request) -> Member:
        kind, epoch, number, _ = request

        def answer(member: Member, said: str) -> Member:
            reply = (kind, epoch, number, said)
            return member._replace(down=tuple(sorted({*member.down, reply})))

        if kind == "init":
            return self.arrive_init(member, number)
        if kind == "ask":
            return answer(member, self.standing(member, number))
        if self.protocol.fenced and epoch != member.epoch:
            return answer(member, "fenced" if kind == "finish" else "no")
        return getattr(self, f"on_{kind}")(member, number, answer)

    def standing(self, member: Member, number: int) -> str:
        if member.version == number:
            return "committed"
        return "busy" if member.state in BUSY else "failed"

    def arrive_init(self, member: Member, attempt: int) -> Member:
        if member.state in BUSY:
            reply = ("init", 0, attempt, "no")
            return member._replace(down=tuple(sorted({*member.down, reply})))
        if member.state == INITIALIZED:
            member = self.worker(member, Trigger.RELEASE, channel=NONE)
        elif member.state == FAILED:
            member = self.worker(member, Trigger.RESET, channel=NONE)
        epoch = member.epoch + 1
        fresh = self.worker(member, Trigger.INITIALIZE, channel=OPEN, epoch=epoch, seen=0)
        reply = ("init", epoch, attempt, "ok")
        return fresh._replace(down=tuple(sorted({*fresh.down, reply})))

    def on_start(self, member: Member, number: int, answer: Callable[..., Member]) -> Member:
        if number == member.round:
            return answer(member, "ok")
        if not self.may(member.state, Trigger.START):
            return answer(member, "no")
        if self.protocol.fenced and number <= member.seen:
            return answer(member, "no")
        begun = self.worker(member, Trigger.START, round=number, seen=number, whole=False)
        return answer(begun, "ok")

    def on_update(self, member: Member, number: int, answer: Callable[..., Member]) -> Member:
        if member.round != number or not self.may(member.state, Trigger.UPDATE):
            return answer(member, "no")
        return answer(self.worker(member, Trigger.UPDATE, whole=True), "ok")

    def on_prepare(self, member: Member, number: int, answer: Callable[..., Member]) -> Member:
        if member.round != number:
            return answer(member, "no")
        ready = self.finalize(member)
        return answer(self.give_back(ready), "no") if not ready.whole else answer(ready, "ok")

    def finalize(self, member: Member) -> Member:
        if member.state == FINALIZING:
            return member
        return self.worker(member, Trigger.FINALIZE)

    def on_finish(self, member: Member, number: int, answer: Callable[..., Member]) -> Member:
        if member.round != number:
            settled = member.seen == number and member.version == number
            return answer(member, "ok" if settled else "no")
        ready = self.finalize(member)
        if not ready.whole:
            return answer(self.give_back(ready), "no")
        done = self.worker(ready, Trigger.COMPLETE, round=0, whole=False, version=number)
        return answer(done, "ok")

    def on_abort(self, member: Member, number: int, answer: Callable[..., Member]) -> Member:
        if member.round == number:
            member = self.give_back(member)
        elif self.protocol.remembers_aborts and number > member.seen and not member.round:
            member = member._replace(seen=number)
        is_whole = member.state == INITIALIZED
        return answer(member, "aborted" if is_whole else "other")

    def on_bye(self, member: Member, number: int, answer: Callable[..., Member]) -> Member:
        if member.state in BUSY:
            return member
        if self.may(member.state, Trigger.RELEASE):
            return self.worker(member, Trigger.RELEASE, channel=NONE)
        if self.may(member.state, Trigger.RESET):
            return self.worker(member, Trigger.RESET, channel=NONE)
        return member

    # -- the channel, and crashes

    def hear(self, world: World, member: Member, reply: Reply) -> Member:
        """A reply reaches the trainer; one that it does not wait for is nobody's."""
        kind, epoch, number, said = reply
        rest = member._replace(down=tuple(r for r in member.down if r != reply))
        if kind != world.phase:
            return rest
        if number != (world.attempt if kind == "init" else world.round):
            return rest
        if kind == "init" and said == "ok":
            return rest._replace(view="ok", known=epoch)
        if kind == "finish":
            if said == "fenced" and self.protocol.asks:
                return rest  # it may have been carried out before somebody took over
            return rest._replace(view="committed" if said == "ok" else "failed")
        if kind == "ask":
            return rest if said == "busy" else rest._replace(view=said)
        if kind == "abort":
            return rest if world.asked_finish else rest._replace(view=said)
        return rest._replace(view=said)

    def crash(self, world: World) -> Iterator[tuple[str, World]]:
        if world.accidents < self.accidents:
            # A new process in the trainer's place; what it had sent may still arrive.
            members = tuple(m._replace(view="", known=0, down=()) for m in world.members)
            yield (
                "crash",
                World(
                    members=members,
                    last=world.last,
                    inits=world.inits,
                    attempt=world.attempt,
                    accidents=world.accidents + 1,
                ),
            )

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        """Every next step of anybody: a label, and the world after it."""
        yield from self.trainer_moves(world)
        yield from self.crash(world)
        for place, member in enumerate(world.members):

            def put(after: Member, world: World = world, place: int = place) -> World:
                others = world.members
                return world._replace(members=(*others[:place], after, *others[place + 1 :]))

            for label, changed, after in self.worker_moves(world, member):
                yield label, put(after, changed)
            for reply in member.down:
                yield "heard", put(self.hear(world, member, reply))
                if world.accidents < self.accidents:
                    rest = tuple(r for r in member.down if r != reply)
                    fewer = world._replace(accidents=world.accidents + 1)
                    yield "lost", put(member._replace(down=rest), fewer)
            if world.accidents < self.accidents:
                # It remembers nothing, and what was on its way to the old one is lost.
                epoch = member.epoch if self.protocol.later_epochs else 0
                fresh = Member(view=member.view, known=member.known, epoch=epoch)
                yield "crash", put(fresh, world._replace(accidents=world.accidents + 1))

    # -- what is promised

    def judge(self, world: World, labels: set[str]) -> None:
        for member in world.members:
            pair = (world.state, member.state)
            self.reached.add(pair)
            if pair not in self.pairs or pair == TICKET:
                raise Violation(f"trainer {pair[0]} over worker {pair[1]}")
            _agree(member.state, member.channel, bool(member.round))
            if member.state == FINALIZING and not member.whole:
                raise Violation("a worker finalizes what it does not have")
        _agree(world.state, world.channel, bool(world.round))
        if any(m.version == world.round > 0 for m in world.members) and any(
            m.round == world.round and not m.whole for m in world.members
        ):
            raise Violation("a worker has committed what another one cannot verify")
        if (world.state == FINALIZING) != world.complete:
            raise Violation(f"input complete: {world.complete}, state {world.state}")
        number, outcome = world.reported
        holders = [member.version == number for member in world.members]
        if outcome == "failed" and any(holders):
            raise Violation("a worker holds what was reported as failed")
        if outcome == "committed" and world.accidents == 0 and not all(holders):
            raise Violation("a worker does not hold what was reported as committed")
        # No wait without a bound.
        if world.phase in WAITING and "timer" not in labels:
            raise Violation(f"the trainer waits in {world.phase} without a limit")
        if any(member.state in BUSY for member in world.members) and "lease" not in labels:
            raise Violation("a worker's round has no limit")

    def explore(self) -> Model:
        """Visit every world; raise `Violation` at the first that breaks a promise."""
        first = World(members=(Member(),) * self.workers)
        before: dict[World, list[World]] = {first: []}
        frontier = deque([first])
        done: list[World] = []
        how: dict[World, str] = {first: ""}
        while frontier:
            world = frontier.popleft()
            labels = set()
            try:
                for label, after in self.moves(world):
                    labels.add(label)
                    if len(after.members) == 2 and after.members[0] > after.members[1]:
                        after = after._replace(members=after.members[::-1])
                    if after not in before:
                        before[after] = []
                        how[after] = label
                        frontier.append(after)
                    before[after].append(world)
                self.judge(world, labels)
            except Violation as violation:
                violation.add_note(_path(world, before, how))
                raise
            if world.state not in BUSY and all(m.state not in BUSY for m in world.members):
                done.append(world)
        self.states = len(before)
        self._check_exits(before, done)
        if self.accidents:
            self._check_use()
        return self

    def _check_exits(self, before: dict[World, list[World]], done: list[World]) -> None:
        """From everywhere a run leads to the end of all rounds; while it can, to a commit."""
        if stuck := len(before) - len(_leading_to(done, before)):
            raise Violation(f"{stuck} states have no exit")
        committed = [
            world
            for world in before
            if world.reported == (self.rounds, "committed") and world.last == self.rounds
        ]
        able = _leading_to(committed, before)
        for world in before:
            is_open = CLOSED not in (world.state, *(m.state for m in world.members))
            spare = world.last < self.rounds and world.inits < self.inits
            if is_open and spare and world not in able:
                raise Violation(f"no further round works after {world}")

    def _check_use(self) -> None:
        """Each rule is there for some run."""
        legal = {
            (str(state), str(trigger))
            for state in self.table.states
            for trigger in self.table.allowed(state)
        }
        if unused := sorted(legal - set(self.fired)):
            raise Violation(f"no run needs {unused[0][1]} in state {unused[0][0]}")
        missing = self.pairs - self.reached - {TICKET}
        if missing and self.accidents > 1:
            raise Violation(f"no run leads to {min(missing)}")


def _check_channel(trigger: str, channel: int) -> None:
    needed = {
        Trigger.INITIALIZE: NONE,
        Trigger.START: OPEN,
        Trigger.RELEASE: OPEN,
        Trigger.RESET: DEAD,
    }.get(Trigger(trigger), channel)
    if channel != needed:
        raise Violation(f"{trigger} with channel {channel}")


def _agree(state: str, channel: int, has_round: bool) -> None:
    """What the state says against what was done."""
    expected = {
        IDLE: (NONE, False),
        INITIALIZED: (OPEN, False),
        UPDATING: (OPEN, True),
        FINALIZING: (OPEN, True),
        FAILED: (DEAD, False),
        CLOSED: (GONE, False),
    }[state]
    if expected != (channel, has_round):
        raise Violation(f"state {state} with channel {channel}, round open: {has_round}")


def _path(world: World, before: dict[World, list[World]], how: dict[World, str]) -> str:
    """The shortest way to a world, a line a step."""
    steps = []
    while before[world]:
        steps.append(f"{how[world]}: {world}")
        world = before[world][0]
    return "\n".join(reversed(steps))


def _leading_to(ends: list[World], before: dict[World, list[World]]) -> set[World]:
    found = set(ends)
    frontier = list(ends)
    while frontier:
        for world in before[frontier.pop()]:
            if world not in found:
                found.add(world)
                frontier.append(world)
    return found


FULL = (
    Model(workers=1, rounds=2, accidents=2),
    Model(workers=2, inits=1, accidents=1),
)
"""What the tests explore; `make model` goes on to two accidents with two workers."""


def main() -> None:
    for model in (*FULL, Model(workers=2, inits=1, accidents=2)):
        began = time.monotonic()
        model.explore()
        print(
            f"{model.states} states: workers {model.workers}, rounds {model.rounds},"
            f" accidents {model.accidents}; {len(model.reached)} pairs, {len(model.fired)} rules"
            f" used; {time.monotonic() - began:.1f} s"
        )


if __name__ == "__main__":
    main()
