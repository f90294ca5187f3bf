"""The parts of a round that all trainer ranks take together: agree, iterate, leave.

The ranks' own table is `aiosync.ranks`; what runs here runs on the source lane.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio
import msgspec

from aiosync.agreement import check_holdings, facts_of, holding_of
from aiosync.concurrency import collapse
from aiosync.errors import PeerLost, Validation
from aiosync.ranks import Word, earlier, may_return
from aiosync.reporting import make_report
from aiosync.round_options import NEXT
from aiosync.source_pass import SourcePass
from aiosync.streaming import OutStream, pass_along
from statemachines.tables import Trigger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiosync.round import Round


async def agree(this: Round) -> None:
    """All ranks send the same, and every tensor is held by a rank that sends.

    A ticket whose round was committed is answered here: one rank that remembers it is enough.
    """
    feed, _ = this.validated()
    engine, ranks = this.engine, this.engine.ranks
    ticket = this.settings.ticket
    follows = this.settings.version is NEXT and ticket is None
    recorded = engine.tickets.recorded(ticket)
    if ranks.size == 1 and this.source_side.agreed is feed:
        this.agreed = recorded  # alone, with what was found right in an earlier round
        return
    named = "none" if ticket is None else f"{ticket.id} (round {ticket.round})"
    limit = time.monotonic() + earlier(anyio.current_effective_deadline() - anyio.current_time())

    payload = engine.for_ranks()

    def meet() -> list[Word]:
        mine = Word(
            at="admit",
            facts={
                **facts_of(feed),
                "target": repr(this.target),
                "ticket": named,
                "source": "the engine's" if this.source_side is engine.source_side else "its own",
            },
            holding=holding_of(feed, sends=engine.is_sender),
            version=this.version,
            follows=follows,
            report=recorded,
            payload=payload,
        )
        return ranks.meet(mine, deadline=limit)

    def on_lane() -> None:
        words = _meet_first(this, limit, meet)
        _agree_on_version(this, words)
        holdings = [word.holding for word in words if word.holding is not None]
        check_holdings(feed.metadata, holdings, backend=engine.backend_name)
        this.source_side.agreed = feed
        this.agreed = next((word.report for word in words if word.report is not None), None)
        if ranks.size > 1 and this.agreed is None:
            engine.agreed(this, [word.payload for word in words])

    await this.source_side.lane.run(on_lane, abort=ranks.abort, grace=this.source_grace)


def _agree_on_version(this: Round, words: list[Word]) -> None:
    """A rank that asked for the next version takes rank 0's: it may have missed the last round.

    Raises:
        Validation: A rank asked for another one; named.
    """
    lead = words[0].version
    if lead is None:
        return
    for rank, word in enumerate(words):
        its = word.version
        if its is None or word.follows or (its.label, its.order) == (lead.label, lead.order):
            continue
        raise Validation(
            f"version differs between trainer ranks: rank 0 has {lead} (order {lead.order}),"
            f" rank {rank} has {its} (order {its.order})",
            rank=rank,
            phase="admit",
        )
    if words[this.engine.ranks.rank].follows:
        this.version = msgspec.structs.replace(lead, lineage=this.version.lineage)


def _meet_first(this: Round, limit: float, meet: Callable[[], list[Word]]) -> list[Word]:
    """The round's first meeting: nothing has moved, so a broken table can still be mended."""
    ranks, recovers = this.engine.ranks, this.engine.recovers
    if not ranks.broken:
        try:
            return meet()
        except PeerLost as error:
            if not (ranks.broken and recovers and may_return(error)):
                raise
    elif not recovers:
        raise PeerLost(
            "the trainer ranks lost each other in an earlier round",
            phase="admit",
            next_step="on all ranks: await engine.shutdown(), then engine.initialize()",
        )
    ranks.regather(limit)
    this.notes.append(f"the trainer ranks sat down again (epoch {ranks.epoch})")
    return meet()


async def heard(this: Round, fn: Callable[[], Awaitable[None]]) -> None:
    """Await ``fn()``; the other ranks raise, too, what it raised."""
    try:
        await fn()
    except Exception as error:  # noqa: BLE001  raised again, out of its group
        cause = collapse(error)
        if this.engine.ranks.size > 1:
            this.engine.ranks.stop(cause)
        raise cause from cause.__cause__


async def take_part(this: Round) -> None:
    """The round of a rank that does not send: it stays in the source's collectives."""
    feed, plan = this.validated()
    engine = this.engine
    sender = engine.co_sender(this)
    the_pass = SourcePass(feed, engine.ranks, sender, linger=this.budget.cleanup / 4)
    grace, lane = this.source_grace, this.source_side.lane
    if sender is None:
        await pass_along(the_pass, grace=grace, lane=lane)
    else:
        stream = OutStream(
            the_pass,
            sender,
            plan=plan,
            readers=0,
            round=this.number,
            stall=this.budget.stall,
            grace=grace,
            lane=lane,
        )
        await stream.run()
    this.released.set()
    engine.machine.fire(Trigger.FINALIZE, **this.facts())


async def conclude(this: Round) -> None:
    """All ranks leave with rank 0's report."""
    engine, ranks = this.engine, this.engine.ranks
    if ranks.size == 1:
        return
    mine = make_report(this, None, took=this.elapsed) if engine.is_sender else None

    def on_lane() -> None:
        this.agreed = ranks.conclude(mine)  # here: a cancellation must not lose it

    await this.source_side.lane.run(on_lane, abort=ranks.abort, grace=this.budget.cleanup / 2)
