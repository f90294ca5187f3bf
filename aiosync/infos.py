"""Typed init and update infos to and from the dicts that travel."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from aiosync.errors import Validation
from aiosync.few_collections import few_collections

T = TypeVar("T")


def parse_info(cls: type[T], data: object, *, what: str) -> T:
    """Build an info object from a dict; unknown, missing and ill-typed keys are refused.

    Args:
        cls: A dataclass or a `msgspec.Struct`.
        data: The dict, or an instance of `cls` already.
        what: Name of the info in messages (``"init_info"``).

    Raises:
        Validation: Names the path of the bad field.
    """
    if isinstance(data, cls):
        return data
    if not isinstance(data, Mapping):
        raise Validation(f"{what} must be a dict or a {cls.__name__}, not {type(data).__name__}")
    known = _field_names(cls)
    if known is not None and (unknown := [key for key in data if key not in known]):
        raise Validation(
            f"{what} of {cls.__name__}: unknown field(s) {', '.join(map(repr, unknown))};"
            f" known: {', '.join(known)}"
        )
    try:
        if known is None:
            return cls(**data)
        with few_collections:
            return msgspec.convert(dict(data), cls, strict=True)
    except msgspec.ValidationError as error:
        raise Validation(f"{what} of {cls.__name__}: {error}") from error
    except (TypeError, NotImplementedError) as error:
        return _construct(cls, data, what, error)


def _construct(cls: type[T], data: Mapping[str, Any], what: str, first: Exception) -> T:
    """Fields of types msgspec does not know (a tensor, a user's class): pass values as they are."""
    try:
        return cls(**data)
    except TypeError:
        raise Validation(f"{what} of {cls.__name__}: {first}") from first


def _field_names(cls: type) -> tuple[str, ...] | None:
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls) if field.init)
    if issubclass(cls, msgspec.Struct):
        return tuple(cls.__struct_fields__)
    return None
