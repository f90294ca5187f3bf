"""Bytes to typed messages and back, for bytes that a stranger may have sent.

Every refusal is a `Validation` that names the path of the bad field; nothing here can raise
RecursionError, UnicodeDecodeError or KeyError, and nothing is ever unpickled.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any, TypeVar

import msgspec

from aiosync.defaults import DEFAULTS
from aiosync.errors import Validation
from aiosync.few_collections import few_collections

T = TypeVar("T")

JSON = "application/json"
MSGPACK = "application/msgpack"
_MSGPACK_NAMES = (MSGPACK, "application/x-msgpack", "application/vnd.msgpack")

PICKLED = "ipc_handles_pickled"

# Keeps brackets (as one pair), quotes and backslashes; everything else has no say in nesting.
_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'{}[]"'))
_QUOTED = re.compile(rb'"[^"]*"')
_AT_PATH = re.compile(r"^(?P<what>.*) - at `(?P<path>.*)`$", re.DOTALL)


def decode_json(
    data: bytes, type: type[T], *, limit: int = DEFAULTS.body_limit_bytes, what: str = "body"
) -> T:
    """Decode JSON of at most `limit` bytes and `DEFAULTS.json_depth` levels into `type`.

    Raises:
        Validation: Too large (``detail["limit_bytes"]``), empty, too deep, not JSON, or not a
            `type`; then the message and ``detail["path"]`` name the field.
    """
    _check_size(data, limit, what)
    if _nesting_exceeds(data, DEFAULTS.json_depth):
        raise _too_deep(what)
    try:
        with few_collections:
            message: T = _decoder(type).decode(data)  # type: ignore[arg-type]  # a type is hashable
    except msgspec.DecodeError as error:
        raise _refusal(error, what) from error
    return message


def decode_msgpack(
    data: bytes, type: type[T], *, limit: int = DEFAULTS.body_limit_bytes, what: str = "body"
) -> T:
    """Decode msgpack as `decode_json` decodes JSON; only what JSON can say is accepted.

    Raises:
        Validation: As `decode_json`; also for binary and extension values, NaN and infinity.
    """
    _check_size(data, limit, what)
    try:
        with few_collections:
            message = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Validation(f"{what} is not msgpack: {error}") from error
    except RecursionError:
        raise _too_deep(what) from None
    with few_collections:
        _check_json_like(message, what)
    return convert(message, type, what=what)


def decode(
    data: bytes,
    type: type[T],
    *,
    content_type: str | None = None,
    limit: int = DEFAULTS.body_limit_bytes,
    what: str = "body",
) -> T:
    """Decode by content type: JSON unless it says msgpack.

    Raises:
        Validation: As `decode_json`; also for a content type that is neither.
    """
    name = media_type(content_type)
    if name in _MSGPACK_NAMES:
        return decode_msgpack(data, type, limit=limit, what=what)
    if name and name != JSON and not name.endswith("+json"):
        raise Validation(f"{what} must be {JSON} or {MSGPACK}, not {name!r}")
    return decode_json(data, type, limit=limit, what=what)


def convert(obj: Any, type: type[T], *, what: str = "body", at: str = "$") -> T:
    """Check decoded data against `type`; `at` is where `obj` sits in the whole message.

    Raises:
        Validation: Names the path of the bad field.
    """
    try:
        with few_collections:
            return msgspec.convert(obj, type)
    except msgspec.ValidationError as error:
        raise _refusal(error, what, at=at) from error


def encode_json(obj: Any) -> bytes:
    """JSON of a message.

    Raises:
        Validation: Something in it has no JSON form; names its type.
    """
    try:
        return msgspec.json.encode(obj)
    except (TypeError, OverflowError, RecursionError) as error:
        raise Validation(f"not representable as JSON: {error}") from error


def encode_msgpack(obj: Any) -> bytes:
    """msgpack of a message; as `encode_json`."""
    try:
        return msgspec.msgpack.encode(obj)
    except (TypeError, OverflowError, RecursionError) as error:
        raise Validation(f"not representable as msgpack: {error}") from error


def media_type(content_type: str | None) -> str:
    """``"application/json"`` out of ``"Application/JSON; charset=utf-8"``; empty if unknown."""
    return (content_type or "").partition(";")[0].strip().lower()


def accepts_msgpack(accept: str | None) -> bool:
    """Whether an Accept header asks for msgpack."""
    return accept is not None and any(
        media_type(part) in _MSGPACK_NAMES for part in accept.split(",")
    )


def refuse_pickles(obj: Any, *, at: str = "$") -> None:
    """Refuse ``ipc_handles_pickled`` at any depth of `obj`, unless it is null.

    Raises:
        Validation: Names where it was found.
    """
    if isinstance(obj, dict):
        if obj.get(PICKLED) is not None:
            raise Validation(
                f"`{at}.{PICKLED}`: pickled handles are never accepted",
                detail={"path": f"{at}.{PICKLED}"},
                next_step="send handles as plain typed fields",
            )
        for key, value in obj.items():
            if _holds_objects(value):
                refuse_pickles(value, at=f"{at}.{key}")
    elif isinstance(obj, list):
        for index, item in enumerate(obj):
            refuse_pickles(item, at=f"{at}[{index}]")


def _holds_objects(value: Any) -> bool:
    """Judged by the first element: 60,000 names or shapes are not walked one by one."""
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, dict)


@functools.lru_cache(maxsize=64)
def _decoder(type: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(type)


def _check_size(data: bytes, limit: int, what: str) -> None:
    if not data:
        raise Validation(f"{what} is empty")
    if len(data) > limit:
        raise too_large(what, limit, len(data))


def too_large(what: str, limit: int, size: int | None = None) -> Validation:
    """The refusal of a body above the limit; carries ``detail["limit_bytes"]``."""
    seen = "more" if size is None else f"{size} bytes"
    return Validation(
        f"{what} is too large: {seen}, the limit is {limit} bytes",
        detail={"limit_bytes": limit},
    )


def _too_deep(what: str) -> Validation:
    return Validation(f"{what} is nested deeper than {DEFAULTS.json_depth} levels")


def _nesting_exceeds(data: bytes, limit: int) -> bool:
    """Whether JSON text nests deeper than `limit`, by a few passes in C over its brackets.

    Counting brackets settles nearly every message. For the rest: drop escapes and strings, then
    remove innermost pairs, one level per pass. Text that is not JSON may get either answer, the
    decoder refuses it anyway.
    """
    if data.count(b"[") + data.count(b"{") <= limit:
        return False
    text = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    text = text.translate(_TO_BRACKETS, _NOT_STRUCTURE)
    text = text.replace(b'""', b"")
    if b'"' in text:
        text = _QUOTED.sub(b"", text)
    for _ in range(limit):
        inner = text.replace(b"[]", b"")
        if len(inner) == len(text):
            break
        text = inner
    return text.count(b"[") > limit or b"[]" in text


def _check_json_like(message: Any, what: str) -> None:
    """Level by level, without recursion: depth, and values that JSON could not have carried."""
    level: list[tuple[str, Any]] = [("$", message)]
    for _ in range(DEFAULTS.json_depth + 1):
        inner: list[tuple[str, Any]] = []
        for path, value in level:
            if isinstance(value, dict):
                inner += _members(path, value, what)
            elif isinstance(value, list):
                inner += [
                    (f"{path}[{index}]", item)
                    for index, item in enumerate(value)
                    if not isinstance(item, str | int)
                ]
            elif value is not None and not _is_scalar(value):
                raise Validation(
                    f"{what}: `{path}`: {_shown(value)} is not allowed", detail={"path": path}
                )
        if not inner:
            return
        level = inner
    raise _too_deep(what)


def _members(path: str, value: dict[Any, Any], what: str) -> list[tuple[str, Any]]:
    for key in value:
        if not isinstance(key, str):
            raise Validation(
                f"{what}: `{path}`: keys must be strings, not {_shown(key)}", detail={"path": path}
            )
    return [(f"{path}.{key}", item) for key, item in value.items()]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, float | int) else f"a {type(value).__name__}"


def _refusal(error: msgspec.DecodeError, what: str, *, at: str = "$") -> Validation:
    found = _AT_PATH.match(str(error))
    if not isinstance(error, msgspec.ValidationError):
        return Validation(f"{what}: {error}")
    path = at if found is None else at + found["path"].removeprefix("$")
    problem = str(error) if found is None else found["what"]
    return Validation(f"{what}: `{path}`: {problem}", detail={"path": path})
