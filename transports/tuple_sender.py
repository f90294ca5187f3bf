"""vLLM's own form of CUDA IPC: argument tuples of torch's `rebuild_cuda_tensor`, by GPU.

``packed=False``: a tuple for each tensor, all of them in one update. ``packed=True``: one buffer is
exported once a round, filled again and again, and each filling is an update of its own, which
returns when the worker has taken everything out of it. The tuples hold Python classes: whoever
posts an update decides how they travel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
from torch.multiprocessing.reductions import reduce_tensor

from statemachines.errors import InvalidTransition, Validation
from transports.cuda import REACHED, mark_current, poll
from transports.device_memory import uuid_of
from transports.packing import pack_into, settled
from transports.stream import Progress, StreamSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transports.cuda import Mark
    from transports.planning import Chunk, Plan

Update = dict[str, Any]


@final
class TupleSender:
    """See `transports.stream.Sender`; the readers are behind `post`.

    Args:
        device: Where tensors that are elsewhere are copied to, and the buffer is.
        packed: Whether there is a buffer; the plan's rule is then vLLM's `ipc_packed`.
    """

    takes_parameters = True

    def __init__(self, device: torch.device, *, packed: bool) -> None:
        self.progress = Progress()
        self.device = device
        self._packed = packed
        self._names: Sequence[str] = ()
        self._post: Callable[[list[int], Update], object] | None = None
        self._give_up: Callable[[], object] = lambda: None
        self._training: Mark = REACHED
        self._plan: Plan | None = None
        self._at = self._chunk = 0
        self._kept: list[torch.Tensor] = []
        self._tuples: list[dict[str, Any]] = []
        self._buffer: torch.Tensor | None = None
        self._handle: dict[str, Any] = {}
        self._pending: dict[int, torch.Tensor] = {}

    def connect(
        self, post: Callable[[list[int], Update], object], give_up: Callable[[], object]
    ) -> None:
        """How the next round's updates get to the workers.

        Args:
            post: Called with tensors (by index) and the fields that speak of them; blocks until
                the workers have loaded them.
            give_up: Ends a `post` that is out; from any thread.
        """
        self._post, self._give_up = post, give_up

    def order_after(self, mark: Mark) -> None:
        """The next round reads no tensor before `mark`."""
        self._training = mark

    def open(self, plan: Plan, readers: int, *, round: int, stall: float) -> None:
        """See `transports.stream.Sender.open`; waits for nobody."""
        if self._post is None:
            raise InvalidTransition("this sender is not connected", round=round)
        self.forget()
        self._plan, self._at, self._chunk = plan, 0, 0
        poll(self._training, lambda: self.progress.step(0))
        self._training = REACHED
        if self._packed and plan.chunks:
            size = max(chunk.nbytes for chunk in plan.chunks)
            with torch.inference_mode(False):
                self._buffer = torch.empty(max(size, 1), dtype=torch.uint8, device=self.device)
            self._handle = exported(self._buffer)

    def write(self, batch: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See `transports.stream.Sender.write`."""
        for index, tensor in batch:
            plan = self._opened
            if index != self._at or index >= len(plan.sizes) or tensor.nbytes != plan.sizes[index]:
                raise Validation(f"tensor {index} is not what is due", tensor=str(index))
            self._at += 1
            if self._packed:
                self._pack(plan, index, tensor.detach())
            else:
                self._export(tensor.detach())
        self._settle()  # the source may use its own memory again

    def _export(self, tensor: torch.Tensor) -> None:
        if not tensor.numel():
            # A storage without bytes has no handle.
            whole = torch.empty(1, dtype=tensor.dtype, device=self.device)
            shared = whole[:0].view(tensor.shape)
        else:
            shared = settled(tensor)
            shared = shared if shared.is_cuda else shared.to(self.device)
        self._kept.append(shared)
        self._tuples.append(exported(shared))

    def _pack(self, plan: Plan, index: int, tensor: torch.Tensor) -> None:
        self._pending[index] = tensor
        chunk = plan.chunks[self._chunk]
        if index != chunk.pieces[-1].tensor:
            return
        assert self._buffer is not None  # made by `open`
        pack_into(self._buffer[: chunk.nbytes], chunk.pieces, self._pending)
        self._pending = {}
        self._chunk += 1
        if chunk.nbytes:
            self._settle()
            self._send(chunk)

    def _send(self, chunk: Chunk) -> None:
        indices = [piece.tensor for piece in chunk.pieces]
        sizes = [piece.nbytes for piece in chunk.pieces]
        assert self._post is not None  # checked by `open`
        self._post(indices, {"ipc_handles": self._handle, "tensor_sizes": sizes})
        self.progress.step(chunk.nbytes)

    def _settle(self) -> None:
        if self._packed and self._pending:
            # Those of a chunk that is not full are still read from where the source has them.
            self._pending = {index: tensor.clone() for index, tensor in self._pending.items()}
        poll(mark_current(self.device), lambda: None)

    def finish(self) -> StreamSummary:
        """See `transports.stream.Sender.finish`."""
        plan = self._opened
        if self._at < len(plan.sizes):
            raise Validation(f"tensor {self._at} was not written", tensor=str(self._at))
        if not self._packed and plan.sizes:
            assert self._post is not None  # checked by `open`
            self._post(list(range(len(plan.sizes))), {"ipc_handles": self._tuples})
            self.progress.step(plan.total_bytes)
        self._plan = None
        return StreamSummary(nbytes=plan.total_bytes, chunks=len(plan.chunks))

    @property
    def _opened(self) -> Plan:
        if self._plan is None:
            raise InvalidTransition("no round is open")
        return self._plan

    def abort(self) -> None:
        """See `transports.stream.Sender.abort`."""
        self._give_up()

    def close(self) -> None:
        """The workers may use what was exported until they have finished: it is kept."""
        self._plan, self._post = None, None

    def forget(self) -> None:
        """Nobody uses what was exported any more."""
        self._kept, self._tuples, self._pending = [], [], {}
        self._buffer, self._handle = None, {}
        if self.device.type == "cuda":
            collect: Any = torch.cuda.ipc_collect  # untyped
            collect()


def exported(tensor: torch.Tensor) -> dict[str, Any]:
    """One tensor as vLLM's workers take it: the tuple, under the UUID of the tensor's GPU."""
    reduced: Any = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return {uuid_of(tensor.device): reduced[1]}
