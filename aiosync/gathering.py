"""How the ranks of a trainer find each other: through torch.distributed, once."""

from __future__ import annotations

import functools
import ipaddress
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio

from aiosync.defaults import DEFAULTS
from aiosync.errors import PhaseTimeout
from aiosync.ranks import TrainerRanks
from transports.star_door import StarHub, join_star
from transports.waker import Waker

if TYPE_CHECKING:
    import torch.distributed as dist

    from transports.lane import LaneLike
    from transports.star import Star

_ADDRESS_BYTES = 256


@dataclass(frozen=True)
class _Host:
    """Rank 0's seat: the others come to it."""

    hub: StarHub
    size: int

    def sit_down(self, *, waker: Waker, deadline: float) -> Star:
        return self.hub.accept(self.size, waker=waker, deadline=deadline)

    def leave(self) -> None:
        self.hub.close()


@dataclass(frozen=True)
class _Guest:
    """Any other rank's seat."""

    address: str
    token: str
    rank: int
    size: int

    def sit_down(self, *, waker: Waker, deadline: float) -> Star:
        return join_star(
            self.address,
            self.token,
            rank=self.rank,
            size=self.size,
            waker=waker,
            deadline=deadline,
        )

    def leave(self) -> None:
        return


def gather_ranks(group: dist.ProcessGroup | None, *, seconds: float) -> TrainerRanks:
    """Bring all ranks of `group` to one table; blocking, called on every rank.

    Args:
        group: A process group with a CPU backend, or None: an own gloo group over all ranks if
            torch.distributed is initialised, else this rank is alone. It is only used to tell the
            others where rank 0 is.
        seconds: How long the others may take.

    Raises:
        PhaseTimeout, PeerLost: A rank did not come; named.
    """
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return TrainerRanks.alone()
    limit = timedelta(seconds=seconds)
    own = group if group is not None else dist.new_group(backend="gloo", timeout=limit)
    rank, size = dist.get_rank(own), dist.get_world_size(own)
    if size == 1:
        return TrainerRanks.alone()
    card = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
    host = None
    if rank == 0:
        host = _Host(StarHub(own_address()), size)
        text = f"{host.hub.address} {host.hub.token}".encode()
        card[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    try:
        dist.broadcast(card, dist.get_global_rank(own, 0), group=own)
        address, token = bytes(card.tolist()).rstrip(b"\0").decode().split(" ")
        seat = host or _Guest(address, token, rank, size)
        ranks = TrainerRanks(
            seat.sit_down(waker=Waker(), deadline=time.monotonic() + seconds), seat
        )
    except BaseException:
        if host is not None:
            host.leave()
        raise
    finally:
        if group is None:
            dist.destroy_process_group(own)
    return ranks


async def gathered(lane: LaneLike, group: Any) -> TrainerRanks:
    """`gather_ranks` on the source lane, with a limit of its own.

    Raises:
        PhaseTimeout: Not all ranks came; a torch collective that is stuck keeps its thread.
    """
    seconds = DEFAULTS.admit_s
    with anyio.move_on_after(seconds):
        gathering = functools.partial(gather_ranks, group, seconds=seconds)
        return await lane.run(gathering, grace=DEFAULTS.cleanup_s / 2, discard=TrainerRanks.close)
    raise PhaseTimeout(f"not all trainer ranks came within {seconds:g} s", phase="init")


def own_address() -> str:
    """The address other hosts reach this one by, as its own name resolves; else loopback."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"
    addresses = [str(info[4][0]) for info in found]
    # Debian's own entry for the host name is a loopback address that nobody else can use.
    elsewhere = [a for a in addresses if not ipaddress.ip_address(a.split("%")[0]).is_loopback]
    return (elsewhere or addresses or ["127.0.0.1"])[0]
