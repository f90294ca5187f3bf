"""What a group does beside its rounds: targets, labels and checks, on all ranks at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiosync.defaults import DEFAULTS
from aiosync.errors import Refused
from aiosync.generation_table import WeightsTag
from aiosync.messages import RoundHeader
from aiosync.weight_targets import MODEL, Draft

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiosync.generation import GenerationGate
    from aiosync.group_spares import Spares
    from aiosync.version import Version
    from aiosync.weight_targets import Target
    from aiosync.worker_group_peer import Rank
    from aiosync.worker_pausing import Pausing

_PLACES = 4  # dp, pp, pcp and tp stand before a parameter's name


class GroupControls:
    """A group's answers to what every worker engine is asked."""

    ranks: Sequence[Rank]
    owner: str
    generation: GenerationGate
    pausing: Pausing
    spares: Spares | None = None
    _all: Callable[..., Awaitable[None]]

    @property
    def version(self) -> Version | None:
        """What all ranks hold (or enough of them); None where they differ or one is lost."""
        if self.spares is not None:
            return self.spares.held()
        first = self.ranks[0].version
        same = all(rank.lost is None and rank.version == first for rank in self.ranks)
        return first if same else None

    @version.setter
    def version(self, value: Version | None) -> None:
        # Only the ranks' own answers count; where these differ, it tells which of them to believe.
        if self.spares is not None:
            self.spares.committed = value

    @property
    def writes_early(self) -> bool:
        """Whether a rank writes into its model before the round is complete."""
        peers = [rank.link.peer for rank in self.ranks]
        return any(peer is not None and peer.detail.get("writes_early") for peer in peers)

    def resolve_target(self, target: Target) -> tuple[Any, Any]:
        """Every rank must be able to update it."""
        if target != MODEL:
            needed = "draft" if isinstance(target, Draft) else "adapters"
            for rank in self.ranks:
                peer = rank.link.peer
                if peer is None or needed not in peer.features:
                    raise Refused(
                        f"rank {rank.index} cannot update {target.key}",
                        rank=rank.index,
                        phase="start",
                    )
        return None, None

    async def weight_checksums(self) -> dict[str, str]:
        """Of all ranks, each under its own place."""
        found: dict[str, str] = {}

        async def ask(rank: Rank) -> None:
            reply = await rank.call("weight_checker", "checksum", header=self._between(rank))
            for key, value in reply.message["checksums"].items():
                *places, last, name = key.split(":", _PLACES)
                number = rank.first + int(last.removeprefix("tp"))
                found[":".join([*places, f"tp{number}", name])] = value

        await self._all(ask, phase="weight_checker")
        return found

    async def zero_weights(self) -> None:
        """On all ranks."""
        async with self.generation.swap(timeout=DEFAULTS.pause_s):
            await self._all(
                lambda rank: rank.call("weight_checker", "reset", header=self._between(rank)),
                phase="weight_checker",
            )
            self.pausing.judge()

    async def _relabel(self, label: str, header: RoundHeader | None) -> None:
        del header  # judged already; the ranks know the group
        await self._all(
            lambda rank: rank.call("update_weight_version", label, header=self._between(rank)),
            phase="update_weight_version",
        )
        self.generation.adopt(WeightsTag(self.version, self.generation.weights.weights_id))

    def _between(self, rank: Rank) -> RoundHeader | None:
        """The header of calls between rounds; before the first init there is no owner yet."""
        if rank.link.epoch == 0:
            return None
        return RoundHeader(owner=self.owner, epoch=rank.link.epoch)
