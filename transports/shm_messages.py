"""What the two halves of the shared-memory stream say to each other, beside the bytes.

Every message names its protocol. A peer's numbers are checked where they are used: types and signs
here, bounds against the plan and the segments by the receiver.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from statemachines.errors import Validation

PROTOCOL = 1
HANDLES_PER_FRAME = 8192
_TEXT_LIMIT = 16384

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Label = Annotated[str, msgspec.Meta(max_length=256)]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages."""

    protocol: int = PROTOCOL


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """Reader's first word. `resident` is the table of handles that it has, `reads` says that it can
    copy from the sender's memory itself (`transports.foreign_memory`).

    A reader of device memory also says on which device (`device`), whose memory it can open
    (`visible`), and the highest number of the allocations that it has (`known`). One that reads
    staging memory says what lies in it (`layout`).
    """

    token: Label
    round: int
    reader: Label
    segments: Annotated[tuple[Label, ...], msgspec.Meta(max_length=256)] = ()
    resident: Label = ""
    reads: bool = False
    device: Label = ""
    visible: Annotated[tuple[Label, ...], msgspec.Meta(max_length=256)] = ()
    known: Count = 0
    layout: Label = ""


class Refusal(Message, frozen=True, kw_only=True, tag="refusal"):
    """The connection is not taken; the sender closes it."""

    reason: str


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A segment of this round; `attached` when its descriptor comes with the message."""

    key: Label
    nbytes: Count
    attached: bool


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The reader is in. `handles` counts those that follow; None: the table is as it was.

    `direct`: they are addresses in the sender's process.
    """

    round: int
    plan: str
    digest: str | None
    segments: Annotated[tuple[SegmentInfo, ...], msgspec.Meta(max_length=64)]
    resident: Label
    handles: Count | None
    direct: bool = False


class Handles(Message, frozen=True, kw_only=True, tag="handles"):
    """Tensors that stay where they are: index, segment (an index into the welcome's), offset.

    Or index, 0, address.
    """

    handles: tuple[tuple[Count, Count, Count], ...]


class Forget(Message, frozen=True, kw_only=True, tag="forget"):
    """Segments of earlier rounds are of no more use: unmap them, and acknowledge that."""


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    """A chunk lies at `offset` of a segment (-1: all of it is resident)."""

    chunk: Count
    segment: Annotated[int, msgspec.Meta(ge=-1, lt=64)]
    offset: Count
    digest: int | None = None


class Ack(Message, frozen=True, kw_only=True, tag="ack"):
    """The reader has copied the chunk; its place may be written again."""

    chunk: Count


class Alive(Message, frozen=True, kw_only=True, tag="alive"):
    """Nothing new, but the sender is at work."""


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """All chunks have been announced."""

    chunks: Count
    nbytes: Count
    digest: str | None


class Complete(Message, frozen=True, kw_only=True, tag="complete"):
    """The reader's last word: it has everything."""

    chunks: Count
    digest: str | None


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """This side gives the round up."""

    text: str


M = TypeVar("M", bound=Message)
ToSender = Hello | Ack | Complete | Failed
ToReader = Refusal | Welcome | Handles | Forget | Ready | Alive | Done | Failed

_ENCODER = msgspec.msgpack.Encoder()
_TO_SENDER: msgspec.msgpack.Decoder[ToSender] = msgspec.msgpack.Decoder(ToSender)
_TO_READER: msgspec.msgpack.Decoder[ToReader] = msgspec.msgpack.Decoder(ToReader)

encode = _ENCODER.encode


def failed(error: BaseException) -> bytes:
    """The message that tells a peer why this side gives up."""
    message = getattr(error, "message", None) or str(error)
    return encode(Failed(text=f"{type(error).__name__}: {message}"[:_TEXT_LIMIT]))


def decode_to_sender(payload: bytes, *, peer: str) -> ToSender:
    """Raises `Validation` for anything but a well-formed message of our protocol."""
    return decode(_TO_SENDER, payload, peer)


def decode_to_reader(payload: bytes, *, peer: str) -> ToReader:
    """Raises `Validation` for anything but a well-formed message of our protocol."""
    return decode(_TO_READER, payload, peer)


def decode(decoder: msgspec.msgpack.Decoder[M], payload: bytes, peer: str) -> M:
    """Raises `Validation` for what is none of the decoder's messages, or of another protocol."""
    try:
        message = decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Validation(f"malformed message: {error}", replica=peer) from error
    if message.protocol != PROTOCOL:
        raise Validation(
            f"peer speaks protocol {message.protocol}, this side {PROTOCOL}", replica=peer
        )
    return message
