"""Judging what a server answered: only an explicit success counts as one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from aiosync.client_protocol import Readiness, Reply
from aiosync.codec import convert, decode_json
from aiosync.defaults import DEFAULTS
from aiosync.errors import AiosyncError, ProtocolMismatch, Validation
from aiosync.messages import PROTOCOL, ErrorInfo, PeerState, error_type, read_peer, to_error

if TYPE_CHECKING:
    from collections.abc import Iterator

SHOWN = 200
_OURS = b'"aiosync"'
_TRUNCATED = "the body ended before its announced end"

# Texts of vLLM's own success replies; any other text is looked at for a confession.
_SUCCESS_TEXTS = frozenset(
    (
        "weight transfer initialized",
        "weight transfer shut down",
        "weight update started",
        "draft weight update started",
        "weights updated",
        "weight update finished",
    )
)
_CLAIM = re.compile(
    r"\b(ok|okay|done|success\w*|succeeded|complete\w*|updated|started|finished|initiali[sz]ed"
    r"|loaded|applied|received|accepted|committed|paused|resumed|released|reset|shut down)\b"
)
_CONFESSION = re.compile(
    r"fail|error|invalid|refus|reject|unable|cannot|could not|denied|\bnot |exception|timed out"
    r"|\bpartial|\bskipp|\babort|\b(0|none) (of|out of)\b|\bno (weights|bytes|workers|tensors)\b"
)
_SUCCESS_KEYS = ("success", "ok")
_FAILURE_KEYS = ("error", "errors", "exception", "failed", "failure", "failures", "traceback")
_RESULT_KEYS = ("result", "results")
_STATUS_KEYS = ("status", "code", "status_code")
_FAILED_STATUS = re.compile(r"(error|fail\w*|aborted|rejected|refused|denied|timeout)$")


class _Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a server of ours answers when it has done what it was asked to."""

    message: str
    aiosync: PeerState


class RawReply(msgspec.Struct, frozen=True, kw_only=True):
    """What came over the wire, before anybody believed it.

    Attributes:
        headers: By names in lower case, or in any case.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str
    cut_off: bool = False
    truncated: bool = False

    def describe(self) -> str:
        """Status, content type and the first characters of the body."""
        kind = self.headers.get("content-type") or "no content type"
        text = self.body[: 4 * SHOWN].decode("utf-8", "replace")
        shown = repr(text[:SHOWN]) if text else "an empty body"
        return f"status {self.status}, {kind}, {shown}"


def read_reply(raw: RawReply, *, replica: str, phase: str, needs: str | None = None) -> Reply:
    """The reply as success, or the error it is.

    Args:
        needs: Key of the answer of a call that only asks (``"world_size"``); None for a call that
            does something, which must say that it did.

    Raises:
        ProtocolMismatch: The answer is not one of this protocol: another content, a redirect, cut
            off, no explicit success.
        RemoteError: The peer reports a failure; its text is in the message.
    """
    try:
        return _read(raw, phase, replica, needs)
    except AiosyncError as error:
        error.locate(replica=replica, phase=phase)
        error.detail.setdefault("status", raw.status)
        error.detail.setdefault("content_type", raw.headers.get("content-type"))
        raise


def _read(raw: RawReply, phase: str, replica: str, needs: str | None) -> Reply:
    if raw.cut_off:
        limit = DEFAULTS.reply_limit_bytes
        raise _odd(raw, f"more than {limit} bytes; the rest was not read")
    if HTTPStatus.MULTIPLE_CHOICES <= raw.status < HTTPStatus.BAD_REQUEST:
        target = raw.headers.get("location")
        raise _odd(raw, f"a redirect to {target!r}; redirects are not followed")
    if raw.status >= HTTPStatus.BAD_REQUEST:
        raise read_error(raw, replica=replica, phase=phase)
    if raw.truncated:
        raise _odd(raw, _TRUNCATED)
    if raw.status != HTTPStatus.OK:
        raise _odd(raw, "not the 200 that means success")
    if needs is None and (done := _done(raw)) is not None:
        return done
    message = _object(raw)
    peer = read_peer(message.get("aiosync"))
    # What was asked for may hold anything below its top level; what was done must be done whole.
    _refuse_denials(raw, [message] if needs else list(_parts(message)), phase, replica)
    if needs is not None:
        if needs not in message:
            raise _odd(raw, f"an answer without {needs!r}")
    elif peer is None and not _says_success(message):
        raise _odd(raw, "no explicit success")
    return Reply(message, peer)


def _done(raw: RawReply) -> Reply | None:
    """The reply, if it is nothing but our own words for success: it has no room for others."""
    if _OURS not in raw.body:
        return None
    try:
        done = decode_json(raw.body, _Done, what="reply")
    except Validation:
        return None
    if done.aiosync.protocol != PROTOCOL:
        return None
    return Reply({"message": done.message}, done.aiosync)


def _object(raw: RawReply) -> dict[str, Any]:
    try:
        return decode_json(raw.body, dict[str, Any], what="reply")
    except Validation as error:
        raise _odd(raw, f"not a JSON object ({error.message})") from error


def _says_success(message: dict[str, Any]) -> bool:
    if any(message.get(key) is True for key in _SUCCESS_KEYS):
        return True
    text = message.get("message")
    if not isinstance(text, str) or not text.strip():
        return False
    plain = text.strip().rstrip(".!").lower()
    if plain in _SUCCESS_TEXTS:
        return True
    return _CLAIM.search(plain) is not None and _CONFESSION.search(plain) is None


def _refuse_denials(raw: RawReply, parts: list[dict[str, Any]], phase: str, replica: str) -> None:
    """A 200 that says it failed, as a whole or in one of its sub-results, is a failure."""
    for part in parts:
        if _denies(part):
            info = _error_of(part, raw.status) or ErrorInfo(message=raw.describe())
            text = f"answered {raw.status} but reports a failure: {info.message}"
            # Reported under a 200: the status says nothing about the kind.
            info = msgspec.structs.replace(info, message=text, status=HTTPStatus.OK)
            raise to_error(info, replica=replica, phase=phase)


def refuse_denial(reply: Any, *, replica: str, phase: str) -> None:
    """A client of the caller's own returned what says that it failed.

    ``None``, a `Reply` and anything else that denies nothing are fine: such clients raise.

    Raises:
        RemoteError: False, ``(False, text)``, or an object as `read_reply` refuses it.
    """
    if isinstance(reply, dict):
        raw = RawReply(status=HTTPStatus.OK, headers={}, body=b"", url=replica)
        _refuse_denials(raw, list(_parts(reply)), phase, replica)
        return
    first, *rest = reply if isinstance(reply, tuple) and reply else (reply,)
    if first is False:
        text = f"the client returned {reply!r}" if not rest else str(rest[0])
        info = ErrorInfo(message=f"reports a failure: {text}"[: 2 * SHOWN], status=HTTPStatus.OK)
        raise to_error(info, replica=replica, phase=phase)


def _denies(part: dict[str, Any]) -> bool:
    if any(part.get(key, True) is not True for key in _SUCCESS_KEYS):
        return True
    if any(part.get(key) for key in _FAILURE_KEYS):
        return True
    if part.get("detail") and "message" not in part:
        return True
    for key in _RESULT_KEYS:
        value = part.get(key)
        if value is False or (isinstance(value, list) and False in value):
            return True
    if part.get("status") == "aborted" and isinstance(part.get("aborted"), int):
        return False  # vLLM's success of abort_requests: it says how many
    return any(_is_failed_status(part.get(key)) for key in _STATUS_KEYS)


def _is_failed_status(value: Any) -> bool:
    if isinstance(value, str):
        return _FAILED_STATUS.match(value.strip().lower()) is not None
    return isinstance(value, int) and value >= HTTPStatus.BAD_REQUEST


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """An answer and all objects inside of it; decoding has limited their depth."""
    if isinstance(value, dict):
        yield value
        for key, inner in value.items():
            if key != "aiosync":
                yield from _parts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _parts(inner)


def _odd(raw: RawReply, problem: str) -> ProtocolMismatch:
    return ProtocolMismatch(f"{raw.url} gave {problem}: {raw.describe()}")


def read_readiness(raw: RawReply, *, replica: str) -> Readiness:
    """The answer of ``/ready``, whose 503 is an answer too."""
    if raw.status == HTTPStatus.SERVICE_UNAVAILABLE:
        try:
            reasons = decode_json(raw.body, dict[str, Any]).get("reasons")
        except Validation:
            reasons = None  # the 503 of somebody else
        if isinstance(reasons, list):
            return Readiness(False, [str(reason) for reason in reasons])
    read_reply(raw, replica=replica, phase="ready", needs="ready")
    return Readiness(True)


def read_error(raw: RawReply, *, replica: str, phase: str) -> AiosyncError:
    """The error a 4xx or 5xx reply reports, whoever wrote it."""
    info, peer = None, None
    try:
        message = decode_json(raw.body, dict[str, Any], what="reply")
        info, peer = _error_of(message, raw.status), message.get("aiosync")
    except Validation:
        pass  # HTML of a proxy, text, nothing at all: shown as it is
    if info is None:
        info = ErrorInfo(message=raw.describe(), status=raw.status)
    text = f"{raw.url} answered {raw.status} {_phrase(raw.status)}: {info.message}"
    if raw.status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED) and not info.code:
        text += (
            " (check host, port and path; a vLLM server has these routes only with"
            " VLLM_SERVER_DEV_MODE=1)"
        )
    if raw.truncated:
        text += f" ({_TRUNCATED})"
    info = msgspec.structs.replace(info, message=text, status=raw.status)
    error = to_error(info, replica=replica, phase=phase)
    if isinstance(peer, dict):  # whose word it is; that of a worker behind it is not
        error.detail["incarnation"] = peer.get("incarnation")
    retry_after = raw.headers.get("retry-after")
    if retry_after is not None:
        error.detail["retry_after"] = retry_after
    return error


def _error_of(message: Mapping[str, Any], status: int) -> ErrorInfo | None:
    """The error inside a reply, in any of the shapes that vLLM, FastAPI or we use."""
    found = message.get("error")
    if isinstance(found, dict):
        try:
            info = convert(found, ErrorInfo)
        except Validation:
            info = ErrorInfo()
        if info.message:
            return info
        text = found.get("message")
        found = text if isinstance(text, str) and text else _text(found)
    told = [message.get(key) for key in _FAILURE_KEYS if key != "error"]
    for value in (found, *told, message.get("message"), message.get("detail")):
        if value:
            text = value if isinstance(value, str) else _text(value)
            return ErrorInfo(message=text, status=status)
    return None


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()[:SHOWN]


def _phrase(status: int) -> str:
    try:
        return (
            error_type(status)
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR
            else HTTPStatus(status).phrase
        )
    except ValueError:
        return "(not a known status)"
