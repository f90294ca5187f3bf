"""The same worker behind every host: same replies, driven by a blocking client of vLLM's kind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
from by_hand import ByHand, tensors, values
from hosts import HOSTS, KEY, hosting
from plain_vllm import TIMEOUT, PlainClient

import aiosync
from aiosync import RoundHeader

every_host = pytest.mark.parametrize("kind", HOSTS)


def make_engine(sink="staged", **options):
    config = aiosync.WeightTransferConfig("by_hand", sink=sink)
    engine = ByHand(config, None, "cpu", tensors(), name="replica", **options)
    # Random, and of the clock, otherwise: replies are compared.
    engine.incarnation, engine.cycle.ownership.epoch = "one", 0
    return engine


@contextmanager
def replica(kind, engine=None, headers=None, **options):
    engine = engine or make_engine()
    with (
        hosting(kind, engine, **options) as host,
        PlainClient(host.url, **(headers or {})) as plain,
    ):
        try:
            yield engine, host, plain
        finally:
            host.call(engine.aclose)


@every_host
def test_a_whole_round_as_vllms_blocking_client_drives_it(kind):
    with replica(kind) as (engine, _, plain):
        engine.set_draft_model(tensors())
        plain.get("health")
        assert plain.get("get_world_size") == {**plain.get("get_world_size"), "world_size": 1}
        assert plain.get("get_world_size", include_dp="false")["world_size"] == 1
        assert plain.get("weight_info")["weight_version"] == "default"
        answers = [
            plain.init_weight_transfer_engine({"address": "here"}),
            plain.post("pause", mode="keep", clear_cache="false"),
            plain.start_weight_update(),
            plain.update_weights([{"value": 2.0}]),
            plain.finish_weight_update("step-1"),
            plain.post("resume"),
        ]
        said = [answer.get("message") or answer["status"] for answer in answers]
        assert said == [
            "Weight transfer initialized", "paused", "Weight update started", "Weights updated",
            "Weight update finished", "resumed",
        ]  # fmt: skip
        assert answers[-1]["is_paused"] is False
        assert values(engine.model) == {2.0}
        assert plain.get("weight_info")["weight_version"] == "step-1"
        # a round without a version, labelled afterwards
        plain.start_weight_update()
        plain.update_weights({"value": 3.0})
        plain.finish_weight_update()
        answer = plain.post("update_weight_version", {"new_version": "step-2"})
        assert (answer["success"], answer["new_version"]) == (True, "step-2")
        assert plain.get("weight_info")["weight_version"] == "step-2"
        # the draft
        said = plain.post("start_draft_weight_update")["message"]
        assert said == "Draft weight update started"
        plain.update_weights({"value": 9.0})
        plain.finish_weight_update("draft-1")
        assert values(engine.draft_model) == {9.0}
        assert values(engine.model) == {3.0}
        assert plain.get("weight_info")["weight_version"] == "step-2"
        # checks
        sums = plain.post("weight_checker", {"action": "checksum"})["checksums"]
        answer = plain.post("weight_checker", {"action": "compare", "baseline": sums})
        assert (answer["match"], answer["mismatches"]) == (True, [])
        assert plain.post("abort_requests", {})["aborted"] == 0
        assert plain.shutdown_weight_transfer_engine()["message"] == "Weight transfer shut down"
        assert plain.shutdown_weight_transfer_engine()["message"] == "Weight transfer shut down"


# What each host must answer in the same words: (method, route, body, query, headers).
EXCHANGES = [
    ("GET", "health", None, {}, {}),
    ("GET", "ready", None, {}, {}),
    ("GET", "nowhere", None, {}, {}),
    ("GET", "pause", None, {}, {}),
    ("POST", "ready", {}, {}, {}),
    ("POST", "pause", None, {"mode": "stop"}, {}),
    ("POST", "pause", None, {"clear_cache": "perhaps"}, {}),
    ("POST", "pause", {"mode": "keep"}, {}, {}),
    ("POST", "abort_requests", None, {}, {}),
    ("POST", "abort_requests", {"request_ids": ["x", 3]}, {}, {}),
    ("POST", "init_weight_transfer_engine", {"init_info": {"port": 1}}, {}, {}),
    ("POST", "init_weight_transfer_engine", b"{", {}, {}),
    ("POST", "init_weight_transfer_engine", b"x" * 70_000, {}, {"content-type": "text/plain"}),
    ("POST", "start_weight_update", {"pad": "x" * 70_000}, {}, {}),
    ("POST", "start_weight_update", None, {}, {}),
    ("POST", "update_weights", {"update_info": 3}, {}, {}),
    ("POST", "update_weights", {"update_info": {"ipc_handles_pickled": "gA=="}}, {}, {}),
    ("POST", "finish_weight_update", {"weight_version": 7}, {}, {}),
    ("POST", "update_weight_version", {"new_version": 7}, {}, {}),
    ("POST", "weight_checker", {"action": "compare"}, {}, {}),
    ("POST", "start_draft_weight_update", None, {}, {}),
    ("GET", "get_world_size", None, {"include_dp": "maybe"}, {}),
    ("GET", "weight_info", None, {}, {"accept": "application/msgpack"}),
    ("POST", "start_weight_update", b"{}", {}, {"content-encoding": "gzip"}),
    ("GET", "weight_update_status", None, {"owner": "o", "epoch": "x"}, {}),
    ("GET", "metrics", None, {}, {}),
    ("GET", "is_paused", None, {}, {}),
]  # fmt: skip
HEADERS = ("content-type", "allow", "www-authenticate", "x-request-id", "cache-control")


def ask(base, exchange, token=None):
    method, route, body, query, headers = exchange
    headers = {**headers, "x-request-id": "r-1"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
    with requests.Session() as session:
        session.trust_env = False
        answer = session.request(
            method, f"{base}/{route}", data=data, params=query, headers=headers, timeout=TIMEOUT
        )
    shown = {name: answer.headers.get(name) for name in HEADERS}
    return answer.status_code, shown, answer.content


@pytest.fixture(scope="module")
def expected():
    """The stand-alone server's answers."""
    with replica("stand-alone", token="secret") as (_, host, _plain):
        return [ask(host.url, exchange, "secret") for exchange in EXCHANGES]


@pytest.mark.parametrize("kind", HOSTS[1:])
def test_every_host_answers_in_the_same_words(kind, expected):
    statuses = {status for status, _, _ in expected}
    assert {200, 400, 404, 405, 409, 413} <= statuses, statuses
    assert 500 not in statuses
    with replica(kind, token="secret") as (_, host, _plain):
        for exchange, wanted in zip(EXCHANGES, expected, strict=True):
            if kind == "aiohttp" and exchange[1] == "nowhere":
                continue  # unknown paths are the application's own affair
            assert ask(host.url, exchange, "secret") == wanted, exchange
        for token in (None, "wrong"):
            status, shown, text = ask(host.url, EXCHANGES[1], token)
            assert (status, shown["www-authenticate"]) == (401, "Bearer")
            assert b"aiosync" not in text  # a stranger learns nothing
        assert ask(host.url, EXCHANGES[0])[0] == 200


@every_host
def test_generation_is_refused_while_paused_and_the_reply_says_so(kind):
    with replica(kind) as (engine, host, plain):
        plain.post("pause")

        async def generate():
            async with engine.generation.request():
                pass

        with pytest.raises(aiosync.Paused):
            host.call(generate)
        assert plain.get("is_paused")["is_paused"] is True
        answer = plain.raw("GET", "ready")
        assert answer.status_code == 503
        assert answer.json()["reasons"] == ["generation is paused (a client without a name)"]
        plain.post("resume")
        host.call(generate)
        assert plain.get("ready")["ready"] is True


@every_host
def test_an_owned_worker_is_not_shut_down_by_a_bare_call(kind):
    with replica(kind) as (engine, host, plain):
        header = RoundHeader(owner="trainer")

        async def own():
            await engine.init_transfer_engine({}, header=header)

        host.call(own)
        for route in ("shutdown_weight_transfer_engine", "start_weight_update",
                      "abort_weight_update", "prepare_weight_update"):  # fmt: skip
            answer = plain.raw("POST", route)
            assert (answer.status_code, answer.json()["error"]["kind"]) == (409, "fenced"), route
        body = {"weight_version": None}
        assert plain.raw("POST", "finish_weight_update", body).status_code == 409
        assert plain.raw("POST", "weight_checker", {"action": "reset"}).status_code == 409
        assert engine.state == "initialized"
        owned = {"aiosync": {"owner": "trainer", "epoch": engine.cycle.ownership.epoch}}
        plain.post("shutdown_weight_transfer_engine", owned)
        assert engine.state == "idle"


@every_host
def test_a_body_without_a_length_is_read_up_to_the_limit_only(kind):
    def parts():
        for _ in range(40):
            yield b" " * 4096

    with replica(kind) as (engine, host, _):
        with requests.Session() as session:
            session.trust_env = False
            url = f"{host.url}/start_weight_update"
            try:
                answer = session.post(url, data=parts(), timeout=TIMEOUT)
            except requests.ConnectionError:
                return  # it hung up on the rest of the body, as it may
        assert answer.status_code == 413
        assert engine.steps == []


@every_host
def test_events_stream_through_every_host(kind):
    with replica(kind) as (_, host, plain):
        plain.init_weight_transfer_engine({})
        url = f"{host.url}/events?since=0"
        with requests.get(url, stream=True, timeout=TIMEOUT) as answer:
            assert answer.headers["content-type"] == "application/x-ndjson"
            first = json.loads(next(answer.iter_lines()))
            assert (first["trigger"], first["seq"]) == ("initialize", 1)
        plain.post("pause")
        url = f"{host.url}/events?since=0&of=generation"
        with requests.get(url, stream=True, timeout=TIMEOUT) as answer:
            lines = answer.iter_lines()
            assert [json.loads(next(lines))["dest"] for _ in range(2)] == ["pausing", "paused"]
        assert plain.raw("GET", "events", of="nothing").status_code == 400


@every_host
def test_stopping_the_host_during_a_round_ends_the_round_with_the_weights_intact(kind):
    engine = make_engine()
    failed = []

    def update(plain):
        try:
            failed.append(plain.raw("POST", "update_weights", {"update_info": {"value": 1.0}}))
        except requests.RequestException as error:  # the host may cut the connection
            failed.append(error)

    engine.hold("update")
    with hosting(kind, engine) as host, PlainClient(host.url) as plain:
        plain.init_weight_transfer_engine({})
        plain.start_weight_update()
        thread = threading.Thread(target=update, args=(plain,), daemon=True)
        thread.start()
        host.call(engine.reached["update"].wait)
    thread.join(20)
    assert len(failed) == 1
    assert "the server is closing" in str(engine.cycle.ownership.outcome)
    assert (engine.state, engine.weights, values(engine.model)) == ("initialized", "intact", {0.0})
    if isinstance(failed[0], requests.Response):
        assert failed[0].status_code == 500


def test_a_hosts_middleware_and_authorisation_apply():
    with replica("fastapi", key="k", headers={KEY: "k"}) as (engine, host, plain):
        assert plain.get("own") == {"host": "fastapi"}
        answer = plain.raw("POST", "init_weight_transfer_engine", {"init_info": {}})
        assert (answer.status_code, answer.headers["x-host"]) == (200, "fastapi")
        with PlainClient(host.url) as stranger:
            answer = stranger.raw("POST", "start_weight_update")
            assert (answer.status_code, answer.json()) == (401, {"detail": "who are you"})
        assert engine.state == "initialized"


# -- several API processes -------------------------------------------------------------------------

APP = """
import aiosync
from by_hand import ByHand, tensors
from hosts import fastapi_app

config = aiosync.WeightTransferConfig("by_hand")
engine = ByHand(config, None, "cpu", tensors(), name="replica")
app = fastapi_app(aiosync.WeightUpdateService(engine))
"""


@pytest.mark.slow
def test_a_second_api_process_refuses_to_start_and_says_why(tmp_path):
    (tmp_path / "served_app.py").write_text(APP)
    paths = [str(tmp_path), str(Path(__file__).with_name("support")), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "uvicorn", "served_app:app", "--workers", "2", "--port", "0"]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    seen = []

    def read():
        seen.extend(process.stdout)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    deadline = time.monotonic() + 50
    try:
        while time.monotonic() < deadline:
            if any("run one API process" in line or "serves 127.0.0.1" in line for line in seen):
                break
            time.sleep(0.05)
        else:
            pytest.fail("".join(seen))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(10)
        process.stdout.close()
