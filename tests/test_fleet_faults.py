"""Eight workers in processes of their own, some of which are killed, stopped, slow, or return."""

from __future__ import annotations

import asyncio
import signal
import time

import anyio
import pytest
from many import many
from paced import Hold
from processes import program

import aiosync
from aiosync import State

NAMES = [f"w{number}" for number in range(8)]
ROUTES = {
    "start": "start_weight_update",
    "update": "update_weights",
    "prepare": "prepare_weight_update",
    "finish": "finish_weight_update",
}


async def reached(hold):
    async with asyncio.timeout(20):
        while not hold.reached.is_set():
            await asyncio.sleep(0.005)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("policy", "phases"),
    [("quorum(5)", ["start", "prepare"]), ("best_effort", ["update", "finish"])],
)
async def test_members_that_end_in_any_phase_are_left_behind_and_come_back(policy, phases):
    async with many(8, policy=policy) as it:
        await it.send()
        assert it.routable() == set(NAMES)
        for phase in phases:
            route = ROUTES[phase]
            it.at("w1", route, lambda: it.kill("w1"))
            it.at("w4", route, lambda: it.stop("w4"))
            report = await it.send()
            assert report.outcome == "committed"
            healthy = set(NAMES) - {"w1", "w4"}
            assert it.routable() == healthy
            assert await it.holders(*healthy) == healthy
            assert it.states()["w1"] in ("lost", "stale")
            assert it.states()["w4"] == "stale"
            rows = {member.name: member for member in report.members}
            for name in ("w1", "w4"):
                assert rows[name].outcome in ("failed", "unknown")
                assert rows[name].phase == phase
            it.resume("w4")
            await it.send()
            assert it.states()["w1"] == "lost"
            assert it.routable() == await it.holders(*healthy, "w4") == healthy | {"w4"}
            it.fleet.add(await it.start("w1"))  # another process, elsewhere
            assert "w1" not in it.routable()
            await it.send()
            assert it.routable() == await it.holders(*NAMES) == set(NAMES)


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", ["quorum(5)"])
async def test_members_that_end_in_the_middle_of_the_bytes(policy):
    async with many(8, policy=policy) as it:
        await it.send(version=1)
        hold = it.source.before = Hold(3)
        running = asyncio.create_task(it.send(version=2))
        await reached(hold)
        it.stop("w6")
        await it.kill("w2")
        hold.released.set()
        report = await running
        healthy = set(NAMES) - {"w2", "w6"}
        assert report.outcome == "committed"
        assert report.verified
        assert it.routable() == await it.holders(*healthy) == healthy
        it.resume("w6")
        facts = await it.replicas["w6"].wait_state("initialized", "failed")
        assert facts["version"] == 1
        assert facts["weights"] == "intact"
        await it.send(version=3)
        assert it.routable() == await it.holders(*healthy, "w6") == healthy | {"w6"}


@pytest.mark.asyncio
@pytest.mark.parametrize("phase", ["start", "prepare"])
async def test_under_all_one_killed_member_keeps_the_version_from_everybody(phase):
    async with many(8) as it:
        await it.send(version=1)
        it.at("w1", ROUTES[phase], lambda: it.kill("w1"))
        with pytest.raises(aiosync.PeerLost) as caught:
            await it.send(version=2)
        assert caught.value.replica == "w1"
        healthy = set(NAMES) - {"w1"}
        assert await it.holders(*healthy) == set()
        for name in healthy:
            facts = await it.replicas[name].wait_state("initialized", "failed")
            assert (facts["version"], facts["weights"]) == (1, "intact")
        it.fleet.remove("w1")
        await it.send(version=2)
        assert it.routable() == await it.holders(*healthy) == healthy


@pytest.mark.asyncio
async def test_a_slow_member_holds_nobody_up():
    async with many(8, kind="large", buffer=1 << 20, policy="quorum(5)") as it:
        await it.send(version=1)
        began = time.monotonic()
        async with anyio.create_task_group() as group:

            async def crawl():
                try:
                    while True:
                        it.stop("w3")
                        await asyncio.sleep(0.19)
                        it.resume("w3")
                        await asyncio.sleep(0.01)
                finally:
                    it.resume("w3")

            group.start_soon(crawl)
            report = await it.send(version=2)
            took = time.monotonic() - began
            group.cancel_scope.cancel()
        healthy = set(NAMES) - {"w3"}
        assert report.outcome == "committed"
        assert took < 20
        if it.states()["w3"] != "current":  # else it was not slow enough to be left behind
            assert it.routable() == healthy
        assert await it.holders(*healthy) == healthy
        await it.send(version=3)
        assert it.routable() == await it.holders(*NAMES) == set(NAMES)


@pytest.mark.asyncio
async def test_probes_find_a_killed_and_a_stopped_member_and_one_that_comes_back(tmp_path):
    async with many(2, policy="quorum(1)") as it:
        path = str(tmp_path / "third.sock")
        it.fleet.add(await it.start("w2", path))
        await it.send(version=1)
        async with it.fleet:
            await it.fleet.wait_ready(10)
            await it.kill("w2")
            await it.until("w2", "lost", seconds=3)
            it.stop("w1")
            await it.until("w1", "lost", seconds=10)
            assert it.routable() == {"w0"}
            await it.send(version=2)
            await it.start("w2", path)  # another process at the same place
            it.resume("w1")
            await it.until("w2", "joining")
            await it.until("w1", "joining")
            assert it.routable() == {"w0"}  # no traffic before it is current
            await it.send(version=3)
            assert it.routable() == await it.holders("w0", "w1", "w2") == {"w0", "w1", "w2"}


@pytest.mark.asyncio
async def test_wait_ready_tells_loading_from_a_wrong_url_or_token(tmp_path):
    path = tmp_path / "later.sock"
    fleet = aiosync.FleetClient([aiosync.Member("slow", f"unix://{path}")])
    with pytest.raises(aiosync.PhaseTimeout, match="slow: nothing listens there: still loading"):
        await fleet.wait_ready(0.3)
    async with many(1) as it:
        waiting = asyncio.create_task(fleet.wait_ready(20))
        await it.start("late", str(path))
        await waiting
    async with aiosync_server("secret") as url:
        wrong = aiosync.HTTPVLLMWeightSyncClient(url, token="other")
        with pytest.raises(aiosync.Unauthorized) as caught:
            await aiosync.FleetClient([aiosync.Member("locked", wrong)]).wait_ready(10)
        assert caught.value.replica == "locked"
    async with plain_server() as url:
        with pytest.raises(aiosync.ProtocolMismatch) as caught:
            await aiosync.FleetClient([aiosync.Member("other", url)]).wait_ready(10)
        assert caught.value.replica == "other"


def aiosync_server(token):
    import torch

    config = aiosync.WeightTransferConfig("ipc")
    model = torch.nn.Linear(2, 2)
    engine = aiosync.WeightTransferEngineFactory.create_engine(config, model=model)
    return Served(engine, token)


class Served:
    def __init__(self, engine, token):
        self.engine = engine
        self.server = aiosync.serve(engine, token=token)

    async def __aenter__(self):
        return (await self.server.__aenter__()).url

    async def __aexit__(self, *exc):
        await self.server.__aexit__(*exc)
        await self.engine.aclose()


class plain_server:  # noqa: N801
    """Something else that listens, and does not speak HTTP."""

    async def __aenter__(self):
        async def talk(reader, writer):
            await reader.readline()
            writer.write(b"SSH-2.0-nothing of yours\r\n")
            await writer.drain()
            writer.close()

        self.server = await asyncio.start_server(talk, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *exc):
        self.server.close()
        await self.server.wait_closed()


@pytest.mark.asyncio
async def test_of_two_trainers_that_race_one_drives_all_or_none():
    async with many(4, policy="quorum(2)") as it:
        await it.send(version=1)
        second = aiosync.IPCTrainerWeightTransferEngine(
            client=aiosync.FleetClient(it.fleet.members, policy="quorum(2)"),
            source=it.source,
            packed=True,
        )
        async with second:
            hold = it.source.before = Hold(2)
            running = asyncio.create_task(it.send(version=2))
            await reached(hold)
            with pytest.raises(aiosync.Busy):
                await second.initialize()
            hold.released.set()
            await running
            await second.initialize()
            with pytest.raises(aiosync.Fenced):
                await it.send(version=3)
            assert await it.holders(*NAMES[:4]) == set()
            await second.send_weights(version=9)
            assert await it.holders(*NAMES[:4]) == set(NAMES[:4])
            with pytest.raises(aiosync.Fenced):
                await it.send(version=4)
            await it.trainer.initialize()
            await it.send(version=10)
            assert it.routable() == await it.holders(*NAMES[:4]) == set(NAMES[:4])


@pytest.mark.asyncio
async def test_a_takeover_in_the_middle_fences_the_first_trainer_and_its_bytes_never_land():
    async with many(3, policy="quorum(2)", initialized=False) as it:
        urls = [worker.url for worker in it.replicas.values()]
        async with program("fleet_trainer.py", "quorum(2)", *urls) as first:
            assert await first.stdout.readline() == b"holding\n"
            first.signal(signal.SIGSTOP)
            for worker in it.replicas.values():  # its lease ends
                await worker.wait_state("initialized", "failed", seconds=40)
            await it.trainer.initialize()
            await it.send(version=5)
            first.signal(signal.SIGCONT)
            said = [(await first.stdout.readline()).decode().strip() for _ in range(2)]
            assert "committed" not in said
            assert said[1] == "Fenced"
            await first.wait()
            assert it.routable() == await it.holders("w0", "w1", "w2") == {"w0", "w1", "w2"}
            await it.send(version=6)
            assert it.routable() == await it.holders("w0", "w1", "w2") == {"w0", "w1", "w2"}


@pytest.mark.asyncio
async def test_sixteen_workers_are_called_at_once_and_four_times_each():
    async with many(16, policy="quorum(9)") as it:
        await it.send(version=1)
        arrived: dict[str, int] = {}
        everybody = {route: asyncio.Event() for route in ROUTES.values()}

        async def before(route):
            arrived[route] = arrived.get(route, 0) + 1
            if arrived[route] == 16:
                everybody[route].set()
            await everybody[route].wait()  # for ever, if calls were made one after the other

        for client in it.clients.values():
            client.before = before
        report = await it.send(version=2)
        assert arrived == dict.fromkeys(ROUTES.values(), 16)
        assert report.outcome == "committed"
        assert it.trainer.state is State.INITIALIZED
        names = {f"w{number}" for number in range(16)}
        assert it.routable() == await it.holders(*names) == names
