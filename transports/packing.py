"""Bytes of tensors, in and out of packed buffers, exact to the bit.

Everything here moves bit patterns: a NaN keeps its payload, a bool its byte. Nothing needs
gradients or gets any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from statemachines.errors import Validation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from transports.planning import Piece

# Copying through an integer of the same size keeps bits that arithmetic types may normalise.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor of any dtype as a 1-d uint8 view of the same memory.

    Raises:
        Validation: The tensor is not contiguous, has no memory (meta), is not strided, or carries
            a lazy conjugation or negation, so that its bytes are not its values.
    """
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise Validation(f"no bytes in a {tensor.layout} tensor on {tensor.device}")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise Validation(
            f"the bytes of a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} "
            "are not its values in order",
            next_step="Call contiguous(), resolve_conj() or resolve_neg() first.",
        )
    return tensor.view(-1).view(torch.uint8)


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a form that `bytes_of` takes; a copy only where that is needed."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return _bits(tensor).contiguous().view(tensor.dtype)


def views(
    buffer: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int]],
    offsets: Sequence[int],
    *,
    names: Sequence[str] | None = None,
) -> list[torch.Tensor]:
    """Typed views of whole tensors in a packed buffer (contiguous 1-d uint8).

    Shape ``()`` gives a 0-d view. Nothing is copied: the views change with the buffer.

    Raises:
        Validation: A tensor does not lie within the buffer, or is not aligned to its element
            size; names the tensor.
    """
    found = []
    for index, (dtype, shape, offset) in enumerate(zip(dtypes, shapes, offsets, strict=True)):
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        name = f"tensor {index}" if names is None else names[index]
        if not 0 <= offset <= end <= buffer.numel():
            message = f"{name}: bytes {offset} to {end} are not in a buffer of {buffer.numel()}"
            raise Validation(message, tensor=name)
        if (buffer.storage_offset() + offset) % dtype.itemsize:
            message = f"{name}: byte {offset} of the buffer is not aligned to {dtype}"
            raise Validation(message, tensor=name)
        found.append(buffer[offset:end].view(dtype).view(torch.Size(shape)))
    return found


def pack_into(
    buffer: torch.Tensor,
    pieces: Iterable[Piece],
    tensors: Mapping[int, torch.Tensor] | Sequence[torch.Tensor],
) -> None:
    """Copy the pieces of a chunk into its buffer, ``tensors[piece.tensor]`` being the sources.

    Sources may be non-contiguous or on another device. A non-contiguous tensor that is split
    over chunks is made contiguous for each piece; settle it once (`settled`) if that matters.
    """
    targets, sources = [], []
    for piece in pieces:
        tensor = tensors[piece.tensor].detach()
        place = buffer[piece.offset : piece.offset + piece.nbytes]
        typed = _typed(place, tensor) if piece.nbytes == tensor.nbytes else None
        if typed is not None:
            targets.append(typed)
            sources.append(_bits(tensor))
        else:
            targets.append(place)
            sources.append(bytes_of(settled(tensor))[piece.start : piece.start + piece.nbytes])
    _copy(targets, sources)


def unpack(
    buffer: torch.Tensor,
    pieces: Iterable[Piece],
    tensors: Mapping[int, torch.Tensor] | Sequence[torch.Tensor],
) -> None:
    """Copy the pieces of a chunk out of its buffer: `pack_into` the other way round.

    Raises:
        Validation: A non-contiguous destination gets a part of a tensor, or one that is not
            aligned in the buffer; whole aligned ones may have any strides.
    """
    targets, sources = [], []
    for piece in pieces:
        tensor = tensors[piece.tensor].detach()
        place = buffer[piece.offset : piece.offset + piece.nbytes]
        typed = _typed(place, tensor) if piece.nbytes == tensor.nbytes else None
        if typed is not None and not (tensor.is_conj() or tensor.is_neg()):
            targets.append(_bits(tensor))
            sources.append(typed)
        else:
            targets.append(bytes_of(tensor)[piece.start : piece.start + piece.nbytes])
            sources.append(place)
    _copy(targets, sources)


def _typed(place: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor | None:
    """`place` with the shape and bits of the whole tensor; None where it is not aligned."""
    if place.storage_offset() % tensor.itemsize:
        return None
    return _bits(place.view(tensor.dtype).view(tensor.shape))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_conj() or tensor.is_neg():
        tensor = settled(tensor)
    bits = _BITS.get(tensor.itemsize)
    return tensor if bits is None else tensor.view(bits)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
