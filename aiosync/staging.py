"""Staging that the ranks of a group share: who asks for it, who can, and each rank's place in it.

The ranks themselves do it (`transports.staging`); here is what is decided before.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from aiosync.errors import Refused, Validation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiosync.messages import PeerState, RoundHeader
    from aiosync.worker import WeightTransferEngine
    from aiosync.worker_group_peer import Rank
    from transports.stream import Receiver

SHARED = "shared_host"
STAGING = ("private", SHARED)
_MEET_S = 5.0

Label = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class StagingPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's part in a staging copy that several share; comes with its group's init.

    Attributes:
        rank: Its number; 0 receives for all.
        ranks: How many there are.
        address, token: Where they meet, and what they have to know; the token is a secret.
    """

    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    ranks: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    address: Label
    token: Label

    def __repr__(self) -> str:  # the token stays out of logs
        return f"StagingPlace(rank={self.rank}, ranks={self.ranks})"


def shares(config: Any) -> bool:
    """Whether the worker's config asks for staging that is shared."""
    return bool(getattr(config, "staging", "private") == SHARED)


def check_staging(config: Any) -> None:
    """Refuse a value of `staging` that means nothing.

    Raises:
        Validation: Names the field.
    """
    staging, sink = getattr(config, "staging", "private"), getattr(config, "sink", "staged")
    if staging not in STAGING:
        raise Validation(f"staging must be one of {', '.join(STAGING)}, not {staging!r}")
    if staging == SHARED and sink != "staged":
        raise Validation(f'staging="{SHARED}" needs sink="staged", not {sink!r}')


def check_shares(engine: WeightTransferEngine[Any, Any]) -> None:
    """Refuse an engine whose backend cannot do what its config asks for.

    Raises:
        Refused: It receives elsewhere than into the host's memory, or loads by itself.
    """
    if not shares(engine.config):
        return
    if not engine.shares_staging:
        raise Refused(
            f'staging="{SHARED}" stages in the host\'s memory; backend'
            f" {getattr(engine.config, 'backend', None)!r} does not receive into that",
            phase="init",
            next_step='use backend "ipc" or "gloo", or staging="private"',
        )
    if os.uname().sysname != "Linux":
        raise Refused(f'staging="{SHARED}" needs Linux', next_step='use staging="private"')


def place_of(
    engine: WeightTransferEngine[Any, Any], header: RoundHeader | None
) -> StagingPlace | None:
    """The engine's place, as an init's header gives it; None where staging is its own.

    Raises:
        Refused: One side expects the other to share.
    """
    place = None if header is None else header.staging
    if shares(engine.config) == (place is not None):
        return place
    text = "the group shares its staging, this rank's config does not"
    if place is None:
        text = f'staging="{SHARED}" is for ranks of a WorkerGroup: this worker has no group'
    raise Refused(text, replica=engine.name, phase="init")


def receiver_at(place: StagingPlace | None, make: Callable[[], Receiver]) -> Receiver:
    """The receiver of a rank at that place; `make` makes the backend's own. May block a moment.

    Raises:
        Refused: The rank that receives for this one cannot be reached.
    """
    from transports.errors import PeerLost  # here: what transports needs, most of us do not
    from transports.staging import FollowReceiver, LeadReceiver

    if place is None:
        return make()
    where = {"address": place.address, "token": place.token}
    if place.rank == 0:
        return LeadReceiver(make(), others=place.ranks - 1, **where)
    receiver = FollowReceiver(place.rank, **where)
    try:
        receiver.meet(seconds=_MEET_S)
    except (PeerLost, Validation) as error:
        receiver.release()
        raise Refused(
            f'staging="{SHARED}": rank {place.rank} cannot reach rank 0; they must be processes of'
            f" one host, one network namespace and one user ({error.message})",
            rank=place.rank,
            phase="init",
            next_step='make a group of the ranks of each host, or use staging="private"',
        ) from error
    return receiver


# -- in the group --------------------------------------------------------------------------------


def is_shared(peer: PeerState | None) -> bool:
    """Whether a worker says that it shares its staging."""
    return peer is not None and peer.detail.get("staging") == SHARED


def give_places(ranks: Sequence[Rank]) -> list[StagingPlace | None]:
    """A place for each rank, where they share their staging.

    Raises:
        Validation: Some of them do, and some do not.
    """
    from transports.listener import new_address  # here: as above

    shared = [rank for rank in ranks if is_shared(rank.link.peer)]
    if not shared:
        return [None] * len(ranks)
    if len(shared) < len(ranks):
        other = next(rank for rank in ranks if rank not in shared)
        raise Validation(
            f'rank {shared[0].index} has staging="{SHARED}", rank {other.index} has not: ranks of'
            " one group share it, or none does",
            rank=other.index,
            phase="init",
        )
    address, token, size = new_address(), secrets.token_hex(16), len(ranks)
    return [
        StagingPlace(rank=number, ranks=size, address=address, token=token)
        for number in range(size)
    ]
