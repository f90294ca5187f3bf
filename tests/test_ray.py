"""Ray actors as workers, on a real local Ray: ours, and those with vLLM's method names."""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from pathlib import Path

import models
import pytest
from paced import Hold, Paced
from processes import replica

import aiosync
from aiosync import (
    Budget,
    FleetClient,
    Member,
    PeerLost,
    PhaseTimeout,
    RayMember,
    RayVLLMWeightSyncClient,
    Refused,
    RemoteError,
    RoundCancelled,
    Validation,
)

# Starting Ray takes long on a busy machine. It drops sockets and files of its own without a word.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
HERE = Path(__file__).parent
BUDGET = Budget(total=60.0, stall=30.0, finish=30.0, cleanup=5.0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """One local Ray for the module; its actors import what the tests do."""
    before = dict(os.environ)
    path = [str(HERE.parent), str(HERE / "support"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    os.environ |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_NUM_THREADS": "1",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray

        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
            logging_level="ERROR",
        )
        import ray_actors

        yield ray_actors
        ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


async def engines(cluster, *names, ours=True):
    made = [cluster.EngineActor.remote(name, seed) for seed, name in enumerate(names, 1)]
    for handle in made:
        await handle.facts.remote()
    return made


async def end(*handles):
    import ray

    for handle in handles:
        ray.kill(handle)


@pytest.mark.asyncio
async def test_engines_in_actors_take_rounds_and_cancelled_ones_leave_them_whole(cluster, free_shm):
    one, two = await engines(cluster, "one", "two")
    trained = models.make("small", 9)
    source = Paced(trained)
    client = RayVLLMWeightSyncClient([one, two], names=["one", "two"])
    assert await client.get_world_size() == 2
    workers = [RayMember("one", one), RayMember("two", two)]
    async with aiosync.connect(source, workers=workers, packed_buffer_size_bytes=4096) as sync:
        report = await sync.send_weights(version=1, budget=BUDGET)
        assert [(m.name, m.outcome) for m in report.members] == [
            ("one", "committed"),
            ("two", "committed"),
        ]
        assert report.verified
        for handle in (one, two):
            facts = await handle.facts.remote()
            assert facts["prints"] == models.fingerprint(trained)
            assert (facts["version"], facts["state"]) == (1, "initialized")

        source.before = hold = Hold(2)  # the source stops before its third tensor
        update = sync.begin_update(version=2, budget=BUDGET)
        while not hold.reached.is_set():
            await asyncio.sleep(0.01)
        facts = await one.facts.remote()  # a call that is under way keeps no other out
        assert facts["state"] == "updating"
        update.cancel()
        hold.released.set()
        with pytest.raises(RoundCancelled):
            await update
        for handle in (one, two):
            facts = await handle.facts.remote()
            assert (facts["version"], facts["weights"]) == (1, "intact")
        assert (await sync.send_weights(version=3, budget=BUDGET)).outcome == "committed"

        with pytest.raises(Refused, match="goes back") as caught:
            await sync.send_weights(version=2, budget=BUDGET)
        assert isinstance(caught.value, RemoteError)  # typed, although it came out of an actor

        await end(two)
        with pytest.raises(PeerLost) as lost:
            await sync.send_weights(version=4, budget=BUDGET)
        assert lost.value.replica == "two"
        assert {m.name: m.outcome for m in lost.value.report.members}["two"] != "committed"
    async with aiosync.connect(trained, workers=[RayMember("one", one)]) as sync:
        await sync.send_weights(version=5, budget=BUDGET)
    await end(one)


@pytest.mark.asyncio
async def test_one_replica_may_be_several_actors(cluster):
    one, two = await engines(cluster, "left", "right")
    trained = models.make("small", 9)
    async with aiosync.connect(trained, workers=[RayMember("pair", [one, two])]) as sync:
        report = await sync.send_weights(version=1, budget=BUDGET)
    assert [(m.name, m.outcome) for m in report.members] == [("pair", "committed")]
    for handle in (one, two):
        facts = await handle.facts.remote()
        assert (facts["prints"], facts["version"]) == (models.fingerprint(trained), 1)
    await end(one, two)


@pytest.mark.asyncio
async def test_a_driver_hands_its_ticket_to_a_trainer_in_an_actor(cluster):
    async with replica(name="worker", seed=3) as worker:
        (inside,) = await engines(cluster, "inside")
        # One member is a process, the other an actor; the trainer is an actor, too.
        members = [Member("outside", worker.url), RayMember("inside", inside)]
        fleet = FleetClient(members)
        rank = cluster.RankActor.remote(9)
        await rank.connect.remote([worker.url], {"inside": inside})
        async with fleet.round(version=4, timeout=60) as rnd:
            sent = await rank.send.remote(rnd.ticket.encode())
        assert (sent["outcome"], rnd.report.outcome) == ("committed", "committed")
        assert (await inside.facts.remote())["prints"] == sent["prints"]
        assert (await worker.facts())["prints"] == sent["prints"]
        with pytest.raises(RoundCancelled, match="too early"):
            async with fleet.round(version=5, timeout=60) as rnd:
                await rnd.cancel("too early")
        assert (await rank.send.remote(rnd.ticket.encode()))["error"] == "Refused"
        assert (await inside.facts.remote())["version"] == 4
        await rank.close.remote()
        await end(rank, inside)


@pytest.mark.asyncio
async def test_actors_with_vllms_methods_are_called_as_vllm_calls_them(cluster):
    handles = [cluster.Methods.remote() for _ in range(2)]
    client = RayVLLMWeightSyncClient(handles, timeout=30, names=["left", "right"])
    assert isinstance(client, aiosync.VLLMWeightSyncClient)
    await client.init_weight_transfer_engine({"master_port": 1})
    await client.start_weight_update()
    await client.update_weights({"names": ["a"]})
    await client.finish_weight_update("7")
    for handle in handles:
        assert await handle.told.remote() == [
            ["init", {"master_port": 1}],
            ["start"],
            ["update", {"names": ["a"]}],
            ["finish"],
            ["version", "7"],
        ]
    # A failure names its actor and carries its text; the other one was called, too.
    await handles[1].fail_at.remote("start")
    with pytest.raises(RemoteError, match="OSError: start went wrong here") as caught:
        await client.start_weight_update()
    assert (caught.value.replica, caught.value.phase) == ("right", "start")
    assert (await handles[0].told.remote())[-1] == ["start"]
    # Whatever else it has is used where a round can use it, and nothing it lacks.
    link = client.members[0].client
    assert (await link.capabilities()).features == ["abort"]
    assert isinstance(link, aiosync.SupportsAbort)
    assert not isinstance(link, aiosync.SupportsPrepare)
    update = asyncio.ensure_future(link.update_weights({"wait": True}))
    while (await handles[0].told.remote())[-1] != ["update", {"wait": True}]:
        await asyncio.sleep(0.01)
    await link.abort_weight_update("enough")
    await update
    await end(*handles)


@pytest.mark.asyncio
async def test_cancelling_a_call_lets_the_caller_go_and_leaves_the_actor_in_order(cluster):
    gates = cluster.Methods.remote()
    actor = cluster.OneByOne.remote()
    client = RayVLLMWeightSyncClient(actor, requests=False)
    await client.init_weight_transfer_engine({"n": 3})
    with pytest.raises(RemoteError, match="KeyError"):
        await client.update_weights({})
    busy = asyncio.ensure_future(client.update_weights({"until": gates.is_open}))
    while (await gates.told.remote()).count(["asked"]) < 1:
        await asyncio.sleep(0.01)
    waiting = asyncio.ensure_future(client.start_weight_update())
    for _ in range(5):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    late = RayVLLMWeightSyncClient(actor, timeout=1.0, requests=False)
    with pytest.raises(PhaseTimeout, match="start_weight_update within 1 s"):
        await late.start_weight_update()
    await gates.open.remote()
    await busy
    await client.finish_weight_update("4")  # not kept waiting by what was given up
    told = await actor.told.remote()
    assert (told[0], told[-1]) == ("init 3", "finish 4")
    await end(gates, actor)
    import ray

    with pytest.raises(ray.exceptions.RayActorError):
        async with asyncio.timeout(20):
            while True:  # to kill it takes Ray a moment
                await actor.told.remote()
    with pytest.raises(PeerLost) as caught:
        await client.start_weight_update()
    assert caught.value.replica == client.name


@pytest.mark.asyncio
async def test_cancelling_an_init_reaches_the_engine_in_the_actor(cluster):
    actor = cluster.HangingActor.remote()
    client = RayVLLMWeightSyncClient(actor)
    init = asyncio.ensure_future(client.init_weight_transfer_engine({"address": "here"}))
    await actor.begun.remote()
    init.cancel()
    with pytest.raises(asyncio.CancelledError):
        await init
    assert await actor.ended.remote() == "failed"
    await end(actor)


@pytest.mark.asyncio
async def test_what_is_no_worker_is_refused_by_name(cluster):
    nothing = cluster.Nothing.remote()
    with pytest.raises(Validation, match="lacks init_weight_transfer_engine") as caught:
        RayMember("odd", nothing)
    assert caught.value.replica == "odd"
    with pytest.raises(Validation, match="at least one"):
        RayVLLMWeightSyncClient([])
    with pytest.raises(Validation, match="1 names were given for 2"):
        RayVLLMWeightSyncClient([nothing, nothing], names=["a"])
    await end(nothing)


def test_ray_is_not_imported_before_it_is_used():
    import subprocess

    program = (
        "import sys, aiosync; aiosync.RayMember, aiosync.RayServed;"
        "assert 'ray' not in sys.modules, 'imported'"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
