"""Any local safetensors checkpoint, as tensors to send, to receive and to compare."""

from __future__ import annotations

import ctypes
import hashlib
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from aiosync.metadata import ParamMeta
from aiosync.module_layout import compact
from aiosync.sources import WeightSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PREFIX = "checkpoint."
"""Keeps a checkpoint's names apart from the policy's."""


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder's ``*.safetensors`` files, by `PREFIX` and its name.

    Raises:
        ValueError: There is no such file, one is broken, or two have a tensor of one name.
    """
    return {name: tensor.clone() for name, tensor in _opened(folder)}


def blank(folder: Path) -> dict[str, torch.Tensor]:
    """Zeros in the shapes and dtypes of `load`; the tensors' data is not read."""
    return {name: torch.zeros_like(tensor) for name, tensor in _opened(folder)}


def _opened(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no *.safetensors in {folder}")
    owner: dict[str, Path] = {}
    for file in files:
        for name, tensor in _read(file):
            if name in owner:
                raise ValueError(f"{name} is in {owner[name].name} and in {file.name}")
            owner[name] = file
            yield PREFIX + name, tensor


def _read(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{file}: {error}") from error


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 over the bytes of each tensor."""
    return {name: _sha256(tensor.detach()) for name, tensor in tensors.items()}


def _sha256(tensor: torch.Tensor) -> str:
    data = compact(tensor.contiguous())
    size = data.numel() * data.element_size()
    # Not through numpy, which torch does without.
    view = (ctypes.c_char * size).from_address(data.data_ptr()) if size else b""
    return hashlib.sha256(view).hexdigest()


class TensorSource(WeightSource):
    """Sends a dict of tensors as they are at the time of each round."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self._tensors.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()
