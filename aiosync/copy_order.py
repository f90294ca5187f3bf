"""The typed call by which a worker is asked to send its model to another one."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

# At run time: msgspec resolves the annotations of a Struct when it is first decoded.
from aiosync.messages import Count, Name, Seconds
from aiosync.version import Version

Text = Annotated[str, Meta(min_length=1, max_length=4096)]


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """A server, and what it asks for."""

    url: Text
    token: Text | None = None

    def __repr__(self) -> str:  # the token stays out of logs
        return f"Reach({self.url!r})"


class CopyOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be sent, and to whom.

    Attributes:
        id: For `cancel`.
        owner: As whom the receiver is taken.
        version: What the sender must hold.
        digest: Of its bytes, of kind `digest_kind`, in chunks of `buffer_size_bytes`; None: only
            their number is checked.
        wire_digest: Of names, dtypes and shapes, in the order in which they travel.
        member, servers: The receiver: all its servers commit, or none does.
        seconds: What it may take.
    """

    id: Name
    owner: Name
    version: Version
    digest: Name | None = None
    digest_kind: Name | None = None
    buffer_size_bytes: Count
    wire_digest: Name
    member: Name
    servers: Annotated[list[Reach], Meta(min_length=1, max_length=1024)]
    seconds: Seconds


class CopyBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``send_weights``."""

    order: CopyOrder
    aiosync: Any = None


class CancelCopyBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``send_weights/cancel``."""

    id: Name
    aiosync: Any = None
