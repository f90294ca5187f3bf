"""What became of a round, as its caller sees it."""

from __future__ import annotations

from typing import Literal

import msgspec

# At run time too: msgspec resolves the annotations of a Struct when it is first decoded.
from aiosync.version import Version

MemberResult = Literal["committed", "failed", "unknown"]
_COUNTED: tuple[MemberResult, ...] = ("committed", "failed", "unknown")


class MemberOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's part in a round.

    Attributes:
        outcome: ``"unknown"`` when finish was sent and its answer never came.
        weights: ``"intact"``, ``"torn"`` or ``"unknown"``.
        phase: Where it failed.
        error: Text of the error, the remote text included.
        seconds: From the first call to this member's last answer.
        pause_seconds: How long its generation stood still during the round, as it measured.
        left_paused: Why its generation was not seen going on again.
    """

    name: str
    outcome: MemberResult
    weights: str = "intact"
    phase: str | None = None
    error: str | None = None
    seconds: float = 0.0
    pause_seconds: float = 0.0
    left_paused: str | None = None

    def __str__(self) -> str:
        where = f" in {self.phase}" if self.phase else ""
        why = f": {self.error.splitlines()[0]}" if self.error else ""
        paused = f"; {self.left_paused}" if self.left_paused else ""
        return f"{self.name} {self.outcome}{where} (weights {self.weights}){why}{paused}"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one round did.

    Attributes:
        outcome: ``"committed"`` only if every member that counts has the new weights.
        version: What was sent; None for a round without a version.
        round: Number of the round within its epoch.
        target: What was updated: ``"model"``, ``"draft"`` or ``"adapter:<name>"``.
        nbytes: Payload bytes that were sent, once per link.
        seconds: Wall time of each phase.
        pause_seconds: How long generation stood still, the longest member.
        digest: Digest over the whole round, where one was computed.
        verified: Both sides compared digests.
        left_out: Names of tensors or members that took no part.
        notes: What the caller should know (a peer without fencing, a choice that was made).
        recovered: The channel was reset and initialised again inside this round.
    """

    outcome: str
    version: Version | None = None
    round: int = 0
    target: str = "model"
    backend: str = ""
    nbytes: int = 0
    seconds: dict[str, float] = {}
    pause_seconds: float = 0.0
    members: list[MemberOutcome] = []
    digest: str | None = None
    verified: bool = False
    left_out: list[str] = []
    notes: list[str] = []
    recovered: bool = False

    def metrics(self, prefix: str = "aiosync") -> dict[str, float]:
        """Flat floats for an experiment tracker; keys are ``prefix/name``."""
        flat = {
            "committed": float(self.outcome == "committed"),
            "round": float(self.round),
            "bytes": float(self.nbytes),
            "pause_seconds": self.pause_seconds,
            "verified": float(self.verified),
            "recovered": float(self.recovered),
            "left_out": float(len(self.left_out)),
        }
        if self.version is not None:
            flat["version_order"] = float(self.version.order)
        for name in _COUNTED:
            count = sum(member.outcome == name for member in self.members)
            flat[f"members/{name}"] = float(count)
        for phase, spent in self.seconds.items():
            flat[f"seconds/{phase}"] = spent
        return {f"{prefix}/{name}": float(value) for name, value in flat.items()}

    def __str__(self) -> str:
        label = "without a version" if self.version is None else f"version {self.version.wire}"
        spent = " ".join(f"{phase} {value:.3f}s" for phase, value in self.seconds.items())
        head = (
            f"{f'round {self.round}' if self.round else 'round'} {label} {self.outcome}:"
            f" {self.nbytes} bytes over {self.backend or 'no backend'}"
            f"{', ' + spent if spent else ''},"
            f"{f' paused {self.pause_seconds:.3f}s,' if self.pause_seconds else ''}"
            f" {'verified' if self.verified else 'not verified'}"
            f"{', after a recovery' if self.recovered else ''}"
        )
        rows = [str(member) for member in self.members]
        if self.left_out:
            rows.append(f"left out: {', '.join(self.left_out)}")
        rows += [f"note: {note}" for note in self.notes]
        return "\n  ".join([head, *rows])
