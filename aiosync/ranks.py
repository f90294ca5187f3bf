"""The ranks of one trainer, agreeing with each other.

Sources run collectives, so no rank may stop iterating alone: it would hang or kill the others. All
ranks therefore meet before each layer group and at the end of the round. A meeting is one exchange
over the star (`transports.star`): every rank says "go on" or why not, and one "not" stops all of
them at the same boundary. Whatever ends a round on one rank ends it on all, with the same error.

The meetings happen on the source lane. A single rank meets nobody, at no cost.
"""

from __future__ import annotations

import functools
import ipaddress
import math
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import anyio
import msgspec

from aiosync.agreement import Holding
from aiosync.concurrency import first_line
from aiosync.defaults import DEFAULTS
from aiosync.errors import PeerLost, PhaseTimeout, RoundCancelled, Validation
from aiosync.messages import ErrorInfo, error_info, to_error
from aiosync.report import Report
from transports.star import Star, StarHub, join_star
from transports.waker import Waker

if TYPE_CHECKING:
    import torch.distributed as dist

    from transports.lane import LaneLike


_ADDRESS_BYTES = 256


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says at a meeting."""

    at: str
    stop: ErrorInfo | None = None
    facts: dict[str, str] = {}
    holding: Holding | None = None
    report: Report | None = None


_WORD = msgspec.json.Decoder(Word)


@final
class TrainerRanks:
    """This rank's seat. Blocking calls belong on the source lane; `stop` may come from any thread.

    Attributes:
        rank, size: This rank, and how many take part.
    """

    def __init__(self, star: Star) -> None:
        self._star = star
        self._reason: BaseException | None = None
        self.parted = False
        """Whether the ranks left this round together, or cannot meet any more."""
        self._lock = threading.Lock()
        self._broken = False
        self.deadline = math.inf
        """Of `time.monotonic`; a meeting does not wait longer. Set by the round."""

    @classmethod
    def alone(cls) -> TrainerRanks:
        return cls(Star.alone())

    @property
    def rank(self) -> int:
        return self._star.rank

    @property
    def size(self) -> int:
        return self._star.size

    def begin(self, deadline: float) -> None:
        """A new round: nobody has asked to stop yet.

        Raises:
            PeerLost: An earlier round ended in the middle of a meeting, or without one: the ranks
                do not know where the others are any more.
        """
        if self._broken:
            raise PeerLost(
                "the trainer ranks lost each other in an earlier round",
                phase="admit",
                next_step="make new engines on all ranks",
            )
        self.deadline = deadline
        self.parted = False
        with self._lock:
            self._reason = None

    def stop(self, reason: BaseException | None = None) -> None:
        """Have the next meeting end the round; the first reason counts."""
        with self._lock:
            if self._reason is None:
                self._reason = reason or RoundCancelled(f"rank {self.rank} was cancelled")

    def meet(
        self,
        at: str,
        facts: dict[str, str] | None = None,
        holding: Holding | None = None,
        *,
        report: Report | None = None,
    ) -> list[Word]:
        """Agree to go on.

        Args:
            at: Where this rank is; all must be at the same place.
            facts: Things that must be equal on all ranks, by name.
            holding: What this rank contributes.
            report: What became of this very round, where this rank remembers it.

        Returns:
            What each rank said, by rank.

        Raises:
            The reason of the lowest rank that wants to stop; on that rank, the reason itself.
            Validation: Ranks are at different places, or a fact differs; names rank and fact.
            PeerLost, PhaseTimeout: A rank is gone or did not come; named.
        """
        with self._lock:
            reason = self._reason
        if self.size == 1:
            if reason is not None:
                raise reason
            return [Word(at=at, holding=holding, report=report)]
        words = self._exchange(at, reason, facts or {}, holding=holding, report=report)
        self._settle(words, reason)
        return words

    def say_stop(self, at: str, reason: BaseException) -> None:
        """Tell the others why this rank leaves; they learn it at the meeting they are in.

        A no-op where they left together, or where there are none.
        """
        if self.size > 1 and not self.parted:
            self._exchange(at, reason, {})

    def conclude(self, report: Report | None) -> Report | None:
        """The last meeting: rank 0 brings the report, all leave with it."""
        with self._lock:
            reason = self._reason if self.rank else None  # rank 0 has committed: too late to stop
        if self.size == 1:
            return report
        words = self._exchange("end", reason, {}, report=report)
        if words[0].report is None:
            self._settle(words, reason)
        return words[0].report

    def _exchange(
        self,
        at: str,
        reason: BaseException | None,
        facts: dict[str, str],
        *,
        holding: Holding | None = None,
        report: Report | None = None,
    ) -> list[Word]:
        info = None if reason is None else _info(reason)
        word = Word(at=at, stop=info, facts=facts, holding=holding, report=report)
        try:
            parts = self._star.exchange(msgspec.json.encode(word), deadline=self.deadline)
            words = [_WORD.decode(part) for part in parts]
        except BaseException:
            self.parted = self._broken = True  # whatever it was, the ranks are out of step now
            raise
        if any(other.stop is not None or other.at != words[0].at for other in words):
            self.parted = True
        return words

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
        self._broken = True
        self._star.abort()

    def close(self) -> None:
        self._star.close()


def _info(reason: BaseException) -> ErrorInfo:
    if isinstance(reason, Exception):
        return error_info(reason)
    return error_info(RoundCancelled(first_line(reason)))


def gather_ranks(group: dist.ProcessGroup | None, *, seconds: float) -> TrainerRanks:
    """Bring all ranks of `group` to one table; blocking, called on every rank.

    Args:
        group: A process group with a CPU backend, or None: an own gloo group over all ranks if
            torch.distributed is initialised, else this rank is alone. It is only used to tell the
            others where rank 0 is.
        seconds: How long the others may take.

    Raises:
        PhaseTimeout, PeerLost: A rank did not come; named.
    """
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return TrainerRanks.alone()
    limit = timedelta(seconds=seconds)
    own = group if group is not None else dist.new_group(backend="gloo", timeout=limit)
    rank, size = dist.get_rank(own), dist.get_world_size(own)
    if size == 1:
        return TrainerRanks.alone()
    card = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
    hub = None
    if rank == 0:
        hub = StarHub(own_address())
        text = f"{hub.address} {hub.token}".encode()
        card[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    try:
        dist.broadcast(card, dist.get_global_rank(own, 0), group=own)
        deadline = time.monotonic() + seconds
        if hub is not None:
            return TrainerRanks(hub.accept(size, waker=Waker(), deadline=deadline))
        address, token = bytes(card.tolist()).rstrip(b"\0").decode().split(" ")
        star = join_star(address, token, rank=rank, size=size, waker=Waker(), deadline=deadline)
        return TrainerRanks(star)
    finally:
        if hub is not None:
            hub.close()
        if group is None:
            dist.destroy_process_group(own)


async def gathered(lane: LaneLike, group: Any) -> TrainerRanks:
    """`gather_ranks` on the source lane, with a limit of its own.

    Raises:
        PhaseTimeout: Not all ranks came; a torch collective that is stuck keeps its thread.
    """
    seconds = DEFAULTS.admit_s
    with anyio.move_on_after(seconds):
        gathering = functools.partial(gather_ranks, group, seconds=seconds)
        return await lane.run(gathering, grace=DEFAULTS.cleanup_s / 2, discard=TrainerRanks.close)
    raise PhaseTimeout(f"not all trainer ranks came within {seconds:g} s", phase="init")


def own_address() -> str:
    """The address other hosts reach this one by, as its own name resolves; else loopback."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"
    addresses = [str(info[4][0]) for info in found]
    # Debian's own entry for the host name is a loopback address that nobody else can use.
    elsewhere = [a for a in addresses if not ipaddress.ip_address(a.split("%")[0]).is_loopback]
    return (elsewhere or addresses or ["127.0.0.1"])[0]
