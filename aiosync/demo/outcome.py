"""What a run of the demonstration is asked for, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    backend: str = "auto"
    rounds: int = 36
    workers: int = 1
    model: Path | None = None
    seed: int = 0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table of rounds.

    Attributes:
        seconds: Per phase, and ``"total"``.
        lag_ms: 99th percentile of the event loop's lag since the line before.
        reward: Mean reward of the step's answers; None before the first step.
        sampled_by: Versions that sampled those answers.
    """

    version: int
    nbytes: int
    seconds: dict[str, float]
    lag_ms: float
    verified: bool
    reward: float | None
    sampled_by: list[int]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of ``--json``.

    Attributes:
        verified: Every round's digests agreed, every worker's logits differed from the trainer's
            before the last sync and were bit-equal after it, and the checkpoint arrived.
        bytes_per_round: Payload of one round, to each worker.
        loop_lag_ms_p99: How late the trainer's event loop woke up while training and syncing.
        loop_lag_floor_ms_p99: The same with torch's own copies of the bytes instead of syncs.
        reward_first: Mean of the first five steps.
        reward_last: Mean of the last five steps.
    """

    rounds: int
    workers: int
    backend: str
    verified: bool
    bytes_per_round: int
    round_ms_median: float
    loop_lag_ms_p99: float
    loop_lag_floor_ms_p99: float
    reward_first: float
    reward_last: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run; with `failures`, something was not as promised."""

    summary: Summary
    failures: list[str]
