"""Arguments that cannot be right are refused when an engine is made, not in its first round."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import aiosync
from transports.loopback import LoopbackLink


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 3),
        ("model", {"w": 1.0}),
        ("lane_factory", "lane"),
        ("name", 7),
        ("sink", "stage"),
        ("sink", 7),
        ("verify", "crc"),
        ("lease_s", -1),
    ],
)
def test_a_worker_engine_that_cannot_work_is_not_made(field, value):
    config = SimpleNamespace(backend="ipc", sink="staged", verify="digest", lease_s=None)
    options = {"model": {"w": torch.zeros(2)}}
    if hasattr(config, field):
        setattr(config, field, value)
    else:
        options[field] = value
    with pytest.raises(aiosync.Validation, match=rf"\b{field}\b"):
        aiosync.WeightTransferEngineFactory.create_engine(config, **options)


@pytest.mark.parametrize(
    ("field", "value"),
    [("link", None), ("link", "a"), ("lane_factory", 3), ("name", 7), ("name", ["a"])],
)
def test_a_trainer_engine_that_cannot_work_is_not_made(field, value):
    options = {"link": LoopbackLink(), field: value}
    engine = aiosync.WeightTransferTrainerFactory.engine_class("loopback")
    with pytest.raises(aiosync.Validation, match=rf"\b{field}\b"):
        engine(client=None, source=torch.nn.Linear(1, 1), is_sender=False, **options)
