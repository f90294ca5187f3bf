"""Members that are brought to the fleet's version between rounds, from a snapshot."""

from __future__ import annotations

import asyncio
import copy
from functools import cached_property

import anyio
import models
import pytest
import torch
from fleets import fleet
from safetensors.torch import save_file

import aiosync
from aiosync import State
from aiosync.fleet_health import Health

KEEP = {"catch_up": "snapshot", "snapshot": "keep"}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """No member is given up because this machine is slow."""
    monkeypatch.setattr("aiosync.lone_round.DEFAULTS", type(aiosync.DEFAULTS)(join_s=30.0))


async def current(it, *names, seconds=30):
    """Wait until these are current, and hold the version under the name that the others have."""
    with anyio.move_on_after(seconds):
        while not {*names} <= it.routable():
            await asyncio.sleep(0.01)
    assert {*names} <= it.routable(), [s.error for s in it.client.roster.standings.values()]
    ids = {worker.generation.weights.weights_id for n, worker in it.workers.items() if n in names}
    ids.add(it.workers["w0"].generation.weights.weights_id)
    assert len(ids) == 1


async def fell_back(it, name, seconds=30):
    async with asyncio.timeout(seconds):
        async for transition in it.client.subscribe(since=0):
            if (transition.engine, transition.trigger) == (name, "fall_back"):
                break
    return transition.error


def calls_of(it, name):
    return [method for who, method in it.calls if who == name]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("backend", "policy"), [("ipc", "all"), ("ipc", "quorum(1)"), ("gloo", "all")]
)
async def test_a_joiner_is_current_without_another_round(backend, policy):
    async with fleet(1, backend=backend, policy=policy, **KEEP) as it, it.client:
        seen = []
        it.client.on_member(lambda t: seen.append((t.engine, t.trigger, t.dest, t.version)))
        await it.send(version=1)
        await it.send(version=2)
        it.client.add(aiosync.Member("w9", await it.worker("w9")))
        assert it.routable() == {"w0"}
        await current(it, "w0", "w9")
        assert it.holders() == {"w0", "w9"}
        assert it.workers["w9"].version == it.client.version
        assert [each for each in seen if each[0] == "w9"] == [
            ("w9", "catch_up", "joining", "2"),
            ("w9", "commit", "current", "2"),
        ]
        assert it.trainer.state is State.INITIALIZED
        report = await it.send(version=3)
        assert [member.outcome for member in report.members] == ["committed", "committed"]
        assert backend == "gloo" or not report.recovered  # a group is made anew for joiners
        assert it.routable() == it.holders() == {"w0", "w9"}


@pytest.mark.asyncio
async def test_the_copy_is_of_what_was_committed_not_of_what_the_trainer_has_now():
    async with fleet(1, **KEEP) as it, it.client:
        await it.send(version=1)
        before = copy.deepcopy(it.model.state_dict())
        it.change()
        it.client.add(aiosync.Member("w9", await it.worker("w9")))
        await current(it, "w9")
        held = it.copies["w9"].state_dict()
        assert all(torch.equal(held[name], tensor) for name, tensor in before.items())


@pytest.mark.asyncio
async def test_a_member_that_missed_a_round_is_brought_up_after_it():
    async with fleet(3, policy="quorum(2)", **KEEP) as it, it.client:
        await it.send(version=1)

        async def refuse():
            it.faults.clear()
            raise RuntimeError("out of order")

        it.faults["w1", "prepare_weight_update"] = refuse
        report = await it.send(version=2)
        assert [member.outcome for member in report.members].count("committed") == 2
        await current(it, "w1")
        assert it.holders() == {"w0", "w1", "w2"}
        report = await it.send(version=3)
        assert not report.recovered  # it is known to have belonged to somebody else
        assert it.holders() == it.routable() == {"w0", "w1", "w2"}


@pytest.mark.asyncio
async def test_a_failed_round_leaves_the_kept_version_as_it_was():
    async with fleet(1, **KEEP) as it, it.client:
        await it.send(version=1)
        before = copy.deepcopy(it.model.state_dict())

        async def refuse():
            raise RuntimeError("out of order")

        it.faults["w0", "prepare_weight_update"] = refuse
        with pytest.raises(RuntimeError, match="out of order"):
            await it.send(version=2)
        it.faults.clear()
        it.client.add(aiosync.Member("w9", await it.worker("w9")))
        await current(it, "w9")
        assert it.workers["w9"].version.label == 1
        held = it.copies["w9"].state_dict()
        assert all(torch.equal(held[name], tensor) for name, tensor in before.items())


@pytest.mark.asyncio
async def test_a_round_that_begins_meanwhile_takes_the_member_along(monkeypatch):
    monkeypatch.setattr("aiosync.catch_up.WAY_S", 10.0)  # however slow this machine is
    async with fleet(1, **KEEP) as it, it.client:
        await it.send(version=1)
        client = await it.worker("w9")
        reached = asyncio.Event()

        async def hang():
            reached.set()
            await asyncio.sleep(60)

        it.faults["w9", "update_weights"] = hang
        it.client.add(aiosync.Member("w9", client))
        await asyncio.wait_for(reached.wait(), 30)
        it.faults.clear()
        report = await it.send(version=2)
        assert [member.outcome for member in report.members] == ["committed", "committed"]
        assert it.routable() == it.holders() == {"w0", "w9"}
        assert it.workers["w9"].generation.statistics()["swaps_done"] == 1  # nothing in between
        assert calls_of(it, "w9").count("abort_weight_update") == 1


@pytest.mark.asyncio
async def test_a_round_may_begin_at_any_moment_of_it():
    async with fleet(1, **KEEP) as it, it.client:
        client, begun, wrong = await it.worker("w9"), asyncio.Event(), []
        sent = {}

        def judge(transition):
            if transition.trigger == "catch_up":
                begun.set()
            elif transition.dest == "current":
                held = models.fingerprint(it.copies[transition.engine])
                if held != sent[transition.version]:
                    wrong.append(transition)

        it.client.on_member(judge)

        async def send(version):
            it.change()
            sent[str(version)] = models.fingerprint(it.model)
            return await it.trainer.send_weights(version=version)

        for number, turns in enumerate((0, 1, 2, 5, 10, 20, 35, 50, 80, 120)):
            await send(2 * number + 1)
            begun.clear()
            it.client.add(aiosync.Member("w9", client))
            await asyncio.wait_for(begun.wait(), 30)
            for _ in range(turns):
                await asyncio.sleep(0)
            await send(2 * number + 2)
            await current(it, "w9")
            assert it.workers["w9"].version.label == 2 * number + 2
            assert it.trainer.state is State.INITIALIZED
            it.client.remove("w9")
        assert wrong == []


@pytest.mark.asyncio
async def test_one_that_does_not_let_go_in_time_joins_at_the_round_after(monkeypatch):
    monkeypatch.setattr("aiosync.catch_up.WAY_S", 0.05)
    async with fleet(1, **KEEP) as it, it.client:
        await it.send(version=1)
        client = await it.worker("w9")
        reached, end = asyncio.Event(), asyncio.Event()

        async def hang():
            reached.set()
            await end.wait()

        async def swapping():
            """The point of no return was passed, and the answer does not come."""
            reached.set()
            await end.wait()

        it.after["w9", "finish_weight_update"] = swapping
        it.faults["w9", "weight_update_status"] = hang
        it.faults["w9", "abort_weight_update"] = hang
        it.faults["w9", "shutdown"] = hang
        it.client.add(aiosync.Member("w9", client))
        await asyncio.wait_for(reached.wait(), 30)
        report = await it.send(version=2)
        assert [member.name for member in report.members] == ["w0"]
        assert report.left_out == ["w9"]
        assert "w9" not in it.routable()
        it.faults.clear()
        it.after.clear()
        end.set()
        await current(it, "w0", "w9")
        assert it.workers["w9"].version.label == 2
        await it.send(version=3)
        assert it.routable() == it.holders() == {"w0", "w9"}


@pytest.mark.asyncio
async def test_a_joiner_that_fails_waits_for_the_next_round_and_its_record_says_why():
    async with fleet(1, **KEEP) as it, it.client:
        await it.send(version=1)
        client = await it.worker("w9")

        async def refuse():
            raise RuntimeError("no memory")

        it.faults["w9", "update_weights"] = refuse
        it.client.add(aiosync.Member("w9", client))
        assert "no memory" in await fell_back(it, "w9")
        assert "no memory" in it.client.roster.standings["w9"].error
        await Health(it.client.roster).probe_all()
        await it.client.roster.catch_ups.run_once()
        assert calls_of(it, "w9").count("update_weights") == 1  # not again for this version
        assert it.states() == {"w0": "current", "w9": "joining"}
        it.faults.clear()
        await it.send(version=2)
        assert it.routable() == it.holders() == {"w0", "w9"}
        assert it.client.roster.standings["w9"].error is None


@pytest.mark.asyncio
async def test_another_trainers_worker_is_not_taken():
    async with fleet(1, **KEEP) as it, it.client:
        await it.send(version=1)
        client = await it.worker("w9")
        rival = aiosync.IPCTrainerWeightTransferEngine(client=client, source=it.model, packed=True)
        async with rival:
            await rival.initialize()
            await rival.send_weights(version=7)
            it.client.add(aiosync.Member("w9", client))
            assert "belongs to" in await fell_back(it, "w9")
            await rival.send_weights(version=8)


@pytest.mark.asyncio
async def test_leaving_and_closing_end_it():
    async with fleet(1, **KEEP) as it:
        await it.send(version=1)
        client = await it.worker("w9")
        reached = asyncio.Event()

        async def hang():
            reached.set()
            await asyncio.sleep(60)

        it.faults["w9", "update_weights"] = hang
        async with it.client:
            it.client.add(aiosync.Member("w9", client))
            await asyncio.wait_for(reached.wait(), 30)
            it.client.remove("w9")
            async with asyncio.timeout(30):
                await it.workers["w9"].wait_for(State.IDLE)
            reached.clear()
            it.client.add(aiosync.Member("w9", client))
            await asyncio.wait_for(reached.wait(), 30)
        async with asyncio.timeout(30):  # leaving waits for it, but not for ever
            await it.workers["w9"].wait_for(State.IDLE)
            while "fleet-catch-up" in {task.get_name() for task in asyncio.all_tasks()}:
                await asyncio.sleep(0.01)
        assert it.workers["w9"].version is None
        assert it.states()["w9"] == "joining"


@pytest.mark.asyncio
async def test_a_closed_trainer_brings_nobody_up():
    async with fleet(1, **KEEP) as it, it.client:
        await it.send(version=1)
        await it.trainer.aclose()
        it.client.add(aiosync.Member("w9", await it.worker("w9")))
        await it.client.roster.catch_ups.run_once()
        assert it.states()["w9"] == "joining"
        assert calls_of(it, "w9") == []


def checkpoint(it, path):
    save_file({name: tensor.clone() for name, tensor in it.model.state_dict().items()}, path)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["file", "folder", "function", "async function", "source"])
async def test_where_a_snapshot_may_come_from(kind, tmp_path):
    path = tmp_path / "model.safetensors"
    asked = []

    def made(version):
        asked.append(version.label)
        return path

    async def made_async(version):
        return made(version)

    model = {}
    given = {"file": path, "folder": str(tmp_path), "function": made, "async function": made_async}
    if kind == "source":
        model["held"] = torch.nn.Sequential(
            torch.nn.Linear(64, 96), torch.nn.LayerNorm(96), torch.nn.Linear(96, 7)
        )
    snapshot = given.get(kind) or aiosync.ModuleSource(model["held"])
    async with fleet(1, catch_up="snapshot", snapshot=snapshot) as it, it.client:
        await it.send(version=1)
        checkpoint(it, path)
        if model:
            model["held"].load_state_dict(it.model.state_dict())
        it.client.add(aiosync.Member("w9", await it.worker("w9")))
        await current(it, "w9")
        assert it.holders() == {"w0", "w9"}
        assert asked == ([1] if "function" in kind else [])


@pytest.mark.asyncio
async def test_a_snapshot_of_another_version_is_refused_before_it_is_committed(tmp_path):
    path = tmp_path / "model.safetensors"
    async with fleet(1, catch_up="snapshot", snapshot=path) as it, it.client:
        await it.send(version=1)
        checkpoint(it, path)
        await it.send(version=2)
        it.client.add(aiosync.Member("w9", await it.worker("w9")))
        assert "its bytes differ" in await fell_back(it, "w9")
        assert it.workers["w9"].version is None
        assert it.workers["w9"].weights == "intact"
        await it.send(version=3)
        assert it.routable() == it.holders() == {"w0", "w9"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("content", "said"), [({}, "no tensor"), ({"0.weight": torch.zeros(1)}, "0.weight")]
)
async def test_a_checkpoint_that_does_not_fit_is_refused_by_name(content, said, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(content, path)
    async with fleet(1, catch_up="snapshot", snapshot=path) as it, it.client:
        await it.send(version=1)
        it.client.add(aiosync.Member("w9", await it.worker("w9")))
        assert said in await fell_back(it, "w9")
        assert it.workers["w9"].weights == "intact"


@pytest.mark.asyncio
async def test_a_source_with_another_order_is_refused_before_a_byte_moves():
    class Reversed(aiosync.WeightSource):
        @cached_property
        def metadata(self):
            named = reversed(list(models.make("small", 1).named_parameters()))
            return [aiosync.ParamMeta(n, p.dtype, tuple(p.shape)) for n, p in named]

        def iter_full(self):
            yield from ()

    async with fleet(1, catch_up="snapshot", snapshot=Reversed()) as it, it.client:
        await it.send(version=1)
        it.client.add(aiosync.Member("w9", await it.worker("w9")))
        assert "another order" in await fell_back(it, "w9")
        assert "start_weight_update" not in calls_of(it, "w9")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"catch_up": "snapshot"}, "needs snapshot="),
        ({"catch_up": "snapshot", "snapshot": 7}, "no source"),
        ({"snapshot": "keep"}, "is for catch_up='snapshot'"),
        ({"catch_up": "sometimes"}, "must be one of"),
    ],
)
def test_what_cannot_be_done_to_catch_up_is_said(options, said):
    with pytest.raises(aiosync.Validation, match=said):
        aiosync.FleetClient(["unix:///nowhere"], **options)


@pytest.mark.asyncio
async def test_leaving_a_fleet_leaves_no_task_although_the_block_is_cancelled():
    async with fleet(1, **KEEP) as it:
        with anyio.CancelScope() as scope:
            async with it.client:
                scope.cancel()
                await anyio.sleep_forever()
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert not [name for name in names if name.startswith("fleet-")]
        async with it.client:  # it can be entered again at once
            pass
