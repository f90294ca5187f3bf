"""Rank 0's half of a stream over a collective group; see `gloo_stream`."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, final

from statemachines.errors import AiosyncError, Validation
from transports.gloo_half import AHEAD, Half, copy_all
from transports.packing import bytes_of, settled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from transports.planning import Plan
    from transports.sections import Frames, Part, Section
    from transports.stream import StreamSummary


@final
class GlooSender(Half):
    """The trainer's half; see `transports.stream.Sender`.

    Args:
        group: Joined, rank 0.
        digest: How what arrives is verified (`transports.digest`); None only counts.
    """

    takes_parameters = True

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
                    copy_all(targets, sources)
                    self._send_frame(frames, section)
            copy_all(targets, sources)
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
            while len(self._under_way) >= AHEAD:
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
