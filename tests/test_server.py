from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import secrets
import socket
import stat
import tempfile
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import aiohttp
import anyio
import msgspec
import pytest
from aiohttp import web

from aiosync import defaults
from aiosync.client import HTTPVLLMWeightSyncClient, Readiness
from aiosync.codec import encode_json, encode_msgpack
from aiosync.defaults import DEFAULTS
from aiosync.errors import (
    Busy,
    Coverage,
    Fenced,
    InvalidTransition,
    PeerLost,
    ProtocolMismatch,
    Refused,
    RemoteError,
    Torn,
    Unauthorized,
    Validation,
)
from aiosync.messages import PeerState, RoundHeader
from aiosync.server import WeightUpdateService, serve
from aiosync.tokens import is_authorized, is_loopback
from aiosync.version import Version
from statemachines.events import Transition
from statemachines.hub import TransitionHub
from transports import socket_place

HEADER = RoundHeader(owner="t", epoch=1, round=2, version=Version(3, "run", 3))


class Engine:
    """Records what it is told; raises or waits where a test says so."""

    name = "fake"

    def __init__(self):
        self.events = TransitionHub()
        self.calls = []
        self.errors = {}
        self.hold = None
        self.entered = asyncio.Event()
        self.state = "idle"
        self.owner = None
        self.weights = "intact"
        self.version = None
        self.detail = {"allowed": ["initialize"], "round": 2}
        self.touched = []

    async def _call(self, name, *args, header):
        self.calls.append((name, *args, header))
        self.entered.set()
        if self.hold is not None and name == "update":
            await self.hold.wait()
        if name in self.errors:
            raise self.errors[name]

    async def init_transfer_engine(self, info, *, header=None):
        await self._call("init", info, header=header)

    async def start_weight_update(self, *, header=None):
        await self._call("start", header=header)
        self.state = "updating"

    async def update_weights(self, info, *, header=None):
        await self._call("update", info, header=header)

    async def prepare_weight_update(self, *, header=None):
        await self._call("prepare", header=header)

    async def finish_weight_update(self, weight_version=None, *, header=None):
        await self._call("finish", weight_version, header=header)
        self.state = "initialized"

    async def abort_weight_update(self, reason="", *, header=None):
        await self._call("abort", reason, header=header)
        self.state = "initialized"
        if self.hold is not None:
            self.hold.set()

    async def shutdown(self, *, header=None):
        await self._call("shutdown", header=header)

    def peer_state(self):
        return PeerState(
            incarnation="i",
            epoch=1,
            state=self.state,
            weights=self.weights,
            version=self.version,
            owner=self.owner,
            features=["prepare"],
            world_size=2,
            detail=self.detail,
        )

    def touch(self, header):
        self.touched.append(header)
        if "touch" in self.errors:
            raise self.errors["touch"]

    def publish(self, seq):
        self.events.publish(
            Transition(
                engine="fake",
                role="worker",
                seq=seq,
                trigger="start",
                source="initialized",
                dest="updating",
                wall_time=1.0,
                monotonic=1.0,
                seconds_in_source=0.0,
            )
        )


@pytest.fixture(params=["tcp", "unix", "private"])
def where(request, tmp_path):
    return {"tcp": {"port": 0}, "unix": {"path": tmp_path / "s.sock"}, "private": {}}[request.param]


# -- vLLM's routes ---------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_whole_round_over_every_kind_of_socket(where):
    engine = Engine()
    async with serve(engine, **where) as server, HTTPVLLMWeightSyncClient(server.url) as client:
        texts = [
            (await client.init_weight_transfer_engine({"a": 1}, header=HEADER)).message["message"],
            (await client.start_weight_update(header=HEADER)).message["message"],
            (await client.update_weights([{"x": 1}, {"x": 2}])).message["message"],
            (await client.prepare_weight_update()).message["message"],
            (await client.finish_weight_update("7")).message["message"],
            (await client.abort_weight_update("why")).message["message"],
            (await client.shutdown_weight_transfer_engine()).message["message"],
        ]
        assert await client.get_world_size(include_dp=False) == 2
        await client.health()
        assert await client.ready() == Readiness(True)
    assert texts == [
        "Weight transfer initialized",
        "Weight update started",
        "Weights updated",
        "Weight update prepared",
        "Weight update finished",
        "Weight update aborted",
        "Weight transfer shut down",
    ]
    assert engine.calls == [
        ("init", {"a": 1}, HEADER),
        ("start", HEADER),
        ("update", [{"x": 1}, {"x": 2}], None),
        ("prepare", None),
        ("finish", "7", None),
        ("abort", "why", None),
        ("shutdown", None),
    ]


@pytest.mark.asyncio
async def test_weight_info_names_the_version():
    engine = Engine()
    async with serve(engine) as server:
        client = HTTPVLLMWeightSyncClient(server.url)
        assert (await client.weight_info()).message["weight_version"] == "default"
        engine.version = Version(42, "run", 42)
        reply = await client.weight_info()
    assert reply.message["weight_version"] == "42"
    assert reply.peer == engine.peer_state()


@pytest.mark.asyncio
async def test_capabilities_and_status():
    engine = Engine()
    async with serve(engine) as server:
        client = HTTPVLLMWeightSyncClient(server.url)
        found = await client.capabilities()
        assert (found.protocol, found.features) == (1, ["prepare"])
        assert engine.touched == []
        reply = await client.weight_update_status(header=HEADER)
        assert reply.message["state"] == "idle"
        assert engine.touched == [RoundHeader(owner="t", epoch=1, round=2)]
        engine.errors["touch"] = Fenced("not yours")
        with pytest.raises(Fenced, match="not yours"):
            await client.weight_update_status(header=HEADER)


# -- the core, without sockets ---------------------------------------------------------------------


async def call(service, method, path, body=b"", **headers):
    path, _, query = path.partition("?")
    pairs = dict(part.split("=") for part in query.split("&") if part)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await service.dispatch(method, path, pairs, names, body)
    return response, json.loads(response.body) if response.body else None


@pytest.mark.asyncio
async def test_bodies_may_be_absent_where_vllm_ignores_them():
    engine = Engine()
    service = WeightUpdateService(engine)
    for path in ("/start_weight_update", "/shutdown_weight_transfer_engine"):
        assert (await call(service, "POST", path))[0].status == 200
        assert (await call(service, "POST", path, b'{"x": 1}'))[0].status == 200
    assert (await call(service, "POST", "/finish_weight_update"))[0].status == 200
    body = b'{"weight_version": null}'
    assert (await call(service, "POST", "/finish_weight_update", body))[0].status == 200
    assert engine.calls[-1] == ("finish", None, None)


@pytest.mark.fault("A-INPUT-3")
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/init_weight_transfer_engine", b"", "init_info"),
        ("/init_weight_transfer_engine", b'{"init_info": []}', "$.init_info"),
        ("/update_weights", b"{}", "update_info"),
        ("/update_weights", b'{"update_info": 1}', "$.update_info"),
        ("/update_weights", b'{"update_info": [1]}', "$.update_info[0]"),
        ("/update_weights", b'{"update_info": {"names": ["a", 1]}}', "$.update_info.names[1]"),
        ("/update_weights", b'{"update_info": {"shapes": [[-1]]}}', "$.update_info.shapes[0][0]"),
        ("/finish_weight_update", b'{"weight_version": 7}', "$.weight_version"),
        ("/start_weight_update", b'{"aiosync": {}}', "$.aiosync"),
        ("/start_weight_update", b'{"aiosync": {"owner": "t", "epoch": "1"}}', "$.aiosync.epoch"),
        ("/abort_weight_update", b'{"reason": 5}', "$.reason"),
        ("/start_weight_update", b"not json", "malformed"),
        ("/start_weight_update", b"\xff", "malformed"),
        ("/start_weight_update", b"[" * 100_000, "nested"),
        ("/start_weight_update", b"null", "Expected `object`"),
    ],
)
@pytest.mark.asyncio
async def test_malformed_bodies_are_400_with_the_path_of_the_field(path, body, field):
    engine = Engine()
    response, reply = await call(WeightUpdateService(engine), "POST", path, body)
    assert response.status == reply["error"]["code"] == 400
    assert field in reply["error"]["message"]
    assert reply["error"]["type"] == "Bad Request"
    assert reply["error"]["param"] in (None, "$", *(field,))
    assert engine.calls == []


@pytest.mark.fault("A-INPUT-1")
@pytest.mark.asyncio
async def test_pickles_are_never_loaded(tmp_path):
    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self):
            return open, (str(marker), "w")

    engine = Engine()
    service = WeightUpdateService(engine)
    bomb = pickle.dumps(Bomb())
    text = bomb.hex()
    hostile = [
        ({}, bomb),
        ({"content_type": "application/octet-stream"}, bomb),
        ({}, encode_json({"update_info": {"ipc_handles_pickled": text}})),
        ({}, encode_json({"update_info": [{"a": 1}, {"ipc_handles_pickled": text}]})),
        ({}, encode_json({"update_info": {"ipc_handles_pickled": ""}})),
        ({"content_type": "application/msgpack"}, encode_msgpack({"update_info": {"a": bomb}})),
    ]
    for headers, body in hostile:
        response, _ = await call(service, "POST", "/update_weights", body, **headers)
        assert response.status == 400
    body = encode_json({"init_info": {"ipc_handles_pickled": text}})
    assert (await call(service, "POST", "/init_weight_transfer_engine", body))[0].status == 400
    assert engine.calls == []
    body = encode_json({"update_info": {"ipc_handles_pickled": None}})
    assert (await call(service, "POST", "/update_weights", body))[0].status == 200
    assert not await anyio.Path(marker).exists()


@pytest.mark.fault("A-INPUT-3")
@pytest.mark.asyncio
async def test_another_protocol_is_named_first():
    engine = Engine()
    body = encode_json({"aiosync": {"protocol": 2, "moved": 1}})
    response, reply = await call(WeightUpdateService(engine), "POST", "/start_weight_update", body)
    assert response.status == 400
    assert reply["error"]["kind"] == "protocol_mismatch"
    assert "speaks protocol 2, this side speaks 1" in reply["error"]["message"]
    assert engine.calls == []


@pytest.mark.asyncio
async def test_the_header_may_sit_inside_the_payload():
    engine = Engine()
    service = WeightUpdateService(engine)
    inner = {"owner": "t", "epoch": 1}
    info = {"a": 1, "aiosync": inner}
    for path, key in (
        ("/init_weight_transfer_engine", "init_info"),
        ("/update_weights", "update_info"),
    ):
        await call(service, "POST", path, encode_json({key: info}))
        assert engine.calls[-1][1:] == ({"a": 1}, RoundHeader(owner="t", epoch=1))
    await call(service, "POST", "/update_weights", encode_json({"update_info": [info, info]}))
    assert engine.calls[-1][1:] == ([{"a": 1}, {"a": 1}], RoundHeader(owner="t", epoch=1))


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (
            InvalidTransition("order", detail={"allowed": ["update"], "state": "updating"}),
            409,
            None,
        ),
        (Busy("another"), 409, None),
        (Fenced("late"), 409, None),
        (Refused("older"), 409, None),
        (Coverage("layer 3"), 400, None),
        (Torn("mixed"), 503, None),
        (PeerLost("gone"), 500, None),
        (KeyError("layer"), 500, RemoteError),
        (TimeoutError(), 500, RemoteError),
    ],
)
@pytest.mark.asyncio
async def test_errors_of_the_engine_reach_the_caller(error, status, kind, caplog):
    engine = Engine()
    engine.errors["start"] = error
    async with serve(engine) as server:
        with pytest.raises(kind or type(error).kind) as caught:
            await HTTPVLLMWeightSyncClient(server.url).start_weight_update()
    assert isinstance(caught.value, RemoteError)
    assert caught.value.detail["status"] == status
    assert caught.value.replica == server.url
    assert caught.value.weights == "intact"
    assert caught.value.detail["reported_by"] == "fake"
    if kind is None:
        assert error.message in caught.value.message
        assert not caplog.records
    else:
        assert type(error).__name__ in caught.value.message
        assert "a request failed" in caplog.text


@pytest.mark.asyncio
async def test_a_wrong_order_carries_state_and_allowed_triggers():
    engine = Engine()
    engine.errors["start"] = InvalidTransition("start: not now")
    _, reply = await call(WeightUpdateService(engine), "POST", "/start_weight_update")
    error = reply["error"]
    assert (error["code"], error["state"], error["allowed"]) == (409, "idle", ["initialize"])
    assert reply["aiosync"]["incarnation"] == "i"


@pytest.mark.asyncio
async def test_unknown_paths_and_verbs():
    service = WeightUpdateService(Engine())
    response, reply = await call(service, "POST", "/nothing")
    assert (response.status, reply["error"]["code"]) == (404, 404)
    response, reply = await call(service, "GET", "/start_weight_update")
    assert (response.status, reply["error"]["code"]) == (405, 405)
    assert response.headers["Allow"] == "POST"
    assert (await call(service, "HEAD", "/health"))[0].status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/get_world_size?include_dp=perhaps",
        "/events?since=-1",
        "/events?since=x",
        "/events?since=" + "9" * 5000,
        "/weight_update_status?owner=t&round=1.5",
        "/weight_update_status?owner=",
    ],
)
@pytest.mark.asyncio
async def test_bad_queries_are_400(path):
    engine = Engine()
    response, _ = await call(WeightUpdateService(engine), "GET", path)
    assert response.status == 400
    assert engine.touched == []


@pytest.mark.asyncio
async def test_msgpack_both_ways():
    engine = Engine()
    service = WeightUpdateService(engine)
    response = await service.dispatch(
        "POST",
        "/update_weights",
        {},
        {"Content-Type": "application/msgpack", "Accept": "application/msgpack"},
        encode_msgpack({"update_info": {"names": ["a"]}, "aiosync": HEADER}),
    )
    assert response.content_type == "application/msgpack"
    assert msgspec.msgpack.decode(response.body)["message"] == "Weights updated"
    assert engine.calls == [("update", {"names": ["a"]}, HEADER)]


@pytest.mark.fault("A-STATE-5")
@pytest.mark.asyncio
async def test_ready_only_while_the_replica_may_serve():
    engine = Engine()
    service = WeightUpdateService(engine)
    assert (await call(service, "GET", "/ready"))[0].status == 200
    engine.state = "failed"  # the channel is dead, the old weights serve on
    assert (await call(service, "GET", "/ready"))[0].status == 200
    engine.state = "closed"
    engine.weights = "torn"
    engine.detail = {"paused": True}
    response, reply = await call(service, "GET", "/ready")
    assert response.status == 503
    assert [reason.split()[-1] for reason in reply["reasons"]] == ["torn", "paused", "closed"]
    engine.detail = {}
    engine.state = "idle"
    engine.weights = "unknown"
    assert (await call(service, "GET", "/ready"))[1]["ready"] is False
    assert (await call(service, "GET", "/health"))[0].status == 200


# -- tokens ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_token_guards_everything_but_health():
    engine = Engine()
    token = secrets.token_urlsafe(32)
    async with serve(engine, token=token) as server:
        for wrong in (None, token[:-1], token + "x"):
            client = HTTPVLLMWeightSyncClient(server.url, token=wrong)
            for ask in (client.start_weight_update, client.ready, client.capabilities):
                with pytest.raises(Unauthorized):
                    await ask()
            await client.health()
            with pytest.raises(Unauthorized):
                async for _ in client.events():
                    pass
        assert engine.calls == []
        await HTTPVLLMWeightSyncClient(server.url, token=token).start_weight_update()
    response, reply = await call(server.service, "GET", "/nothing")
    assert response.status == 401  # unknown routes are nobody's business either
    assert "aiosync" not in reply
    assert token not in repr(server)


@pytest.mark.asyncio
async def test_a_token_file_serves_both_sides(tmp_path, blocking_detector):
    file = tmp_path / "token"
    blocking_detector.deactivate()
    file.write_text("secret\n")
    blocking_detector.activate()
    async with serve(Engine(), port=0, token_file=file) as server:
        await HTTPVLLMWeightSyncClient(server.url, token_file=file).start_weight_update()
        with pytest.raises(Unauthorized):
            await HTTPVLLMWeightSyncClient(server.url).start_weight_update()
    with pytest.raises(Validation, match="not both"):
        async with serve(Engine(), token="t", token_file=file):
            pass


def test_authorization():
    assert is_authorized("t", {"authorization": "bearer  t"})
    for wrong in ("t", "Basic t", "Bearer", "Bearer \udcff", "Bearer T"):
        assert not is_authorized("t", {"authorization": wrong})
    assert is_authorized(None, {})


@pytest.mark.asyncio
async def test_a_web_page_cannot_drive_a_local_server():
    engine = Engine()
    service = WeightUpdateService(engine)
    page = {"origin": "https://evil.example"}
    assert (await call(service, "POST", "/start_weight_update", **page))[0].status == 401
    service = WeightUpdateService(engine, token="t")
    page["authorization"] = "Bearer t"
    assert (await call(service, "POST", "/start_weight_update", **page))[0].status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "example.org"])
@pytest.mark.asyncio
async def test_outside_loopback_a_token_is_needed(host):
    with pytest.raises(Validation, match="token"):
        async with serve(Engine(), host=host, port=0):
            pass
    assert not is_loopback(host)
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "LOCALHOST")))


@pytest.mark.asyncio
async def test_insecure_is_possible_and_logged(caplog):
    async with serve(Engine(), host="0.0.0.0", port=0, insecure=True) as server:
        assert socket.gethostname() in server.url  # 0.0.0.0 is no address to connect to
    assert "without a token" in caplog.text
    caplog.clear()
    options = {"host": "", "token": "t", "advertise": "trainer.example"}
    async with serve(Engine(), **options) as server:
        assert server.url.startswith("http://trainer.example:")
    assert not caplog.records


# -- sockets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"path": "/tmp/x", "port": 0},
        {"port": -1},
        {"port": 65536},
        {"port": True},
        {"port": "80"},
        {"path": "/tmp/" + "x" * 120},
    ],
)
@pytest.mark.asyncio
async def test_bad_addresses_are_refused(options):
    with pytest.raises(Validation):
        async with serve(Engine(), **options):
            pass


@pytest.mark.asyncio
async def test_a_taken_port_is_named():
    async with serve(Engine(), port=0) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
            async with serve(Engine(), port=port):
                pass
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1"):
        async with serve(Engine(), host="192.0.2.1", port=0, token="t"):
            pass
    with pytest.raises(OSError, match=r"cannot listen on nowhere\.invalid"):
        async with serve(Engine(), host="nowhere.invalid", port=0, token="t"):
            pass


@pytest.mark.asyncio
async def test_ipv6_loopback():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    async with serve(Engine(), host="::1") as server:
        assert server.url.startswith("http://[::1]:")
        await HTTPVLLMWeightSyncClient(server.url).health()


@pytest.mark.asyncio
async def test_unix_sockets_are_private_and_go_away(tmp_path, blocking_detector):
    blocking_detector.deactivate()
    path = tmp_path / "s.sock"
    old = os.umask(0)
    try:
        async with serve(Engine(), path=path) as server:
            assert server.url == f"unix://{path}"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            # A live server keeps its socket.
            with pytest.raises(Refused, match="another server"):
                async with serve(Engine(), path=path):
                    pass
            await HTTPVLLMWeightSyncClient(server.url).health()
    finally:
        os.umask(old)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.asyncio
async def test_a_dead_servers_socket_is_replaced_and_other_files_are_not(
    tmp_path, blocking_detector
):
    blocking_detector.deactivate()
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with serve(Engine(), path=path) as server:
        await HTTPVLLMWeightSyncClient(server.url).health()
        # A successor took the name: it is not ours to remove any more.
        path.unlink()
        with socket.socket(socket.AF_UNIX) as successor:
            successor.bind(str(path))
    assert path.exists()
    path.unlink()
    path.write_text("precious")
    with pytest.raises(Validation, match="no socket"):
        async with serve(Engine(), path=path):
            pass
    assert path.read_text() == "precious"


@pytest.mark.asyncio
async def test_a_relative_path_gives_an_absolute_url(tmp_path, monkeypatch, blocking_detector):
    blocking_detector.deactivate()
    monkeypatch.chdir(tmp_path)
    async with serve(Engine(), path="s.sock") as server:
        assert server.url == f"unix://{tmp_path}/s.sock"
    async with serve(Engine()) as server:
        folder = anyio.Path(server.url.removeprefix("unix://")).parent
        assert stat.S_IMODE((await folder.stat()).st_mode) == 0o700
    assert not await folder.exists()


@pytest.mark.asyncio
async def test_a_long_temporary_folder_is_left_for_a_short_one(
    tmp_path, monkeypatch, blocking_detector
):
    blocking_detector.deactivate()
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    async with serve(Engine()) as server:
        folder = Path(server.url.removeprefix("unix://")).parent
        assert folder.parent != long
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        await HTTPVLLMWeightSyncClient(server.url).health()
    assert not folder.exists()
    assert list(long.iterdir()) == []
    # One that will do is taken.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if len(str(tmp_path)) < 70:
        async with serve(Engine()) as server:
            assert server.url.startswith(f"unix://{tmp_path}/aiosync-")
    # None will.
    monkeypatch.setattr(socket_place, "_ELSEWHERE", (str(tmp_path / "missing"),))
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(Validation, match="no folder for a Unix socket") as caught:
        async with serve(Engine()):
            pass
    assert "TMPDIR" in caught.value.next_step
    with pytest.raises(Validation, match="longer than"):
        async with serve(Engine(), path=long / "s.sock"):
            pass


# -- bodies over the wire --------------------------------------------------------------------------


@pytest.mark.fault("A-HTTP-1")
@pytest.mark.asyncio
async def test_sixty_thousand_names_arrive():
    engine = Engine()
    names = [f"model.layers.311.mlp.experts.{n}.down_proj.weight" for n in range(60_000)]
    async with serve(engine) as server:
        await HTTPVLLMWeightSyncClient(server.url).update_weights({"names": names})
    assert engine.calls[0][1]["names"] == names


@pytest.fixture
def small_limit(monkeypatch):
    for name in ("service", "aiohttp_routes", "routes", "control_routes"):
        small = msgspec.structs.replace(DEFAULTS, body_limit_bytes=1000, rpc_s=1.0)
        monkeypatch.setattr(f"aiosync.{name}.DEFAULTS", small)


@pytest.mark.fault("A-HTTP-1")
@pytest.mark.asyncio
async def test_a_body_above_the_limit_is_413_however_it_comes(small_limit):
    assert defaults.DEFAULTS.body_limit_bytes == 64 << 20
    engine = Engine()

    async def chunks():
        for _ in range(5):
            yield b"x" * 500

    async with serve(engine, port=0) as server, aiohttp.ClientSession() as session:
        url = f"{server.url}/update_weights"
        for data in (b"x" * 1001, chunks()):
            async with session.post(url, data=data) as response:
                assert response.status == 413
                assert "limit is 1000 bytes" in (await response.json())["error"]["message"]
        # A hostile length is refused before any of it was sent.
        head = f"POST /update_weights HTTP/1.1\r\nHost: x\r\nContent-Length: {2 << 30}\r\n\r\n"
        assert b" 413 " in (await talk(server.url, head.encode())).split(b"\r\n")[0]
        async with session.post(url, data=b"{}", headers={"Content-Encoding": "gzip"}) as response:
            assert response.status == 400
    assert engine.calls == []


async def talk(url, data, *, half_close=False):
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        return await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.fault("A-HTTP-3")
@pytest.mark.asyncio
async def test_a_body_that_never_ends_is_not_waited_for(small_limit):
    async with serve(Engine(), port=0) as server:
        head = b"POST /update_weights HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"
        assert b" 500 " in (await talk(server.url, head)).split(b"\r\n")[0]


@pytest.mark.asyncio
async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked():
    async with serve(Engine(), port=0) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "POST /start_weight_update HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
        writer.write(f"{head}Connection: close\r\nExpect: 100-continue\r\n\r\n".encode())
        async with asyncio.timeout(5):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"{}")
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"Weight update started" in answer


@pytest.mark.asyncio
async def test_unknown_paths_are_json_over_the_wire():
    async with serve(Engine(), port=0) as server, aiohttp.ClientSession() as session:
        for method, path, status in (("GET", "/a/b", 404), ("PUT", "/ready", 405)):
            async with session.request(method, server.url + path) as response:
                assert response.status == status
                assert (await response.json())["error"]["code"] == status
        async with session.head(server.url + "/health") as response:
            assert response.status == 200


@pytest.mark.fault("A-HTTP-2")
@pytest.mark.asyncio
async def test_a_client_that_leaves_does_not_cancel_the_handler():
    engine = Engine()
    engine.hold = asyncio.Event()
    async with serve(engine) as server:
        client = HTTPVLLMWeightSyncClient(server.url)
        task = asyncio.create_task(client.update_weights({}))
        await engine.entered.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        done = asyncio.Event()

        async def finish(weight_version=None, *, header=None):
            done.set()

        engine.finish_weight_update = finish
        await client.finish_weight_update()
        await done.wait()
        engine.hold.set()


# -- events ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_events_are_replayed_and_followed(where):
    engine = Engine()
    for seq in (1, 2, 3):
        engine.publish(seq)
    seen = []
    async with serve(engine, **where) as server:
        client = HTTPVLLMWeightSyncClient(server.url)
        stream = client.events(since=1)
        async for event in stream:
            seen.append(event["seq"])
            if event["seq"] == 3:
                engine.publish(4)
            if event["seq"] == 4:
                break
        await stream.aclose()
    assert seen == [2, 3, 4]


@pytest.mark.asyncio
async def test_server_sent_events():
    engine = Engine()
    engine.publish(1)
    engine.publish(2)
    headers = {"Accept": "text/event-stream", "Last-Event-ID": "1"}
    async with (
        serve(engine, port=0) as server,
        aiohttp.ClientSession() as session,
        session.get(f"{server.url}/events", headers=headers) as response,
    ):
        assert response.content_type == "text/event-stream"
        lines = [await response.content.readline() for _ in range(3)]
    assert lines[0] == b"id: 2\n"
    assert json.loads(lines[1].removeprefix(b"data: "))["trigger"] == "start"
    assert lines[2] == b"\n"


@pytest.mark.parametrize(("accept", "beat"), [("text/event-stream", b":\n\n"), ("", b"\n")])
@pytest.mark.asyncio
async def test_silence_is_broken_by_heartbeats(monkeypatch, accept, beat):
    quick = msgspec.structs.replace(DEFAULTS, heartbeat_s=0.01)
    monkeypatch.setattr("aiosync.event_stream.DEFAULTS", quick)
    service = WeightUpdateService(Engine())
    response = await service.dispatch("GET", "/events", {}, {"Accept": accept}, b"")
    assert await anext(response.stream) == beat
    assert "streams=1" in repr(service)
    await response.stream.aclose()
    assert "streams=0" in repr(service)


@pytest.mark.asyncio
async def test_closing_the_server_ends_the_streams():
    engine = Engine()
    engine.publish(1)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve(engine))
        seen = []

        async def follow():
            async for event in HTTPVLLMWeightSyncClient(server.url).events(since=0):
                seen.append(event["seq"])
                first.set()

        first = asyncio.Event()
        task = asyncio.create_task(follow())
        await first.wait()
        await stack.aclose()
    await task
    assert seen == [1]
    assert engine.events.statistics().subscribers == 0


@pytest.mark.asyncio
async def test_a_follower_that_leaves_is_forgotten():
    engine = Engine()
    engine.publish(1)
    async with serve(engine) as server:
        stream = HTTPVLLMWeightSyncClient(server.url).events(since=0)
        await anext(stream)
        await stream.aclose()
        with anyio.fail_after(10):
            while engine.events.statistics().subscribers:
                engine.publish(2)  # noticed with the next part
                await asyncio.sleep(0.01)


# -- closing and other homes -----------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["t", None])
@pytest.mark.asyncio
async def test_closing_gives_the_open_round_up(owner):
    engine = Engine()
    engine.hold = asyncio.Event()
    engine.owner = owner
    async with serve(engine) as server:
        client = HTTPVLLMWeightSyncClient(server.url)
        await client.start_weight_update()
        task = asyncio.create_task(client.update_weights({}))
        engine.entered.clear()
        await engine.entered.wait()
    header = RoundHeader(owner="t", epoch=1, round=2) if owner else None
    assert ("abort", "the server is closing", header) in engine.calls
    await task  # its handler ran to its end


@pytest.mark.asyncio
async def test_closing_survives_an_engine_that_fails_or_hangs(caplog):
    for error in (Fenced("no"), None):
        engine = Engine()
        engine.state = "updating"
        engine.errors["abort"] = error
        if error is None:
            engine.abort_weight_update = lambda *_, **__: asyncio.Event().wait()
        async with serve(engine) as server:
            await HTTPVLLMWeightSyncClient(server.url).health()
    assert "could not be ended" in caplog.text


@pytest.mark.asyncio
async def test_closing_does_not_wait_for_a_handler_that_never_ends():
    engine = Engine()
    engine.hold = asyncio.Event()
    with anyio.fail_after(10):
        async with serve(engine) as server:
            client = HTTPVLLMWeightSyncClient(server.url)
            task = asyncio.create_task(client.update_weights({}))
            await engine.entered.wait()
    with pytest.raises((PeerLost, ProtocolMismatch)):
        await task


@pytest.mark.asyncio
async def test_cancelling_the_block_still_cleans_up(tmp_path):
    path = anyio.Path(tmp_path / "s.sock")
    with anyio.CancelScope() as scope:
        async with serve(Engine(), path=str(path)):
            scope.cancel()
            await anyio.sleep_forever()
    assert not await path.exists()


@pytest.mark.asyncio
async def test_routes_in_an_application_of_ones_own():
    engine = Engine()
    service = WeightUpdateService(engine, name="mine", world_size=8)
    app = web.Application()
    app.add_routes(service.routes())
    inner = web.Application()
    inner.add_routes(service.routes())
    app.add_subapp("/prefix", inner)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    names = ["x" * 100] * 20_000  # more than aiohttp's own limit of 1 MiB
    for base in (url, f"{url}/prefix"):
        client = HTTPVLLMWeightSyncClient(base)
        await client.update_weights({"names": names})
        assert await client.get_world_size() == 8
    service.close()
    await runner.cleanup()


@pytest.mark.asyncio
async def test_nothing_is_logged_about_good_requests(caplog):
    caplog.set_level(logging.INFO)
    async with serve(Engine()) as server:
        await HTTPVLLMWeightSyncClient(server.url).start_weight_update()
    assert not caplog.records
