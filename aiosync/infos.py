"""Typed init and update infos to and from the dicts that travel."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from aiosync.errors import Validation

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


def info_to_dict(info: object) -> dict[str, Any]:
    """The dict that travels; fields that are None are left out."""
    if isinstance(info, Mapping):
        return dict(info)
    if dataclasses.is_dataclass(info) and not isinstance(info, type):
        pairs = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    elif isinstance(info, msgspec.Struct):
        pairs = msgspec.structs.asdict(info)
    else:
        raise Validation(f"an info must be a dict, dataclass or Struct, not {type(info).__name__}")
    return {name: value for name, value in pairs.items() if value is not None}
