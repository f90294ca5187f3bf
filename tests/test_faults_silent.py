"""Faults that look like success, or leave a state behind (docs/faults.md)."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import AsyncExitStack

import models
import pytest
import torch
from aiohttp import web
from fault_rig import (
    BACKENDS,
    BUDGET,
    assert_new_trainer_works,
    assert_round_works,
    bounded,
    paced,
    replicas,
    until,
    wired,
)
from looped import looped
from paced import Hold
from processes import program, replica
from proxy import proxy

import aiosync
from aiosync import State
from aiosync.testing import DirectClient
from transports.loopback import Fault, LoopbackLink

pytestmark = pytest.mark.asyncio

# -- SILENT ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_silent_1_there_and_back_again(backend):
    source = paced(kind="odd")
    first = {name: p.detach().clone() for name, p in source.module.named_parameters()}
    print_a = models.fingerprint(source.module)
    async with replicas(1, backend, kind="odd") as (worker,):
        async with aiosync.connect(source, workers=[worker.url], **wired(backend)) as sync:
            await sync.send_weights(version=1, timeout=20)
            assert (await worker.facts())["prints"] == print_a
            with torch.no_grad():
                for parameter in source.module.parameters():
                    parameter.copy_(torch.ones_like(parameter))
            await sync.send_weights(version=2, timeout=20)
            assert (await worker.facts())["prints"] == models.fingerprint(source.module)
            with torch.no_grad():
                for name, parameter in source.module.named_parameters():
                    parameter.copy_(first[name])
            await sync.send_weights(version=3, timeout=20)
            assert (await worker.facts())["prints"] == print_a


@pytest.mark.parametrize("verify", ["digest", "counts"])
@pytest.mark.parametrize("sink", ["staged", "in_place", "layerwise"])
async def test_a_silent_1_every_payload_is_dropped(sink, verify):
    async with looped(initialized=False) as pair:
        chunks = pair.chunks()
    script = {"sender": [Fault.drop(n, round=1) for n in range(chunks)]}
    async with looped(script=script, sink=sink, verify=verify) as pair:
        with pytest.raises(aiosync.AiosyncError):
            await pair.trainer.send_weights(version=1, budget=BUDGET)
        assert pair.worker.version is None
        await pair.assert_next_round_works(1)


DENIALS = [
    {"success": False, "message": "no memory"},
    {"success": "false", "message": "no memory"},
    {"success": 0, "message": "no memory"},
    {"message": "ok", "results": [{"ok": True}, {"ok": False, "message": "no memory"}]},
    {"message": "ok", "results": {"0": {"success": True}, "1": {"error": "no memory"}}},
    {"success": True, "results": [[{"success": False, "message": "no memory"}]]},
    {"success": True, "results": [True, False], "message": "no memory"},
    {"message": "Weights updated", "errors": ["rank 1: no memory"]},
    {"message": "Weights updated", "failed": ["no memory on w1"]},
    {"status": "error", "message": "no memory"},
    {"status": 500, "message": "no memory"},
    {"error": "no memory"},
    {"detail": "no memory"},
]
ODD = [{}, [], "done", None, {"success": None}, {"message": ""}, {"message": "skipped: no memory"}]


@pytest.mark.parametrize("body", DENIALS, ids=json.dumps)
async def test_a_silent_2_a_200_that_denies(body):
    with pytest.raises(aiosync.RemoteError, match="no memory") as caught:
        await answered(body)
    assert caught.value.phase == "update"


@pytest.mark.parametrize("body", ODD, ids=json.dumps)
async def test_a_silent_2_a_200_that_says_nothing(body):
    with pytest.raises(aiosync.AiosyncError) as caught:
        await answered(body)
    assert isinstance(caught.value, aiosync.ProtocolMismatch | aiosync.RemoteError)


async def answered(body):
    """What a client makes of a server that answers 200 and `body` to an update."""

    async def reply(_):
        return web.json_response(body)

    app = web.Application()
    app.add_routes([web.post("/update_weights", reply)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        await aiosync.HTTPVLLMWeightSyncClient(f"http://127.0.0.1:{port}").update_weights({})
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("route", ["update_weights", "finish_weight_update"])
async def test_a_silent_2_what_was_denied_is_sent_again(route):
    source = paced()
    async with replicas(2, "ipc") as workers, proxy(workers[1].url) as middle:
        urls = [workers[0].url, middle.url]
        async with aiosync.connect(source, workers=urls, **wired("ipc")) as sync:
            middle.answer(route, {"success": False, "message": "no memory"})
            with bounded(), pytest.raises(aiosync.RemoteError, match="no memory") as caught:
                await sync.send_weights(version=1, budget=BUDGET)
            assert caught.value.replica == middle.url
            assert (await workers[1].facts())["version"] is None
            assert sync.version is None
            middle.heal()
            await assert_round_works(sync, source, workers, 1)


async def test_a_silent_3_a_loader_that_fails_at_its_third_tensor():
    class Loader:
        def __init__(self):
            self.active, self.taken = True, []

        def load_weights(self, pairs):
            for name, _ in pairs:
                if self.active and len(self.taken) == 2:
                    raise OSError("cannot map the page")
                self.taken.append(name)

    loader, source = Loader(), {f"t{n}": torch.ones(32) for n in range(6)}
    module = torch.nn.ParameterDict({k: torch.nn.Parameter(v) for k, v in source.items()})
    config = aiosync.WeightTransferConfig("loopback", sink="in_place")
    with LoopbackLink() as link:
        async with aiosync.WeightTransferEngineFactory.create_engine(
            config, model=loader
        ) as worker:
            trainer = aiosync.LoopbackTrainerWeightTransferEngine(
                client=DirectClient(worker), source=module, link=link, buffer_size_bytes=128
            )
            async with trainer:
                with pytest.raises(aiosync.RemoteError, match="cannot map the page"):
                    await trainer.send_weights(version=1, budget=BUDGET)
                assert loader.taken == ["t0", "t1"]
                loader.active, loader.taken = False, []
                await trainer.send_weights(version=1, budget=BUDGET)
                assert loader.taken == list(source)


async def test_a_silent_3_replies_find_their_requests():
    async with replica(seed=2) as worker:
        async with aiosync.HTTPVLLMWeightSyncClient(worker.url) as client:
            asked = [
                coroutine
                for _ in range(10)
                for coroutine in (client.get_world_size(), client.ready(), client.weight_info())
            ]
            wrong = [client.update_weights({"names": []}) for _ in range(3)]
            got = await asyncio.gather(*asked, *wrong, return_exceptions=True)
        assert got[0:30:3] == [1] * 10
        assert all(ready.ready for ready in got[1:30:3])
        assert all("weight_version" in info.message for info in got[2:30:3])
        assert all(isinstance(error, aiosync.InvalidTransition) for error in got[30:])


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_silent_4_every_one_of_four_replicas_is_asked(backend):
    source = paced()
    async with replicas(4, backend) as workers:
        urls = [worker.url for worker in workers]
        async with aiosync.connect(source, workers=urls, **wired(backend)) as sync:
            await assert_round_works(sync, source, workers, 1)
            assert len(sync.last_report.members) == 4


# -- STATE -------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_busy", ["raise", "wait", "supersede"])
async def test_a_state_1_two_tasks_update_at_once(on_busy):
    async with looped() as pair:
        one = pair.trainer.send_weights(version=1, budget=BUDGET)
        two = pair.trainer.send_weights(version=2, budget=BUDGET, on_busy=on_busy)
        first, second = await asyncio.gather(one, two, return_exceptions=True)
        if on_busy == "raise":
            assert isinstance(second, aiosync.Busy)
            assert first.outcome == "committed"
        else:
            assert second.outcome == "committed"
            assert pair.worker.version.label == 2
        assert pair.is_equal()
        await pair.assert_next_round_works(3)


async def test_a_state_1_update_and_close_at_once():
    source = paced()
    async with replica(seed=2) as worker:
        old = await worker.facts()
        async with aiosync.connect(source, workers=[worker.url], **wired("ipc")) as sync:
            round_ = asyncio.create_task(sync.send_weights(version=1, budget=BUDGET))
            await asyncio.sleep(0)
            await sync.aclose()
            outcome = (await asyncio.gather(round_, return_exceptions=True))[0]
        facts = await worker.wait_state("idle", "initialized", "failed")
        new = models.fingerprint(source.module)
        assert facts["weights"] == "intact"
        done = not isinstance(outcome, BaseException)
        assert facts["prints"] == (new if done or facts["version"] else old["prints"])
        await assert_new_trainer_works([worker], "ipc", version=2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("route", "how"),
    [
        ("start_weight_update", "500"),
        ("start_weight_update", "lost"),
        ("update_weights", "500"),
        ("prepare_weight_update", "lost"),
        ("finish_weight_update", "500"),
        ("finish_weight_update", "lost"),
        ("finish_weight_update", "hang"),
    ],
)
async def test_a_state_2_a_new_trainer_after_a_failure_in_each_phase(route, how, backend):
    source = paced()
    async with replica(seed=2, backend=backend) as worker, proxy(worker.url) as middle:
        old = await worker.facts()

        async def soon():
            await asyncio.sleep(0.05)

        async with aiosync.connect(source, workers=[middle.url], **wired(backend)) as sync:
            middle.break_route(route, how, soon)
            budget = aiosync.Budget(total=8, finish=2, stall=4, cleanup=1)
            with bounded():
                try:
                    await sync.send_weights(version=1, budget=budget)
                except aiosync.AiosyncError as error:
                    said = error.report.members[0].outcome
                else:
                    said = "committed"
            facts = await worker.wait_state("initialized", "failed", "idle")
            new = facts["version"] == 1
            assert facts["prints"] == (models.fingerprint(source.module) if new else old["prints"])
            assert said in (("committed", "unknown") if new else ("failed", "unknown"))
            middle.heal()
        await assert_new_trainer_works([worker], backend)


async def test_a_state_2_the_trainer_dies_between_commit_and_reply():
    """What the worker holds is found out by asking, not by guessing."""
    async with replica(seed=2) as worker, proxy(worker.url) as middle:

        async def kill():
            await worker.wait_state("initialized")
            trainer.signal(signal.SIGKILL)

        middle.break_route("finish_weight_update", "lost", kill)
        async with program("trainer.py", middle.url) as trainer:
            await trainer.wait()
        status = await aiosync.HTTPVLLMWeightSyncClient(worker.url).capabilities()
        facts = await worker.facts()
        assert facts["version"] == 1
        assert status.peer.version.label == 1
        assert facts["prints"] == models.fingerprint(models.make("small", 7))
        await assert_new_trainer_works([worker], "ipc", version=1)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_state_4_finish_waits_for_the_slowest(backend):
    """A stopped worker acknowledges late; nobody is told to finish before it has."""
    import signal

    hold = Hold(3)
    source = paced(hold)
    async with replicas(2, backend) as workers, proxy(workers[0].url) as middle:
        urls = [middle.url, workers[1].url]
        async with aiosync.connect(source, workers=urls, **wired(backend)) as sync:
            round_ = asyncio.create_task(sync.send_weights(version=1, timeout=20))
            await until(hold.reached)
            workers[1].signal(signal.SIGSTOP)
            hold.released.set()
            await asyncio.sleep(0.3)
            assert "/prepare_weight_update" not in middle.calls
            assert "/finish_weight_update" not in middle.calls
            workers[1].signal(signal.SIGCONT)
            assert (await round_).outcome == "committed"
            await assert_round_works(sync, source, workers, 2)


class Net(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("fault", ["raises", "unknown dtype", "other shape", "unknown name"])
async def test_a_state_5_the_old_weights_still_compute(fault):
    new, old = Net(0.5), Net(0.25)
    script = {"receiver": [Fault.raises(1, OSError("cannot apply"))]} if fault == "raises" else None
    x = torch.ones(2, 4)
    before = old(x)
    if fault == "unknown dtype":
        new.layers[2].weight = torch.nn.Parameter(new.layers[2].weight.half())
    elif fault == "other shape":
        new.layers[2].bias = torch.nn.Parameter(torch.ones(1, 4))
    elif fault == "unknown name":
        new.register_parameter("extra", torch.nn.Parameter(torch.ones(2)))
    async with AsyncExitStack() as stack:
        link = stack.enter_context(LoopbackLink(script=script))
        config = aiosync.WeightTransferConfig("loopback")
        worker = aiosync.WeightTransferEngineFactory.create_engine(config, model=old)
        await stack.enter_async_context(worker)
        trainer = aiosync.LoopbackTrainerWeightTransferEngine(
            client=DirectClient(worker), source=new, link=link, buffer_size_bytes=64
        )
        await stack.enter_async_context(trainer)
        with pytest.raises(aiosync.AiosyncError):
            await trainer.send_weights(version=1, budget=BUDGET)
        assert torch.equal(old(x), before)
        assert (worker.weights, worker.version) == ("intact", None)
        assert worker.state in (State.INITIALIZED, State.FAILED)


async def test_a_state_5_in_place_weights_that_broke_are_not_served():
    source = paced()
    async with replica(seed=2, sink="in_place") as worker:
        hold = Hold(3)
        source.before = hold
        async with aiosync.connect(source, workers=[worker.url], **wired("ipc")) as sync:
            round_ = asyncio.create_task(sync.send_weights(version=1, budget=BUDGET))
            await until(hold.reached)
            round_.cancel()
            hold.released.set()
            await asyncio.wait([round_])
            await worker.wait_state("initialized", "failed")
            client = aiosync.HTTPVLLMWeightSyncClient(worker.url)
            readiness = await client.ready()
            assert not readiness.ready
            assert any("torn" in reason for reason in readiness.reasons)
            await assert_round_works(sync, source, [worker], 1)
            assert (await client.ready()).ready
