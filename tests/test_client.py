from __future__ import annotations

import asyncio
import base64
import functools
import gc
import json
import pickle
import socket
import threading
from contextlib import asynccontextmanager, suppress

import aiohttp
import anyio
import msgspec
import pytest

from aiosync.client import (
    Capabilities,
    HTTPVLLMWeightSyncClient,
    Readiness,
    SupportsAbort,
    SupportsPrepare,
    SupportsStatus,
    VLLMWeightSyncClient,
    adapt_client,
    capabilities_of,
    sync_client,
)
from aiosync.defaults import DEFAULTS
from aiosync.errors import (
    Busy,
    PeerLost,
    PhaseTimeout,
    ProtocolMismatch,
    RemoteError,
    Unauthorized,
    Validation,
)
from aiosync.messages import PeerState, RoundHeader
from aiosync.version import Version

STARTED = {"message": "Weight update started"}


class Wire:
    """A server that answers every request with the same bytes, and keeps what it was sent."""

    def __init__(self, reply: bytes, *, hold: asyncio.Event | None = None) -> None:
        self.reply = reply
        self.hold = hold
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.arrived = asyncio.Event()

    async def answer(self, reader, writer):
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = [
                int(line.split(b":")[1])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            ]
            self.heads.append(head)
            self.bodies.append(await reader.readexactly(length[0]) if length else b"")
            self.arrived.set()
            if self.hold is not None:
                await self.hold.wait()
            writer.write(self.reply)
            await writer.drain()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def http(body: bytes, *, status="200 OK", kind="application/json", extra="", length=None) -> bytes:
    size = len(body) if length is None else length
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n{extra}\r\n"
    return head.encode() + body


def answer(obj, **options) -> bytes:
    return http(msgspec.json.encode(obj), **options)


@asynccontextmanager
async def serving(reply: bytes, **options):
    wire = Wire(reply, **options)
    server = await asyncio.start_server(wire.answer, "127.0.0.1", 0)
    async with server:
        wire.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield wire


async def start_against(reply: bytes, **options):
    async with serving(reply) as wire:
        return await HTTPVLLMWeightSyncClient(wire.url, **options).start_weight_update()


# -- what is sent ----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_bodies_are_those_of_vllm():
    async with serving(answer({"message": "Weights updated"})) as wire:
        client = HTTPVLLMWeightSyncClient(wire.url + "/")
        await client.init_weight_transfer_engine({"packed": True})
        await client.start_weight_update()
        await client.update_weights([{"names": ["a"]}, {"names": ["b"]}])
        await client.finish_weight_update()
        await client.finish_weight_update("7")
        await client.shutdown_weight_transfer_engine()
    paths = [head.split(b" ")[1].decode() for head in wire.heads]
    assert paths == [
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/finish_weight_update",
        "/shutdown_weight_transfer_engine",
    ]
    assert [json.loads(body) if body else None for body in wire.bodies] == [
        {"init_info": {"packed": True}},
        None,
        {"update_info": [{"names": ["a"]}, {"names": ["b"]}]},
        None,
        {"weight_version": "7"},
        None,
    ]


@pytest.mark.asyncio
async def test_the_header_travels_beside_the_body():
    header = RoundHeader(owner="t", epoch=1, round=2, version=Version(3, "run", 3))
    async with serving(answer({"message": "ok"})) as wire:
        client = HTTPVLLMWeightSyncClient(wire.url)
        await client.start_weight_update(header=header)
        await client.abort_weight_update("why", header=header)
        await client.prepare_weight_update(header=header)
    sent = [json.loads(body) for body in wire.bodies]
    assert sent[0]["aiosync"]["version"] == {"label": 3, "lineage": "run", "order": 3}
    assert sent[1]["reason"] == "why"
    assert all(body["aiosync"]["owner"] == "t" for body in sent)


@pytest.mark.asyncio
async def test_tokens_and_headers_travel(tmp_path, blocking_detector):
    file = tmp_path / "token"
    file.write_text(" secret-1\n")
    async with serving(answer(STARTED)) as wire:
        client = HTTPVLLMWeightSyncClient(wire.url, token_file=file, headers={"X-Run": "7"})
        await client.start_weight_update()
        # Read again with the next connection: a rotated token needs no new client.
        blocking_detector.deactivate()
        file.write_text("secret-2")
        blocking_detector.activate()
        await client.start_weight_update()
    assert b"Authorization: Bearer secret-1\r\n" in wire.heads[0]
    assert b"X-Run: 7\r\n" in wire.heads[0]
    assert b"Bearer secret-2" in wire.heads[1]
    assert "secret" not in repr(client)
    assert b"secret" not in pickle.dumps(client)


@pytest.mark.parametrize("text", [b"", b"two words", b"\xff\xfe", b"x" * 5000])
@pytest.mark.asyncio
async def test_a_bad_token_file_is_named(tmp_path, blocking_detector, text):
    file = tmp_path / "token"
    blocking_detector.deactivate()
    file.write_bytes(text)
    blocking_detector.activate()
    with pytest.raises(Validation, match=r"token file .*token"):
        await HTTPVLLMWeightSyncClient("http://127.0.0.1:1", token_file=file).health()
    with pytest.raises(Validation, match="No such file"):
        await HTTPVLLMWeightSyncClient("http://127.0.0.1:1", token_file=tmp_path / "none").health()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:8000",
        "ftp://host",
        "http://",
        "http://host:99999",
        "http://host:x",
        "http://host:0",
        "http://user:pw@host",
        "http://host/?q=1",
        "http://host/#f",
        "unix://relative/path",
        "unix://",
        "http://[::1",
        None,
        8000,
    ],
)
def test_bad_urls_are_refused_at_once(url):
    with pytest.raises(Validation, match="base_url"):
        HTTPVLLMWeightSyncClient(url)


@pytest.mark.parametrize(
    "url", ["http://host:8000/prefix", "https://host", "http://[::1]:8000", "unix:///tmp/a.sock"]
)
def test_good_urls_are_names(url):
    client = HTTPVLLMWeightSyncClient(url + "/")
    assert client.base_url == client.name == url
    assert isinstance(client, VLLMWeightSyncClient)
    assert isinstance(client, SupportsPrepare)
    assert isinstance(client, SupportsAbort)
    assert isinstance(client, SupportsStatus)


@pytest.mark.fault("A-HTTP-3")
@pytest.mark.parametrize("timeout", [None, 0, float("inf"), True, "5"])
def test_a_timeout_is_always_finite(timeout):
    with pytest.raises(Validation, match="timeout"):
        HTTPVLLMWeightSyncClient("http://h", timeout)


@pytest.mark.parametrize("token", ["", "a b", "ü", 5])
def test_bad_tokens_are_refused_at_once(token):
    with pytest.raises(Validation, match="token"):
        HTTPVLLMWeightSyncClient("http://h", token=token)


@pytest.mark.asyncio
async def test_pickled_handles_only_where_they_were_asked_for():
    info = {"names": ["a"], "ipc_handles": [{"uuid": (int, b"handle")}]}
    async with serving(answer({"message": "Weights updated"})) as wire:
        with pytest.raises(Validation, match="JSON") as caught:
            await HTTPVLLMWeightSyncClient(wire.url).update_weights(info)
        assert "allow_pickled_handles" in caught.value.next_step
        client = HTTPVLLMWeightSyncClient(wire.url, allow_pickled_handles=True)
        await client.update_weights([info, {"names": []}])
    first, second = json.loads(wire.bodies[0])["update_info"]
    assert "ipc_handles" not in first
    assert pickle.loads(base64.b64decode(first["ipc_handles_pickled"])) == info["ipc_handles"]
    assert second == {"names": []}


@pytest.mark.asyncio
async def test_large_bodies_are_sent_without_a_warning():
    names = [f"model.layers.{n}.mlp.experts.63.down_proj.weight" for n in range(30_000)]
    async with serving(answer({"message": "Weights updated"})) as wire:
        await HTTPVLLMWeightSyncClient(wire.url).update_weights({"names": names})
    assert json.loads(wire.bodies[0])["update_info"]["names"] == names


# -- what is believed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        STARTED,
        {"message": "Weight update started."},
        {"message": "ok"},
        {"success": True},
        {"success": True, "message": "no error was found", "error": None},
        {"message": "done", "results": [{"success": True}, {"rank": 1}]},
        {"aiosync": {"protocol": 1, "state": "updating"}},
    ],
)
@pytest.mark.asyncio
async def test_explicit_success(body):
    reply = await start_against(answer(body))
    assert reply.message == body
    assert (reply.peer is None) == ("aiosync" not in body)


@pytest.mark.asyncio
async def test_our_own_success_is_believed_and_what_is_said_beside_it_is_read():
    peer = {"protocol": 1, "state": "updating", "incarnation": "abc"}
    reply = await start_against(answer({"message": "Weight update started", "aiosync": peer}))
    assert reply.message["message"] == "Weight update started"
    assert reply.peer is not None
    assert (reply.peer.state, reply.peer.incarnation) == ("updating", "abc")
    with pytest.raises(RemoteError, match="no bytes moved"):
        await start_against(answer({"message": "ok", "error": "no bytes moved", "aiosync": peer}))
    with pytest.raises(ProtocolMismatch, match="protocol 2"):
        await start_against(answer({"message": "ok", "aiosync": peer | {"protocol": 2}}))


@pytest.mark.fault("A-SILENT-2")
@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({"success": False, "message": "no bytes moved"}, "no bytes moved"),
        ({"success": "false", "message": "string"}, "string"),
        ({"success": None, "message": "ok"}, "ok"),
        ({"success": 1, "message": "ok"}, "ok"),
        ({"error": "text"}, "text"),
        ({"error": {"message": "inner", "code": 500}}, "inner"),
        ({"error": {"odd": 1}, "message": "ok"}, "odd"),
        ({"detail": "Not quite"}, "Not quite"),
        ({"detail": [{"loc": ["body"], "msg": "missing"}]}, "missing"),
        (
            {"success": True, "results": [{"success": True}, {"success": False, "error": "r1"}]},
            "r1",
        ),
        ({"message": "ok", "results": [{"success": False}]}, "200"),
    ],
)
@pytest.mark.asyncio
async def test_a_200_that_reports_failure_is_one(body, shown):
    with pytest.raises(RemoteError, match=r"reports a failure") as caught:
        await start_against(answer(body))
    assert shown in caught.value.message
    assert caught.value.replica.startswith("http://127.0.0.1:")
    assert caught.value.phase == "start"


@pytest.mark.fault("A-HTTP-4")
@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (http(b"ok", kind="text/plain"), "text/plain.*'ok'"),
        (http(b"<html>hello</html>", kind="text/html"), "text/html.*<html>hello"),
        (http(b'{"message": "Weight upd'), "not a JSON object"),
        (http(b'{"message": "Weight upd', length=100), "ended before"),
        (http(b"", status="204 No Content"), "status 204"),
        (http(b"", status="302 Found", extra="Location: /health\r\n"), "redirect to '/health'"),
        (answer(STARTED, status="202 Accepted"), "status 202"),
        (http(b"null"), "not a JSON object"),
        (http(b'["Weight update started"]'), "not a JSON object"),
        (http(b'"Weight update started"'), "not a JSON object"),
        (http(b"{}"), "no explicit success"),
        (http(b""), "an empty body"),
        (answer({"message": ""}), "no explicit success"),
        (answer({"message": "Failed to update"}), "no explicit success"),
        (answer({"message": {"text": "ok"}}), "no explicit success"),
        (answer({"status": "ok?"}), "no explicit success"),
        (http(b"[" * 100_000), "not a JSON object"),
        (http(b"x" * 100_000, kind="text/plain"), "status 200"),
        (answer({"aiosync": {"protocol": 2}}), "speaks protocol 2"),
        (answer({"aiosync": {"world_size": -1}}), "world_size"),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "does not speak HTTP"),
    ],
)
@pytest.mark.asyncio
async def test_odd_replies_are_protocol_errors(reply, problem):
    with pytest.raises(ProtocolMismatch, match=problem) as caught:
        await start_against(reply)
    assert caught.value.replica.startswith("http://127.0.0.1:")
    assert caught.value.phase == "start"
    assert len(caught.value.message) < 1000


@pytest.mark.fault("A-HTTP-4")
@pytest.mark.asyncio
async def test_a_redirected_post_is_not_replayed():
    async with serving(
        http(b"", status="307 Temporary Redirect", extra="Location: /x\r\n")
    ) as wire:
        with pytest.raises(ProtocolMismatch):
            await HTTPVLLMWeightSyncClient(wire.url).start_weight_update()
    assert len(wire.heads) == 1


@pytest.mark.fault("A-HTTP-4")
@pytest.mark.asyncio
async def test_a_big_reply_is_cut_off():
    size = DEFAULTS.reply_limit_bytes + 1
    with pytest.raises(ProtocolMismatch, match="the rest was not read"):
        await start_against(http(b"x" * size, kind="text/plain", length=50_000_000))


@pytest.mark.parametrize(
    ("reply", "kind", "text"),
    [
        (
            answer(
                {"error": {"message": "Call failed: KeyError", "type": "x", "code": 500}},
                status="500 Oh",
            ),
            RemoteError,
            "Call failed: KeyError",
        ),
        (answer({"error": "cannot pause"}, status="400 Bad Request"), Validation, "cannot pause"),
        (
            answer({"detail": "Not Found"}, status="404 Not Found"),
            ProtocolMismatch,
            "(check host, port and path; a vLLM server has these routes only with VLLM_SERVER_DEV",
        ),
        (answer({"detail": [1]}, status="422 X"), RemoteError, "[1]"),
        (http(b"<h1>too big</h1>", status="413 X", kind="text/html"), Validation, "413"),
        (http(b"", status="401 Unauthorized"), Unauthorized, "401"),
        (answer({"error": {"message": "m", "code": "odd"}}, status="500 X"), RemoteError, "m"),
        (answer({"error": {"message": [3]}}, status="500 X"), RemoteError, "[3]"),
        (answer({"x": 1}, status="599 X"), RemoteError, '{"x":1}'),
        (http(b'{"error"', status="500 X", length=99), RemoteError, "ended before"),
        (answer({"error": {"message": "m", "kind": "busy"}}, status="409 X"), Busy, "m"),
    ],
)
@pytest.mark.asyncio
async def test_the_remote_text_is_in_the_error(reply, kind, text):
    with pytest.raises(kind) as caught:
        await start_against(reply)
    assert isinstance(caught.value, RemoteError)
    assert text in caught.value.message
    assert caught.value.replica.startswith("http://127.0.0.1:")
    assert caught.value.detail["status"] >= 400


@pytest.mark.fault("A-HTTP-4")
@pytest.mark.asyncio
async def test_a_503_says_when_to_come_back():
    with pytest.raises(RemoteError) as caught:
        await start_against(http(b"later", status="503 X", extra="Retry-After: 5\r\n"))
    assert caught.value.retryable
    assert caught.value.detail["retry_after"] == "5"


# -- time and loss ---------------------------------------------------------------------------------


@pytest.mark.fault("A-HTTP-3")
@pytest.mark.asyncio
async def test_no_answer_names_phase_url_and_seconds():
    async with serving(b"", hold=asyncio.Event()) as wire:
        client = HTTPVLLMWeightSyncClient(wire.url)
        with pytest.raises(PhaseTimeout, match=rf"start: {wire.url}.* 0.2 s") as caught:
            await client.start_weight_update(timeout=0.2)
        assert (caught.value.phase, caught.value.replica) == ("start", wire.url)
        deadline = RoundHeader(owner="t", deadline_s=0.2)
        with pytest.raises(PhaseTimeout, match="update"):
            await client.update_weights({}, header=deadline)
        with pytest.raises(Validation, match="timeout"):
            await client.health(timeout=-1)
        wire.hold.set()


@pytest.mark.asyncio
async def test_cancelling_a_call_leaves_at_once():
    async with serving(b"", hold=asyncio.Event()) as wire:
        client = HTTPVLLMWeightSyncClient(wire.url)
        task = asyncio.create_task(client.start_weight_update())
        await wire.arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with anyio.move_on_after(0.1) as scope:
            await client.start_weight_update()
        assert scope.cancelled_caught
        wire.hold.set()


@pytest.mark.fault("A-CANCEL-7")
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.asyncio
async def test_cancelled_at_any_turn_nothing_is_left(tmp_path, blocking_detector, native):
    file = tmp_path / "token"
    blocking_detector.deactivate()
    file.write_text("secret")
    blocking_detector.activate()
    async with serving(answer(STARTED)) as wire:
        client = HTTPVLLMWeightSyncClient(wire.url, token_file=file)

        async def call(scope):
            with scope:
                await client.start_weight_update()

        for turns in range(40):
            scope = anyio.CancelScope()
            task = asyncio.create_task(call(scope))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel() if native else scope.cancel()
            with suppress(asyncio.CancelledError):
                await task
            assert "users=0" in repr(client)
        assert (await client.start_weight_update()).message == STARTED
    gc.collect()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.asyncio
async def test_nobody_there(tmp_path):
    for url in (f"http://127.0.0.1:{free_port()}", f"unix://{tmp_path}/none.sock"):
        with pytest.raises(PeerLost, match="cannot be reached") as caught:
            await HTTPVLLMWeightSyncClient(url).start_weight_update()
        assert caught.value.replica == url
        assert url in caught.value.message
        assert "ssl" not in caught.value.message


async def started(client):
    await client.start_weight_update()


async def followed(client):
    async for _ in client.events():
        pass


@pytest.mark.asyncio
@pytest.mark.parametrize("call", [started, followed])
async def test_a_server_behind_a_unix_socket_is_named_by_its_path(call, tmp_path):
    url, wire = f"unix://{tmp_path}/w.sock", Wire(http(b"no", status="500 Oops"))
    async with await asyncio.start_unix_server(wire.answer, tmp_path / "w.sock"):
        with pytest.raises(RemoteError) as caught:
            await call(HTTPVLLMWeightSyncClient(url))
    assert caught.value.message.startswith(f"{url}/")
    assert "localhost" not in str(caught.value)


@pytest.mark.asyncio
async def test_a_server_that_hangs_up():
    with pytest.raises(PeerLost, match="connection broke"):
        await start_against(b"")


# -- questions -------------------------------------------------------------------------------------


async def ask(reply: bytes, method: str, *args, **kwargs):
    async with serving(reply) as wire:
        try:
            return await getattr(HTTPVLLMWeightSyncClient(wire.url), method)(*args, **kwargs)
        finally:
            ask.head = wire.heads[0]


@pytest.mark.asyncio
async def test_world_size_and_weight_info():
    assert await ask(answer({"world_size": 4}), "get_world_size", include_dp=False) == 4
    assert b"include_dp=false" in ask.head
    for size in (0, "4", True, None):
        with pytest.raises(ProtocolMismatch, match="world_size"):
            await ask(answer({"world_size": size}), "get_world_size")
    with pytest.raises(ProtocolMismatch, match="without 'world_size'"):
        await ask(answer({"size": 4}), "get_world_size")
    info = await ask(answer({"weight_version": "default"}), "weight_info")
    assert info.message["weight_version"] == "default"


@pytest.mark.asyncio
async def test_health_of_a_stock_server_is_an_empty_200():
    await ask(http(b""), "health")
    with pytest.raises(RemoteError):
        await ask(http(b"", status="503 X"), "health")
    with pytest.raises(ProtocolMismatch):
        await ask(http(b"", status="204 X"), "health")


@pytest.mark.asyncio
async def test_ready():
    assert await ask(answer({"ready": True}), "ready") == Readiness(True)
    reply = answer({"ready": False, "reasons": ["torn"]}, status="503 X")
    assert await ask(reply, "ready") == Readiness(False, ["torn"])
    for reply in (http(b"busy", status="503 X"), answer({"error": "x"}, status="503 X")):
        with pytest.raises(RemoteError):
            await ask(reply, "ready")


@pytest.mark.asyncio
async def test_a_stock_server_has_protocol_0():
    for status in ("404 Not Found", "405 Method Not Allowed"):
        found = await ask(answer({"detail": "no"}, status=status), "capabilities")
        assert found == Capabilities()
    with pytest.raises(ProtocolMismatch):
        await ask(http(b"<html>", kind="text/html"), "capabilities")
    with pytest.raises(Unauthorized):
        await ask(http(b"", status="401 X"), "capabilities")


@pytest.mark.asyncio
async def test_capabilities_are_remembered():
    peer = PeerState(incarnation="i", features=["prepare"], digests=["wsum64"])
    async with serving(answer({"aiosync": peer})) as wire:
        client = HTTPVLLMWeightSyncClient(wire.url)
        found = await client.capabilities()
        assert found == Capabilities(
            protocol=1, features=["prepare"], digests=["wsum64"], peer=peer
        )
        assert await capabilities_of(client) is found
        assert len(wire.heads) == 1
        await client.capabilities(refresh=True)
        assert len(wire.heads) == 2
        header = RoundHeader(owner="a b", epoch=1, round=2)
        assert (await client.weight_update_status(header=header)).peer == peer
        assert b"owner=a+b&epoch=1&round=2" in wire.heads[-1]


@pytest.mark.asyncio
async def test_events_are_dicts():
    body = b'{"seq":1}\n\n{"seq":2}\n'
    async with serving(http(body, kind="application/x-ndjson")) as wire:
        found = [event async for event in HTTPVLLMWeightSyncClient(wire.url).events(since=0)]
    assert found == [{"seq": 1}, {"seq": 2}]
    assert b"since=0" in wire.heads[0]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (http(b"<html>\n", kind="text/html"), ProtocolMismatch),
        (http(b"[1]\n"), ProtocolMismatch),
        (http(b"x" * (DEFAULTS.event_limit_bytes + 1)), ProtocolMismatch),
        (answer({"detail": "x"}, status="404 X"), ProtocolMismatch),
        (answer({"error": "since"}, status="400 X"), Validation),
        (answer({"error": {"message": "gone", "kind": "peer_lost"}}, status="500 X"), PeerLost),
        (http(b'{"seq":1}\n', length=100), PeerLost),
    ],
)
@pytest.mark.asyncio
async def test_odd_event_streams(reply, kind):
    async with serving(reply) as wire:
        with pytest.raises(kind) as caught:
            async for _ in HTTPVLLMWeightSyncClient(wire.url).events():
                pass
    assert caught.value.replica == wire.url


# -- sessions --------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_scope_is_re_entrant_and_leaves_nothing():
    async with serving(answer(STARTED, extra="Connection: close\r\n")) as wire:
        client = HTTPVLLMWeightSyncClient(wire.url)
        async with client:
            async with client:
                await client.start_weight_update()
            await client.start_weight_update()
            assert "users=1" in repr(client)
        assert "users=0" in repr(client)
    gc.collect()  # an unclosed session would warn here


@asynccontextmanager
async def keeping(replies: int):
    """A server that keeps each connection for so many replies; then it takes one more request."""
    connections: list[int] = []

    async def serve(reader, writer):
        number = len(connections)
        connections.append(0)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while connections[number] <= replies:
                await reader.readuntil(b"\r\n\r\n")
                connections[number] += 1
                if connections[number] <= replies:
                    writer.write(answer(STARTED))
                    await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections


@pytest.mark.asyncio
async def test_calls_of_a_scope_share_a_connection_and_no_other_does():
    async with keeping(3) as (url, connections):
        client = HTTPVLLMWeightSyncClient(url)
        async with client:
            for _ in range(3):
                await client.start_weight_update()
        async with client:
            await client.start_weight_update()
        assert connections == [3, 1]


@pytest.mark.asyncio
async def test_a_call_that_dies_on_a_kept_connection_is_not_sent_again():
    async with keeping(1) as (url, connections):
        async with HTTPVLLMWeightSyncClient(url) as client:
            await client.start_weight_update()
            with pytest.raises(PeerLost, match=r"start: .* the connection broke"):
                await client.start_weight_update()
        assert connections == [2]


@pytest.mark.asyncio
async def test_leaving_a_scope_does_not_cut_a_running_call():
    hold = asyncio.Event()
    async with serving(answer(STARTED), hold=hold) as wire:
        client = HTTPVLLMWeightSyncClient(wire.url)
        async with client:
            task = asyncio.create_task(client.start_weight_update())
            await wire.arrived.wait()
        hold.set()
        assert (await task).message == STARTED


@pytest.mark.asyncio
async def test_a_given_session_is_used_and_not_closed():
    async with serving(answer(STARTED)) as wire:
        async with aiohttp.ClientSession(headers={"X-Mine": "1"}) as session:
            client = HTTPVLLMWeightSyncClient(wire.url, session=session)
            async with client:
                await client.start_weight_update()
            assert not session.closed
        assert b"X-Mine: 1" in wire.heads[0]
        with pytest.raises(Validation, match=r"session .* is closed"):
            await client.start_weight_update()
        await pickle.loads(pickle.dumps(client)).start_weight_update()


def test_one_loop_after_another():
    clients: list[HTTPVLLMWeightSyncClient] = []

    async def once(*, scoped):
        async with serving(answer(STARTED)) as wire:
            if not clients:
                clients.append(HTTPVLLMWeightSyncClient(wire.url))
            client = clients[0]
            client._connections.endpoint = HTTPVLLMWeightSyncClient(wire.url)._connections.endpoint
            if scoped:
                async with client:
                    await client.start_weight_update()
            await client.start_weight_update()

    for scoped in (True, False, True):
        asyncio.run(once(scoped=scoped))
    gc.collect()


@pytest.mark.fault("A-HTTP-5")
@pytest.mark.asyncio
async def test_a_hundred_and_thirty_calls_stay_open_at_once():
    everybody = 130
    arrived = 0
    all_here = asyncio.Event()

    async def held(reader, writer):
        nonlocal arrived
        await reader.readuntil(b"\r\n\r\n")
        arrived += 1
        if arrived == everybody:
            all_here.set()
        await all_here.wait()
        writer.write(answer(STARTED, extra="Connection: close\r\n"))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(held, "127.0.0.1", 0, backlog=256) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with HTTPVLLMWeightSyncClient(url) as client:
            calls = [client.start_weight_update(timeout=20) for _ in range(everybody)]
            assert len(await asyncio.gather(*calls)) == everybody


# -- other people's clients ------------------------------------------------------------------------


class Blocking:
    name = "theirs"

    def __init__(self):
        self.calls = []

    def init_weight_transfer_engine(self, init_info):
        self.calls.append((init_info, threading.current_thread()))

    def start_weight_update(self):
        raise RuntimeError("not now")

    def update_weights(self, update_info):
        return {"got": update_info}

    def finish_weight_update(self, weight_version=None):
        async def later():
            return weight_version

        return later()

    async def capabilities(self):
        return Capabilities(features=["x"])


class Async:
    async def init_weight_transfer_engine(self, init_info): ...
    async def start_weight_update(self): ...
    async def update_weights(self, update_info): ...
    async def finish_weight_update(self, weight_version=None): ...


def test_async_clients_are_taken_as_they_are():
    client = Async()
    assert adapt_client(client) is client
    client.start_weight_update = functools.partial(client.start_weight_update)
    assert adapt_client(client) is client


def test_missing_methods_are_all_named():
    class Half:
        async def start_weight_update(self): ...

        update_weights = "not callable"

    with pytest.raises(TypeError, match="init_weight_transfer_engine, update_weights, finish"):
        adapt_client(Half())


@pytest.mark.asyncio
async def test_blocking_clients_run_beside_the_loop():
    theirs = Blocking()
    client = adapt_client(theirs)
    assert isinstance(client, VLLMWeightSyncClient)
    assert not isinstance(client, SupportsAbort)
    assert client.name == "theirs"
    await client.init_weight_transfer_engine({"a": 1})
    assert theirs.calls[0][0] == {"a": 1}
    assert theirs.calls[0][1] is not threading.current_thread()
    assert theirs.calls[0][1].daemon
    with pytest.raises(RuntimeError, match="not now"):
        await client.start_weight_update()
    assert await client.update_weights([{}]) == {"got": [{}]}
    assert await client.finish_weight_update("7") == "7"
    assert (await capabilities_of(client)).features == ["x"]
    assert await capabilities_of(Async()) == Capabilities()
    assert "Blocking" in repr(client)


@pytest.mark.fault("A-HTTP-5")
@pytest.mark.asyncio
async def test_an_abort_is_not_queued_behind_the_call_it_ends():
    released = threading.Event()

    class Theirs(Blocking):
        def update_weights(self, update_info):
            released.wait(20)
            return "released"

        def abort_weight_update(self, reason=""):
            released.set()

    client = sync_client(Theirs())
    assert isinstance(client, SupportsAbort)
    async with anyio.create_task_group() as group:
        group.start_soon(client.update_weights, {})
        await client.abort_weight_update()
    assert released.is_set()


@pytest.mark.asyncio
async def test_a_cancelled_blocking_call_lets_its_caller_go():
    released = threading.Event()

    class Theirs(Blocking):
        def start_weight_update(self):
            released.wait(20)

    with anyio.move_on_after(0.1) as scope:
        await sync_client(Theirs()).start_weight_update()
    assert scope.cancelled_caught
    released.set()


def test_an_adapted_client_can_be_pickled():
    client = pickle.loads(pickle.dumps(sync_client(Blocking())))
    assert isinstance(client, VLLMWeightSyncClient)
    assert client.client.calls == []
