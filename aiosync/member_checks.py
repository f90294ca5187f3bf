"""What a round's options ask of its members, judged before anything moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiosync.errors import Refused
from aiosync.weight_targets import MODEL, Draft

if TYPE_CHECKING:
    from aiosync.members import MemberLink
    from aiosync.round import Round


def check_options(round: Round) -> None:
    """Refuse members that cannot do what the round's options say.

    Raises:
        Refused: Names the first of them.
    """
    round.holds.check()
    unable = [link.name for link in round.links if not _takes(round, link)]
    if unable:
        raise Refused(
            f"{', '.join(unable)} cannot update {round.target.key}",
            replica=unable[0],
            phase="admit",
            next_step=(
                "the worker names its draft with set_draft_model()"
                if isinstance(round.target, Draft)
                else "the worker's engine must set supports_adapters"
            ),
        )


def opening_call(round: Round, link: MemberLink) -> str:
    """The method that opens the round: a peer without our header needs another for its draft."""
    is_draft = isinstance(round.target, Draft)
    return "start_draft_weight_update" if is_draft and not link.speaks_ours else _START


_START = "start_weight_update"


def _takes(round: Round, link: MemberLink) -> bool:
    if round.target == MODEL:
        return True
    is_draft = isinstance(round.target, Draft)
    if link.speaks_ours:
        return ("draft" if is_draft else "adapters") in link.capabilities.features
    return is_draft and callable(getattr(link.client, "start_draft_weight_update", None))
