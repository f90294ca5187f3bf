"""Random calls to a worker's routes, and what must hold after each of them.

``python route_fuzz.py SECONDS [SEED]`` runs it by itself and prints the seed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
import time
from collections import Counter
from typing import Any

import msgspec
from by_hand import ByHand, tensors
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import aiosync

CALL_SECONDS = 5
SEEN: Counter[tuple[str, int]] = Counter()
"""Routes and statuses that were met, to see how far the calls reach."""
ROUTES = (
    "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update",
    "/start_draft_weight_update", "/update_weights", "/prepare_weight_update",
    "/finish_weight_update", "/abort_weight_update", "/weight_update_status", "/health", "/ready",
    "/metrics", "/pause", "/resume", "/is_paused", "/abort_requests", "/update_weight_version",
    "/weight_info", "/weight_checker", "/get_world_size", "/nowhere", "/",
)  # fmt: skip

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.sampled_from(["", "keep", "wait", "abort", "1", "7", "default", "checksum", "compare"]),
)  # fmt: skip
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)
versions = st.fixed_dictionaries(
    {"label": st.integers(0, 3) | st.text(max_size=3), "lineage": st.sampled_from(["run", "x", ""]),
     "order": st.integers(-1, 3)}
)  # fmt: skip
targets = st.one_of(
    st.none(), st.just({"kind": "draft"}), st.just({"kind": "model"}),
    st.just({"kind": "adapter", "name": "a"}), anything,
)  # fmt: skip
headers_of_rounds = st.fixed_dictionaries(
    {"owner": st.sampled_from(["a", "b"]) | scalars},
    optional={
        "protocol": st.sampled_from([1, 1, 1, 2]) | scalars,
        "epoch": st.integers(0, 3) | scalars,
        "round": st.integers(0, 4) | scalars,
        "version": versions | scalars,
        "target": targets,
        "lease_s": st.sampled_from([0.5, 5.0]) | scalars,
        "rollback": st.booleans(),
        "extra": scalars,
    },
)
round_headers = st.none() | headers_of_rounds | anything
updates = st.fixed_dictionaries({"value": st.floats(0, 9)}) | anything
bodies = st.fixed_dictionaries(
    {},
    optional={
        "aiosync": round_headers,
        "init_info": st.just({"address": "here"}) | st.just({}) | anything,
        "update_info": updates | st.lists(updates, max_size=3),
        "weight_version": st.text(max_size=4) | scalars,
        "new_version": st.text(max_size=4) | scalars,
        "reason": st.text(max_size=9) | scalars,
        "action": st.sampled_from(["checksum", "compare", "reset"]) | scalars,
        "baseline": st.dictionaries(st.text(max_size=4), st.text(max_size=4)) | anything,
        "request_ids": st.lists(st.text(max_size=4), max_size=3) | anything,
        "names": anything,
        "mode": st.none() | scalars,
    },
)
queries = st.dictionaries(
    st.sampled_from(["mode", "clear_cache", "include_dp", "owner", "epoch", "round", "since"]),
    st.sampled_from(["keep", "wait", "abort", "true", "false", "1", "a", "", "²"])
    | st.text(max_size=20),
    max_size=3,
)
raw_bodies = st.one_of(
    st.binary(max_size=50), st.just(b""), st.just(b"[" * 5000), st.just(b'{"a":' * 3000),
    st.just(b'{"init_info":{"a":1e999}}'), st.just(b"\xff\xfe{}"),
)  # fmt: skip
extra_headers = st.dictionaries(
    st.sampled_from(["content-type", "accept", "content-encoding", "content-length", "origin",
                     "x-request-id", "authorization"]),
    st.sampled_from(["application/json", "application/msgpack", "text/html", "gzip", "9" * 30, "-1",
                     "a\nb"]) | st.text(max_size=10),
    max_size=2,
)  # fmt: skip


_MINE = {"owner": "a", "epoch": 1}
# Calls that are right in some state, so that random ones meet every state.
USUAL: list[tuple[str, dict[str, str], Any]] = [
    ("/init_weight_transfer_engine", {}, {"init_info": {}}),
    ("/init_weight_transfer_engine", {}, {"init_info": {}, "aiosync": {"owner": "a"}}),
    ("/start_weight_update", {}, None),
    ("/start_draft_weight_update", {}, None),
    ("/update_weights", {}, {"update_info": {"value": 1.0}}),
    ("/update_weights", {}, {"update_info": {"value": 1.0, "fail_at": 2}}),
    ("/prepare_weight_update", {}, None),
    ("/finish_weight_update", {}, {"weight_version": "v"}),
    ("/finish_weight_update", {}, None),
    ("/abort_weight_update", {}, None),
    ("/shutdown_weight_transfer_engine", {}, None),
    ("/pause", {"mode": "keep"}, None),
    ("/pause", {}, {"aiosync": _MINE}),
    ("/resume", {}, None),
    ("/resume", {}, {"aiosync": _MINE}),
    ("/weight_checker", {}, {"action": "reset"}),
    ("/update_weight_version", {}, {"new_version": "w"}),
    *(
        (route, {}, {"aiosync": {**_MINE, "round": number, **extra}, **more})
        for number in (1, 2)
        for route, extra, more in (
            ("/start_weight_update", {"version": {"label": number, "lineage": "r",
                                                  "order": number}}, {}),
            ("/update_weights", {}, {"update_info": {"value": 1.0}}),
            ("/finish_weight_update", {}, {}),
        )
    ),
]  # fmt: skip


def _usual(chosen: tuple[str, dict[str, str], Any]) -> tuple[Any, ...]:
    route, query, body = chosen
    return "POST", route, query, {}, b"" if body is None else json.dumps(body).encode()


def usual_calls() -> st.SearchStrategy[Any]:
    return st.sampled_from(USUAL).map(_usual)


def beginnings() -> st.SearchStrategy[Any]:
    """The first calls of a round as it should be, up to some point."""
    bare = [USUAL[0], USUAL[2], USUAL[4], USUAL[6], USUAL[7]]
    draft = [USUAL[0], USUAL[3], USUAL[4], USUAL[7]]
    owned = [USUAL[1], *USUAL[-6:-3]]
    whole = st.sampled_from([bare, draft, owned])
    return st.tuples(whole, st.integers(0, 5)).map(
        lambda chosen: [_usual(call) for call in chosen[0][: chosen[1]]]
    )


@st.composite
def calls(draw: Any) -> tuple[str, str, dict[str, str], dict[str, str], bytes]:
    route = draw(st.sampled_from(ROUTES))
    asks = route in ("/weight_update_status", "/health", "/ready", "/metrics", "/is_paused",
                     "/weight_info", "/get_world_size")  # fmt: skip
    usual = "GET" if asks else "POST"
    method = draw(st.sampled_from([usual] * 8 + ["GET", "POST", "PUT", "X" * 300]))
    headers = draw(st.just({}) | extra_headers)
    shape = draw(st.integers(0, 9))
    if shape == 0:
        body = draw(raw_bodies)
    elif shape == 1:
        content = draw(bodies)
        try:
            body = msgspec.msgpack.encode(content)
        except OverflowError:  # msgpack has no such integer
            body = msgspec.msgpack.encode(str(content))
        headers = {**headers, "content-type": "application/msgpack"}
    else:
        body = json.dumps(draw(bodies)).encode("utf-8", "surrogatepass")
    query = draw(st.just({}) | queries)
    return method, route, query, headers, body


def snapshot(engine: Any) -> tuple[Any, ...]:
    """What a refused call must leave alone."""
    ownership = engine.cycle.ownership
    return (
        engine.state, engine.machine.seq, engine.weights, engine.version,
        dict(engine.target_versions), ownership.owner, ownership.epoch, ownership.last_round,
        engine.model is engine._default_model, engine.generation.state,
        [str(hold) for hold in engine.generation.holds],
    )  # fmt: skip


def _is_legitimate(status: int, answer: dict[str, Any]) -> bool:
    """A 5xx needs a cause that the call itself can have."""
    error = answer.get("error", {})
    return {
        503: "ready" in answer or error.get("kind") in ("torn", "paused"),
        # The round was given up, or the payload told the engine to fail.
        500: error.get("kind") in ("round_cancelled", "phase_timeout")
        or "cannot read tensor" in error.get("message", ""),
    }.get(status, False)


def _decoded(response: Any) -> dict[str, Any]:
    kind = response.content_type
    if kind == "application/json":
        return json.loads(response.body)
    return msgspec.msgpack.decode(response.body) if kind == "application/msgpack" else {}


class Fuzzed(ByHand):
    one_update = True


async def _drive(sequence: list[Any]) -> None:
    config = aiosync.WeightTransferConfig("by_hand", lease_s=5.0)
    engine = Fuzzed(config, None, "cpu", tensors(), name="fuzzed")
    engine.set_draft_model(tensors())
    engine.cycle.ownership.epoch = 0  # so that calls can guess the next one
    service = aiosync.WeightUpdateService(engine)
    try:
        for method, route, query, headers, body in sequence:
            before = snapshot(engine)
            async with asyncio.timeout(CALL_SECONDS):
                response = await service.dispatch(method, route, query, headers, body)
            SEEN[route, response.status] += 1
            what = (method, route, query, headers, body[:200], response.status, response.body[:300])
            answer = _decoded(response)
            if response.status >= 500:
                assert _is_legitimate(response.status, answer), what
            error = answer.get("error", {})
            # "coverage" is no refusal but a verdict: the round brought too little, and is over.
            if 400 <= response.status < 500 and error.get("kind") != "coverage":
                assert error.get("message"), what
                assert snapshot(engine) == before, what
    finally:
        async with asyncio.timeout(CALL_SECONDS):
            await engine.aclose()
    own = engine.model is engine._default_model
    assert own
    assert engine.state == "closed"


def fuzz(seconds: float, number: int) -> int:
    """Run sequences of calls until the time is over; how many."""
    done = 0
    deadline = time.monotonic() + seconds

    @seed(number)
    @settings(
        max_examples=10**9,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(beginnings(), st.lists(usual_calls() | calls(), min_size=1, max_size=30))
    def run(beginning: list[Any], sequence: list[Any]) -> None:
        nonlocal done
        if time.monotonic() > deadline:
            raise _TimeIsUp
        done += 1
        asyncio.run(_drive([*beginning, *sequence]))

    logging.disable(logging.CRITICAL)
    try:
        run()
    except _TimeIsUp:
        pass
    finally:
        logging.disable(logging.NOTSET)
    return done


class _TimeIsUp(BaseException):
    pass


if __name__ == "__main__":
    chosen = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(2**32)
    print(f"seed {chosen}", flush=True)
    print(f"{fuzz(float(sys.argv[1]), chosen)} sequences, {sum(SEEN.values())} calls")
    for (route, status), count in sorted(SEEN.items()):
        print(f"  {count:6} {status} {route!a}")
