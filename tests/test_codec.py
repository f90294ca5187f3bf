from __future__ import annotations

import json
import math

import msgspec
import pytest

from aiosync.codec import (
    JSON,
    MSGPACK,
    accepts_msgpack,
    convert,
    decode,
    decode_json,
    decode_msgpack,
    encode_json,
    encode_msgpack,
    media_type,
    refuse_pickles,
)
from aiosync.defaults import DEFAULTS
from aiosync.errors import Validation
from aiosync.messages import Announced, UpdateBody

DEEP = DEFAULTS.json_depth


def body(inner):
    return b'{"update_info": {"a": ' + inner + b"}}"


def test_a_body_arrives_as_it_was_sent():
    message = {"update_info": {"names": ["a", "b"], "x": [1, 2.5, None, True, {"y": "z"}]}}
    for data, kind in ((encode_json(message), JSON), (encode_msgpack(message), MSGPACK)):
        assert decode(data, UpdateBody, content_type=kind).update_info == message["update_info"]
    assert decode(encode_json(message), UpdateBody).update_info == message["update_info"]
    problem = "application/problem+json; charset=utf-8"
    assert decode(encode_json(message), UpdateBody, content_type=problem)


@pytest.mark.fault("A-INPUT-2")
@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "empty"),
        (b"not json", "malformed"),
        (b"\x80\x04\x95", "malformed"),
        (body(b"NaN"), "malformed"),
        (body(b"1e999"), "out of range"),
        (body(b"1" + b"0" * 10_000), "out of range"),
        (body(b'"\xff\xfe"'), "UTF-8"),
        (body(b"[1, 2")[:-2], "truncated"),
        (b"null", r"`\$`: Expected `object`, got `null`"),
        (b"{}", "missing required field `update_info`"),
        (b'{"update_info": 3}', r"`\$.update_info`: Expected `object | array`"),
        (b'{"update_info": [{}, 3]}', r"`\$.update_info\[1\]`: Expected `object`"),
    ],
)
def test_bad_json_is_refused(data, problem):
    with pytest.raises(Validation, match=problem):
        decode_json(data, UpdateBody)


def test_the_path_of_the_bad_element_is_in_the_message():
    with pytest.raises(Validation, match=r"payload: `\$.names\[3\]`: Expected `str`") as caught:
        decode_json(b'{"names": ["a", "b", "c", 4]}', Announced, what="payload")
    assert caught.value.detail["path"] == "$.names[3]"
    with pytest.raises(Validation, match=r"`\$.update_info\[1\].shapes\[0\]\[1\]`"):
        convert({"shapes": [[1, -4]]}, Announced, at="$.update_info[1]")


@pytest.mark.fault("A-INPUT-2")
@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        body(b"[" * 100_000),
        body(b"[" * DEEP + b"]" * DEEP),
        body(b'["\\"", ' * DEEP + b"1" + b"]" * DEEP),
        body(b'["]", ' * DEEP + b'"["' + b"]" * DEEP),
        body(b'{"[": ' * DEEP + b"1" + b"}" * DEEP),
        body(b"[[]," * DEEP + b"1" + b"]" * DEEP),
    ],
)
def test_deep_nesting_is_refused_before_decoding(data):
    with pytest.raises(Validation, match="nested deeper"):
        decode_json(data, UpdateBody)


@pytest.mark.parametrize(
    "inner",
    [
        b"[" * (DEEP - 2) + b"]" * (DEEP - 2),
        b"[" + b",".join([b"[1]"] * 1000) + b"]",
        json.dumps(["[" * 100, "{\\" * 100, '"' * 101, "]" * 100, '\\"[' * 100]).encode(),
        json.dumps(["plain [name]"] * 100).encode(),
    ],
)
def test_wide_or_bracketed_text_is_not_deep(inner):
    assert decode_json(body(inner), UpdateBody).update_info["a"] == json.loads(inner)


def test_the_limit_is_stated():
    with pytest.raises(Validation, match="limit is 10 bytes") as caught:
        decode_json(b'{"update_info": {}}', UpdateBody, limit=10)
    assert caught.value.detail["limit_bytes"] == 10
    with pytest.raises(Validation, match="limit is 10 bytes"):
        decode_msgpack(b"x" * 11, UpdateBody, limit=10)


@pytest.mark.fault("A-INPUT-2")
@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "empty"),
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),
        (b"\x91" * 100_000, "nested deeper"),
        (b"\x91" * DEEP + b"\x91\x91\xc3", "nested deeper"),
        (b"\xa2\xff\xfe", "not msgpack"),
        (msgspec.msgpack.encode({1: 2}), "keys must be strings, not 1"),
        (msgspec.msgpack.encode({b"a": 2}), "keys must be strings, not a bytes"),
        (encode_msgpack({"update_info": {"a": b"\x80\x04"}}), r"`\$.update_info.a`: a bytes"),
        (encode_msgpack({"update_info": {"a": [1, math.nan]}}), r"`\$.update_info.a\[1\]`: nan"),
        (encode_msgpack({"update_info": {"a": math.inf}}), "inf is not allowed"),
        (encode_msgpack({"update_info": {"a": msgspec.msgpack.Ext(5, b"x")}}), "a Ext"),
        (encode_msgpack({"update_info": 3}), r"`\$.update_info`: Expected"),
    ],
)
def test_bad_msgpack_is_refused(data, problem):
    with pytest.raises(Validation, match=problem):
        decode_msgpack(data, UpdateBody)


def test_scalars_in_msgpack_are_fine():
    info = {"a": [1, None, 2.5, "x", True, [], {}], "b": None}
    assert decode_msgpack(encode_msgpack({"update_info": info}), UpdateBody).update_info == info


def test_other_content_types_are_refused():
    with pytest.raises(Validation, match="octet-stream"):
        decode(b"{}", UpdateBody, content_type="application/octet-stream")


def test_content_type_names():
    assert media_type(None) == ""
    assert media_type("Application/JSON; charset=utf-8") == JSON
    assert accepts_msgpack("text/html, application/x-msgpack;q=0.9")
    assert not accepts_msgpack(None)


@pytest.mark.fault("A-INPUT-1")
def test_pickled_handles_are_refused_wherever_they_are():
    for info, path in (
        ({"ipc_handles_pickled": "gASV"}, r"\$.x.ipc_handles_pickled"),
        ([{}, {"ipc_handles_pickled": ""}], r"\$.x\[1\].ipc_handles_pickled"),
        ({"a": {"b": [{"ipc_handles_pickled": 1}]}}, r"\$.x.a.b\[0\].ipc_handles_pickled"),
    ):
        with pytest.raises(Validation, match=path):
            refuse_pickles(info, at="$.x")
    refuse_pickles({"ipc_handles_pickled": None, "names": ["a"], "shapes": [[1]], "e": [], "n": 1})
    refuse_pickles([{"a": 1}, {}])
    refuse_pickles("ipc_handles_pickled")


def test_what_has_no_wire_form_is_refused():
    recursive: list = []
    recursive.append(recursive)
    for bad in ({"a": int}, recursive):
        with pytest.raises(Validation, match="JSON"):
            encode_json(bad)
        with pytest.raises(Validation, match="msgpack"):
            encode_msgpack(bad)


def test_sixty_thousand_parameters_fit():
    names = [f"model.layers.311.mlp.experts.{n}.down_proj.weight" for n in range(60_000)]
    data = encode_json({"update_info": {"names": names, "shapes": [[64, 64]] * 60_000}})
    assert decode_json(data, UpdateBody).update_info["names"] == names
    long = "x" * 1_500_000
    assert decode_json(encode_json({"update_info": {"names": [long]}}), UpdateBody)
