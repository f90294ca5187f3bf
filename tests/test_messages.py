from __future__ import annotations

import msgspec
import pytest

from aiosync import errors
from aiosync.codec import decode_json, encode_json
from aiosync.errors import (
    KINDS,
    AiosyncError,
    Fenced,
    ProtocolMismatch,
    RemoteError,
    Torn,
    Unauthorized,
    Validation,
)
from aiosync.messages import (
    PROTOCOL,
    ErrorInfo,
    FinishBody,
    InitBody,
    PeerState,
    PlainBody,
    RoundHeader,
    check_announced,
    error_info,
    error_type,
    read_header,
    read_peer,
    status_of,
    to_error,
)
from aiosync.version import Version


def travelled(value, type):
    return decode_json(encode_json(value), type)


def test_the_header_arrives_as_it_was_sent():
    header = RoundHeader(
        owner="t",
        epoch=2,
        round=3,
        lease_s=30.0,
        deadline_s=5.5,
        version=Version("v", "run", 4),
        rollback=True,
        digest="ab",
        metadata_digest="cd",
    )
    body = travelled({"aiosync": header, "something": "else"}, PlainBody)
    assert read_header(body.aiosync) == header
    assert read_header(None) is None


@pytest.mark.fault("A-INPUT-3")
@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({}, r"`\$.aiosync`: .*`owner`"),
        ([], r"`\$.aiosync`: Expected `object`"),
        ("x" * 10, r"`\$.aiosync`: Expected `object`"),
        ({"owner": ""}, r"`\$.aiosync.owner`"),
        ({"owner": "x" * 513}, r"`\$.aiosync.owner`"),
        ({"owner": "t", "epoch": -1}, r"`\$.aiosync.epoch`"),
        ({"owner": "t", "round": 2**63}, r"`\$.aiosync.round`"),
        ({"owner": "t", "round": True}, r"`\$.aiosync.round`"),
        ({"owner": "t", "lease_s": 0}, r"`\$.aiosync.lease_s`"),
        ({"owner": "t", "lease_s": "30"}, r"`\$.aiosync.lease_s`"),
        ({"owner": "t", "version": "42"}, r"`\$.aiosync.version`"),
        ({"owner": "t", "version": {"label": 1, "lineage": "r", "order": 2}}, "its own order"),
        ({"owner": "t", "surprise": 1}, "unknown field `surprise`"),
        ({"owner": "t", "protocol": "1"}, r"`\$.aiosync.protocol`"),
        ({"owner": "t", "protocol": True}, r"`\$.aiosync.protocol`"),
    ],
)
def test_bad_headers_are_refused_by_path(raw, problem):
    with pytest.raises(Validation, match=problem):
        read_header(raw)


@pytest.mark.fault("A-INPUT-3")
def test_the_protocol_is_judged_before_the_fields():
    with pytest.raises(ProtocolMismatch, match="speaks protocol 2, this side speaks 1") as caught:
        read_header({"protocol": 2, "moved": True})
    assert caught.value.detail == {"peer": 2, "here": PROTOCOL}
    with pytest.raises(ProtocolMismatch, match="speaks protocol 0"):
        read_peer({"protocol": 0})


def test_peer_states():
    peer = PeerState(incarnation="i", version=Version(1, "r", 1), features=["prepare"])
    assert read_peer(travelled({"aiosync": peer}, PlainBody).aiosync) == peer
    assert read_peer(None) is None
    # Fields of a later minor version are no reason to fail.
    assert read_peer({"protocol": 1, "later": 1}) == PeerState()
    with pytest.raises(ProtocolMismatch, match=r"`\$.aiosync.world_size`"):
        read_peer({"world_size": "many"})
    with pytest.raises(ProtocolMismatch, match="Expected `object`"):
        read_peer(3)


def test_bodies_of_vllm():
    assert travelled({"init_info": {"a": 1}, "extra": 2}, InitBody).init_info == {"a": 1}
    assert travelled({}, FinishBody).weight_version is None
    assert travelled({"weight_version": "7"}, FinishBody).weight_version == "7"
    with pytest.raises(Validation, match=r"`\$.weight_version`: Expected `str | null`"):
        travelled({"weight_version": 7}, FinishBody)


@pytest.mark.fault("A-INPUT-2")
@pytest.mark.parametrize(
    "shape", [[-1, 4], [2**63], [10**23], [1.5], ["4"], [True], [1] * 65, 4, None, [[1]]]
)
def test_hostile_shapes_are_refused(shape):
    with pytest.raises(Validation, match=r"\$.update_info.shapes"):
        check_announced({"names": ["a"], "shapes": [shape]})


def test_announcements():
    check_announced({})
    check_announced({"names": ["a"], "dtype_names": ["bool"], "shapes": [[]], "other": object()})
    check_announced([{"shapes": [[0, 2**62]]}, {}])
    with pytest.raises(Validation, match=r"\$.update_info\[1\].names\[0\]"):
        check_announced([{}, {"names": [1]}])


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("Validation", 400),
        ("Coverage", 400),
        ("ProtocolMismatch", 400),
        ("Unauthorized", 401),
        ("InvalidTransition", 409),
        ("Fenced", 409),
        ("Busy", 409),
        ("Refused", 409),
        ("Torn", 503),
        ("PhaseTimeout", 500),
        ("PeerLost", 500),
        ("AiosyncError", 500),
    ],
)
def test_status_of_each_kind(kind, status):
    assert status_of(getattr(errors, kind)("x")) == status


def test_status_of_others():
    assert status_of(ValueError("x")) == 500
    assert status_of(Validation("x", detail={"limit_bytes": 1})) == 413


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_comes_back_as_itself_from_the_peer(kind):
    where = {"rank": 1, "phase": "update", "tensor": "a.b", "round": 7, "weights": "torn"}
    sent = kind("what happened", next_step="do", detail={"state": "idle", "x": 1}, **where)
    error = to_error(travelled(error_info(sent), ErrorInfo), replica="http://w:1")
    assert isinstance(error, RemoteError)
    assert isinstance(error, kind)
    assert error.message == "what happened"
    assert {name: getattr(error, name) for name in where} == where
    assert error.replica == "http://w:1"
    assert error.next_step == "do"
    assert error.retryable == sent.retryable
    assert error.detail["x"] == 1


def test_an_error_tells_readers_of_vllm_what_they_expect():
    error = Validation("bad", replica="w0", detail={"path": "$.a", "allowed": ("start",)})
    error.__cause__ = KeyError("k")
    wire = msgspec.json.decode(encode_json(error_info(error)))
    assert (wire["message"], wire["type"], wire["param"], wire["code"]) == (
        "bad",
        "Bad Request",
        "$.a",
        400,
    )
    assert wire["kind"] == "validation"
    assert wire["allowed"] == ["start"]
    assert wire["detail"]["cause"] == "KeyError: 'k'"
    assert error_type(500) == "InternalServerError"


def test_details_without_a_wire_form_are_described():
    info = error_info(AiosyncError("x", detail={"thing": object(), 3: Version(1, "r", 1)}))
    assert "object" in encode_json(info).decode()


def test_foreign_exceptions_keep_their_type_and_text():
    assert error_info(KeyError("layer")).message == "KeyError: 'layer'"
    info = error_info(TimeoutError())
    assert (info.message, info.code, info.status) == ("TimeoutError", "error", 500)
    assert AiosyncError("").code in error_info(AiosyncError("")).message


def test_who_answered_is_the_callers_name():
    info = error_info(Fenced("x", replica="worker-3"))
    error = to_error(info, replica="http://h:1", phase="start")
    assert (error.replica, error.phase) == ("http://h:1", "start")
    assert error.detail["reported_by"] == "worker-3"
    assert to_error(info).replica == "worker-3"


def test_stock_errors_are_sorted_by_status():
    def kind(status, code=""):
        return to_error(ErrorInfo(message="m", status=status, code=code))

    assert isinstance(kind(400), Validation)
    assert isinstance(kind(403), Unauthorized)
    assert isinstance(kind(404), ProtocolMismatch)
    assert not kind(500).retryable
    assert kind(503).retryable
    assert not isinstance(kind(503), Torn)
    strange = kind(500, "later_kind")
    assert type(strange) is RemoteError
    assert strange.detail["kind"] == "later_kind"
