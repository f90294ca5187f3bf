"""A client whose methods block, without `sync_client`, and with one of the four missing."""

from __future__ import annotations

from typing import Any

from torch import nn

import aiosync


class PoolClient:
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...


async def mistake(url: str) -> None:
    await aiosync.IPCTrainerWeightTransferEngine.trainer_init(
        aiosync.IPCTrainerInitInfo(rank=0),
        client=PoolClient(),  # mypy: arg-type  pyright: reportArgumentType
        source=nn.Linear(4, 2),
    )
