"""What both halves of a stream over a collective group have in common; see `gloo_stream`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, final

from statemachines.errors import InvalidTransition, Validation
from transports.copy_batches import SameBatches
from transports.digest import available, chain
from transports.piece_digest import PieceDigest
from transports.sections import Frames
from transports.stream import Progress, StreamSummary

if TYPE_CHECKING:
    import torch

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
        self._frame_digest = FrameDigest(digest)
        self._frames: Frames | None = None
        self._batches: dict[tuple[int, int], SameBatches] = {}
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
            self._batches = {}
        self._round, self._stall, self._digests, self._is_open = round, stall, [], True
        self._frame_digest = FrameDigest(self._kind)
        text = f"stream 1 {round} {plan.digest} {self._kind}"
        return hashlib.sha256(text.encode()).digest()

    def _batches_from(self, section: int, tensor: int) -> SameBatches:
        """What made the copies of a section's packed tensors, from `tensor` on, ready last time."""
        return self._batches.setdefault((section, tensor), SameBatches())

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


@final
class FrameDigest:
    """The digest of a frame's packed bytes, padding included, taken while they are warm."""

    def __init__(self, kind: str | None) -> None:
        self._digest = None if kind is None else PieceDigest(kind)
        # Pieces count for some kinds: those see the packed bytes as the one piece they are.
        self._steps = self._digest is not None and not self._digest.by_piece
        self._done = 0

    def reach(self, start: int, end: int) -> None:
        """Bytes of the frame at address `start` are there up to address `end`."""
        if self._steps and self._digest is not None:
            at = start + self._done
            self._digest.update_at(at, end - at)
            self._done = end - start

    def end(self, start: int, nbytes: int) -> int:
        """The value, once all `nbytes` are there."""
        assert self._digest is not None  # callers look at the kind
        self._digest.update_at(start + self._done, nbytes - self._done)
        self._done = 0
        return self._digest.end()
