"""The messages of the control plane: vLLM's bodies, and the one object ``aiosync`` of our own.

Bodies ignore top-level keys they do not know, as vLLM does; our object refuses them, after its
protocol number was read.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from aiosync.codec import convert
from aiosync.errors import KINDS, AiosyncError, ProtocolMismatch, Unauthorized, Validation
from aiosync.staging import StagingPlace

# At run time: msgspec resolves the annotations of a Struct when it is first decoded.
from aiosync.version import Version
from aiosync.weight_targets import MODEL, Target

PROTOCOL = 1
STARTS = "starts"
"""The feature of a worker whose update may also start the round."""

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
LONGEST_S = 1e9
Seconds = Annotated[float, Meta(gt=0, le=LONGEST_S)]
Name = Annotated[str, Meta(min_length=1, max_length=512)]
Shape = Annotated[list[Count], Meta(max_length=64)]


class RoundHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every call of a trainer of ours says about itself (wire key ``aiosync``).

    Attributes:
        owner: Names the trainer; one owner at a time.
        epoch: From the init reply; orders owners.
        round: Number within the epoch.
        lease_s: Silence after which the worker gives the round up.
        deadline_s: Seconds that are left for the round, of a pause and a finish for the call
            itself (clocks are not compared).
        version: What this round carries; sent with ``start``.
        digest: Of the chunk plan.
        metadata_digest: Digest over names, dtypes and shapes, instead of sending them again.
        target: What the round updates; None: the model. Sent with ``start``.
        ticket: Id of the ticket, where somebody else than this trainer drives the round.
        staging: A rank's place in staging that its group shares; sent with the group's init.
        starts: Of an update: it also starts the round, as a start before it would. Sent only
            where it is true, to a worker whose last answer names the feature `STARTS`.
    """

    protocol: int = PROTOCOL
    owner: Name
    epoch: Count = 0
    round: Count = 0
    lease_s: Seconds | None = None
    deadline_s: Seconds | None = None
    version: Version | None = None
    rollback: bool = False
    digest: Name | None = None
    metadata_digest: Name | None = None
    target: Target | None = None
    ticket: Name | None = None
    staging: StagingPlace | None = None
    starts: bool | UnsetType = UNSET


class PeerState(msgspec.Struct, frozen=True, kw_only=True):
    """What a server of ours says about itself in every reply (wire key ``aiosync``).

    Attributes:
        incarnation: New for each process; a change means the worker restarted.
        state: State of the engine's machine.
        weights: ``"intact"``, ``"torn"`` or ``"unknown"``.
        version: Of the model.
        versions: Of its other targets that have one: ``"draft"``, ``"adapter:<name>"``.
        features: Calls it knows beyond vLLM's four (``"prepare"``, ``"abort"``, ...).
        digests: Digest kinds it can check, best first.
        detail: Further facts: ``allowed`` triggers, ``paused``, ``round``, ...
    """

    protocol: int = PROTOCOL
    incarnation: str = ""
    epoch: Count = 0
    state: str = "idle"
    weights: str = "intact"
    version: Version | None = None
    versions: dict[str, Version] = {}
    owner: str | None = None
    features: list[str] = []
    digests: list[str] = []
    world_size: Count = 1
    lease_s: float | None = None
    detail: dict[str, Any] = {}

    def held(self, target: Target) -> Version | None:
        """Its version of `target`."""
        return self.version if target == MODEL else self.versions.get(target.key)


class PlainBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of start, prepare and shutdown: nothing of vLLM's."""

    aiosync: Any = None


class InitBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``init_weight_transfer_engine``."""

    init_info: dict[str, Any]
    aiosync: Any = None


class UpdateBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``update_weights``: one payload, or one per worker rank."""

    update_info: dict[str, Any] | list[dict[str, Any]]
    aiosync: Any = None


class FinishBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``finish_weight_update``."""

    weight_version: str | None = None
    aiosync: Any = None


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``abort_weight_update``."""

    reason: str = ""
    aiosync: Any = None


class PauseBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``pause``: nothing of vLLM's, whose mode and clear_cache travel in the query."""

    mode: Any = None
    clear_cache: Any = None
    aiosync: Any = None

    def checked(self) -> PauseBody:
        """vLLM ignores them here, and pauses in another mode than was meant.

        Raises:
            Validation: Says where they belong.
        """
        for name in ("mode", "clear_cache"):
            if getattr(self, name) is not None:
                raise Validation(
                    f"`$.{name}`: pause takes {name} in the query: POST /pause?{name}=...",
                    detail={"path": f"$.{name}"},
                )
        return self


class AbortRequestsBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``abort_requests``; without ids, all."""

    request_ids: list[str] | None = None


class VersionBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``update_weight_version``."""

    new_version: Annotated[str, Meta(max_length=512)]
    aiosync: Any = None


class CheckerBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``weight_checker``."""

    action: str
    baseline: dict[str, str] | None = None
    aiosync: Any = None


class Announced(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that every dense payload of vLLM's shares, with bounded numbers."""

    names: list[str] | None = None
    dtype_names: list[str] | None = None
    shapes: list[Shape] | None = None


def check_announced(update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Check names, dtype names and shapes of a payload, where it has them.

    Raises:
        Validation: Names the path of the bad element.
    """
    if isinstance(update_info, dict):
        convert(update_info, Announced, at="$.update_info")
        return
    for rank, payload in enumerate(update_info):
        convert(payload, Announced, at=f"$.update_info[{rank}]")


def read_header(raw: Any) -> RoundHeader | None:
    """The header under the key ``aiosync``; the protocol number is judged first.

    Raises:
        ProtocolMismatch: The peer speaks another version of the protocol.
        Validation: Names the path of the bad field.
    """
    if raw is None:
        return None
    _check_protocol(raw)
    return convert(raw, RoundHeader, at="$.aiosync")


def read_peer(raw: Any) -> PeerState | None:
    """The `PeerState` under the key ``aiosync`` of a reply; None where there is none.

    Raises:
        ProtocolMismatch: The peer speaks another version of the protocol, or not one at all.
    """
    if raw is None:
        return None
    _check_protocol(raw)
    try:
        return convert(raw, PeerState, at="$.aiosync", what="reply")
    except Validation as error:
        raise ProtocolMismatch(error.message, detail=error.detail) from error


def _check_protocol(raw: Any) -> None:
    spoken = raw.get("protocol", PROTOCOL) if isinstance(raw, dict) else PROTOCOL
    if isinstance(spoken, int) and not isinstance(spoken, bool) and spoken != PROTOCOL:
        raise ProtocolMismatch(
            f"the peer speaks protocol {spoken}, this side speaks {PROTOCOL}",
            next_step="run the same version of aiosync on both sides",
            detail={"peer": spoken, "here": PROTOCOL},
        )


class ErrorInfo(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"code": "kind", "status": "code"}.get,
):
    """An error as it travels, under ``error``; readers of vLLM's shape find what they expect.

    Attributes:
        code: Wire code of the kind (``AiosyncError.code``; key ``kind``); empty from a stock vLLM.
        status: HTTP status (key ``code``).
        param: Path of the bad field of the request.
        state, allowed: The engine's state and the triggers that are legal in it.
    """

    message: str = ""
    type: str = ""
    param: str | None = None
    status: int = 500
    code: str = ""
    retryable: bool = False
    state: str | None = None
    allowed: list[str] = []
    replica: str | None = None
    rank: int | None = None
    phase: str | None = None
    tensor: str | None = None
    round: int | None = None
    weights: str | None = None
    next_step: str | None = None
    detail: dict[str, Any] = {}


_STATUS = {
    "validation": 400,
    "coverage": 400,
    "protocol_mismatch": 400,
    "unauthorized": 401,
    "invalid_transition": 409,
    "fenced": 409,
    "gate_rejected": 409,
    "busy": 409,
    "refused": 409,
    "torn": 503,
    "paused": 503,
}
_KIND_OF_STATUS: dict[int, type[AiosyncError]] = {
    400: Validation,
    401: Unauthorized,
    403: Unauthorized,
    404: ProtocolMismatch,
    405: ProtocolMismatch,
    413: Validation,
}
_TYPES = {500: "InternalServerError", 503: "ServiceUnavailableError"}
_WHERE = ("replica", "rank", "phase", "tensor", "round", "weights", "next_step")


def status_of(exc: BaseException) -> int:
    """The HTTP status that stands for `exc`."""
    if not isinstance(exc, AiosyncError):
        return 500
    return 413 if "limit_bytes" in exc.detail else _STATUS.get(exc.code, 500)


def error_info(exc: BaseException) -> ErrorInfo:
    """`exc` as it travels; an exception of another library becomes ``"error"`` with its text."""
    status = status_of(exc)
    if not isinstance(exc, AiosyncError):
        text = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
        return ErrorInfo(message=text, type=error_type(status), status=status, code="error")
    detail = msgspec.to_builtins(exc.detail, str_keys=True, enc_hook=repr)
    if exc.__cause__ is not None:
        detail.setdefault("cause", f"{type(exc.__cause__).__name__}: {exc.__cause__}")
    return ErrorInfo(
        message=exc.message or exc.code,
        type=error_type(status),
        param=detail.get("path"),
        status=status,
        code=exc.code,
        retryable=exc.retryable,
        state=detail.get("state"),
        allowed=[str(name) for name in detail.get("allowed", ())],
        detail=detail,
        **{field: getattr(exc, field) for field in _WHERE},
    )


def error_type(status: int) -> str:
    """vLLM's name for a status, the ``type`` of an error body."""
    return _TYPES.get(status) or HTTPStatus(status).phrase


def to_error(
    info: ErrorInfo, *, replica: str | None = None, phase: str | None = None
) -> AiosyncError:
    """The exception that `info` reports, as a `RemoteError` of its kind.

    Args:
        replica: Who answered, in the caller's words; what the peer calls itself goes to
            ``detail["reported_by"]``.
        phase: Used where the peer did not name one.
    """
    kind = KINDS.get(info.code) or _KIND_OF_STATUS.get(info.status, AiosyncError)
    detail = {"status": info.status, **info.detail}
    if info.code and info.code not in KINDS:
        detail["kind"] = info.code
    if replica is not None and info.replica is not None:
        detail["reported_by"] = info.replica
    where = {field: getattr(info, field) for field in _WHERE}
    where["replica"] = replica or info.replica
    where["phase"] = info.phase or phase
    retryable = info.retryable or (not info.code and info.status == HTTPStatus.SERVICE_UNAVAILABLE)
    return kind.remote(info.message, retryable=retryable, detail=detail, **where)
