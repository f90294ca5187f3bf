"""Checksums of the parameters that serve: vLLM's ``weight_checker``."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from aiosync.errors import Busy, Refused, Validation
from aiosync.watchable import BUSY
from statemachines.tables import Weights

if TYPE_CHECKING:
    from aiosync.worker import WeightTransferEngine

ACTIONS = ("checksum", "reset", "compare")


async def check_weights(
    engine: WeightTransferEngine[Any, Any], action: str, baseline: dict[str, str] | None
) -> dict[str, Any]:
    """Do what `WeightTransferEngine.weight_checker` says; the reply of the route.

    The weights are read while requests may use them (they only read, too); a reset has the gate
    for itself.
    """
    if action not in ACTIONS:
        raise Validation(f"action must be one of {', '.join(ACTIONS)}, not {action!r:.40}")
    if action == "compare" and baseline is None:
        raise Validation("compare needs a baseline: {key: sha256}", detail={"path": "$.baseline"})
    if engine.state in BUSY or engine.cycle.channel.turn.what:
        raise Busy(f"weight_checker: {engine.state} (a round is under way)", replica=engine.name)
    if action == "reset":
        await engine.zero_weights()
        return {"status": "reset"}
    found = await engine.weight_checksums()
    if baseline is None or action == "checksum":
        return {"checksums": found}
    keys = sorted(found.keys() | baseline.keys())
    different = [key for key in keys if found.get(key) != baseline.get(key)]
    return {"match": not different, "mismatches": different}


def parameters_of(model: Any) -> dict[str, Any]:
    """Parameters by name; of a mapping, its tensors.

    Raises:
        Refused: The model is only ever written through its own loader.
    """
    from aiosync.targets import model_tensors  # here: needs torch

    try:
        held = model_tensors(model)
    except TypeError as error:
        raise Refused(f"weight_checker: {error}") from error
    return {name: held.tensors[name] for name in held.required}


def checksums(model: Any, rank: int) -> dict[str, str]:
    """SHA-256 of each parameter's bytes. Blocks."""
    import torch  # here: this module is reached without it

    found = {}
    with torch.no_grad():
        for name, tensor in parameters_of(model).items():
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest = hashlib.sha256(flat.numpy().data).hexdigest()
            found[f"dp0:pp0:pcp0:tp{rank}:{name}"] = digest
    return found


def zero(model: Any) -> None:
    """Fill every parameter with zeros. Blocks."""
    import torch  # as above

    with torch.no_grad():
        for tensor in parameters_of(model).values():
            tensor.detach().zero_()


def doubt(engine: WeightTransferEngine[Any, Any]) -> None:
    """Nobody vouches for the weights any more."""
    engine.weights = Weights.UNKNOWN
    engine.pausing.judge()
