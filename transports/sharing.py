"""A model's tensors, moved into shared memory where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import torch

from statemachines.errors import Validation
from transports.segments import ALIGNMENT, Segment

if TYPE_CHECKING:
    from collections.abc import Iterable


@final
class SharedStorage:
    """Tensors that live in one segment, see `share_tensors`.

    Attributes:
        segment: Where they live.
        names: What was moved.
    """

    def __init__(self, segment: Segment, names: tuple[str, ...]) -> None:
        self.segment = segment
        self.names = names

    def __repr__(self) -> str:
        return f"<SharedStorage of {len(self.names)} tensors in {self.segment!r}>"

    def locate(self, tensor: torch.Tensor) -> tuple[Segment, int] | None:
        """Segment and offset of a contiguous tensor that lies in it whole; else None."""
        offset = self.segment.locate(tensor)
        return None if offset is None else (self.segment, offset)

    def statistics(self) -> dict[str, Any]:
        """The segment's, and how many tensors were moved."""
        return self.segment.statistics() | {"tensors": len(self.names)}

    def close(self) -> None:
        """Close the descriptor; the tensors stay usable where they are."""
        self.segment.close()


def share_tensors(
    source: torch.nn.Module | Mapping[str, torch.Tensor], *, buffers: bool = False
) -> SharedStorage:
    """Move tensors into one shared segment, in place: same objects, same values, new memory.

    Optimizers keep working (a `Parameter` stays the object it is), and so do tied parameters and
    tensors that are views of one storage: such a storage is moved as it is. Other tensors become
    contiguous. Views taken earlier by anybody else keep looking at the old memory.

    Args:
        source: A module (all its parameters), or names and tensors.
        buffers: Move a module's buffers too.

    Raises:
        Validation: A tensor that cannot be moved (not on the CPU, sparse, a tensor subclass), or
            none at all; nothing has been changed.
        OutOfSharedMemory: There is no room for a second copy, which the move needs.
    """
    named = dict(_named_tensors(source, buffers=buffers))
    for name, tensor in named.items():
        _check_movable(name, tensor)
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in named.values()}.values():
        storage = tensor.untyped_storage()
        groups.setdefault(storage.data_ptr() or id(tensor), []).append(tensor)
    offsets, total = [], 0
    for tensors in groups.values():
        offsets.append(total)
        total += -(-_moved_nbytes(tensors) // ALIGNMENT) * ALIGNMENT
    if total == 0:
        raise Validation("there is no tensor with any bytes to share")
    segment = Segment.create(total)
    with torch.no_grad():
        for tensors, offset in zip(groups.values(), offsets, strict=True):
            _move(tensors, segment.view(offset, _moved_nbytes(tensors)))
    return SharedStorage(segment, tuple(named))


def _named_tensors(
    source: torch.nn.Module | Mapping[str, torch.Tensor], *, buffers: bool
) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(source, Mapping):
        yield from source.items()
        return
    yield from source.named_parameters()
    if buffers:
        yield from source.named_buffers()


def _check_movable(name: str, tensor: torch.Tensor) -> None:
    why = None
    if tensor.device.type != "cpu":
        why = f"is on {tensor.device}"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        why = f"is a {type(tensor).__name__}"
    elif tensor.layout is not torch.strided:
        why = f"has layout {tensor.layout}"
    elif tensor.is_inference():
        why = "was made in inference mode"
    elif tensor.is_conj() or tensor.is_neg():
        why = "is a lazy conjugate or negative view"
    if why is not None:
        raise Validation(f"only plain CPU tensors can be shared; {name!r} {why}", tensor=name)


def _is_one_view(tensors: list[torch.Tensor]) -> bool:
    first = tensors[0]
    return all(
        (t.storage_offset(), t.shape, t.stride(), t.dtype)
        == (first.storage_offset(), first.shape, first.stride(), first.dtype)
        for t in tensors
    )


def _moved_nbytes(tensors: list[torch.Tensor]) -> int:
    return tensors[0].nbytes if _is_one_view(tensors) else tensors[0].untyped_storage().nbytes()


def _move(tensors: list[torch.Tensor], place: torch.Tensor) -> None:
    first = tensors[0]
    if _is_one_view(tensors):
        target = place.view(first.dtype).view(first.shape)
        target.copy_(first)
        for tensor in tensors:
            tensor.data = target
        return
    place.copy_(torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage()))
    for tensor in tensors:
        typed = place[: len(place) // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
        tensor.data = typed.as_strided(
            tensor.shape, tensor.stride(), typed.storage_offset() + tensor.storage_offset()
        )
