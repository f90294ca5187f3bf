"""Who may drive a worker, how much they may send, and what is written down about it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
import subprocess

import aiohttp
import pytest
from by_hand import ByHand, by_hand, tensors

import aiosync
from aiosync.defaults import DEFAULTS
from aiosync.server import WeightUpdateService, serve

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in ("AIOSYNC_TOKEN", "AIOSYNC_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


async def test_outside_loopback_the_environment_may_give_the_token(monkeypatch, tmp_path):
    token = secrets.token_urlsafe(32)
    async with by_hand() as engine:
        with pytest.raises(aiosync.Validation, match="a token is needed") as caught:
            async with serve(engine, host="0.0.0.0"):
                pytest.fail("started")
        assert "AIOSYNC_TOKEN" in caught.value.next_step
        file = tmp_path / "token"
        file.write_text(token + "\n")
        for name, value in (("AIOSYNC_TOKEN", token), ("AIOSYNC_TOKEN_FILE", str(file))):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                async with serve(engine, host="0.0.0.0", advertise="127.0.0.1") as server:
                    with pytest.raises(aiosync.Unauthorized):
                        await aiosync.HTTPVLLMWeightSyncClient(server.url).ready()
                    client = aiosync.HTTPVLLMWeightSyncClient(server.url, token=token)
                    assert (await client.ready()).ready
                async with serve(engine, port=0) as server:  # on loopback it is not asked for
                    assert (await aiosync.HTTPVLLMWeightSyncClient(server.url).ready()).ready
        monkeypatch.setenv("AIOSYNC_TOKEN", "two words")
        with pytest.raises(aiosync.Validation, match="printable ASCII") as caught:
            async with serve(engine, host="0.0.0.0"):
                pytest.fail("started")
        assert "two words" not in str(caught.value)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
               "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
               "-keyout", str(key), "-out", str(cert)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


async def test_tls(certificate, blocking_detector):
    cert, key = certificate
    async with by_hand() as engine:
        async with serve(engine, port=0, certfile=cert, keyfile=key) as server:
            assert server.url.startswith("https://127.0.0.1:")
            blocking_detector.deactivate()
            trust = ssl.create_default_context(cafile=str(cert))
            connector = aiohttp.TCPConnector(ssl=trust)
            async with aiohttp.ClientSession(connector=connector) as session:
                client = aiosync.HTTPVLLMWeightSyncClient(server.url, session=session)
                await client.init_weight_transfer_engine({"address": "here"})
                assert (await client.weight_update_status()).peer.state == "initialized"
            with pytest.raises(aiosync.PeerLost):  # a certificate nobody vouches for
                await aiosync.HTTPVLLMWeightSyncClient(server.url).ready()
        for wrong, text in (
            ({"port": 0, "certfile": key}, "certfile"),
            ({"port": 0, "certfile": cert.with_name("none.pem")}, "none.pem"),
            ({"port": 0, "keyfile": key}, "keyfile needs a certfile"),
            ({"certfile": cert, "keyfile": key}, "for TCP"),
        ):
            with pytest.raises(aiosync.Validation, match=text):
                async with serve(engine, **wrong):
                    pytest.fail("started")


async def test_no_token_reaches_a_log_at_any_level(caplog):
    caplog.set_level(logging.DEBUG)
    right, wrong = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    told = []
    async with by_hand() as engine:
        async with serve(engine, port=0, token=right) as server:
            for token in (right, wrong):
                client = aiosync.HTTPVLLMWeightSyncClient(server.url, token=token)
                for call in (
                    client.init_weight_transfer_engine({"address": "here"}),
                    client.init_weight_transfer_engine({"port": 3}),
                    client.start_weight_update(),
                    client.update_weights({"value": 1.0, "fail_at": 2}),
                    client.ready(),
                ):
                    try:
                        await call
                    except aiosync.AiosyncError as error:
                        told.append(f"{error!r} {error} {error.detail}")
                told.append(repr(client))
            assert right not in f"{server!r} {server.service!r}"
            async with aiohttp.ClientSession() as session:
                headers = {"Authorization": f"Basic {right}", "X-Request-Id": "a b\tc"}
                async with session.get(f"{server.url}/ready", headers=headers) as answer:
                    assert answer.status == 401
                    assert answer.headers["X-Request-Id"] != headers["X-Request-Id"]
    assert len(told) > 5
    written = (
        "".join(told) + caplog.text + "".join(str(record.__dict__) for record in caplog.records)
    )
    assert right not in written
    assert wrong not in written
    assert "a b\tc" not in written
    assert "request " in caplog.text  # it did look at something


async def test_without_the_token_no_route_does_anything():
    token = secrets.token_urlsafe(32)
    async with by_hand() as engine:
        service = WeightUpdateService(engine, token=token)
        seen = []
        engine.on_transition(seen.append)
        for sent in (None, "Bearer", f"Bearer {secrets.token_urlsafe(32)}", f"Bearer {token[:-1]}",
                     f"Bearer {token}x", f"Basic {token}", token):  # fmt: skip
            headers = {} if sent is None else {"Authorization": sent}
            for path in service.paths:
                if path != "/health":
                    method = service._routes[path].verb
                    answer = await service.dispatch(method, path, {}, headers, b"{}")
                    assert answer.status == 401, (path, sent)
                    assert token not in answer.body.decode()
        assert not seen
        assert not await engine.is_paused()
        headers = {"Authorization": f"Bearer {token}"}
        answer = await service.dispatch("GET", "/ready", {}, headers, b"")
        assert answer.status == 200


async def test_request_ids_tie_an_answer_to_what_was_logged(caplog):
    caplog.set_level(logging.DEBUG, "aiosync.service")
    async with by_hand() as engine:
        service = WeightUpdateService(engine)
        answer = await service.dispatch("GET", "/ready", {}, {"X-Request-Id": "abc-1"}, b"")
        assert answer.headers["X-Request-Id"] == "abc-1"
        assert "GET '/ready' answered 200, request abc-1" in caplog.text
        engine.errors["start"] = KeyError("layer")
        await engine.init_transfer_engine({})
        answer = await service.dispatch("POST", "/start_weight_update", {}, {}, b"")
        assert answer.status == 500
        assert f"a request failed ({answer.headers['X-Request-Id']})" in caplog.text
        for path in ("/a\nb", "/" + "x" * 5000):
            answer = await service.dispatch("GET", path, {}, {}, b"")
            assert answer.status == 404
            assert len(answer.body) < 2000
        assert "/a\nb" not in caplog.text


SMALL = [
    "shutdown_weight_transfer_engine", "start_weight_update", "start_draft_weight_update",
    "prepare_weight_update", "finish_weight_update", "abort_weight_update", "pause", "resume",
    "update_weight_version",
]  # fmt: skip


async def test_every_route_has_a_limit_of_its_own():
    async with by_hand() as engine:
        service = WeightUpdateService(engine)
        limits = {path: service.limit_of(path) for path in service.paths}
        assert {limits[f"/{name}"] for name in SMALL} == {DEFAULTS.small_body_bytes}
        assert limits["/update_weights"] == DEFAULTS.body_limit_bytes
        for path, limit in limits.items():
            headers = {"content-length": str(limit + 1)}
            method = service._routes[path].verb
            answer = await service.dispatch(method, path, {}, headers, b"")
            assert answer.status == 413, path
            assert str(limit) in answer.body.decode()


async def test_fifty_thousand_parameters_fit():
    count = 50_000
    payload = {
        "names": [f"model.layers.{n // 400}.mlp.experts.{n % 400}.weight" for n in range(count)],
        "dtype_names": ["bfloat16"] * count,
        "shapes": [[4096, 14336]] * count,
        "value": 1.0,
    }  # fmt: skip
    seen = []

    class Counting(ByHand):
        def parse_update_info(self, update_info):
            seen.append(len(update_info["names"]))
            return super().parse_update_info({"value": update_info["value"]})

    config = aiosync.WeightTransferConfig("by_hand")
    async with Counting(config, None, "cpu", tensors()) as engine, serve(engine, port=0) as server:
        client = aiosync.HTTPVLLMWeightSyncClient(server.url)
        await client.init_weight_transfer_engine({})
        await client.start_weight_update()
        await client.update_weights(payload)
        await client.finish_weight_update("1")
    assert seen == [count]


async def test_deep_and_odd_bodies_are_refused_by_the_path_of_the_field():
    async with by_hand() as engine:
        service = WeightUpdateService(engine)
        for route, body, at in (
            ("pause", b"[" * 1000 + b"]" * 1000, None),
            ("abort_requests", b'{"request_ids": ["a", 1]}', "$.request_ids[1]"),
            ("update_weight_version", b'{"new_version": null}', "$.new_version"),
            ("weight_checker", b'{"action": "compare", "baseline": {"a": 1}}', "$.baseline[...]"),
            ("pause", b'{"mode": "keep"}', "$.mode"),
            ("resume", b'{"aiosync": {"owner": "a", "target": {"kind": "x"}}}',
             "$.aiosync.target.kind"),
        ):  # fmt: skip
            answer = await service.dispatch("POST", f"/{route}", {}, {}, body)
            assert answer.status == 400, (route, answer.body)
            if at is not None:
                assert at in answer.body.decode(), (route, answer.body)
        assert engine.state == "idle"
        assert engine.generation.state == "running"


async def test_a_page_of_another_site_drives_nothing():
    async with by_hand() as engine:
        service = WeightUpdateService(engine)
        headers = {"Origin": "http://evil.example"}
        for path in service.paths:
            if path != "/health":
                method = service._routes[path].verb
                answer = await service.dispatch(method, path, {}, headers, b"{}")
                assert answer.status == 401, path
        await asyncio.sleep(0)
        assert not await engine.is_paused()
