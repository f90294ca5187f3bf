"""The client's calls beside a round, against our server and against a stock one's answers."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from by_hand import by_hand, header, owned, tensors, values

import aiosync
from aiosync import HTTPVLLMWeightSyncClient, RoundHeader, SupportsDraft, SupportsPause
from aiosync.client import sync_client
from aiosync.server import serve

pytestmark = pytest.mark.asyncio


async def test_pausing_and_the_rest_over_http():
    async with by_hand() as engine, serve(engine, port=0) as server:
        async with HTTPVLLMWeightSyncClient(server.url) as client:
            assert isinstance(client, SupportsPause)
            assert isinstance(client, SupportsDraft)
            operator = RoundHeader(owner="operator")
            await client.pause("keep", clear_cache=False, header=operator)
            assert await client.is_paused()
            ready = await client.ready()
            assert (ready.ready, ready.reasons) == (False, ["generation is paused (operator)"])
            reply = await client.resume()  # of nobody's hold
            assert reply.message["held_by"] == ["operator"]
            assert reply.message["is_paused"] is True
            reply = await client.resume(header=operator)
            assert reply.message["is_paused"] is False
            assert reply.peer.detail["seconds_paused"] > 0
            with pytest.raises(aiosync.Validation, match="mode"):
                await client.pause("stop")
            assert await client.abort_requests() == 0
            assert await client.abort_requests(["a"]) == 0

            async def generate():
                async with engine.generation.request(id="a") as request:
                    assert await client.abort_requests(["a"]) == 1
                    return request.aborted

            assert await generate()
            assert "draft" not in (await client.capabilities()).features
            engine.set_draft_model(tensors())
            assert "draft" in (await client.capabilities(refresh=True)).features
            await owned(engine)
            this = header(engine, 1, 1)
            await client.start_draft_weight_update(header=this)
            await client.update_weights({"value": 3.0}, header=this)
            reply = await client.finish_weight_update("1", header=this)
            assert reply.peer.versions["draft"].label == 1
            assert (values(engine.draft_model), values(engine.model)) == ({3.0}, {0.0})
            mine = header(engine, 0)
            with pytest.raises(aiosync.Fenced):
                await client.update_weight_version("x")
            await client.update_weight_version("x", header=mine)
            assert (await client.weight_info()).message["weight_version"] == "x"
            sums = (await client.weight_checker("checksum", header=mine)).message["checksums"]
            reply = await client.weight_checker("compare", sums, header=mine)
            assert reply.message["match"] is True
            await client.weight_checker("reset", header=mine)
            with pytest.raises(aiosync.Torn, match="unknown"):
                await client.resume(header=mine)
            for action in ("checksums", None):
                with pytest.raises(aiosync.Validation, match="action"):
                    await client.weight_checker(action)


@pytest.mark.parametrize("paused", [True, False])
async def test_a_real_round_under_a_streaming_generation(paused):
    model, trained = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    references = {"default": copy.deepcopy(model), "1": trained}
    config = aiosync.WeightTransferConfig("ipc")
    engine = aiosync.WeightTransferEngineFactory.create_engine(config, model=model)
    outputs = []

    def step(on, at):
        with torch.no_grad():
            return on(torch.full((8,), float(at))).tolist()

    async def generate(until):
        async with engine.generation.request() as request:
            while not until.is_set() or len(outputs) - done < 5:
                await request.checkpoint()
                outputs.append(step(model, len(outputs)))
                request.produced()
                await asyncio.sleep(0.001)
            return request.spans

    async with engine, serve(engine, port=0) as server:
        client = HTTPVLLMWeightSyncClient(server.url)
        over, done = asyncio.Event(), 0
        generating = asyncio.create_task(generate(over))
        while len(outputs) < 3:
            await asyncio.sleep(0.001)
        async with aiosync.connect(trained, workers=[server.url]) as sync:
            if paused:
                await client.pause("keep", clear_cache=False)
                before = len(outputs)
            await sync.send_weights(version=1)
            if paused:
                assert len(outputs) == before
                await client.resume()
            done = len(outputs)
            over.set()
            spans = await generating
        assert [span.version for span in spans] == ["default", "1"]
        lineage, order, digest = spans[1].weights_id.split("/")
        assert (lineage, order) == (engine.version.lineage, "1")
        assert "unverified" not in digest  # it names the bytes
        for span in spans:
            again = [step(references[span.version], at) for at in range(span.start, span.end)]
            assert again == outputs[span.start : span.end]


async def test_a_target_in_the_header_reaches_the_engine():
    async with by_hand() as engine, serve(engine, port=0) as server:
        engine.set_draft_model(tensors())
        client = HTTPVLLMWeightSyncClient(server.url)
        await owned(engine)
        this = header(engine, 1, 1, target=aiosync.Draft())
        await client.start_weight_update(header=this)
        assert engine.model is engine.draft_model
        await client.abort_weight_update(header=this)
        with pytest.raises(aiosync.Refused, match="adapter:lora"):
            lora = header(engine, 2, 2, target=aiosync.Adapter("lora", {"r": 8}))
            await client.start_weight_update(header=lora)


async def test_a_stock_vllm_server_is_paused_in_its_own_words():
    seen = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.path, dict(request.query), await request.text()))
        replies = {
            "/pause": {"status": "paused"}, "/resume": {"status": "resumed"},
            "/is_paused": {"is_paused": False},
            "/abort_requests": {"status": "aborted", "aborted": 2},
            "/update_weight_version": {"success": True, "new_version": "7"},
            "/start_draft_weight_update": {"message": "Draft weight update started"},
        }  # fmt: skip
        return web.json_response(replies[request.path])

    app = web.Application()
    app.add_routes([web.route("*", "/{_:.*}", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = HTTPVLLMWeightSyncClient(f"http://127.0.0.1:{runner.addresses[0][1]}")
    await client.pause("wait", clear_cache=False)
    await client.resume()
    assert await client.is_paused() is False
    assert await client.abort_requests() == 2
    await client.update_weight_version("7")
    await client.start_draft_weight_update()
    await runner.cleanup()
    assert seen[:4] == [
        ("/pause", {"mode": "wait", "clear_cache": "false"}, ""),
        ("/resume", {}, ""),
        ("/is_paused", {}, ""),
        ("/abort_requests", {}, "{}"),
    ]


async def test_world_size_with_and_without_data_parallelism():
    async with by_hand() as engine:
        engine.parallel_config = SimpleNamespace(data_parallel_size=3)
        for size in (None, 2):
            async with serve(engine, port=0, world_size=size) as server:
                client = HTTPVLLMWeightSyncClient(server.url)
                assert await client.get_world_size() == 3 * (size or 1)
                assert await client.get_world_size(include_dp=False) == (size or 1)


async def test_metrics_are_prometheus_text():
    async with by_hand() as engine:
        await engine.init_transfer_engine({})
        await engine.pause_generation()
        service = aiosync.WeightUpdateService(engine)
        answer = await service.dispatch("GET", "/metrics", {}, {}, b"")
        assert answer.content_type == "text/plain"
        lines = answer.body.decode().splitlines()
        assert 'aiosync_state{state="initialized"} 1' in lines
        assert 'aiosync_state{state="idle"} 0' in lines
        assert 'aiosync_weights{weights="intact"} 1' in lines
        assert "aiosync_generation_paused 1" in lines
        assert "aiosync_version_order -1" in lines
        samples = [line for line in lines if not line.startswith("#")]
        assert all(len(line.rsplit(" ", 1)) == 2 and float(line.rsplit(" ", 1)[1]) is not None
                   for line in samples)  # fmt: skip


async def test_a_blocking_client_keeps_its_pause():
    class Blocking:
        def init_weight_transfer_engine(self, init_info): ...
        def start_weight_update(self): ...
        def update_weights(self, update_info): ...
        def finish_weight_update(self, weight_version=None): ...
        def pause(self, mode="abort", *, clear_cache=True):
            return mode

        def resume(self): ...

    adapted = sync_client(Blocking())
    assert isinstance(adapted, SupportsPause)
    assert not isinstance(adapted, SupportsDraft)
    assert await adapted.pause("keep") == "keep"
