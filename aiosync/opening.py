"""How a round begins at its members: with a call of its own, or together with their update."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from aiosync.defaults import DEFAULTS
from aiosync.errors import Fenced, InvalidTransition
from aiosync.messages import STARTS
from aiosync.roll_call import begin_again, has_restarted
from aiosync.settling import can_begin_again
from aiosync.weight_targets import MODEL

if TYPE_CHECKING:
    from aiosync.round import Round

_START = "start_weight_update"


async def start(round: Round) -> None:
    """Have every member begin the round, unless its update will.

    Raises:
        InvalidTransition, Fenced: A member refuses, and not since it restarted; or it did, and
            must not be initialised again.
        Exception: What else a member's start raised.
    """
    round.starts_with_update = may_start_with_update(round)
    if round.starts_with_update:
        return
    try:
        await round.engine.beside_start(round, partial(round.call, "start", None))
    except (InvalidTransition, Fenced) as error:
        if round.recovered or not round.engine.recovers or not await has_restarted(round):
            raise
        await begin_again(round, error)
        await round.holds.take("round")
        await round.call("start", None)


def may_start_with_update(round: Round) -> bool:
    """Whether the round's update may start it, which saves a call.

    One that finds out then that the worker was restarted cannot be mended in its midst: the round
    has to be one that can begin again as a whole (`settling.at_most_twice`). And what `start` is
    there to find out before bytes move has to be none of others' affair: other members, who would
    be half way, a pause, a driver.
    """
    engine, budget = round.engine, round.budget
    if not engine.starts_with_update or len(round.links) != 1:
        return False
    link, settings = round.links[0], round.settings
    is_able = link.speaks_ours and link.peer is not None and STARTS in link.peer.features
    is_able = is_able and _starts_plainly(link.client)
    is_plain = round.target == MODEL and settings.pause is None and not settings.around
    has_begun_again = round.has_moved or round.recovered
    # A member that does not answer is noticed as soon as by a start of its own.
    is_limited = budget.stall <= (budget.admit or DEFAULTS.admit_s)
    return is_able and is_plain and is_limited and can_begin_again(round) and not has_begun_again


def _starts_plainly(client: Any) -> bool:
    """Whether a start is a method of ours: somebody's own one may do more than to hand it on."""
    method = getattr(type(client), _START, None)
    is_ours = getattr(method, "__module__", "").partition(".")[0] == __package__
    return is_ours and _START not in getattr(client, "__dict__", {})
