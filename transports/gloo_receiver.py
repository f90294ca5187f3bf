"""A reader's half of a stream over a collective group; see `gloo_stream`."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, final

import torch

from statemachines.errors import AiosyncError, Validation
from transports.errors import DigestMismatch
from transports.gloo_half import AHEAD, Half
from transports.packing import bytes_of
from transports.plain_memory import addresses_of
from transports.stream import known_of, targets_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from transports.planning import Plan
    from transports.sections import Frames, Part, Section
    from transports.stream import StreamSummary

_LONGER, _LATER = 1.25, 1.0


@final
class GlooReceiver(Half):
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
        # The trainer's limit comes first: it knows which of several ranks gives no sign.
        word = self._begin(plan, round, stall * _LONGER + _LATER)
        self.progress.step(0)
        try:
            self._group.announce(f"ready-{round}", word)
            self._take(plan, destination, landed)
            self._group.announce(f"done-{round}", word, last=True)
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
            while orders and len(under_way) < AHEAD:
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
        self._unpack(frames, index, destination)
        if self._kind is not None:
            if section.packed_nbytes:
                start = frames.address(index)
                values.append(self._frame_digest.end(start, section.packed_nbytes))
            self._compare(section, frames.read_digests(index), values)
            self._digests.extend(values)
        self.progress.step(sum(part.nbytes for part in section.packed))

    def _unpack(
        self, frames: Frames, index: int, destination: Callable[[int], torch.Tensor]
    ) -> None:
        parts = [part for part in frames.sections[index].packed if part.nbytes]
        if not parts:
            return
        indices, nbytes = [part.tensor for part in parts], [part.nbytes for part in parts]
        targets = targets_of(destination, indices)
        addresses = addresses_of(targets, nbytes, known_of(destination, indices))
        if addresses is not None:
            start, digest = frames.address(index), self._frame_digest
            sources = [start + part.start for part in parts]
            ready = self._batches_from(index, indices[0])(addresses, sources, nbytes)
            for batch in ready:
                for _, address, size in batch.move_each():
                    digest.reach(start, address + size)
            return
        for part, target in zip(parts, targets, strict=True):
            if target.nbytes != part.nbytes:
                name = f"tensor {part.tensor}"
                message = f"{name}: {part.nbytes} bytes into {target.nbytes}"
                raise Validation(message, tensor=name)
            with torch.no_grad():
                target.copy_(frames.view(index, part, target))

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
