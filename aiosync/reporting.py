"""The report of a round, attached to its error where there is one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from aiosync.concurrency import collapse
from aiosync.errors import AiosyncError
from aiosync.giving_up import worst_weights
from aiosync.memory_plan import staging_notes
from aiosync.parts import left_behind
from aiosync.report import MemberOutcome, Report
from statemachines.tables import Weights

if TYPE_CHECKING:
    from aiosync.members import MemberLink
    from aiosync.report import MemberResult
    from aiosync.round import Round


def make_report(round: Round, error: BaseException | None, *, took: float) -> Report:
    """Sum the round up; `error` gets the report and the facts it lacks."""
    engine, summary = round.engine, round.summary
    report = Report(
        outcome=_outcome(round, error),
        version=round.version,
        round=round.number,
        backend=engine.backend_name,
        nbytes=round.nbytes,
        seconds={**round.seconds, "total": took},
        members=_members(round, error),
        target=round.target.key,
        pause_seconds=max((round.holds.seconds(link) for link in round.links), default=0.0),
        digest=summary.digest if summary is not None else None,
        verified=summary is not None and summary.digest is not None,
        left_out=_left_out(round, error),
        notes=[*round.notes, *staging_notes(round.links, summary)],
        recovered=round.recovered,
    )
    if error is not None:
        _attach(collapse(error), report, round)
    return report


def _left_out(round: Round, error: BaseException | None) -> list[str]:
    fleet, there = round.engine.fleet, {link.member for link in round.links}
    members = [] if fleet is None else [name for name in fleet.standings if name not in there]
    members += left_behind(round.links)
    if round.feed is not None:
        return [*round.feed.left_out, *members]
    if error is not None:
        return members  # an unread source may have to run a collective to answer, not on the loop
    return [*(getattr(round.source_side.source, "left_out", None) or ()), *members]


def _outcome(round: Round, error: BaseException | None) -> str:
    if error is None:
        return "committed"
    if not round.sent_finish:
        return "failed"
    outcomes = {link.outcome for link in round.links}
    if outcomes == {"committed"}:
        return "committed"
    return "unknown" if outcomes & {"committed", "unknown"} else "failed"


def _members(round: Round, error: BaseException | None) -> list[MemberOutcome]:
    servers: dict[str, list[MemberLink]] = {}
    for link in round.links:
        servers.setdefault(link.member, []).append(link)
    counts = {name for name in servers if error is None and name not in round.attendance.lost}
    return [
        _member(round, name, own, error, committed=name in counts) for name, own in servers.items()
    ]


def _member(
    round: Round,
    name: str,
    servers: list[MemberLink],
    error: BaseException | None,
    *,
    committed: bool,
) -> MemberOutcome:
    """One row for all servers of a member: what the worst of them has."""
    found = {link.outcome for link in servers}
    outcome: MemberResult = "failed"
    if committed or found == {"committed"}:
        outcome = "committed"
    elif found & {"unknown", "committed"}:
        outcome = "unknown"  # so is a member of which only some servers have committed
    bad = next((link for link in servers if link.error), servers[0])

    def left_paused(link: MemberLink) -> str | None:
        return round.holds.left_paused.get(link.name)

    return MemberOutcome(
        name=name,
        outcome=outcome,
        weights=_weights(servers, outcome),
        phase=None if outcome == "committed" else bad.phase,
        error=_why(bad, error, alone=len(servers) == 1),
        seconds=max(link.seconds for link in servers),
        pause_seconds=max(map(round.holds.seconds, servers)),
        left_paused=next(filter(None, map(left_paused, servers)), None),
    )


def _weights(servers: list[MemberLink], outcome: MemberResult) -> str:
    said = {link.peer.weights for link in servers if link.peer is not None}
    if outcome == "unknown" or any(link.peer is None for link in servers):
        return Weights.UNKNOWN.value
    return next((w.value for w in (Weights.UNKNOWN, Weights.TORN) if w in said), Weights.INTACT)


def _why(link: MemberLink, error: BaseException | None, *, alone: bool) -> str | None:
    why = link.error or _blame(link, error)
    return why if alone or not why else f"{link.name}: {why}"


def _blame(link: MemberLink, error: BaseException | None) -> str | None:
    """What the data plane found wrong with this member, whose own call was cut short by it."""
    cause = None if error is None else collapse(error)
    if not isinstance(cause, AiosyncError) or cause.replica != link.name:
        return None
    return f"{type(cause).__name__}: {cause.message}"


def _attach(cause: BaseException, report: Report, round: Round) -> None:
    if isinstance(cause, AiosyncError):
        cause.locate(report=report, phase=round.phase)
        if round.number:
            cause.locate(round=round.number)
        if round.links:
            cause.locate(weights=worst_weights(round).value)
        return
    # An exception with slots takes no attribute; `engine.last_report` has the report as well.
    with contextlib.suppress(AttributeError):
        cause.report = report  # type: ignore[attr-defined]
