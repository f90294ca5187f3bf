"""Arguments that cannot be right are refused when an engine is made, not in its first round."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
import torch

import aiosync
from aiosync.testing import DirectClient
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


@pytest.mark.asyncio
async def test_a_worker_engine_without_a_model_takes_no_round(caplog):
    config, trained = aiosync.WeightTransferConfig("ipc"), torch.nn.Linear(2, 2)
    engine = aiosync.WeightTransferEngineFactory.create_engine(config, name="w0")
    async with engine:
        async with aiosync.connect(trained, workers=[DirectClient(engine)]) as sync:
            assert "w0 has no model yet: it was made without model=" in caplog.text
            with pytest.raises(aiosync.Validation, match="model: w0 was made without") as caught:
                await sync.send_weights()
            assert "model=" in caught.value.next_step
            assert (sync.state, engine.state, engine.weights) == (*["initialized"] * 2, "intact")
            engine.model = torch.nn.Linear(2, 2)
            await sync.send_weights()
        assert torch.equal(engine.model.weight, trained.weight)


@pytest.mark.asyncio
async def test_a_worker_engine_may_have_a_draft_alone_or_hand_everything_on():
    trained, draft, got = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), []

    def put(name, tensor):
        got.append(name)

    parts = {"put": put, "commit": lambda _: None, "abort": got.clear}
    relay = aiosync.WeightTransferConfig("ipc", sink=aiosync.RelaySink(**parts))
    make = aiosync.WeightTransferEngineFactory.create_engine
    async with make(relay) as relayed, make(aiosync.WeightTransferConfig("ipc")) as drafting:
        async with aiosync.connect(trained, workers=[DirectClient(relayed)]) as sync:
            await sync.send_weights()
        assert got == ["weight", "bias"]
        drafting.set_draft_model(draft)
        async with aiosync.connect(trained, workers=[DirectClient(drafting)]) as sync:
            await sync.send_weights(target=aiosync.Draft())
        assert torch.equal(draft.weight, trained.weight)


@pytest.mark.parametrize(
    ("field", "value"),
    [("link", None), ("link", "a"), ("lane_factory", 3), ("name", 7), ("name", ["a"])],
)
def test_a_trainer_engine_that_cannot_work_is_not_made(field, value):
    options = {"link": LoopbackLink(), field: value}
    engine = aiosync.WeightTransferTrainerFactory.engine_class("loopback")
    with pytest.raises(aiosync.Validation, match=rf"\b{field}\b"):
        engine(client=None, source=torch.nn.Linear(1, 1), is_sender=False, **options)


# -- connect ---------------------------------------------------------------------------------------

URL = "unix:///nowhere"


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"workers": [aiosync.FleetClient([URL])]}, "give the fleet itself: workers=fleet"),
        ({"workers": URL, "policy": "quorum(1)"}, r"policy belongs to FleetClient\("),
        ({"workers": URL, "catch_up": "peer"}, "catch_up belongs to FleetClient"),
        ({"workers": URL, "polcy": "all"}, "backend 'ipc' has no polcy; it has"),
    ],
)
@pytest.mark.asyncio
async def test_what_belongs_elsewhere_is_refused_with_the_place(options, advice):
    with pytest.raises(aiosync.Validation, match=advice):
        async with aiosync.connect(torch.nn.Linear(1, 1), backend="ipc", **options):
            pass


@pytest.mark.asyncio
async def test_connect_without_its_block_says_how_to_use_it():
    made = aiosync.connect(torch.nn.Linear(1, 1), workers=[URL])
    block = r"use `async with aiosync.connect\(\.\.\.\) as sync:`"
    with pytest.raises(AttributeError, match=f"no send_weights here: .*{block}"):
        await made.send_weights(version=1)
    with pytest.raises(TypeError, match=block):
        await made
    with pytest.raises(TypeError, match=block), made:
        pass


@pytest.mark.asyncio
async def test_where_nothing_listens_connect_says_what_that_may_mean(tmp_path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # and does not listen
        for url in (f"http://127.0.0.1:{sock.getsockname()[1]}", f"unix://{tmp_path}/none.sock"):
            with pytest.raises(aiosync.PeerLost, match="cannot be reached") as caught:
                async with aiosync.connect(torch.nn.Linear(1, 1), workers=[url]):
                    pass
            assert caught.value.next_step == "nothing listens there: still loading, or a wrong URL"
            assert "ssl" not in str(caught.value)
