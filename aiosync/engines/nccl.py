"""Backend ``nccl``: one broadcast group over NCCL, wire-compatible with vLLM 0.33.

The trainer sends as rank 0, the workers follow. Both sides cut the announced tensors into vLLM's
chunks (`transports.nccl_half`), so either side may be a stock vLLM. Workers of ours also get a
digest of every chunk, unless they only count. A round that is given up ends the group by an abort:
the next round makes a new one.
"""

from __future__ import annotations

from aiosync.engines.nccl_common import (
    NCCLTrainerInitInfo,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)
from aiosync.engines.nccl_trainer import NCCLTrainerWeightTransferEngine
from aiosync.engines.nccl_worker import NCCLWeightTransferEngine

__all__ = [
    "NCCLTrainerInitInfo",
    "NCCLTrainerWeightTransferEngine",
    "NCCLWeightTransferEngine",
    "NCCLWeightTransferInitInfo",
    "NCCLWeightTransferUpdateInfo",
]
