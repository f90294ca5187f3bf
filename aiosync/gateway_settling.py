"""After a gateway's round: what became of each member, as its fleet sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiosync.member_table import MemberTrigger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiosync.report import MemberOutcome
    from aiosync.roster import Roster
    from aiosync.version import Version
    from aiosync.worker_group_peer import Rank


def settle(
    roster: Roster,
    ranks: Sequence[Rank],
    outcomes: Sequence[MemberOutcome],
    version: Version | None,
) -> None:
    """Tell the fleet who holds `version` now, who does not, and who is gone."""
    found: dict[str, list[tuple[Rank, MemberOutcome]]] = {}
    for rank, outcome in zip(ranks, outcomes, strict=True):
        found.setdefault(rank.link.member, []).append((rank, outcome))
    done = {
        name
        for name, own in found.items()
        if version is not None and all(each.outcome == "committed" for _, each in own)
    }
    if done and version is not None:
        roster.versions.set(version)
    facts: dict[str, Any] = {"version": None if version is None else version.wire}
    for name, own in found.items():
        standing = roster.standings.get(name)
        if standing is None:
            continue
        why = next((each.error for _, each in own if each.error), None)
        if name in done:
            standing.version = version
            standing.fire(MemberTrigger.COMMIT, **facts)
        elif any(rank.lost is not None for rank, _ in own):
            standing.fire(MemberTrigger.LOSE, error=why, **facts)
        elif done or any(each.outcome == "unknown" for _, each in own):
            standing.fire(MemberTrigger.MISS, error=why, **facts)
