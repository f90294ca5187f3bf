"""What the routes are made of: a request, an answer, and the engine that is served."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from aiosync import codec
from aiosync.defaults import DEFAULTS
from aiosync.errors import Validation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Mapping

    from aiosync.generation import GenerationGate
    from aiosync.messages import PeerState, RoundHeader
    from statemachines.hub import TransitionHub

T = TypeVar("T")
_TRUTH = {"true": True, "1": True, "false": False, "0": False}
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")  # what may stand in a log as it is
_DIGITS = 18  # a longer number is no 64-bit one, and is not worth converting


Step: TypeAlias = Callable[..., Awaitable[Any]]
"""A step as callers see it: it takes ``header=``."""


class ServedEngine(Protocol):
    """What the server drives: a worker engine, or a group of them."""

    # The steps are properties here because a subclass writes them bare: without `header`, blocking
    # or not. What an engine's instance has is the wrapped, awaitable step (`aiosync.overrides`).
    @property
    def init_transfer_engine(self) -> Step: ...
    @property
    def start_weight_update(self) -> Step: ...
    @property
    def update_weights(self) -> Step: ...
    @property
    def prepare_weight_update(self) -> Step: ...
    @property
    def finish_weight_update(self) -> Step: ...
    @property
    def abort_weight_update(self) -> Step: ...
    @property
    def shutdown(self) -> Step: ...
    @property
    def start_draft_weight_update(self) -> Step: ...
    @property
    def pause_generation(self) -> Step: ...
    @property
    def resume_generation(self) -> Step: ...
    @property
    def is_paused(self) -> Step: ...
    @property
    def abort_requests(self) -> Step: ...
    @property
    def update_weight_version(self) -> Step: ...
    @property
    def weight_checker(self) -> Step: ...

    @property
    def events(self) -> TransitionHub: ...
    @property
    def generation(self) -> GenerationGate: ...

    def peer_state(self) -> PeerState:
        """What every reply carries; ``detail["paused"]`` is true while generation is held."""
        ...

    def touch(self, header: RoundHeader | None) -> None:
        """Renew the lease of the round that `header` names."""
        ...


@dataclass(frozen=True, kw_only=True)
class Response:
    """An answer: a whole `body`, or a `stream` of parts that ends when the service closes."""

    status: int = 200
    body: bytes = b""
    content_type: str = codec.JSON
    headers: dict[str, str] = field(default_factory=dict)
    stream: AsyncGenerator[bytes, None] | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    def read(self, type: type[T], *, needs_body: bool = False) -> T:
        """The body; an absent one counts as an empty object, unless there must be one."""
        content_type = self.headers.get("content-type")
        if not self.body and not needs_body:
            return codec.convert({}, type)
        return codec.decode(self.body, type, content_type=content_type)


@dataclass(frozen=True)
class Answer:
    """What a handler has to say; the service adds the engine's state and encodes it."""

    reply: dict[str, Any]
    status: int = 200


def read_headers(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Header names in lower case, and an ``x-request-id``: the client's, or a fresh one."""
    headers = {name.lower(): value for name, value in pairs}
    if _REQUEST_ID.fullmatch(headers.get("x-request-id", "")) is None:
        headers["x-request-id"] = secrets.token_hex(8)
    return headers


Handler: TypeAlias = Callable[[Request], Awaitable[Answer | Response]]


class Route(NamedTuple):
    """One path: its verb, its handler, and the largest body it reads."""

    verb: str
    handler: Handler
    limit: int = DEFAULTS.small_body_bytes


def true_or_false(name: str, query: Mapping[str, str], default: str) -> bool:
    """A query parameter that is a truth value.

    Raises:
        Validation: Names it.
    """
    text = query.get(name, default)
    if text.lower() not in _TRUTH:
        raise bad_query(name, text, "true or false")
    return _TRUTH[text.lower()]


def whole(name: str, text: str) -> int:
    """A query parameter that is a whole number.

    Raises:
        Validation: Names it.
    """
    if not (text.isascii() and text.isdecimal()) or len(text) > _DIGITS:
        raise bad_query(name, text, "a whole number")
    return int(text)


def bad_query(name: str, value: str, wanted: str) -> Validation:
    """The refusal of a query parameter."""
    return Validation(
        f"query {name} must be {wanted}, not {value[:40]!r}", detail={"path": f"query.{name}"}
    )
