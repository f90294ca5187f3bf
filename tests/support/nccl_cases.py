"""The wire's fixture as tensors and plans, a group that is only written down, a worker engine."""

from __future__ import annotations

import json
from pathlib import Path

import nccl_wire
import torch
from fake_nccl import FakeGroup

import aiosync
from aiosync import WeightTransferEngineFactory
from aiosync.metadata import ParamMeta, parse_dtype
from transports.planning import EACH, NCCL_PACKED, plan_chunks

FIXTURE = json.loads((Path(__file__).parents[1] / "fixtures" / "nccl_wire.json").read_text())


def tensor_of(name, dtype, shape):
    raw = bytearray(nccl_wire.content(name, dtype, tuple(shape)))
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(parse_dtype(dtype)).view(shape)


def described(case):
    metas = [ParamMeta(n, parse_dtype(d), tuple(s)) for n, d, s in case["tensors"]]
    plan = plan_chunks(
        [torch.Size(m.shape).numel() * m.dtype.itemsize for m in metas],
        [m.dtype.itemsize for m in metas],
        limit=case["limit"],
        rule=NCCL_PACKED if case["packed"] else EACH,
    )
    return metas, plan


class Recorder(FakeGroup):
    """Rank 0 whose broadcasts are only written down."""

    def __init__(self):
        super().__init__(0, 2)
        self.alive = True


def create(model, **options):
    config = aiosync.WeightTransferConfig("nccl", **options)
    return WeightTransferEngineFactory.create_engine(config, None, None, model)
