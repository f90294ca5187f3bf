"""The ranks of one trainer, agreeing with each other.

Sources run collectives, so no rank may stop iterating alone: it would hang or kill the others. All
ranks therefore meet before each layer group and at the end of the round. A meeting is one exchange
over the star (`transports.star`): every rank says "go on" or why not, and one "not" stops all of
them at the same boundary. Whatever ends a round on one rank ends it on all, with the same error.

The meetings happen on the source lane. A single rank meets nobody, at no cost.

A rank that is cancelled in the middle of a meeting, or dies, breaks the table for all. Those that
live sit down again where they first met (`regather`), all of them, before the next round begins.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Protocol, final

import anyio
import msgspec

from aiosync.agreement import Holding
from aiosync.concurrency import distance_from_cause, first_line
from aiosync.errors import PeerLost, RoundCancelled, Validation
from aiosync.messages import ErrorInfo, error_info, to_error
from aiosync.report import Report
from aiosync.version import Version
from transports.star import ALIVE, Star
from transports.waker import Waker

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiosync.errors import AiosyncError
    from transports.lane import LaneLike


class Seat(Protocol):
    """Where this rank finds the others, as often as it has to."""

    def sit_down(self, *, waker: Waker, deadline: float) -> Star:
        """Wait for all of them; blocking."""

    def leave(self) -> None:
        """Nobody will be found here any more."""


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says at a meeting.

    Attributes:
        at: Where it is; all must be at the same place.
        stop: Why it does not go on.
        facts: Things that must be equal on all ranks, by name.
        holding: What it contributes.
        version: What it would send; `follows` says that rank 0 may name another one.
        report: What became of this very round, where it knows.
        payload: What a backend's ranks tell each other at this place.
    """

    at: str
    stop: ErrorInfo | None = None
    facts: dict[str, str] = {}
    holding: Holding | None = None
    version: Version | None = None
    follows: bool = False
    report: Report | None = None
    payload: bytes = b""


_WORD = msgspec.json.Decoder(Word)
_AGAIN = "may_begin_again"


@final
class TrainerRanks:
    """This rank's seat. Blocking calls belong on the source lane; `stop` may come from any thread.

    Attributes:
        rank, size: This rank, and how many take part.
    """

    def __init__(self, star: Star, seat: Seat | None = None) -> None:
        self._star = star
        self._seat = seat
        self._sitting_down: Waker | None = None
        self._reason: BaseException | None = None
        self.parted = False
        """Whether the ranks left this round together, or cannot meet any more."""
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)  # a reason has come up
        self._broken = False
        self.deadline = math.inf
        """Of `time.monotonic`; a meeting does not wait longer. Set by the round."""
        self.may_begin_again: Callable[[BaseException], bool] | None = None
        """Asked of the reason with which this rank stops the round; then the others wait to hear
        whether it begins again."""
        self.promised = False
        """Whether they do."""

    @classmethod
    def alone(cls) -> TrainerRanks:
        return cls(Star.alone())

    @property
    def rank(self) -> int:
        return self._star.rank

    @property
    def size(self) -> int:
        return self._star.size

    @property
    def epoch(self) -> int:
        """Counts how often the ranks have sat down together; the same on all of them."""
        return self._star.epoch

    @property
    def broken(self) -> bool:
        """Whether a meeting ended half way: the ranks do not know where the others are."""
        return self._broken

    def begin(self, deadline: float) -> None:
        """A new round: nobody has asked to stop yet."""
        self.deadline = deadline
        self.parted = self._broken
        self.promised = False
        with self._lock:
            self._reason = None

    def regather(self, deadline: float) -> None:
        """Sit down again, all ranks that live; blocking. Each rank calls it.

        Raises:
            PhaseTimeout: Ranks did not come before the deadline (of `time.monotonic`); named.
            PeerLost: Rank 0 is gone, or these ranks have no place to meet.
            TransportAborted: `abort` was called.
        """
        if self._seat is None:
            raise PeerLost("the trainer ranks have no place to meet again", phase="admit")
        with self._lock:
            self._star.close()
            waker = self._sitting_down = Waker()
        star = None
        try:
            star = self._seat.sit_down(waker=waker, deadline=deadline)
        finally:
            with self._lock:
                self._sitting_down = None
                if star is None:
                    waker.close()
                else:
                    self._star = star
                    self._broken = self.parted = False

    async def regathered(self, lane: LaneLike, *, grace: float) -> None:
        """`regather` on the source lane, in nearly all the time that the caller has."""
        left = anyio.current_effective_deadline() - anyio.current_time()
        limit = time.monotonic() + earlier(left)
        await lane.run(self.regather, limit, abort=self.abort, grace=grace)

    def stop(self, reason: BaseException | None = None) -> None:
        """Have the next meeting end the round; of several reasons the nearest to the cause counts.

        Args:
            reason: None: this rank was cancelled, unless there is another reason already.
        """
        with self._news:
            known = self._reason
            if known is None:
                self._reason = reason or RoundCancelled(f"rank {self.rank} was cancelled")
            elif reason is not None:
                self._reason = min(known, reason, key=distance_from_cause)
            self._news.notify_all()

    def stop_if_unexplained(self, symptom: BaseException, *, seconds: float) -> None:
        """`stop`, for a broken connection, whose cause is often told elsewhere a moment later.

        Blocks until then, at most `seconds`: all ranks are to learn the cause.
        """
        self.stop(symptom)
        with self._news:
            self._news.wait_for(lambda: self._reason is not symptom, seconds)

    def meet(self, mine: Word | str, *, deadline: float | None = None) -> list[Word]:
        """Agree to go on.

        Args:
            mine: What this rank says, or only where it is.
            deadline: Of this meeting, if it is not the round's.

        Returns:
            What each rank said, by rank.

        Raises:
            The reason of the lowest rank that wants to stop; on that rank, the reason itself.
            Validation: Ranks are at different places, or a fact differs; names rank and fact.
            PeerLost, PhaseTimeout: A rank is gone or did not come; named.
        """
        with self._lock:
            reason = self._reason
        word = Word(at=mine) if isinstance(mine, str) else mine
        if self.size == 1:
            if reason is not None:
                raise reason
            return [word]
        words = self._exchange(word, reason, deadline)
        self._settle(words, reason)
        return words

    def say_stop(self, at: str, reason: BaseException) -> None:
        """Tell the others why this rank leaves; they learn it at the meeting they are in.

        A no-op where they left together, or where there are none.
        """
        if self.size > 1 and not self.parted:
            self._exchange(Word(at=at), reason)

    def conclude(self, report: Report | None) -> Report | None:
        """The last meeting: rank 0 brings the report, all leave with it."""
        with self._lock:
            reason = self._reason if self.rank else None  # rank 0 has committed: too late to stop
        if self.size == 1:
            return report
        words = self._exchange(Word(at="end", report=report), reason)
        if words[0].report is None:
            self._settle(words, reason)
        return words[0].report

    def _exchange(
        self, word: Word, reason: BaseException | None, deadline: float | None = None
    ) -> list[Word]:
        limit = self.deadline if deadline is None else deadline
        if reason is not None:
            word = msgspec.structs.replace(word, stop=self._told(reason))
        try:
            parts = self._star.exchange(msgspec.json.encode(word), deadline=limit)
            words = [_WORD.decode(part) for part in parts]
        except BaseException:
            self.parted = self._broken = True  # whatever it was, the ranks are out of step now
            raise
        if any(other.stop is not None or other.at != words[0].at for other in words):
            self.parted = True
        return words

    def _told(self, reason: BaseException) -> ErrorInfo:
        info = _info(reason)
        if self.may_begin_again is not None and self.may_begin_again(reason):
            info.detail[_AGAIN] = self.promised = True
        return info

    def _settle(self, words: list[Word], reason: BaseException | None) -> None:
        for rank, word in enumerate(words):
            if word.stop is None:
                continue
            if rank == self.rank and reason is not None:
                raise reason
            error = to_error(word.stop)
            raise error.locate(rank=rank)
        for rank, word in enumerate(words):
            if word.at != words[0].at:
                raise Validation(
                    f"rank 0 is at {words[0].at!r}, rank {rank} at {word.at!r}", rank=rank
                )
            for name, value in words[0].facts.items():
                if word.facts.get(name) != value:
                    raise Validation(
                        f"{name} differs between trainer ranks: rank 0 has {value}, rank {rank}"
                        f" has {word.facts.get(name)}",
                        rank=rank,
                        phase="admit",
                    )

    def abort(self) -> None:
        """End a blocked meeting; the star is of no more use."""
        with self._lock:
            self._broken = True
            if self._sitting_down is not None:
                self._sitting_down.wake()
            else:
                self._star.abort()

    def close(self) -> None:
        with self._lock:
            self._star.close()
        if self._seat is not None:
            self._seat.leave()


def _info(reason: BaseException) -> ErrorInfo:
    if isinstance(reason, Exception):
        return error_info(reason)
    return error_info(RoundCancelled(first_line(reason)))


def earlier(seconds: float) -> float:
    """A little less: who waits inside a limit ends before it, and can say for whom it waited."""
    return seconds - min(seconds / 4, 0.5)


def awaits_word(error: AiosyncError) -> bool:
    """Whether the rank that stopped the round with `error` says later whether it begins again."""
    return bool(error.detail.get(_AGAIN))


def may_return(error: PeerLost) -> bool:
    """Whether the rank that left the meeting is alive, so that all can meet again."""
    return bool(error.detail.get(ALIVE))
