"""After a gateway's round: what became of each member, as its fleet sees it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from aiosync.member_table import MemberTrigger
from aiosync.offers import COMMITTED, FAILED
from aiosync.report import MemberOutcome
from aiosync.watchable import BUSY
from statemachines.tables import Weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiosync.offers import RoundRecord
    from aiosync.policies import Policy
    from aiosync.report import MemberResult
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


def outcomes_of(ranks: Sequence[Rank], target: Version | None) -> list[MemberOutcome]:
    """`outcome_of` each, of a round that this process saw.

    Where a version is sent once more, who was left behind holds it too, with the bytes of before.
    """
    found = [outcome_of(rank, target) for rank in ranks]
    pairs = list(zip(ranks, found, strict=True))
    links = [rank.link for rank, each in pairs if each.outcome == "committed"]
    new = {link.weights_id for link in links if not link.holds_the_same}

    def judged(rank: Rank, each: MemberOutcome) -> MemberOutcome:
        if each.outcome != "committed" or not new or rank.link.weights_id in new:
            return each
        return msgspec.structs.replace(each, outcome="failed", phase=rank.link.phase)

    return [judged(*pair) for pair in pairs]


def outcome_of(rank: Rank, target: Version | None) -> MemberOutcome:
    """What a member holds after a round for `target`, as it said last."""
    outcome: MemberResult = "failed"
    if rank.weights == Weights.UNKNOWN:
        outcome = "unknown"
    elif target is not None and _is(rank.version, target):
        outcome = "committed"
    return MemberOutcome(
        name=rank.link.name,
        outcome=outcome,
        weights=rank.weights.value,
        phase=None if outcome == "committed" else rank.link.phase,
        error=rank.lost or rank.link.error,
        seconds=rank.link.seconds,
    )


def conclude(record: RoundRecord, ranks: Sequence[Rank], policy: Policy) -> bool:
    """Say how a round ended of which only the beginning is on record, by what members hold now.

    Returns:
        Whether that is the last word: every member has been heard, and has no round open.
    """
    if record.version is None:
        record.reason = "the gateway ended during the round, and its trainer named no version"
        return True
    for rank in ranks:
        if rank.lost is not None or rank.link.peer is None or rank.link.peer.state in BUSY:
            return False
    if any(_is_newer(rank.version, record.version) for rank in ranks):
        record.reason = "the gateway ended during the round; members hold something newer by now"
        return True
    record.members = [outcome_of(rank, record.version) for rank in ranks]
    record.ended_at = time.time()
    members = {rank.link.member for rank in ranks}
    pairs = zip(ranks, record.members, strict=True)
    lacking = {rank.link.member for rank, each in pairs if each.outcome != "committed"}
    if len(members - lacking) >= policy.needed(len(members)):
        record.state, record.reason = COMMITTED, None
    elif lacking == members and not any(each.outcome == "unknown" for each in record.members):
        record.state = FAILED
    else:
        names = ", ".join(sorted(lacking))
        record.reason = f"the gateway ended between two commits: not on {names}"
    return True


def _is(held: Version | None, meant: Version | None) -> bool:
    """By lineage and order: finish may have given it another label."""
    if held is None or meant is None:
        return False
    return (held.lineage, held.order) == (meant.lineage, meant.order)


def _is_newer(held: Version | None, than: Version) -> bool:
    return held is not None and held.lineage == than.lineage and held.order > than.order
