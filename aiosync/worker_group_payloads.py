"""Which part of a payload each rank of a group gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiosync.errors import Validation
from aiosync.staging import is_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiosync.worker_group_peer import Rank


def info_of(
    init_info: dict[str, Any],
    rank: Rank,
    *,
    custom: Callable[[dict[str, Any], int], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """The init info of one rank: a reader of its own, and its own place behind ``rank_offset``.

    Of ranks that share their staging only the first one takes a reader's place.
    """
    info = dict(init_info)
    if custom is not None:
        return custom(info, rank.index)
    for key in ("reader", "rank_offset"):
        if isinstance(info.get(key), int):
            info[key] += rank.seat
        elif key in info:
            info[key] = f"{info[key]}/{rank.index}"
    return info


def check_payload(update_info: Any, ranks: Sequence[Rank]) -> Any:
    """Refuse what cannot be dealt out to the ranks; what is in it they judge themselves."""
    if not isinstance(update_info, dict | list):
        raise Validation(f"update_info must be a dict or a list, not {update_info!r:.40}")
    if isinstance(update_info, list) and len(ranks) > 1 and is_shared(ranks[0].link.peer):
        text = "ranks that share their staging take one update_info for all, not a list"
        raise Validation(text, phase="update")
    size = sum(rank.size for rank in ranks)
    if isinstance(update_info, list) and len(update_info) != size:
        raise Validation(
            f"update_info has {len(update_info)} entries for {size} ranks", phase="update"
        )
    return update_info


def of_rank(payload: Any, rank: Rank) -> Any:
    """A rank's part of an update info: its entry of a list, or the dict that all share."""
    if not isinstance(payload, list):
        return payload
    if rank.size == 1:
        return payload[rank.first]
    return payload[rank.first : rank.first + rank.size]
