"""What callers may ask of a worker beside its rounds; vLLM's names, awaitable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiosync.defaults import DEFAULTS
from aiosync.errors import Busy, Validation
from aiosync.generation_table import WeightsTag
from aiosync.version import check_label, next_version, renamed
from aiosync.watchable import BUSY
from aiosync.weight_targets import Draft
from aiosync.worker_checks import check_weights, checksums, doubt, zero

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiosync.generation import GenerationGate
    from aiosync.messages import RoundHeader
    from aiosync.version import Version
    from aiosync.worker_cycle import WorkerCycle
    from aiosync.worker_pausing import Pausing


class Controls:
    """Pausing, labels, checks, and rounds of the draft model; part of every worker engine."""

    cycle: WorkerCycle
    generation: GenerationGate
    pausing: Pausing
    name: str
    incarnation: str
    version: Version | None
    unlabelled: bool
    rank: int
    _default_model: Any

    async def pause_generation(
        self,
        *,
        mode: str = "abort",
        clear_cache: bool = True,
        header: RoundHeader | None = None,
        timeout: float | None = None,
    ) -> None:
        """Keep generation still until the same caller resumes; returns once it stands still.

        Args:
            mode: ``"abort"``, ``"wait"`` or ``"keep"`` (`PauseMode`).
            clear_cache: Empty the cache that is tied to the gate; False keeps it, also over the
                next update.
            header: Names the caller. Its hold ends by itself when it is silent for its lease.

        Raises:
            PhaseTimeout: Requests were still running; generation goes on.
        """
        await self.pausing.pause(mode, clear_cache=clear_cache, header=header, timeout=timeout)

    async def resume_generation(self, *, header: RoundHeader | None = None) -> dict[str, Any]:
        """Lift this caller's hold; the answer says whether others still hold.

        Raises:
            Torn: The hold is lifted, but generation stays paused: the weights are not intact.
        """
        return self.pausing.resume(header=header)

    async def is_paused(self) -> bool:
        """Whether anybody holds generation."""
        return bool(self.pausing.standing()["is_paused"])

    async def abort_requests(self, request_ids: Iterable[str] | None = None) -> int:
        """Have these generations (None: all) end with what they have; returns how many."""
        return self.generation.abort(request_ids, reason="aborted by its id")

    async def start_draft_weight_update(self, *, header: RoundHeader | None = None) -> None:
        """Open a round of the draft model.

        Raises:
            Refused: The engine has no draft model, or cannot update one.
        """
        await self.start_weight_update(header=header, aim=Draft())  # type: ignore[attr-defined]

    async def update_weight_version(
        self, new_version: str, *, header: RoundHeader | None = None
    ) -> None:
        """Give the weights that serve another label.

        Raises:
            Busy: A round is under way: its own finish carries the label.
            Fenced: The worker belongs to another.
        """
        self.cycle.ownership.check(header, "update_weight_version")
        if self.cycle.engine.state in BUSY:
            raise Busy(
                "update_weight_version: a round is under way",
                replica=self.name,
                detail=self.cycle.engine.standing(),
            )
        label: Any = new_version
        if type(label) is not str:
            raise Validation(f"new_version must be a str, not {label!r}")
        check_label(label)
        await self._relabel(label, header)

    async def _relabel(self, label: str, header: RoundHeader | None) -> None:
        del header
        version = self.version
        if version is None or self.unlabelled:
            lineage = self.incarnation if version is None else version.lineage
            self.version = next_version(version, label, lineage=lineage)
        else:
            self.version = renamed(version, label)
        self.unlabelled = False
        self.generation.adopt(WeightsTag(self.version, self.generation.weights.weights_id))

    async def weight_checker(
        self,
        action: str,
        baseline: dict[str, str] | None = None,
        *,
        header: RoundHeader | None = None,
    ) -> dict[str, Any]:
        """Hash the parameters that serve, compare them with a baseline, or zero them.

        Args:
            action: ``"checksum"``, ``"compare"`` or ``"reset"``. After a reset the weights are
                unknown: the replica does not serve until it has a complete update.

        Raises:
            Validation: No such action, or a comparison without a baseline.
            Busy: A round is under way.
        """
        self.cycle.ownership.check(header, "weight_checker")
        return await check_weights(self.cycle.engine, action, baseline)

    async def weight_checksums(self) -> dict[str, str]:
        """SHA-256 of each parameter that serves, by vLLM's keys."""
        return await self.cycle.engine.lane.run(checksums, self._default_model, self.rank)

    async def zero_weights(self) -> None:
        """Zero every parameter; the weights are unknown afterwards."""
        async with self.generation.swap(timeout=DEFAULTS.pause_s):
            await self.cycle.engine.lane.run(zero, self._default_model)
            doubt(self.cycle.engine)
