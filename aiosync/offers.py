"""Rounds that a trainer asks for and another process decides about, and the record of them.

An offer is made by a trainer's ``start``, which waits for the decision. It ends by the decision,
when its time is up, or when the trainer is gone: by its own abort, or by its silence. What became
of it, and of its round, stays on record, so that whoever decides may die, come back and ask.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, final

import anyio
import msgspec
from msgspec import Meta

from aiosync.errors import Busy, Refused, Validation

# At run time: msgspec resolves the annotations of a Struct when it is first decoded.
from aiosync.messages import Count, Name
from aiosync.report import MemberOutcome
from aiosync.version import Version

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from aiosync.messages import RoundHeader
    from aiosync.record_file import RecordFile

OFFERED: Final = "offered"
ACCEPTED: Final = "accepted"
DECLINED: Final = "declined"
EXPIRED: Final = "expired"
WITHDRAWN: Final = "withdrawn"
COMMITTED: Final = "committed"
FAILED: Final = "failed"
UNKNOWN: Final = "unknown"
KEPT: Final = 256


class RoundRecord(msgspec.Struct, kw_only=True):
    """One round that a trainer asked for; as it travels, and as `FleetGateway.rounds` gives it.

    Attributes:
        id: Tells this offer from every other one.
        seq: Order of the offers.
        owner: The trainer; None for a client that has no name.
        epoch, round: The trainer's numbers; 0 where it has none.
        version: What the round will carry, where the trainer says so before.
        state: ``offered``, ``accepted`` (and under way), ``declined``, ``expired`` (nobody decided
            in time), ``withdrawn`` (by the trainer); then ``committed``, ``failed`` or ``unknown``.
        reason: Of the decline, or the error that ended the round.
        offered_at, decided_at, ended_at: Unix times.
        seconds_left: Until the offer expires; 0 once it is decided.
        members: What became of each member, once the round is over.
    """

    id: Name
    seq: Count = 0
    owner: str | None = None
    epoch: Count = 0
    round: Count = 0
    version: Version | None = None
    state: str = OFFERED
    reason: Annotated[str, Meta(max_length=4096)] | None = None
    offered_at: float = 0.0
    decided_at: float | None = None
    ended_at: float | None = None
    seconds_left: float = 0.0
    members: list[MemberOutcome] = []


class Decider(Protocol):
    """Takes decisions: the desk of this process, or the client of another one's gateway."""

    async def accept(self, id: str) -> None: ...

    async def decline(self, id: str, reason: str) -> None: ...


@final
class Offer:
    """A round that waits for a decision.

    Attributes:
        record: What is known of it.
    """

    def __init__(self, record: RoundRecord, decider: Decider) -> None:
        self.record = record
        self._decider = decider

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def version(self) -> Version | None:
        """What the round will carry; None where the trainer does not say."""
        return self.record.version

    async def accept(self) -> None:
        """Let the round begin; returns when that is on record. May be repeated.

        Raises:
            Refused: It was decided otherwise, has expired, or was withdrawn.
        """
        await self._decider.accept(self.id)

    async def decline(self, reason: str = "") -> None:
        """Have the trainer's start refused with `reason`, before a byte moves. May be repeated.

        Raises:
            Refused: As for `accept`.
        """
        await self._decider.decline(self.id, reason)

    def __repr__(self) -> str:
        version = None if self.version is None else self.version.label
        return f"<Offer {self.id} of {self.record.owner} version={version}>"


@final
class _Held:
    __slots__ = ("deadline", "decided", "lease", "record", "renewed")

    def __init__(self, record: RoundRecord, deadline: float, lease: float | None) -> None:
        self.record = record
        self.deadline = deadline
        self.lease = lease
        self.renewed = time.monotonic()
        self.decided = anyio.Event()

    @property
    def ends_at(self) -> float:
        """When it ends undecided: its time is up, or the trainer is silent for its lease."""
        return (
            self.deadline if self.lease is None else min(self.deadline, self.renewed + self.lease)
        )


@final
class OfferDesk:
    """The offers of one gateway: those that wait, and the record of the last 256."""

    def __init__(self, name: str, hold_s: float) -> None:
        self.name = name
        self.hold_s = hold_s
        self._held: dict[str, _Held] = {}
        self._seq = 0
        self._news = anyio.Event()
        self._deciding = anyio.Lock()
        self.file: RecordFile | None = None
        """Where the record outlives this process."""

    # -- the trainer's side ----------------------------------------------------------------------

    async def hold(self, header: RoundHeader | None) -> RoundRecord:
        """Offer the round and wait for the decision; the record of an accepted one.

        Called again for the same round, it waits for, or repeats, the same decision.

        Raises:
            Refused: Declined, expired or withdrawn; says which, and why.
            Busy: A client without a name has asked already.
        """
        held = self._known(header) or self._new(header)
        try:
            while not held.decided.is_set():
                left = held.ends_at - time.monotonic()
                if left <= 0:
                    self._run_out(held)
                    break
                with anyio.move_on_after(left):
                    await held.decided.wait()
        except BaseException:
            self._decide(held, WITHDRAWN, "the gateway stopped")
            raise
        record = held.record
        if record.state in (DECLINED, EXPIRED, WITHDRAWN):
            raise Refused(
                f"the round was {record.state}{': ' + record.reason if record.reason else ''}",
                replica=self.name,
                phase="start",
                retryable=record.state == EXPIRED,
                detail={"offer": record.id, "decision": record.state},
            )
        return record

    def withdraw(self, header: RoundHeader | None, reason: str) -> None:
        """The trainer gave up the round that waits."""
        for held in self._waiting():
            if _key(header) == _key_of(held.record):
                self._decide(held, WITHDRAWN, reason)

    def touch(self, header: RoundHeader | None) -> None:
        """The trainer is alive."""
        for held in self._waiting():
            if _key(header) == _key_of(held.record):
                held.renewed = time.monotonic()

    # -- the side that decides -------------------------------------------------------------------

    async def accept(self, id: str) -> None:
        await self._on_record(id, ACCEPTED, None)

    async def decline(self, id: str, reason: str) -> None:
        await self._on_record(id, DECLINED, reason or None)

    async def _on_record(self, id: str, state: str, reason: str | None) -> None:
        """Decide; with a file, only once that is written: nobody acts on what may be forgotten."""
        async with self._deciding:
            held = self._held.get(id)
            if self.file is not None and held is not None and not held.decided.is_set():
                meant = {"state": state, "reason": reason, "decided_at": time.time()}
                await self.file.write(msgspec.structs.replace(held.record, **meant))
            self._settle(id, state, reason)

    async def next_after(self, seq: int) -> RoundRecord:
        """The first offer after `seq` that waits for a decision."""
        while True:
            news = self._news
            for held in self._waiting():
                if held.record.seq > seq:
                    return self.shown(held)
            await news.wait()

    async def offers(self) -> AsyncGenerator[Offer, None]:
        """Every offer that waits, and then each new one."""
        seq = 0
        while True:
            record = await self.next_after(seq)
            seq = record.seq
            yield Offer(record, self)

    def records(self, last: int = KEPT) -> list[RoundRecord]:
        """The rounds that were offered, oldest first."""
        return [self.shown(held) for held in self._held.values()][-last:]

    def waiting(self) -> RoundRecord | None:
        """The offer that waits longest."""
        return next((self.shown(held) for held in self._waiting()), None)

    # -- what became of a round ------------------------------------------------------------------

    def end(
        self, record: RoundRecord, state: str, reason: str | None, members: list[MemberOutcome]
    ) -> None:
        """The accepted round is over."""
        record.state, record.reason, record.members = state, reason, members
        record.ended_at = time.time()
        self._note(record)

    def restore(self, records: list[RoundRecord]) -> list[RoundRecord]:
        """Take over what an earlier gateway had on record.

        Returns:
            The round that it had let in and did not see the end of, if there is one; ``unknown``
            from here on.
        """
        open_then: list[RoundRecord] = []
        for record in records:
            if record.state == OFFERED:
                record.state, record.reason = WITHDRAWN, "the gateway ended before it was decided"
            elif record.state == ACCEPTED:
                record.state, record.reason = UNKNOWN, "the gateway ended during the round"
                open_then.append(record)
            held = _Held(record, 0.0, None)
            held.decided.set()
            self._held[record.id] = held
            self._seq = max(self._seq, record.seq)
        return open_then[-1:]  # of an earlier one nobody can say any more

    def _note(self, record: RoundRecord) -> None:
        if self.file is not None:
            self.file.note(record)

    def shown(self, held: _Held) -> RoundRecord:
        """A copy, with the seconds that are left now."""
        left = 0.0 if held.decided.is_set() else max(held.ends_at - time.monotonic(), 0.0)
        return msgspec.structs.replace(held.record, seconds_left=left)

    # -- inside ----------------------------------------------------------------------------------

    def _waiting(self) -> list[_Held]:
        return [held for held in self._held.values() if not held.decided.is_set()]

    def _known(self, header: RoundHeader | None) -> _Held | None:
        if header is not None:
            same = [h for h in self._held.values() if _key_of(h.record) == _key(header)]
            return same[-1] if same else None
        if any(held.record.owner is None for held in self._waiting()):
            raise Busy("a client without a name waits for a decision already", phase="start")
        return None

    def _new(self, header: RoundHeader | None) -> _Held:
        self._seq += 1
        owner, epoch, number = _key(header)
        limit, lease = self.hold_s, None
        version = None
        if header is not None:
            limit = min(limit, header.deadline_s or limit)
            lease, version = header.lease_s, header.version
        record = RoundRecord(
            id=secrets.token_hex(8),
            seq=self._seq,
            owner=owner,
            epoch=epoch,
            round=number,
            version=version,
            offered_at=time.time(),
        )
        held = _Held(record, time.monotonic() + limit, lease)
        self._held[record.id] = held
        self._note(record)
        for old in [key for key, each in self._held.items() if each.decided.is_set()]:
            if len(self._held) <= KEPT:
                break
            del self._held[old]
        self._news.set()
        self._news = anyio.Event()
        return held

    def _run_out(self, held: _Held) -> None:
        if held.deadline <= time.monotonic():
            self._decide(held, EXPIRED, "nobody decided in time")
        else:
            self._decide(held, WITHDRAWN, f"no sign of life from {held.record.owner}")

    def _decide(self, held: _Held, state: str, reason: str | None) -> None:
        if not held.decided.is_set():
            held.record.state, held.record.reason = state, reason
            held.record.decided_at = time.time()
            held.decided.set()
            if self.file is not None and state not in (ACCEPTED, DECLINED):
                self.file.note(held.record)  # those two are on record before they are made

    def _settle(self, id: str, state: str, reason: str | None) -> None:
        held = self._held.get(id)
        if held is None:
            raise Validation(f"there is no offer {id!r:.80}", detail={"path": "$.offer"})
        if not held.decided.is_set():
            self._decide(held, state, reason)
            return
        was = held.record.state
        accepted = was not in (DECLINED, EXPIRED, WITHDRAWN)
        if (accepted and state == ACCEPTED) or (was == state):
            return  # the same decision again
        raise Refused(
            f"offer {id} is {was} already{': ' + held.record.reason if held.record.reason else ''}",
            phase="start",
            detail={"offer": id, "decision": was},
        )


def _key(header: RoundHeader | None) -> tuple[Any, int, int]:
    return (None, 0, 0) if header is None else (header.owner, header.epoch, header.round)


def _key_of(record: RoundRecord) -> tuple[Any, int, int]:
    return record.owner, record.epoch, record.round
