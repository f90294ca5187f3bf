"""The two halves of `transports.stream` over a collective group: rank 0 broadcasts, all receive.

A round begins with agreement: each reader announces what it is about to take (round, plan, digest
kind), and rank 0 moves no byte before all of them said the same as it would. Sizes that differ in
a broadcast would end the process. It ends with each reader's word that all of it arrived and was
right; that a broadcast returned at rank 0 says nothing about the others.

A half that leaves a round before its end, for whatever reason, ends the group, so that nobody waits
for it. The group is dead then: a new one is made for the next round.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING, Any, final

import torch

from statemachines.errors import AiosyncError, InvalidTransition, Validation
from transports.digest import available, chain
from transports.errors import DigestMismatch
from transports.packing import bytes_of, settled
from transports.piece_digest import PieceDigest
from transports.sections import Frames
from transports.stream import Progress, StreamSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transports.groups import CollectiveGroup
    from transports.planning import Plan
    from transports.sections import Part, Section

_AHEAD = 2  # broadcasts that are under way at once


class _Half:
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
        self._digest.update(self._digest.kept(raw))
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
class GlooSender(_Half):
    """The trainer's half; see `transports.stream.Sender`.

    Args:
        group: Joined, rank 0.
        digest: How what arrives is verified (`transports.digest`); None only counts.
    """

    _plan: Plan
    _word: bytes
    _at = 0  # the section that is being filled
    _next = 0  # the tensor that is due
    _values: list[int]
    _under_way: deque[tuple[Any, int, int]]  # pending, section of a frame or -1, bytes

    def open(self, plan: Plan, readers: int, *, round: int, stall: float) -> None:
        """See `transports.stream.Sender.open`.

        Raises:
            Validation: The group has another number of readers, or one means to take something
                else; named.
        """
        group = self._group
        if readers != group.size - 1:
            raise Validation(f"{readers} readers in a group of {group.size}", phase="open")
        self._word = self._begin(plan, round, stall)
        self._plan, self._at, self._next = plan, 0, 0
        self._values, self._under_way = [], deque()
        self.progress.step(0)
        try:
            for rank, word in enumerate(self._gather("ready"), 1):
                if word != self._word:
                    raise Validation(
                        f"{group.names[rank]} expects another round, plan or digest",
                        replica=group.names[rank],
                        rank=rank,
                    )
        except AiosyncError as error:
            raise self._located(error, "open") from error.__cause__
        self.progress.step(0)

    def write(self, batch: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See `transports.stream.Sender.write`."""
        frames = self._plan_frames
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        try:
            for index, tensor in batch:
                self._check(index, tensor.nbytes)
                section = frames.sections[self._at]
                part = self._packed_part(section, index)
                if part is None:
                    self._send_direct(section, index, tensor)
                elif part.nbytes:
                    source = tensor if tensor.is_contiguous() else settled(tensor)
                    targets.append(frames.view(self._at, part, source))
                    sources.append(source)
                self._next += 1
                if self._next == section.end:
                    _copy(targets, sources)
                    self._send_frame(frames, section)
            _copy(targets, sources)
            self._settle(lambda frame: frame >= 0)
        except AiosyncError as error:
            raise self._located(error, "write") from error.__cause__

    def finish(self) -> StreamSummary:
        """See `transports.stream.Sender.finish`."""
        _ = self._plan_frames
        if self._next < len(self._plan.sizes):
            name = f"tensor {self._next}"
            raise Validation(f"{name} was not written", tensor=name, phase="finish")
        try:
            self._settle(lambda _: False)
            self._gather("done")
        except AiosyncError as error:
            raise self._located(error, "finish") from error.__cause__
        self.progress.step(0)
        return self._summary(self._plan)

    def _gather(self, what: str) -> list[bytes]:
        ranks = range(1, self._group.size)
        return self._group.gather(f"{what}-{self._round}", ranks=ranks, timeout=self._stall)

    def _check(self, index: int, nbytes: int) -> None:
        name, plan = f"tensor {index}", self._plan
        if index != self._next or index >= len(plan.sizes):
            due = "nothing" if self._next >= len(plan.sizes) else f"tensor {self._next}"
            raise Validation(f"{name} was written, {due} is next", tensor=name)
        if nbytes != plan.sizes[index]:
            message = f"{name} has {nbytes} bytes, planned were {plan.sizes[index]}"
            raise Validation(message, tensor=name)

    def _packed_part(self, section: Section, index: int) -> Part | None:
        if index == section.first:
            self._cursor = 0
        packed = section.packed
        if self._cursor < len(packed) and packed[self._cursor].tensor == index:
            self._cursor += 1
            return packed[self._cursor - 1]
        return None

    def _send_direct(self, section: Section, index: int, tensor: torch.Tensor) -> None:
        data = bytes_of(settled(tensor).cpu())
        for part in section.direct:
            if part.tensor != index:
                continue
            raw = data[part.start : part.start + part.nbytes]
            self._post(raw, -1, part.nbytes)
            if self._kind is not None:  # while the bytes are on their way
                self._values.append(self._hash(raw))
            while len(self._under_way) >= _AHEAD:
                self._settle_one()

    def _send_frame(self, frames: Frames, section: Section) -> None:
        index = self._at
        self._at += 1
        values, self._values = self._values, []
        if not frames.frame(index).numel():
            self._settle(lambda _: False)  # so that the next frame finds its buffer free
            return
        if self._kind is not None:
            if section.packed_nbytes:
                values.append(self._hash(frames.packed(index)))
            frames.write_digests(index, values)
            self._digests.extend(values)
        self._post(frames.frame(index), index, sum(part.nbytes for part in section.packed))
        # The frame after the next one lies where this one does.
        self._settle(lambda frame: frame == index)

    def _post(self, raw: torch.Tensor, frame: int, nbytes: int) -> None:
        pending = self._group.broadcast(raw, timeout=self._stall)
        self._under_way.append((pending, frame, nbytes))

    def _settle(self, may_stay: Callable[[int], bool]) -> None:
        while self._under_way and not all(may_stay(frame) for _, frame, _ in self._under_way):
            self._settle_one()

    def _settle_one(self) -> None:
        pending, _, nbytes = self._under_way[0]
        self._wait(pending)
        self._under_way.popleft()
        self.progress.step(nbytes)

    _cursor = 0


@final
class GlooReceiver(_Half):
    """The worker's half; see `transports.stream.Receiver`.

    Args:
        group: Joined, any rank but 0.
        digest: As the sender's.
    """

    def receive(
        self,
        plan: Plan,
        destination: Callable[[int], torch.Tensor],
        landed: Callable[[list[int]], None],
        *,
        round: int,
        stall: float,
    ) -> StreamSummary:
        """See `transports.stream.Receiver.receive`; `landed` gets a section at a time."""
        word = self._begin(plan, round, stall)
        self.progress.step(0)
        try:
            self._group.announce(f"ready-{round}", word)
            self._take(plan, destination, landed)
            self._group.announce(f"done-{round}", word)
        except BaseException as error:
            self.close()  # nobody is to wait for this rank
            if isinstance(error, AiosyncError):
                raise self._located(error, "receive") from error.__cause__
            raise
        return self._summary(plan)

    def _take(
        self,
        plan: Plan,
        destination: Callable[[int], torch.Tensor],
        landed: Callable[[list[int]], None],
    ) -> None:
        frames = self._plan_frames
        orders = deque(
            (index, part)
            for index, section in enumerate(frames.sections)
            for part in (*section.direct, None)
        )
        under_way: deque[tuple[Any, int, Part | None, torch.Tensor]] = deque()
        values: list[int] = []
        data, data_of = torch.empty(0), -1

        def post(opened: int = -1) -> None:
            """Begin what may begin; the frame of section `opened` is being read."""
            nonlocal data, data_of
            while orders and len(under_way) < _AHEAD:
                index, part = orders[0]
                if part is None:
                    used = {i for _, i, p, _ in under_way if p is None} | {opened} - {-1}
                    if any(frames.buffer_of(i) == frames.buffer_of(index) for i in used):
                        return
                    raw = frames.frame(index)
                else:
                    if data_of != part.tensor:
                        data = _bytes_for(destination(part.tensor), plan, part)
                        data_of = part.tensor
                    raw = data[part.start : part.start + part.nbytes]
                orders.popleft()
                pending = self._group.broadcast(raw, timeout=self._stall) if raw.numel() else None
                under_way.append((pending, index, part, raw))

        while orders or under_way:
            post()
            pending, index, part, raw = under_way.popleft()
            if pending is not None:
                self._wait(pending)
            if part is not None:
                self.progress.step(part.nbytes)
                if self._kind is not None:
                    values.append(self._hash(raw))
                continue
            post(index)
            self._open_frame(frames, index, values, destination)
            values = []
            section = frames.sections[index]
            landed(list(range(section.first, section.end)))

    def _open_frame(
        self,
        frames: Frames,
        index: int,
        values: list[int],
        destination: Callable[[int], torch.Tensor],
    ) -> None:
        section = frames.sections[index]
        if self._kind is not None:
            if section.packed_nbytes:
                values.append(self._hash(frames.packed(index)))
            self._compare(section, frames.read_digests(index), values)
            self._digests.extend(values)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for part in section.packed:
            if part.nbytes:
                target = destination(part.tensor)
                if target.nbytes != part.nbytes:
                    name = f"tensor {part.tensor}"
                    message = f"{name}: {part.nbytes} bytes into {target.nbytes}"
                    raise Validation(message, tensor=name)
                targets.append(target)
                sources.append(frames.view(index, part, target))
        _copy(targets, sources)
        self.progress.step(sum(part.nbytes for part in section.packed))

    def _compare(self, section: Section, sent: list[int], found: list[int]) -> None:
        for at, (theirs, ours) in enumerate(zip(sent, found, strict=True)):
            if theirs == ours:
                continue
            first = section.direct[at] if at < len(section.direct) else section.packed[0]
            last = first if at < len(section.direct) else section.packed[-1]
            raise DigestMismatch(
                f"tensors {first.tensor}..{last.tensor} arrived with digest {ours}, they were sent"
                f" with {theirs}",
                tensor=f"tensor {first.tensor}",
                detail={"sent": theirs, "found": ours, "tensor": first.tensor},
            )


def _bytes_for(tensor: torch.Tensor, plan: Plan, part: Part) -> torch.Tensor:
    name = f"tensor {part.tensor}"
    if tensor.device.type != "cpu":
        message = f"{name}: gloo receives into CPU memory, not into {tensor.device}"
        raise Validation(message, tensor=name)
    data = bytes_of(tensor)
    if data.numel() != plan.sizes[part.tensor]:
        message = f"{name}: {plan.sizes[part.tensor]} bytes into {data.numel()}"
        raise Validation(message, tensor=name)
    return data


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
    targets.clear()
    sources.clear()
