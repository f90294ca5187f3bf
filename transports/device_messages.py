"""What a sender of device memory says, beyond `transports.shm_messages`.

Handles are plain fields: the driver's 64 bytes, the device by its UUID, sizes and offsets. The
reader believes none of them: numbers are bound here, places are checked where they are used.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from transports.device_memory import HANDLE_NBYTES
from transports.shm_messages import (
    Alive,
    Count,
    Done,
    Failed,
    Handles,
    Label,
    Message,
    Ready,
    Refusal,
    decode,
)

ALLOCATIONS_PER_FRAME = 2048
ALLOCATIONS_LIMIT = 1 << 20
VALUES_PER_FRAME = 32768

Handle = Annotated[bytes, msgspec.Meta(min_length=HANDLE_NBYTES, max_length=HANDLE_NBYTES)]
Number = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class DeviceWelcome(Message, frozen=True, kw_only=True, tag="device"):
    """The reader is in.

    Attributes:
        table: Name of the table of places; `allocations` and `places` count what follows of it,
            None for `places`: the table is as it was.
        ring: Number of the allocation with the buffers; 0: there is none.
    """

    round: int
    plan: str
    digest: str | None
    table: Label
    allocations: Annotated[int, msgspec.Meta(ge=0, le=ALLOCATIONS_LIMIT)]
    places: Count | None
    ring: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0


class AllocationInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation of the trainer. `address` is its own, of use in its own process alone."""

    number: Number
    handle: Handle
    uuid: Label
    nbytes: Count
    address: Count


class Allocations(Message, frozen=True, kw_only=True, tag="allocations"):
    """All that the table needs: numbers of those the reader has, and the others whole."""

    kept: Annotated[tuple[Number, ...], msgspec.Meta(max_length=ALLOCATIONS_PER_FRAME)] = ()
    new: Annotated[tuple[AllocationInfo, ...], msgspec.Meta(max_length=ALLOCATIONS_PER_FRAME)] = ()


class Confirmed(Message, frozen=True, kw_only=True, tag="confirmed"):
    """The first `count` tensors of the plan are where the table says; ``Ready`` says it of all."""

    count: Count


class Values(Message, frozen=True, kw_only=True, tag="values"):
    """Digests of the tensors that are read in place, 8 bytes each, from one index on."""

    first: Count
    values: Annotated[bytes, msgspec.Meta(max_length=8 * VALUES_PER_FRAME)]


ToReader = (
    Refusal
    | DeviceWelcome
    | Allocations
    | Handles
    | Confirmed
    | Ready
    | Values
    | Alive
    | Done
    | Failed
)
_TO_READER: msgspec.msgpack.Decoder[ToReader] = msgspec.msgpack.Decoder(ToReader)


def decode_to_reader(payload: bytes, *, peer: str) -> ToReader:
    """Raises `Validation` for anything but a well-formed message of our protocol."""
    return decode(_TO_READER, payload, peer)
