"""What a group says of itself: the ranks' states, weights and abilities as one."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from aiosync.staging import is_shared
from statemachines.tables import State, Weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiosync.messages import PeerState
    from aiosync.worker_group_peer import Rank

_ADVANCE = (
    State.CLOSED,
    State.FAILED,
    State.IDLE,
    State.INITIALIZED,
    State.UPDATING,
    State.FINALIZING,
)


def merge_weights(ranks: Sequence[Rank]) -> Weights:
    """The worst of all; ranks of different versions are torn as a replica, whole as they are."""
    held = {rank.weights for rank in ranks}
    if Weights.UNKNOWN in held:
        return Weights.UNKNOWN
    mixed = any(rank.version != ranks[0].version for rank in ranks)
    return Weights.TORN if mixed or Weights.TORN in held else Weights.INTACT


def merge_states(mine: PeerState, ranks: Sequence[Rank]) -> dict[str, Any]:
    """Fields of the group's `PeerState` that the ranks decide.

    The state is that of the least advanced rank, but only between rounds: during one the group's
    own is what the next call will be judged by, and the ranks' are a moment old.
    """
    peers = [rank.link.peer for rank in ranks if rank.link.peer is not None]
    incarnations = "/".join([mine.incarnation, *(peer.incarnation for peer in peers)])
    state = mine.state
    if state == State.INITIALIZED and peers:
        states = [State(peer.state) for peer in peers]
        lost = [State.FAILED for rank in ranks if rank.lost is not None]
        # A rank that is a moment behind with its news may still look busy.
        state = min([State.INITIALIZED, *states, *lost], key=_ADVANCE.index).value
    backends = sorted({str(peer.detail.get("backend")) for peer in peers})
    sinks = sorted({str(peer.detail.get("sink")) for peer in peers})
    detail = mine.detail | {
        "backend": " and ".join(backends),
        "sink": " and ".join(sinks),
        "ranks": [rank.facts() for rank in ranks],
    }
    shared = bool(peers) and all(map(is_shared, peers))
    detail["readers"] = 1 if shared else sum(rank.link.readers for rank in ranks)
    if any(peer.detail.get("paused") for peer in peers):
        detail["paused"] = True
    return {
        # A rank that restarted is a replica that restarted: the trainer initialises again.
        "incarnation": hashlib.blake2b(incarnations.encode(), digest_size=8).hexdigest(),
        "world_size": sum(rank.size for rank in ranks),
        "state": state,
        "features": _common([mine.features, *(peer.features for peer in peers)]),
        "digests": _common([peer.digests for peer in peers]),
        "detail": detail,
    }


def _common(lists: Sequence[Sequence[str]]) -> list[str]:
    """What is in all of them, in the first one's order."""
    if not lists:
        return []
    return [name for name in lists[0] if all(name in other for other in lists[1:])]
