"""Members that hold different versions, as a driver leaves them that dies between two commits.

Nobody who comes later has seen that round. What the members say of themselves is enough to name
who holds what, to route to the newest only, and to let that very version be sent once more.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from aiosync.member_table import MemberState, MemberTrigger
from aiosync.weight_targets import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aiosync.members import MemberLink
    from aiosync.roster import Roster
    from aiosync.trainer import TrainerWeightTransferEngine
    from aiosync.version import Version

logger = logging.getLogger(__name__)
_PRESENT = (MemberState.JOINING, MemberState.CURRENT)


def mixture(held: Mapping[str, Version | None]) -> str | None:
    """Who holds what, where members differ; None where they do not."""
    by_version: dict[Version | None, list[str]] = {}
    for name, version in held.items():
        by_version.setdefault(version, []).append(name)
    if len(by_version) < 2:
        return None
    lineages = len({version.lineage for version in by_version if version is not None})
    parts = [f"{', '.join(names)}: {_text(v, lineages > 1)}" for v, names in by_version.items()]
    return f"the members hold different versions ({'; '.join(parts)})"


def of_links(links: Sequence[MemberLink]) -> str | None:
    """`mixture` of servers, as they were last heard; a stock one says nothing."""
    return mixture({link.name: link.version for link in links if link.peer is not None})


def notice(engine: TrainerWeightTransferEngine[Any]) -> None:
    """A trainer met its members: say whether they differ, and let what some hold be sent again."""
    text = of_links(engine.links) if engine.version is None else None
    engine.cycle.found = text
    held = [link.version for link in engine.links if link.version is not None]
    if text is None or not held:
        return
    logger.warning("%s: %s", engine.name, text)
    mine = [version for version in held if version.lineage == engine.lineage]
    engine.cycle.mixed = (MODEL, _newest(mine or held))


def follow(fleet: Roster) -> None:
    """A fleet that has had no round of its own takes its version from what its members say.

    That is the newest of their one lineage: as after a round of its own that only some of them
    committed. Of several lineages nobody here can say which is newer.
    """
    standings = list(fleet.standings.values())
    if fleet.driving or not fleet.follows:
        return
    there = [each for each in standings if each.state is not MemberState.LOST]
    if any(each.misses or not each.incarnations for each in there):
        return  # not heard yet
    held = {each.name: each.version for each in there}
    text = mixture(held)
    if text is not None and text != fleet.mixed:
        logger.warning("fleet: %s", text)
    fleet.mixed = text
    found = {version for version in held.values() if version is not None}
    lineages = {version.lineage for version in found}
    if len(lineages) > 1:
        fleet.followed = fleet.versions.version = None
        for each in there:
            if each.state is MemberState.CURRENT:
                each.fire(MemberTrigger.MISS, error=text)
    if len(lineages) != 1:
        return
    newest = _newest(found)
    if newest != fleet.versions.version:
        fleet.followed = newest
        fleet.versions.set(newest)
    for each in there:
        if each.version == newest:
            if each.state is not MemberState.CURRENT:
                each.fire(MemberTrigger.COMMIT, version=newest.wire)
        elif each.version is not None and each.state in _PRESENT:
            error = f"it holds version {each.version}, the fleet's is {newest}"
            each.fire(MemberTrigger.MISS, error=error)


def _newest(versions: Iterable[Version]) -> Version:
    return max(versions, key=lambda version: version.order)


def _text(version: Version | None, tell_lineage: bool) -> str:
    if version is None:
        return "none"
    return f"{version} of {version.lineage}" if tell_lineage else str(version)
