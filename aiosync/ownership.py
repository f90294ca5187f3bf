"""Who may drive a worker, and what became of the rounds it had: pure bookkeeping.

(epoch, round) order everything. The worker hands out epochs: each init makes a new one and thereby
fences whoever came before. Within an epoch rounds only go up; the outcome of the last one is kept,
so that a repeated call is answered from the record instead of being run again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, final

from aiosync.errors import Fenced

if TYPE_CHECKING:
    from aiosync.messages import RoundHeader


@final
class Ownership:
    """The owner of one worker. A plain four-method client is the owner named None."""

    def __init__(self) -> None:
        self.owner: str | None = None
        # A restarted worker's epochs are later than all before: what was meant for those is fenced.
        # In microseconds: nobody initialises a worker that often, and any JSON reader can hold it.
        self.epoch = time.time_ns() // 1_000
        self.since = time.time()
        self.last_round = 0
        self.outcome: BaseException | None = None
        self.settled = True

    def take(self, owner: str | None) -> None:
        """A new owner under a new epoch; earlier ones are fenced from here on."""
        self.owner = owner
        self.epoch += 1
        self.since = time.time()
        self.last_round = 0
        self.outcome = None
        self.settled = True

    def check(self, header: RoundHeader | None, what: str) -> None:
        """Refuse a call of somebody who is not, or no longer, the owner.

        Raises:
            Fenced: Names the present owner and both epochs.
        """
        if header is None:
            if self.owner is None:
                return
            raise Fenced(
                f"{what}: this worker belongs to {self.owner} (epoch {self.epoch}); a client"
                " without a round header must initialise first",
                detail={"owner": self.owner, "epoch": self.epoch, "since": self.since},
            )
        if (header.owner, header.epoch) != (self.owner, self.epoch):
            raise Fenced(
                f"{what}: {header.owner} (epoch {header.epoch}) is not the owner; this worker"
                f" belongs to {self.owner or 'nobody'} (epoch {self.epoch})",
                detail={"owner": self.owner, "epoch": self.epoch, "since": self.since},
            )

    def begin(self, header: RoundHeader | None) -> int:
        """Open the next round and return its number.

        Raises:
            Fenced: The header's round is not newer than the last one.
        """
        number = self.last_round + 1 if header is None else header.round
        if number <= self.last_round:
            raise Fenced(
                f"start: round {number} is not newer than round {self.last_round}",
                round=number,
                detail={"last_round": self.last_round},
            )
        self.last_round = number
        self.outcome = None
        self.settled = False
        return number

    def pass_over(self, header: RoundHeader, outcome: BaseException) -> None:
        """A round was given up before its start arrived: that one comes too late now."""
        if header.round > self.last_round:
            self.begin(header)
            self.settle(outcome)

    def settle(self, outcome: BaseException | None) -> None:
        """Record how the last round ended."""
        self.outcome = outcome
        self.settled = True

    def is_settled(self, header: RoundHeader | None) -> bool:
        """Whether `header` names the last round and that round has ended."""
        return header is not None and self.settled and header.round == self.last_round
