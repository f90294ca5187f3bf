"""CUDA-IPC handles in the form that a stock vLLM's HTTP route takes. The only use of pickle."""

from __future__ import annotations

import base64
import pickle  # noqa: TID251  dumps only: vLLM's own route wants it so; nothing is ever loaded
from typing import Any

from aiosync.codec import PICKLED


def with_pickled_handles(
    info: dict[str, Any] | list[dict[str, Any]],
) -> dict[str, Any] | list[dict[str, Any]]:
    """The payload with ``ipc_handles`` replaced by their base64 pickle, per rank."""
    if isinstance(info, list):
        return [_pickled(part) for part in info]
    return _pickled(info)


def _pickled(info: dict[str, Any]) -> dict[str, Any]:
    if info.get("ipc_handles") is None:
        return info
    rest = {key: value for key, value in info.items() if key != "ipc_handles"}
    return rest | {PICKLED: base64.b64encode(pickle.dumps(info["ipc_handles"])).decode("ascii")}
