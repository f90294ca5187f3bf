from __future__ import annotations

import msgspec
import pytest

from aiosync.errors import Refused, Validation
from aiosync.version import MAX_ORDER, Version, check_successor, next_version, weights_id


def test_an_int_label_is_its_own_order():
    assert next_version(None, 42, lineage="run") == Version(42, "run", 42)
    assert next_version(Version("step-9", "run", 9), 0, lineage="run").order == 0


def test_a_str_label_takes_the_next_order():
    first = next_version(None, "alpha", lineage="run")
    assert (first.order, first.label) == (1, "alpha")
    assert next_version(first, "beta", lineage="run").order == 2
    assert next_version(Version(57, "run", 57), "58", lineage="run") == Version("58", "run", 58)


@pytest.mark.parametrize(
    "label", [None, "", True, False, -1, 2**63, 10**30, 1.0, float("nan"), b"1", [1], object()]
)
def test_bad_labels_are_refused_with_a_sentence(label):
    with pytest.raises(Validation, match="version"):
        next_version(None, label, lineage="run")


def test_none_says_what_to_pass():
    with pytest.raises(Validation, match="pass version="):
        next_version(None, None, lineage="run")


def test_order_and_lineage_are_checked():
    assert Version(MAX_ORDER, "run", MAX_ORDER).order == MAX_ORDER
    with pytest.raises(Validation, match="below 2"):
        next_version(Version(MAX_ORDER, "run", MAX_ORDER), "one more", lineage="run")
    with pytest.raises(Validation, match="lineage"):
        Version(1, "", 1)
    with pytest.raises(Validation, match="lineage"):
        Version(1, None, 1)
    with pytest.raises(Validation, match="order"):
        Version("a", "run", True)
    with pytest.raises(Validation, match="its own order"):
        Version(1, "run", 2)


def test_repeating_and_going_back_are_refused_with_what_the_worker_holds():
    held = Version(57, "run", 57)
    check_successor(held, Version(58, "run", 58))
    for order, word in ((57, "repeats"), (1, "goes back")):
        with pytest.raises(Refused, match=word) as caught:
            check_successor(held, Version(order, "run", order))
        assert caught.value.detail["version"] == {"label": 57, "lineage": "run", "order": 57}
        check_successor(held, Version(order, "run", order), rollback=True)


def test_a_new_lineage_or_an_empty_worker_may_start_anywhere():
    check_successor(None, Version(0, "run", 0))
    check_successor(Version(57, "run", 57), Version(1, "second run", 1))


def test_names_on_the_wire_and_of_the_weights():
    version = Version(7, "run", 7)
    assert version.wire == str(version) == "7"
    assert weights_id(version, "ab") != weights_id(version, "cd")
    assert "unverified" in weights_id(version, None)


def test_decoding_checks_too():
    data = msgspec.json.encode(Version("x", "run", 3))
    assert msgspec.json.decode(data, type=Version) == Version("x", "run", 3)
    for text in (
        b'{"label":-1,"lineage":"r","order":1}',
        b'{"label":"a","lineage":"r","order":-1}',
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(text, type=Version)
