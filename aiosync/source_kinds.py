"""What counts as a source of weights."""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from aiosync.sources import ModuleSource, WeightSource

if TYPE_CHECKING:
    from aiosync.sources import SourceLike

_METHODS = (FunctionType, MethodType, staticmethod, classmethod)


def as_source(obj: Any) -> SourceLike:
    """`obj` as a source: a source as it is, a module in `ModuleSource`, an earlier source (one with
    ``metadata()`` and ``__iter__``) in `LegacySource`.

    Raises:
        TypeError: It is neither, nor has it `metadata` and `iter_full`.
    """
    if isinstance(obj, WeightSource):
        return obj
    if isinstance(obj, nn.Module):
        return ModuleSource(obj)
    metadata = inspect.getattr_static(obj, "metadata", None)  # not read: may be a collective
    is_iterable = callable(getattr(obj, "iter_full", None))
    if isinstance(metadata, _METHODS) and hasattr(obj, "__iter__") and not is_iterable:
        from aiosync.legacy_source import LegacySource  # made from this module

        return LegacySource(obj)
    if isinstance(metadata, _METHODS) and is_iterable:
        raise TypeError(f"{type(obj).__name__}.metadata is a method: make it a property")
    if metadata is not None and is_iterable:
        return obj  # type: ignore[no-any-return] # just checked
    raise TypeError(
        f"{type(obj).__name__} is no source: give a torch.nn.Module, a WeightSource, or an object "
        "with `metadata` (a list of ParamMeta) and `iter_full()` (yields (name, tensor))"
    )
