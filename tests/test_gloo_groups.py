"""Replicas of several ranks in one gloo group: each rank's place in it, and a rank that fails."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, closing
from types import SimpleNamespace

import models
import pytest
import torch
from near_groups import held, near_group, trained
from paced import Paced
from processes import replica
from rank_groups import LONG as BUDGET
from rank_groups import unhurried
from torch import nn

import aiosync
from aiosync import (
    Coverage,
    HTTPVLLMWeightSyncClient,
    OutcomeUnknown,
    Validation,
    WeightTransferConfig,
    WorkerGroup,
)
from aiosync.testing import DirectClient
from transports.gloo_group import GlooGroup
from transports.rendezvous import Meeting, StoreHost

GLOO = {"backend": "gloo"}
CONFIGS = [WeightTransferConfig(**GLOO)]


class Listing(HTTPVLLMWeightSyncClient):
    """Sends each rank an entry of its own."""

    async def update_weights(self, update_info, **options):
        return await super().update_weights([update_info, dict(update_info)], **options)


@pytest.mark.fault("A-RDZV-4")
@pytest.mark.slow
@pytest.mark.asyncio
async def test_replicas_of_different_sizes_share_one_group():
    async with (
        replica(kind="full", **GLOO) as first,
        unhurried(rank=GLOO) as tp,
        replica(kind="full", **GLOO) as last,
    ):
        workers = [first.url, tp.url, last.url]
        async with aiosync.connect(tp.model, workers=workers) as sync:
            assert sync._group.size == 5
            for version in (7, 8):
                tp.set(version)
                await sync.send_weights(version=version, budget=BUDGET)
                await tp.assert_ranks_hold(version, version)
                for single in (first, last):
                    assert (await single.facts())["prints"] == models.fingerprint(tp.model)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_list_has_an_entry_for_each_rank():
    async with unhurried(rank=GLOO) as tp:
        async with aiosync.connect(tp.model, workers=[Listing(tp.url)]) as sync:
            await sync.send_weights(version=7, budget=BUDGET)
            await tp.assert_ranks_hold(7, 7)


@pytest.mark.fault("A-HANG-9")
@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("phase", ["bytes", "finish"])
async def test_a_rank_killed_in_a_phase(phase):
    async with unhurried(rank=GLOO) as tp:
        armed = False

        def kill_at(index: int) -> None:
            if armed and phase == "bytes" and index == 3:
                tp.ranks[1].signal(signal.SIGKILL)

        source = Paced(tp.model, kill_at)
        small = {"buffer_size_bytes": 4096}
        async with aiosync.connect(source, workers=[tp.url], **small) as sync:
            await sync.send_weights(version=1, budget=BUDGET)
            tp.set(8)
            armed = True
            if phase == "finish":
                tp.clients[1].before["finish_weight_update"] = tp.ranks[1].kill
            with pytest.raises(aiosync.AiosyncError) as caught:
                await sync.send_weights(version=2, budget=BUDGET)
            tp.assert_not_ready("unknown")
            if phase == "finish":
                assert isinstance(caught.value, OutcomeUnknown)
                await tp.assert_ranks_hold(8, 2, only=[0])
            else:
                await tp.assert_ranks_hold(7, 1, only=[0])
            armed = False
            async with tp.replaced(1):
                await tp.assert_mended(sync, 9, 3, BUDGET)


# --- ranks of this process ---


@pytest.mark.asyncio
async def test_a_rank_whose_model_differs_costs_the_round_only():
    parts = [trained(0.0), trained(0.0, bias=False)]
    async with near_group(*parts, configs=CONFIGS) as (_, group, url):
        async with aiosync.connect(trained(1.0), workers=[url]) as sync:
            with pytest.raises(Coverage, match="bias") as caught:
                await sync.send_weights(version=1, budget=BUDGET)
            assert (caught.value.rank, group.weights) == (1, "intact")
            assert [held(part) for part in parts] == [{0.0}] * 2
            parts[1].bias = nn.Parameter(torch.zeros(64))
            report = await sync.send_weights(version=2, budget=BUDGET)
            assert report.recovered  # a collective that was left half way is made anew
            assert [held(part) for part in parts] == [{1.0}] * 2


@pytest.mark.fault("A-RDZV-3")
@pytest.mark.asyncio
@pytest.mark.parametrize("alone", [True, False])
async def test_a_replica_that_counts_one_rank_too_few_is_found_at_init(alone, monkeypatch):
    async with AsyncExitStack() as stack:
        parts = [[trained(0.0), trained(0.0)], [trained(0.0)]][: 1 if alone else 2]
        entered = [near_group(*own, configs=CONFIGS) for own in parts]
        groups = [(await stack.enter_async_context(each))[1] for each in entered]
        first = groups[0]
        says = type(first).peer_state

        def too_few(group):
            state = says(group)
            if group is not first:
                return state
            detail = {**state.detail, "readers": 1}
            return aiosync.PeerState(**{**_fields(state), "world_size": 1, "detail": detail})

        monkeypatch.setattr(WorkerGroup, "peer_state", too_few)
        workers = [DirectClient(group, name=f"g{n}") for n, group in enumerate(groups)]
        with pytest.raises(Validation) as caught:
            async with asyncio.timeout(25), aiosync.connect(trained(1.0), workers=workers):
                pass
        text = "rank 2 is not in a group of 2" if alone else "rank 2 of 3 is claimed twice"
        assert text in str(caught.value)


def _fields(state):
    return {name: getattr(state, name) for name in state.__struct_fields__}


@pytest.mark.fault("A-RDZV-3")
@pytest.mark.asyncio
async def test_ranks_of_one_engine_are_counted_as_vllm_counts():
    """Both get the same init info, and know their own place behind its offset."""
    create = aiosync.WeightTransferEngineFactory.create_engine
    engines, parts = [], [trained(0.0), trained(0.0)]
    async with AsyncExitStack() as stack:
        for number, part in enumerate(parts):
            config = SimpleNamespace(data_parallel_index=0, world_size=2, rank=number)
            vllm = SimpleNamespace(parallel_config=config)
            engine = create(WeightTransferConfig("gloo"), vllm, None, part, name=f"r{number}")
            engines.append(await stack.enter_async_context(engine))
        group = WorkerGroup(
            [DirectClient(engine, name=engine.name) for engine in engines],
            init_info_of=lambda info, _: info,
            heartbeat_s=5.0,
        )
        await stack.enter_async_context(group)
        workers = [DirectClient(group)]
        async with aiosync.connect(trained(1.0), workers=workers) as sync:
            await sync.send_weights(version=1, budget=BUDGET)
        assert [engine._group is None for engine in engines] == [True, True]
    assert [held(part) for part in parts] == [{1.0}] * 2


@pytest.mark.asyncio
async def test_a_worker_whose_init_fails_after_the_join_leaves_the_group():
    config = WeightTransferConfig("gloo")
    engine = aiosync.GlooWeightTransferEngine(config, None, "cpu", nn.Linear(2, 2))
    with closing(StoreHost("127.0.0.1", 0)) as host:
        where = {"master_address": host.host, "master_port": host.port, "prefix": host.new_prefix()}
        meeting = Meeting(host.host, host.port, where["prefix"], rank=0, size=2)
        with closing(GlooGroup(meeting)) as group:
            joining = asyncio.to_thread(group.join, timeout=20)
            info = {"rank_offset": 1, "world_size": 2, "reader": "r", "join_s": 20.0}
            info |= {"buffer_size_bytes": 4096, "digest": "unheard-of", **where}
            joined = asyncio.create_task(joining)
            with pytest.raises(Validation, match="unheard-of"):
                await engine.init_transfer_engine(info)
            await joined
            async with asyncio.timeout(20):
                while await asyncio.to_thread(group.lost) != [1]:
                    await asyncio.sleep(0.01)
    await engine.aclose()
