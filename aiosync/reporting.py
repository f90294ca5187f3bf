"""The report of a round, attached to its error where there is one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from aiosync.concurrency import collapse
from aiosync.errors import AiosyncError
from aiosync.giving_up import worst_weights
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
        members=[_member(round, link, error) for link in round.links],
        target=round.target.key,
        pause_seconds=max((round.holds.seconds(link) for link in round.links), default=0.0),
        digest=summary.digest if summary is not None else None,
        verified=summary is not None and summary.digest is not None,
        left_out=_left_out(round, error),
        notes=list(round.notes),
        recovered=round.recovered,
    )
    if error is not None:
        _attach(collapse(error), report, round)
    return report


def _left_out(round: Round, error: BaseException | None) -> list[str]:
    if round.feed is not None:
        return round.feed.left_out
    if error is not None:
        return []  # an unread source may have to run a collective to answer, not on the loop
    return list(getattr(round.engine.source, "left_out", None) or ())


def _outcome(round: Round, error: BaseException | None) -> str:
    if error is None:
        return "committed"
    if not round.sent_finish:
        return "failed"
    outcomes = {link.outcome for link in round.links}
    if outcomes == {"committed"}:
        return "committed"
    return "unknown" if outcomes & {"committed", "unknown"} else "failed"


def _member(round: Round, link: MemberLink, error: BaseException | None) -> MemberOutcome:
    committed = error is None
    outcome: MemberResult = "failed"
    if committed or link.outcome == "committed":
        outcome = "committed"
    elif link.outcome == "unknown":
        outcome = "unknown"
    unsure = link.peer is None or outcome == "unknown"
    return MemberOutcome(
        name=link.name,
        outcome=outcome,
        weights=Weights.UNKNOWN.value if unsure or link.peer is None else link.peer.weights,
        phase=None if outcome == "committed" else link.phase,
        error=link.error or _blame(link, error),
        seconds=link.seconds,
        pause_seconds=round.holds.seconds(link),
        left_paused=round.holds.left_paused.get(link.name),
    )


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
