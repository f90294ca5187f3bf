"""Faults of hostile or foreign control messages, of HTTP and of versions (docs/faults.md)."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import tracemalloc
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import by_hand
import msgspec
import pytest
import torch
from carried import Plain, carried, like
from fault_rig import assert_round_works, paced
from processes import replica

import aiosync
from aiosync import Validation
from aiosync.engines import loopback
from aiosync.sinks import make_sink
from transports.loopback import LoopbackLink

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def served(backend="ipc"):
    """A worker's server, for bodies that no client of ours would send."""
    model = {"w": torch.zeros(4)}
    config = aiosync.WeightTransferConfig(backend)
    engine = aiosync.WeightTransferEngineFactory.create_engine(config, model=model, name="w")
    async with engine, aiosync.serve(engine, host="127.0.0.1", port=0) as server:
        async with aiohttp.ClientSession() as session:

            async def post(route, body, kind="application/json"):
                headers = {"content-type": kind}
                url = f"{server.url}/{route}"
                async with session.post(url, data=io.BytesIO(body), headers=headers) as reply:
                    return reply.status, await reply.text()

            yield post, engine, model


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (Path(self.marker),)


ROUTES = ["init_weight_transfer_engine", "start_weight_update", "update_weights"]


@pytest.mark.parametrize("route", ROUTES)
async def test_a_input_1_pickles_in_every_place(route, tmp_path):
    marker = tmp_path / "marker"
    bomb = pickle.dumps(Bomb(str(marker)))
    field = "init_info" if route.startswith("init") else "update_info"
    bodies = [
        (bomb, "application/octet-stream"),
        (bomb, "application/json"),
        (bomb, "application/msgpack"),
        (json.dumps({field: {"ipc_handles_pickled": bomb.hex()}}).encode(), "application/json"),
        (json.dumps({field: bomb.hex()}).encode(), "application/json"),
        (msgspec.msgpack.encode({field: bomb}), "application/msgpack"),
        (msgspec.msgpack.encode({field: {"names": [bomb]}}), "application/msgpack"),
        (msgspec.msgpack.encode({"aiosync": bomb}), "application/msgpack"),
    ]
    async with served() as (post, engine, model):
        for body, kind in bodies:
            status, text = await post(route, body, kind)
            assert 400 <= status < 500, (status, text)
        assert engine.state == "idle"
        assert model["w"].tolist() == [0] * 4
    assert not marker.exists()


def update(**fields):
    body = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[4]]}
    body |= {"metadata_digest": "00", "plan_digest": "00"} | fields
    return json.dumps({"update_info": body}).encode()


HOSTILE = {
    "array of 4 G": (b"\xdd\xff\xff\xff\xff", "application/msgpack"),
    "map of 4 G": (b"\xdf\xff\xff\xff\xff", "application/msgpack"),
    "text of 4 G": (b"\xdb\xff\xff\xff\xff", "application/msgpack"),
    "deep": (b"[" * 100_000, "application/json"),
    "deep map": (b'{"a":' * 100_000, "application/json"),
    "deep msgpack": (b"\x91" * 100_000, "application/msgpack"),
    "empty msgpack": (b"", "application/msgpack"),
    "invalid UTF-8": (b'{"update_info": "\xff\xfe"}', "application/json"),
    "NaN": (b'{"update_info": {"stall_s": NaN}}', "application/json"),
    "negative": (update(shapes=[[-1, 4]]), "application/json"),
    "huge": (update(shapes=[[2**62]]), "application/json"),
    "beyond int64": (update(shapes=[[10**23]]), "application/json"),
    "product": (update(shapes=[[2**31, 2**31]]), "application/json"),
    "product with zero": (update(shapes=[[0, 2**62, 2**62]]), "application/json"),
    "many dims": (update(shapes=[[1] * 10_000]), "application/json"),
    "float dim": (update(shapes=[[4.5]]), "application/json"),
    "bool dim": (update(shapes=[[True]]), "application/json"),
    "lengths": (update(shapes=[[4], [4]]), "application/json"),
    "dtype": (update(dtype_names=["os.system"]), "application/json"),
    "stall": (update(stall_s=-1), "application/json"),
    "endless stall": (update(stall_s=1e300), "application/json"),
    "aliases": (update(aliases={"a": 3}), "application/json"),
    "round": (update(round=2**70), "application/json"),
    "useless": (json.dumps({"x": ["y" * 100] * 50_000}).encode(), "application/json"),
    "unknown field": (update(surprise=1), "application/json"),
    "list": (b"[]", "application/json"),
    "null": (b"null", "application/json"),
    "tuple": (b'{"update_info": [1, 2]}', "application/json"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_input_2_hostile_numbers_are_refused_cheaply(name):
    body, kind = HOSTILE[name]
    async with served("loopback") as (post, engine, model):
        await opened_for(engine)
        tracemalloc.start()
        try:
            status, text = await asyncio.wait_for(post("update_weights", body, kind), 5)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert 400 <= status < 500, (status, text)
        assert json.loads(text)["error"]["message"]
        assert peak < (60 << 20)
        assert model["w"].tolist() == [0] * 4
        assert engine.weights == "intact"


async def opened_for(engine):
    """A round is open: what arrives now is judged by its content alone."""
    link = LoopbackLink()
    loopback._LINKS["hostile"] = link
    engine.kept = link
    await engine.init_transfer_engine({"link": "hostile", "reader": 0, "buffer_size_bytes": 4096})
    await engine.start_weight_update()


@pytest.mark.parametrize("backend", ["ipc", "gloo", "loopback"])
@pytest.mark.parametrize(
    "field",
    [
        {"buffer_size_bytes": 0},
        {"buffer_size_bytes": -64},
        {"buffer_size_bytes": 2**62},
        {"buffer_size_bytes": "64"},
        {"world_size": 10**9},
        {"world_size": 0},
        {"rank_offset": -1},
        {"master_port": 70000},
        {"join_s": 1e300},
        {"unknown": 1},
    ],
    ids=json.dumps,
)
async def test_a_input_2_hostile_init_infos(field, backend):
    info = {
        "ipc": {"address": "@x", "token": "t", "reader": "w", "buffer_size_bytes": 4096},
        "loopback": {"link": "none", "reader": 0, "buffer_size_bytes": 4096},
        "gloo": {
            "master_address": "127.0.0.1",
            "master_port": 9,
            "rank_offset": 1,
            "world_size": 2,
            "prefix": "p",
            "reader": "w",
            "join_s": 1.0,
            "buffer_size_bytes": 4096,
        },
    }[backend]
    async with served(backend) as (post, engine, _):
        body = json.dumps({"init_info": info | field}).encode()
        status, text = await asyncio.wait_for(post("init_weight_transfer_engine", body), 5)
        assert status == 400, text
        assert next(iter(field)) in text
        assert engine.state in ("idle", "failed")


FOREIGN = [
    ({"aiosync": {"protocol": 2}}, "speaks protocol 2, this side speaks 1"),
    ({"aiosync": {"protocol": 0}}, "protocol"),
    ({"aiosync": {"protocol": "1"}}, "protocol"),
    ({"aiosync": {}}, ""),
    ({"aiosync": []}, "aiosync"),
    ({"aiosync": {"protocol": 1, "round": "7"}}, "round"),
    ({"aiosync": {"protocol": 1, "round": -1}}, "round"),
    ({"aiosync": {"protocol": 1, "version": [1, 2]}}, "version"),
]


@pytest.mark.parametrize(("body", "named"), FOREIGN, ids=lambda value: json.dumps(value)[:60])
async def test_a_input_3_another_format(body, named):
    async with served() as (post, engine, _):
        for route in ROUTES:
            status, text = await post(
                route, json.dumps(body | {"init_info": {}, "update_info": {}}).encode()
            )
            assert 400 <= status < 500, text
            error = json.loads(text)["error"]
            assert named in error["message"] or not isinstance(body["aiosync"], list)
            for inside in ("IndexError", "KeyError", "TypeError", "AttributeError"):
                assert inside not in text
        assert engine.state == "idle"
        status, _ = await post("no_such_message", b"{}")
        assert status == 404


# -- HTTP --------------------------------------------------------------------------------------


async def test_a_http_1_one_very_long_name():
    name = "x" * 1_500_000
    sent = {name: torch.ones(3), "short": torch.ones(2)}
    model = like(sent)
    config = aiosync.WeightTransferConfig("ipc")
    engine = aiosync.WeightTransferEngineFactory.create_engine(config, model=model)
    async with engine, aiosync.serve(engine) as server:
        async with aiosync.connect(Plain(sent), workers=[server.url]) as sync:
            await sync.send_weights(version=1, timeout=20)
    assert model[name].tolist() == [1] * 3


async def test_a_http_2_a_caller_that_leaves_and_calls_again():
    async with by_hand.by_hand() as engine:
        await by_hand.owned(engine)
        async with aiosync.serve(engine) as server:
            header = by_hand.header(engine, 1, 1)
            client = aiosync.HTTPVLLMWeightSyncClient(server.url)
            await client.start_weight_update(header=header)
            await client.update_weights({"value": 1.0}, header=header)
            go = engine.hold("finish")
            first = asyncio.create_task(client.finish_weight_update("1", header=header))
            await engine.reached["finish"].wait()
            first.cancel()
            await asyncio.wait([first])
            again = asyncio.create_task(client.finish_weight_update("1", header=header))
            await asyncio.sleep(0.05)
            go.set()
            await again
            await client.finish_weight_update("1", header=header)
        assert engine.steps.count("finish") == 1
        assert engine.version.order == 1


# -- versions ----------------------------------------------------------------------------------


async def test_a_version_1_a_restarted_replica_is_no_longer_current(tmp_path):
    source, path = paced(), tmp_path / "worker.sock"
    async with replica(seed=3) as other:
        async with replica(seed=2, path=path) as worker:
            urls = [worker.url, other.url]
            sync = await aiosync.WeightTransferTrainerFactory.trainer_init(
                aiosync.IPCTrainerInitInfo(rank=0), client=aiosync.FleetClient(urls), source=source
            )
            await assert_round_works(sync, source, [worker, other], 7)
            await worker.kill()
        async with replica(seed=4, path=path) as worker, sync:
            assert (await worker.facts())["version"] is None
            info = await aiosync.HTTPVLLMWeightSyncClient(worker.url).weight_info()
            assert info.message["weight_version"] != "7"
            assert (await other.facts())["version"] == 7
            report = await sync.send_weights(version=8, timeout=20)
            assert report.recovered
            assert (await worker.facts())["version"] == 8


@pytest.mark.parametrize("step", [1, 2, 3])
async def test_a_version_3_the_version_changes_once_at_the_commit(step):
    async with by_hand.by_hand() as engine:
        await by_hand.owned(engine)
        await by_hand.whole_round(engine, 1, 5)
        header, seen = by_hand.header(engine, 2, 6), []
        await engine.start_weight_update(header=header)
        seen.append(engine.version.order)
        payload = {"value": 6.0, "batch": 10, "fail_at": None if step == 3 else 10 * step}
        try:
            await engine.update_weights(payload, header=header)
        except OSError:
            pass
        seen.append(engine.version.order)
        if step == 3:
            await engine.prepare_weight_update(header=header)
            seen.append(engine.version.order)
            await engine.finish_weight_update("6", header=header)
        else:
            await engine.abort_weight_update("failed", header=header)
        assert set(seen) == {5}
        assert engine.version.order == (6 if step == 3 else 5)
        assert by_hand.values(engine.model) == {float(engine.version.order)}


@pytest.mark.parametrize("sink", ["staged", "in_place"])
@pytest.mark.parametrize("buffer", [64, 448, 1 << 20], ids=["one", "seven", "all"])
async def test_a_version_4_a_reader_sees_one_version(buffer, sink):
    model = {f"t{n}": torch.zeros(16) for n in range(50)}
    sent = {name: torch.zeros(16) for name in model}
    async with carried(sent, model, buffer=buffer) as (sync, worker):
        seen, stop = [], asyncio.Event()

        async def read():
            while not stop.is_set():
                async with worker.generation.request():
                    seen.append({float(t[0]) for t in model.values()})
                await asyncio.sleep(0)

        reader = asyncio.create_task(read())
        for value in range(1, 11):
            for tensor in sent.values():
                tensor.fill_(value)
            await sync.send_weights(version=value, timeout=20)
        stop.set()
        await reader
    assert all(len(values) == 1 for values in seen)
    assert [v for values in seen for v in values] == sorted(v for values in seen for v in values)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_version_5_post_processing_runs_once_and_not_after_a_failure(fails):
    calls = []
    model = {f"t{n}": torch.zeros(64) for n in range(4)}
    sink = make_sink(model, "staged", after_load=lambda: calls.append(model["t3"][0].item()))
    sent = {name: torch.ones(64) for name in model}
    if fails:
        sent["t3"] = torch.ones(63)
    async with carried(sent, model, buffer=256, sink=sink) as (sync, _):
        if fails:
            with pytest.raises(Validation):
                await sync.send_weights(timeout=10)
            assert calls == []
        else:
            await sync.send_weights(timeout=10)
            assert calls == [1.0]


@pytest.mark.parametrize("raises", [False, True])
async def test_a_version_6_caches_go_with_the_weights(raises):
    """`after_load` runs between the last write and the moment a request sees the new version."""
    model, cache = {"w": torch.ones(2)}, {"prompt": 2.0}

    def invalidate():
        cache.clear()
        if raises:
            raise RuntimeError("the cache is locked")

    sink = make_sink(model, "staged", after_load=invalidate)
    async with carried({"w": torch.full((2,), 3.0)}, model, sink=sink) as (sync, worker):
        if raises:
            with pytest.raises(aiosync.AiosyncError, match="the cache is locked"):
                await sync.send_weights(timeout=10)
            assert worker.weights == "torn"
            return
        await sync.send_weights(timeout=10)
        async with worker.generation.request():
            assert cache.get("prompt", model["w"].sum().item()) == 6.0
