"""What a checker knows of the objects that a user gets; it is checked, not run."""

from __future__ import annotations

from typing import Any, assert_type

from torch import nn

import aiosync
import aiosync.blocking


async def engines(model: nn.Module, client: aiosync.HTTPVLLMWeightSyncClient) -> None:
    async with aiosync.connect(model, workers=[client]) as sync:
        assert_type(sync, aiosync.TrainerWeightTransferEngine)
        assert_type(await sync.send_weights(version=1), aiosync.Report)
        assert_type(sync.begin_update(), aiosync.WeightUpdate)
        assert_type(await sync.begin_update(version="two"), aiosync.Report)
        assert_type(sync.session(3), aiosync.PushSession)
        assert_type(sync.version, aiosync.Version | None)
        assert_type(await sync.wait_for("updating"), aiosync.State)
        async for event in sync.subscribe(since=0):
            assert_type(event, aiosync.Transition)
        async for progress in sync.begin_update():
            assert_type(progress, aiosync.RoundProgress)
    info = aiosync.IPCTrainerInitInfo(rank=0)
    built_in = await aiosync.IPCTrainerWeightTransferEngine.trainer_init(info, client=client)
    assert_type(built_in, aiosync.IPCTrainerWeightTransferEngine)
    assert_type(await built_in.send_weights(), aiosync.Report)
    made = await aiosync.WeightTransferTrainerFactory.trainer_init(info, client=client)
    assert_type(await made.send_weights(), aiosync.Report)


async def own_engine(engine: aiosync.TrainerWeightTransferEngine[Any]) -> None:
    assert_type(await engine.begin_update(), aiosync.Report)


async def worker(config: aiosync.WeightTransferConfig, model: nn.Module) -> None:
    engine = aiosync.WeightTransferEngineFactory.create_engine(config, model=model)
    assert_type(engine, aiosync.WeightTransferEngine)
    await engine.init_transfer_engine({"folder": "/somewhere"})
    await engine.start_weight_update()
    await engine.receive_weights({"names": []})
    await engine.finish_weight_update("7")
    await engine.shutdown()
    async with aiosync.serve(engine, port=0, token="secret") as server:
        assert_type(server.url, str)


def blocking(model: nn.Module) -> None:
    with aiosync.blocking.connect(model, workers="unix:///somewhere") as sync:
        assert_type(sync.send_weights(version=1), aiosync.Report)
        assert_type(sync.begin_update().wait(timeout=3), aiosync.Report)
