"""One argument tuple of torch's `rebuild_cuda_tensor` as values that another process may send.

The tuple itself holds Python classes, which only a pickle can carry. What travels between processes
of ours are the numbers and the opaque bytes in it; the classes are put back where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Self

import msgspec
import torch

from statemachines.errors import Validation

if TYPE_CHECKING:
    from collections.abc import Sequence

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Opaque = Annotated[bytes, msgspec.Meta(max_length=256)]
Sizes = Annotated[list[Count], msgspec.Meta(max_length=64)]
MOST_NBYTES = 2048
"""What one handle takes at most when it is encoded, for tensors of a few dimensions."""


class TupleHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Memory on a GPU, and the tensor in it.

    Attributes:
        shape, stride, offset, dtype: Of the tensor; the offset in elements of its storage.
        device: Its number where it was exported.
        memory, nbytes, start: The allocation's handle, and the storage in it, in bytes.
        counter, counter_at: Where torch counts who uses it.
        event, waits: What the reader waits for, if it has to.
    """

    shape: Sizes
    stride: Sizes
    offset: Count
    dtype: str
    device: Count
    memory: Opaque
    nbytes: Count
    start: Count
    counter: Opaque
    counter_at: Count
    event: Opaque
    waits: bool

    @classmethod
    def of(cls, args: Sequence[Any]) -> Self:
        """What is in the tuple.

        Raises:
            Validation: It is of another form, or a subclass of `torch.Tensor`.
        """
        if (
            len(args) != 15
            or args[0] is not torch.Tensor
            or args[4] is not torch.storage.TypedStorage
        ):
            raise Validation(
                f"a handle of {len(args)} parts, for a {getattr(args[0], '__name__', args[0])}, is"
                " not of the form that travels between trainer ranks"
            )
        return cls(
            list(args[1]),
            list(args[2]),
            args[3],
            str(args[5]).removeprefix("torch."),
            args[6],
            bytes(args[7]),
            args[8],
            args[9],
            bytes(args[11]),
            args[12],
            bytes(args[13]),
            bool(args[14]),
        )

    def args(self) -> tuple[Any, ...]:
        """The tuple again.

        Raises:
            Validation: There is no such dtype.
        """
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise Validation(f"a handle of dtype {self.dtype[:40]!r}")
        return (
            torch.Tensor,
            torch.Size(self.shape),
            tuple(self.stride),
            self.offset,
            torch.storage.TypedStorage,
            dtype,
            self.device,
            self.memory,
            self.nbytes,
            self.start,
            False,  # nobody asks for gradients of it
            self.counter,
            self.counter_at,
            self.event,
            self.waits,
        )


_HANDLES = msgspec.msgpack.Decoder(list[TupleHandle])


def encode_handles(handles: Sequence[TupleHandle]) -> bytes:
    return msgspec.msgpack.encode(handles)


def decode_handles(data: bytes) -> list[TupleHandle]:
    """What a peer sent.

    Raises:
        Validation: It is no list of handles; says where it is not.
    """
    try:
        return _HANDLES.decode(data)
    except msgspec.DecodeError as error:
        raise Validation(f"no list of handles: {error}") from error
