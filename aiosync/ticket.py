"""A round that is decided in one place and carried out in another.

A ticket is data: whoever holds the workers issues it, every trainer rank carries it out. It opens
nothing by itself (the workers' tokens and owners stay what they are), and it is never unpickled.

Its deadline travels as the seconds that were left when it was issued, and when that was by the
issuer's clock. The receiver takes off what has passed since by its own clock, beyond an allowance
(`DEFAULTS.clock_allowance_s`) for two clocks that disagree. A clock that is behind the issuer's
thus never makes a ticket longer than it was; one that is ahead by more than the allowance makes
it shorter, and the refusal of an expired ticket says by which clocks.
"""

from __future__ import annotations

import base64
import binascii
import time
from typing import Annotated, Any, Final, Self

import msgspec
from msgspec import Meta

from aiosync.codec import decode_json, encode_json
from aiosync.defaults import DEFAULTS
from aiosync.errors import Validation

# At run time: msgspec resolves the annotations of a Struct when it is first decoded.
from aiosync.messages import Count, Name, Seconds
from aiosync.version import Version
from aiosync.weight_targets import MODEL, Target

_PREFIX: Final = "aiosync-ticket-1."
_LIMIT_BYTES: Final = 64 << 10


class RoundTicket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One round, as whoever drives it hands it to the trainer's ranks.

    Attributes:
        id: Tells this ticket from every other one.
        round: Number of the round on the wire; newer than that of every earlier round.
        version: What the round carries.
        target: What it updates.
        issued_at: Unix time of issue, by the issuer's clock.
        seconds: How long the round may take from then on.
        epochs: By member, the epoch under which the workers are held; members that are not named
            are not checked.
        plan_digest: Digest of the chunk plan; None: not checked.
        driver: Who drives the round instead of the trainer: it was announced to the workers,
            which commit at the driver's word. None: the trainer drives it.
        opaque: The driver's own text, at most 4096 characters; nobody reads it here.
    """

    id: Name
    round: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    version: Version
    target: Target = MODEL
    issued_at: Annotated[float, Meta(ge=0, le=1e12)]
    seconds: Seconds
    epochs: dict[Name, Count] = {}
    plan_digest: Name | None = None
    driver: Name | None = None
    opaque: Annotated[str, Meta(max_length=4096)] = ""

    @property
    def seconds_left(self) -> float:
        """What is left of `seconds` here and now; not above zero: expired."""
        passed = time.time() - self.issued_at - DEFAULTS.clock_allowance_s
        return self.seconds - max(passed, 0.0)

    def to_json(self) -> str:
        """The ticket as a JSON object.

        Raises:
            Validation: A field has no JSON form.
        """
        return encode_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The ticket that `to_json` wrote.

        Raises:
            Validation: Too long, not JSON, or not a ticket; names the path of the bad field.
        """
        given: Any = text
        if isinstance(given, str):
            given = given.encode("utf-8", "surrogatepass")
        if not isinstance(given, bytes):
            raise Validation(f"a ticket is a str or bytes, not {type(text).__name__}")
        return decode_json(given, cls, limit=_LIMIT_BYTES, what="ticket")

    def encode(self) -> str:
        """The ticket as one word of ASCII, for command lines, headers and environments."""
        packed = base64.urlsafe_b64encode(encode_json(self)).decode().rstrip("=")
        return _PREFIX + packed

    @classmethod
    def decode(cls, text: str) -> Self:
        """The ticket that `encode` wrote.

        Raises:
            Validation: Too long, damaged, or not a ticket.
        """
        given: Any = text
        if not isinstance(given, str):
            raise Validation(f"an encoded ticket is a str, not {type(text).__name__}")
        if not given.startswith(_PREFIX):
            raise Validation(f"an encoded ticket begins with {_PREFIX!r}, this is {given[:24]!r}")
        packed = given.removeprefix(_PREFIX)
        if len(packed) > 2 * _LIMIT_BYTES:
            raise Validation(f"the ticket is too long: {len(given)} characters")
        try:
            padded = packed + "=" * (-len(packed) % 4)
            raw = base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError) as error:
            raise Validation(f"the ticket is damaged: {error}") from None
        return cls.from_json(raw)


def ticket_of(given: Any) -> RoundTicket:
    """The ticket meant by a ``ticket=`` argument, with every field's type checked.

    Raises:
        Validation: It is neither a `RoundTicket` nor the string of one.
    """
    if isinstance(given, str):
        return RoundTicket.decode(given)
    if not isinstance(given, RoundTicket):
        raise Validation(f"ticket must be a RoundTicket or its string, not {given!r}")
    return RoundTicket.from_json(given.to_json())  # one made by hand has not been checked yet
