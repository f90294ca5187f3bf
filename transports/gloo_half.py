"""What both halves of a stream over a collective group have in common; see `gloo_stream`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

from statemachines.errors import InvalidTransition, Validation
from transports.digest import available, chain
from transports.piece_digest import PieceDigest
from transports.sections import Frames
from transports.stream import Progress, StreamSummary

if TYPE_CHECKING:
    from statemachines.errors import AiosyncError
    from transports.groups import CollectiveGroup
    from transports.planning import Plan

AHEAD = 2  # broadcasts that are under way at once


class Half:
    """What both halves have in common."""

    def __init__(self, group: CollectiveGroup, *, digest: str | None = "xxh3_64") -> None:
        if digest is not None and digest not in available():
            raise Validation(f"digest {digest!r} is not one of {', '.join(available())}")
        self.progress = Progress()
        self._group = group
        self._kind = digest
        self._digest = None if digest is None else PieceDigest(digest)
        self._frames: Frames | None = None
        self._round = 0
        self._stall = 0.0
        self._is_open = False
        self._digests: list[int] = []

    def abort(self) -> None:
        """End the group: whatever is running raises `TransportAborted`; from any thread."""
        self._group.abort()

    def close(self) -> None:
        """End a round that is not finished (and the group with it); otherwise nothing."""
        if self._is_open:
            self._is_open = False
            self._group.abort()

    def release(self) -> None:
        """End for good; returns at once."""
        self._is_open = False
        self._group.close()

    def _begin(self, plan: Plan, round: int, stall: float) -> bytes:
        if self._is_open:
            raise InvalidTransition(f"round {self._round} is still open", round=self._round)
        if isinstance(stall, bool) or not 0 < stall < float("inf"):
            raise Validation(f"stall must be a finite number of seconds above 0, not {stall!r}")
        if self._frames is None or self._frames.digest != plan.digest:
            self._frames = Frames(plan, verified=self._kind is not None)
        self._round, self._stall, self._digests, self._is_open = round, stall, [], True
        text = f"stream 1 {round} {plan.digest} {self._kind}"
        return hashlib.sha256(text.encode()).digest()

    def _hash(self, raw: torch.Tensor) -> int:
        assert self._digest is not None  # callers look at `_kind`
        self._digest.update(raw)
        return self._digest.end()

    def _wait(self, pending: Any) -> None:
        self._group.wait(pending, timeout=self._stall)

    def _located(self, error: AiosyncError, phase: str) -> AiosyncError:
        return error.locate(phase=phase, round=self._round)

    @property
    def _plan_frames(self) -> Frames:
        if self._frames is None or not self._is_open:
            raise InvalidTransition("no round is open", detail={"allowed": ["open"]})
        return self._frames

    def _summary(self, plan: Plan) -> StreamSummary:
        self._is_open = False
        digest = None if self._kind is None else chain(self._digests)
        frames = self._frames
        chunks = 0 if frames is None else sum(section.digests for section in frames.sections)
        return StreamSummary(nbytes=plan.total_bytes, chunks=chunks, digest=digest)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy all sources into their targets, and forget both."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
    targets.clear()
    sources.clear()
