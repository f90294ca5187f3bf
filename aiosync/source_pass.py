"""One pass over the source, in step with the trainer's other ranks.

A rank that stops iterating alone leaves its peers hanging in the source's collectives. So ranks
meet before each layer group (`aiosync.ranks`) and only a meeting ends a pass early; a rank whose
*send* failed keeps iterating, without sending, until then. Tensors are handed to the sender group
by group and copied out before the source is resumed.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, final

from aiosync.errors import Validation
from aiosync.feed import moved
from aiosync.feed_checker import settled
from aiosync.few_collections import few_collections
from aiosync.glance import FRESH_S
from aiosync.passes import CLOSE_SECONDS, aclosing, closing
from aiosync.reading import Reading
from aiosync.short_turns import short_turns
from transports.stream import columns_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import torch

    from aiosync.feed import SourceFeed
    from aiosync.ranks import TrainerRanks
    from aiosync.snapshots import Keeper
    from transports.lane import LaneLike
    from transports.stream import Run, Sender


@final
class SourcePass:
    """Iterates `feed` and hands each batch to `sender`, where this rank has one.

    Args:
        linger: How long the cause of a failed send may take to become known (`TrainerRanks`).
        keeper: Takes a copy of what is sent.
    """

    def __init__(
        self,
        feed: SourceFeed,
        ranks: TrainerRanks,
        sender: Sender | None,
        *,
        linger: float = 0.0,
        keeper: Keeper | None = None,
    ) -> None:
        self._feed = feed
        self._ranks = ranks
        self._sender = sender
        self._linger = linger
        self._keeper = keeper
        self._counts = feed.group_counts()
        self._failed = False
        self._reading: Reading | None = None
        self._ahead = 0
        self._looked: list[torch.Tensor] = []  # what `get_ahead` had of the source
        self._looked_at = 0.0
        self._passing: Generator[Run] | None = None
        self._rest: list[Run] = []  # of the batch that `get_ahead` took last

    @property
    def is_async(self) -> bool:
        return self._feed.is_async

    def prepare(self, then: Callable[[], None] | None = None) -> None:
        """Look ahead where that costs nobody anything; on the source lane, before the senders.

        Args:
            then: What else is to be done; it may have more looked at before the pass.
        """
        # With other ranks even a complaint about the module has its turn.
        if self._ranks.size == 1 and getattr(self._sender, "takes_parameters", False):
            with short_turns:  # the requests that tell the readers are on their way
                self._feed.look()
        if then is not None:
            then()
        if self._sender is not None:  # readers may read as soon as it is open
            late = getattr(self._sender, "reads_when_written", False)
            self._reading = Reading.of(self._feed, late=late)
        if self._keeper is not None:
            self._keeper.begin(self._feed)

    def get_ahead(self, count: int) -> None:
        """Hand the first `count` tensors to the sender before `run`; on the source lane.

        After `prepare`, on a rank that is alone, of tensors that stay as they are. Nothing is
        done where the source has to be run for them.
        """
        if self._feed.plain is None:
            return
        self._looked, self._looked_at = self._feed.plain, time.monotonic()
        self._passing = self._iter_plain()
        while self._ahead < count:
            batch = next(self._passing)
            due = min(count - self._ahead, len(batch))
            self._hand_over(batch.part(0, due))
            self._ahead += due
            if due < len(batch):
                self._rest.append(batch.part(due, len(batch)))

    def check_ahead(self) -> None:
        """What was taken ahead is what the source has now, right before it leaves.

        Raises:
            Validation: It was written to, or replaced.
        """
        self.check_unwritten()
        if self._passing is None or time.monotonic() - self._looked_at < FRESH_S:
            return
        self._feed.look()
        now = self._feed.plain
        self._feed.forget()
        if now is None or len(now) != len(self._looked) or not all(map(is_, now, self._looked)):
            raise moved()

    def _iter_plain(self) -> Generator[Run]:
        # A copy of half the model at once would keep the readers, and who cancels, waiting.
        return self._feed.iter_plain(grows=self._keeper is None)

    def check_unwritten(self) -> None:
        """All has been read: nobody may have written to it; on the source lane, or fail the round.

        Raises:
            Validation: Somebody has; names the first tensor.
        """
        if self._reading is not None:
            self._reading.check(rank=self._ranks.rank)

    def _tell_if_written(self) -> None:
        """Before the ranks part: later on rank 0 may have committed what another one finds."""
        if self._ranks.size > 1:
            try:
                self.check_unwritten()
            except Validation as error:
                self._ranks.stop(error)

    def abort(self) -> None:
        """End the pass at the next boundary, a blocked send at once. From any thread."""
        self._ranks.stop()
        if self._sender is not None:
            self._sender.abort()

    def run(self) -> None:
        """The whole pass over a source with plain generators; blocking, on the source lane.

        Raises:
            The source's own exception, the sender's, or what the ranks agreed to stop for.
        """
        feed = self._feed
        is_plain = self._passing is not None or feed.plain is not None or feed.looking is not None
        passing = self._passing or (self._iter_plain() if is_plain else feed.iter_batches())
        # A collection looks at each tensor of the lists that are new: the wire waits meanwhile. A
        # source's own code may leave cycles of its own, with large tensors in them.
        with few_collections if is_plain else nullcontext(), closing(passing):
            batches = chain(self._rest, passing)
            due = -self._ahead  # below zero: a batch reached into the next group
            for number, count in enumerate(self._counts):
                self._ranks.meet(f"group {number}")
                due += count
                while due > 0 and (batch := next(batches, None)) is not None:
                    due -= len(batch)
                    self._hand_over(batch)
                    del batch  # a gathered layer must not outlive the next one's gather
            self._tell_if_written()
            self._ranks.meet("end of pass")
            for batch in batches:  # raises: the source yields more than it announced
                self._hand_over(batch)

    async def run_async(self, lane: LaneLike, *, grace: float) -> None:
        """The same over a source with async generators: it runs on the loop, the rest does not."""
        passing = self._feed.aiter_batches()
        async with aclosing(passing, seconds=2 * CLOSE_SECONDS) as batches:
            due = 0
            for number, count in enumerate(self._counts):
                await lane.run(self._ranks.meet, f"group {number}", abort=self.abort, grace=grace)
                due += count
                while due > 0 and (batch := await anext(batches, None)) is not None:
                    due -= len(batch)
                    await lane.run(self._hand_over, batch, abort=self.abort, grace=grace)
                    del batch
            await lane.run(self._ranks.meet, "end of pass", abort=self.abort, grace=grace)
            async for batch in batches:  # raises: the source yields more than it announced
                await lane.run(self._hand_over, batch, abort=self.abort, grace=grace)

    def _hand_over(self, batch: Sequence[tuple[int, torch.Tensor]]) -> None:
        if self._sender is None or self._failed:
            return
        try:
            if self.is_async:  # it came over the loop, where nothing is copied
                batch = [(index, settled(tensor)) for index, tensor in batch]
            if self._reading is not None and self._reading.grows:
                self._reading.note(columns_of(batch).tensors)
            self._sender.write(batch)
            if self._keeper is not None:
                self._keeper.take(batch)
        except Exception as error:
            self._failed = True
            if self._ranks.size == 1 or self._ranks.parted:  # a sender may meet the others, too
                raise
            self._ranks.stop_if_unexplained(error, seconds=self._linger)
