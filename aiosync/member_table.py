"""The states of a fleet member, as data: ``joining -> current -> stale -> lost``.

A member's state says whether requests may be sent to it. What it holds, and what its own engine
can carry, are facts of the member (`PeerState`); this is what the fleet makes of them.

* Only ``commit`` leads to ``current``: a round ended with the member's own word that it holds the
  new version, or a member that was away says that it holds the version that the others do.
* ``miss``: a round was committed without it, or nobody can say what it holds. It takes part in the
  next round.
* ``lose``: it does not answer; it takes part in nothing until it does again (``join``).
* ``catch_up``, ``fall_back``: it is being brought to the fleet's version between rounds; that came
  to nothing, and it takes part in the next round. Its state stays.
* A restarted process holds nothing of ours: ``join`` leads out of every other state.
"""

from __future__ import annotations

from enum import StrEnum

from statemachines.tables import Rule, Table


class MemberState(StrEnum):
    """Whether a member may serve."""

    JOINING = "joining"
    CURRENT = "current"
    STALE = "stale"
    LOST = "lost"
    LEFT = "left"


class MemberTrigger(StrEnum):
    """What moves a member."""

    COMMIT = "commit"
    MISS = "miss"
    LOSE = "lose"
    JOIN = "join"
    CATCH_UP = "catch_up"
    FALL_BACK = "fall_back"
    LEAVE = "leave"


_PRESENT = (MemberState.JOINING, MemberState.CURRENT, MemberState.STALE)
_WAITING = (MemberState.JOINING, MemberState.STALE)
_CATCHES_UP = "it is being brought to the fleet's version, between rounds"
_FALLS_BACK = "that came to nothing: it takes part in the next round"

MEMBER = Table(
    name="member",
    states=tuple(MemberState),
    initial=MemberState.JOINING,
    rules=(
        Rule(
            MemberTrigger.COMMIT,
            (*_PRESENT, MemberState.LOST),
            MemberState.CURRENT,
            "it confirmed the fleet's version",
        ),
        Rule(
            MemberTrigger.MISS,
            (*_PRESENT, MemberState.LOST),
            MemberState.STALE,
            "a round was committed without it, or nobody knows what it holds",
        ),
        Rule(MemberTrigger.LOSE, _PRESENT, MemberState.LOST, "it does not answer any more"),
        Rule(
            MemberTrigger.JOIN,
            (MemberState.CURRENT, MemberState.STALE, MemberState.LOST),
            MemberState.JOINING,
            "it answers again, or as another process",
        ),
        *(Rule(MemberTrigger.CATCH_UP, (state,), state, _CATCHES_UP) for state in _WAITING),
        *(Rule(MemberTrigger.FALL_BACK, (state,), state, _FALLS_BACK) for state in _WAITING),
        Rule(
            MemberTrigger.LEAVE,
            (*_PRESENT, MemberState.LOST),
            MemberState.LEFT,
            "it was removed from the fleet",
        ),
    ),
    final=(MemberState.LEFT,),
)
