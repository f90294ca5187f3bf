"""A round that is started by its update: one call less, and all that a start is there for."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import models
import pytest
from by_hand import ByHand, by_hand, header, owned, values
from fake_gpu import FakeMemory
from looped import BUDGET, change, looped
from lossy import lossy
from msgspec import UNSET
from processes import replica

import aiosync
from aiosync import (
    Budget,
    Fenced,
    GateRejected,
    InvalidTransition,
    Pause,
    PhaseTimeout,
    RemoteError,
    RoundCancelled,
    RoundHeader,
    State,
    Validation,
)
from aiosync.engines import ipc as ipc_engines
from aiosync.messages import STARTS

pytestmark = pytest.mark.asyncio
SEPARATE = ["start", "update", "prepare", "finish"]
TOGETHER = ["update", "prepare", "finish"]


@asynccontextmanager
async def together(**options):
    """A trainer that starts with the update, and its worker; one round is over."""
    async with looped(**options) as pair:
        pair.trainer.starts_with_update = True
        await pair.assert_next_round_works()
        pair.calls.clear()
        pair.path.clear()
        yield pair


def phases(pair):
    short = [method.removesuffix("_weight_update") for _, method in pair.calls]
    return ["update" if method == "update_weights" else method for method in short]


def trainer_header(trainer):
    return RoundHeader(owner=trainer.owner, epoch=trainer.links[0].epoch)


async def restart(pair):
    """The worker's process is another one, under the same address."""
    old = pair.workers[0]
    config = aiosync.WeightTransferConfig("loopback")
    new = aiosync.LoopbackWeightTransferEngine(config, None, "cpu", pair.copies[0], name=old.name)
    await old.aclose()
    pair.workers[0] = new
    pair.trainer.links[0].client.engine = new
    return new


# -- the main job


@pytest.mark.parametrize("sink", ["staged", "in_place"])
async def test_the_update_is_the_first_call(sink):
    async with together(sink=sink) as pair:
        for _ in range(2):
            pair.calls.clear()
            report = await pair.assert_next_round_works()
            assert phases(pair) == TOGETHER
            assert set(report.seconds) == {"admit", "start", "update", "prepare", "finish", "total"}
            assert (report.recovered, report.notes) == (False, [])
        assert pair.path == ["start", "update", "finalize", "complete"] * 2


async def test_the_worker_flips_as_it_does_after_a_start_of_its_own():
    async with looped() as pair:
        seen = []
        pair.worker.on_transition(lambda t: seen.append((t.trigger, t.source, t.dest)))
        await pair.assert_next_round_works()
        apart = list(seen)
        seen.clear()
        pair.trainer.starts_with_update = True
        await pair.assert_next_round_works()
        assert phases(pair)[-4:] == ["finish", *TOGETHER]
        assert seen == apart


@pytest.mark.parametrize("fate", ["reset", "lost", "twice"])
async def test_an_update_that_is_lost_or_comes_twice_starts_one_round(fate, monkeypatch):
    monkeypatch.setattr(aiosync.IPCTrainerWeightTransferEngine, "starts_with_update", True)
    model = models.make("small", 1)
    async with (
        replica(seed=2, tcp=True) as worker,
        lossy(worker.url) as link,
        aiosync.connect(model, workers=[link.url], backend="ipc") as sync,
    ):
        await sync.send_weights(version=1, budget=BUDGET)
        for version in (2, 3):
            link.calls.clear()
            change(model)
            link.plans = {"update_weights": [fate]}
            report = await sync.send_weights(version=version, budget=BUDGET)
            assert (report.outcome, report.recovered, report.notes) == ("committed", False, [])
            assert "start_weight_update" not in link.calls
            assert link.plans == {"update_weights": []}
            facts = await worker.facts()
            assert (facts["version"], facts["prints"]) == (version, models.fingerprint(model))


@pytest.mark.parametrize("gpu", ["gpu-a", None])
async def test_ipc_asks_for_it_where_the_models_are_on_a_gpu(gpu, monkeypatch):
    memory = FakeMemory()
    monkeypatch.setattr(ipc_engines, "open_memory", lambda device, who: memory)
    monkeypatch.setattr(ipc_engines, "own_device", lambda device: (device, gpu))
    ours, theirs = models.make("small", 1), models.make("small", 2)
    config = aiosync.WeightTransferConfig("ipc", sink="in_place")
    worker = aiosync.IPCWeightTransferEngine(config, None, "cpu", theirs)
    async with worker, aiosync.serve(worker, port=0) as server, lossy(server.url) as link:
        trainer = aiosync.IPCTrainerWeightTransferEngine(
            client=aiosync.HTTPVLLMWeightSyncClient(link.url), source=ours, device="cpu"
        )

        async def good_round():
            change(ours)
            memory.own(*ours.parameters())
            report = await trainer.send_weights(budget=BUDGET)
            assert models.fingerprint(ours) == models.fingerprint(theirs)
            return report

        async with trainer:
            for _ in range(5):  # from the third or so on models are looked at late
                await good_round()
            assert ("start_weight_update" in link.calls) == (gpu is None)
            if gpu is not None:
                rounds = link.calls[link.calls.index("update_weights") :]
                assert rounds == ["update_weights", "finish_weight_update"] * 5
            remove = worker.gate("start", lambda _: False)
            with pytest.raises(GateRejected) as caught:
                await trainer.send_weights(budget=BUDGET)
            assert caught.value.phase == "start"
            remove()
            await good_round()
            await worker.shutdown(header=trainer_header(trainer))
            assert (await good_round()).recovered
            assert not (await good_round()).recovered


# -- where a start of its own stays


async def test_a_member_that_does_not_say_that_it_can_is_started_by_itself(monkeypatch):
    async with together() as pair:
        monkeypatch.setattr("aiosync.worker_state.STARTS", "something else")
        pair.trainer.links[0].peer.features.remove(STARTS)
        await pair.assert_next_round_works()
        assert phases(pair) == SEPARATE


async def test_a_worker_whose_start_waits_for_others_code_does_not_say_that_it_can():
    async with looped() as pair:
        assert STARTS in pair.worker.peer_state().features
        pair.worker.gate("start", lambda _: True)
        assert STARTS not in pair.worker.peer_state().features
    async with by_hand() as engine:  # its start is a method of its own
        assert STARTS not in engine.peer_state().features


async def test_a_worker_that_does_more_with_an_update_is_started_before_it():
    class Noting(aiosync.LoopbackWeightTransferEngine):
        async def update_weights(self, update_info, *, header=None):
            states.append(self.state)
            await super().update_weights(update_info, header=header)

    states = []
    async with together() as pair:
        pair.workers[0].__class__ = Noting
        await pair.assert_next_round_works()  # what it says is known from the answer before
        pair.calls.clear()
        states.clear()
        await pair.assert_next_round_works()
        assert phases(pair) == SEPARATE
    assert states == [State.UPDATING]


@pytest.mark.parametrize(
    "options",
    [
        {"pause": Pause()},
        {"budget": Budget(total=20, admit=5, stall=10)},  # a silent member is noticed in 5 s
        {"source": models.make("small", 9)},
    ],
    ids=["pause", "limits", "source"],
)
async def test_what_a_round_asks_for(options):
    async with together() as pair:
        await pair.trainer.send_weights(**{"budget": BUDGET, **options})
        found = [phase for phase in phases(pair) if phase in SEPARATE]
        assert found == (TOGETHER if "source" in options else SEPARATE)


async def test_several_members_are_started_by_themselves():
    async with together(workers=2) as pair:
        await pair.assert_next_round_works()
        assert phases(pair) == [phase for phase in SEPARATE for _ in range(2)]


async def test_a_trainer_that_must_not_recover_starts_by_itself():
    async with together(recover="manual") as pair:
        await pair.assert_next_round_works()
        assert phases(pair) == SEPARATE


class Counting(aiosync.testing.DirectClient):
    """Somebody's, who does more when a round starts."""

    starts = 0

    async def start_weight_update(self, *, header=None):
        self.starts += 1
        return await super().start_weight_update(header=header)


class Wrapped:
    """Hands on all but the start."""

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        return getattr(self._client, name)

    def __dir__(self):
        return dir(self._client)


@pytest.mark.parametrize("how", ["subclass", "wrapper", "instance"])
async def test_a_client_that_does_more_at_the_start_is_asked_to(how):
    async with together() as pair:
        link = pair.trainer.links[0]
        link.client = client = Counting(pair.worker)
        if how == "wrapper":
            link.client = Wrapped(client)
        elif how == "instance":
            link.client = aiosync.testing.DirectClient(pair.worker)
            link.client.start_weight_update = client.start_weight_update
        for _ in range(2):
            await pair.assert_next_round_works()
        assert client.starts == 2


async def test_a_client_of_ones_own_that_starts_as_ours_does_starts_with_the_update():
    class Named(aiosync.testing.DirectClient):
        label = "mine"

    async with together() as pair:
        methods = []

        async def before(method):
            methods.append(method)

        pair.trainer.links[0].client = Named(pair.worker, before=before)
        await pair.assert_next_round_works()
        assert "start_weight_update" not in methods


class Guarded:
    """A worker engine behind somebody's own object, which is what is served."""

    def __init__(self, engine):
        self._engine = engine
        self.starts = 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def start_weight_update(self, *, header=None):
        self.starts += 1
        await self._engine.start_weight_update(header=header)


async def test_what_is_served_in_front_of_an_engine_is_asked_to_start(monkeypatch):
    monkeypatch.setattr(aiosync.IPCTrainerWeightTransferEngine, "starts_with_update", True)
    ours, theirs = models.make("small", 1), models.make("small", 2)
    engine = aiosync.IPCWeightTransferEngine(
        aiosync.WeightTransferConfig("ipc"), None, "cpu", theirs
    )
    guarded = Guarded(engine)
    async with (
        engine,
        aiosync.serve(guarded, port=0) as server,
        aiosync.connect(ours, workers=[server.url], backend="ipc") as sync,
    ):
        for _ in range(2):
            change(ours)
            await sync.send_weights(budget=BUDGET)
        assert guarded.starts == 2
        assert models.fingerprint(ours) == models.fingerprint(theirs)


# -- a worker that refuses to start


async def test_another_trainer_has_the_worker():
    async with together() as pair:
        await pair.worker.init_transfer_engine(
            {"link": f"link-{id(pair.link)}", "reader": 0, "buffer_size_bytes": 4096},
            header=RoundHeader(owner="rival"),
        )
        with pytest.raises(Fenced, match="belongs to rival") as caught:
            await pair.trainer.send_weights(budget=BUDGET)
        assert isinstance(caught.value, RemoteError)
        assert (caught.value.phase, caught.value.replica) == ("start", "w0")
        assert phases(pair).count("update") == 1
        with pytest.raises(Fenced) as caught:  # and is not taken back
            await pair.trainer.send_weights(budget=BUDGET)
        assert caught.value.phase == "admit"
        assert pair.illegal == []


async def test_a_round_is_open_at_the_worker():
    async with together() as pair:
        ownership = pair.worker.cycle.ownership
        stray = RoundHeader(owner=ownership.owner, epoch=ownership.epoch, round=99)
        await pair.worker.start_weight_update(header=stray)
        with pytest.raises(InvalidTransition, match="not possible in state updating") as caught:
            await pair.trainer.send_weights(budget=BUDGET)
        assert caught.value.phase == "start"
        assert phases(pair).count("update") == 1
        await pair.worker.abort_weight_update(header=stray)


async def test_a_version_that_does_not_follow():
    async with together() as pair:
        held = pair.worker.version
        later = aiosync.Version(50, held.lineage, 50)
        pair.worker.version = later
        with pytest.raises(RemoteError) as caught:
            await pair.trainer.send_weights(version=7, budget=BUDGET)
        assert caught.value.phase == "start"
        assert pair.worker.state is State.INITIALIZED
        pair.worker.version = held
        await pair.assert_next_round_works()


@pytest.mark.parametrize("answer", ["vetoes", "raises"])
async def test_a_gate_of_the_worker(answer):
    def check(_):
        if answer == "raises":
            raise OSError("the scheduler is busy")
        return False

    async with together() as pair:
        remove = pair.worker.gate("start", check)  # since its last answer
        with pytest.raises(GateRejected) as caught:
            await pair.trainer.send_weights(budget=BUDGET)
        assert (caught.value.phase, caught.value.replica) == ("start", "w0")
        assert caught.value.report.members[0].weights == "intact"
        assert pair.worker.state is State.INITIALIZED
        remove()
        await pair.assert_next_round_works()


async def test_a_step_of_the_workers_own_that_raises_is_an_error_of_the_start(caplog):
    async with by_hand() as engine:
        await owned(engine)
        client = aiosync.testing.DirectClient(engine)
        engine.errors["start"] = OSError("no room")
        this = header(engine, 1, 1, starts=True)
        with pytest.raises(RemoteError, match="OSError: no room") as caught:
            await client.update_weights({"value": 1.0}, header=this)
        assert caught.value.phase == "start"
        assert engine.steps == ["init", "start"]
        assert "a step that starts a round failed" in caplog.text
        this = header(engine, 2, 1, starts=True)
        await client.update_weights({"value": 1.0}, header=this)
        await engine.finish_weight_update("1", header=this)
        assert engine.steps[2:4] == ["start", "update"]
        assert values(engine.model) == {1.0}


async def test_a_payload_that_is_refused_is_no_error_of_the_start():
    async with by_hand() as engine:
        await owned(engine)
        this = header(engine, 1, 1, starts=True)
        client = aiosync.testing.DirectClient(engine)
        with pytest.raises(Validation) as caught:
            await client.update_weights({"valu": 1.0}, header=this)
        assert caught.value.phase != "start"
        assert engine.state is State.UPDATING  # it stays open, as after a start of its own
        await engine.abort_weight_update(header=this)


# -- a worker that restarted


async def test_a_worker_that_restarted_is_initialised_and_the_round_begun_again():
    async with together() as pair:
        await restart(pair)
        report = await pair.assert_next_round_works()
        assert report.recovered
        assert any("a worker had restarted" in note for note in report.notes)
        assert phases(pair).count("update") == 2
        assert phases(pair).count("start") == 1
        pair.calls.clear()
        await pair.assert_next_round_works()
        assert phases(pair) == TOGETHER
        await pair.workers[0].aclose()


async def test_a_worker_that_was_shut_down_from_elsewhere_is_initialised_again():
    async with together() as pair:
        await pair.worker.shutdown()
        report = await pair.assert_next_round_works()
        assert report.recovered


async def test_one_that_came_back_as_an_older_release_is_started_by_itself(monkeypatch):
    async with together() as pair:
        new = await restart(pair)
        update = new.update_weights

        async def refuse_what_it_does_not_know(info, *, header=None):
            if header.starts is not UNSET:
                text = "$.aiosync: Object contains unknown field `starts`"
                raise Validation(text, detail={"path": "$.aiosync"})
            await update(info, header=header)

        new.update_weights = refuse_what_it_does_not_know
        monkeypatch.setattr("aiosync.worker_state.STARTS", "something else")
        report = await pair.assert_next_round_works()
        assert report.recovered
        await pair.assert_next_round_works()
        await new.aclose()


async def test_one_that_restarts_again_and_again_ends_the_round():
    async with together() as pair:
        await restart(pair)
        client = pair.trainer.links[0].client

        async def before(method):
            pair.calls.append(("w0", method))
            if method == "start_weight_update":
                await restart(pair)

        client._before = before
        with pytest.raises(Fenced) as caught:
            await pair.trainer.send_weights(budget=BUDGET)
        assert caught.value.phase == "start"
        assert (phases(pair).count("update"), phases(pair).count("start")) == (1, 1)
        await pair.workers[0].aclose()


# -- repeated, late, given up


class Once(ByHand):
    one_update = True


async def test_the_same_update_again_joins_the_round_that_it_started():
    async with by_hand(Once) as engine:
        await owned(engine)
        this = header(engine, 1, 1, starts=True)
        engine.hold("update")
        calls = [
            asyncio.create_task(engine.update_weights({"value": 1.0}, header=this))
            for _ in range(3)
        ]
        await engine.reached["update"].wait()
        engine.holds["update"].set()
        await asyncio.gather(*calls)
        await engine.update_weights({"value": 1.0}, header=this)
        assert engine.steps == ["init", "start", "update"]
        await engine.finish_weight_update("1", header=this)
        with pytest.raises(Fenced, match="not newer"):  # it is over: no other one begins
            await engine.update_weights({"value": 1.0}, header=header(engine, 1, 2, starts=True))
        assert engine.state is State.INITIALIZED
        assert engine.steps.count("start") == 1


async def test_two_of_the_same_that_wait_at_a_gate_start_one_round():
    async with by_hand(Once) as engine:
        await owned(engine)
        go = asyncio.Event()

        async def check(_):
            await go.wait()

        engine.gate("start", check)
        this = header(engine, 1, 1, starts=True)
        calls = [
            asyncio.create_task(engine.update_weights({"value": 1.0}, header=this))
            for _ in range(2)
        ]
        await asyncio.sleep(0.05)
        go.set()
        await asyncio.gather(*calls)
        assert engine.steps == ["init", "start", "update"]
        await engine.abort_weight_update(header=this)


async def test_one_that_comes_after_its_round_was_given_up_starts_nothing():
    async with by_hand() as engine:
        await owned(engine)
        this = header(engine, 1, 1, starts=True)
        await engine.abort_weight_update("too late", header=header(engine, 1, 1))
        with pytest.raises(Fenced, match="not newer"):
            await engine.update_weights({"value": 1.0}, header=this)
        assert engine.steps == ["init"]


async def test_a_round_that_is_given_up_between_start_and_update():
    async with by_hand() as engine:
        await owned(engine)
        this = header(engine, 1, 1, starts=True)
        engine.hold("start")
        call = asyncio.create_task(engine.update_weights({"value": 1.0}, header=this))
        await engine.reached["start"].wait()
        await engine.abort_weight_update("given up", header=this)
        with pytest.raises(RoundCancelled):
            await call
        assert (engine.state, engine.weights) == (State.INITIALIZED, "intact")
        assert engine.steps == ["init", "start"]


async def test_a_caller_that_hangs_up_between_start_and_update_leaves_the_round_to_its_lease():
    async with by_hand() as engine:
        await owned(engine)
        this = header(engine, 1, 1, starts=True, lease_s=0.2)
        engine.hold("start")
        call = asyncio.create_task(engine.update_weights({"value": 1.0}, header=this))
        await engine.reached["start"].wait()
        call.cancel()
        engine.holds["start"].set()
        await asyncio.wait([call])
        assert call.cancelled()
        assert engine.state is State.UPDATING
        await engine.wait_for(State.INITIALIZED, timeout=BUDGET.total)
        assert isinstance(engine.cycle.ownership.outcome, PhaseTimeout)
        assert engine.steps == ["init", "start"]


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_cancelled_while_the_update_is_under_way(moment):
    reached = asyncio.Event()

    async def hold(_member, method):
        if method == "update_weights" and pair.trainer.starts_with_update:
            reached.set()
            await asyncio.sleep(60)

    async with looped(**{moment: hold}) as pair:
        await pair.assert_next_round_works()
        old = models.fingerprint(pair.model)
        pair.trainer.starts_with_update = True
        pair.calls.clear()
        change(pair.model)
        sending = asyncio.create_task(pair.trainer.send_weights(budget=BUDGET))
        await reached.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert "start" not in phases(pair)
        assert (pair.trainer.state, pair.worker.state) == (State.INITIALIZED, State.INITIALIZED)
        assert models.fingerprint(pair.copies[0]) == old
        pair.trainer.starts_with_update = False
        await pair.assert_next_round_works()


# -- what is reported


@pytest.mark.parametrize("sink", ["staged", "in_place"])
async def test_seconds_paused_are_those_of_this_round(sink):
    async with together(sink=sink) as pair:
        gate = pair.worker.generation
        hold = gate.hold("keep", owner="operator")
        await asyncio.sleep(0.3)  # before the round, and after the worker's last answer
        hold.release()
        before = gate.seconds_paused
        report = await pair.assert_next_round_works()
        assert before >= 0.3
        assert 0 < report.pause_seconds <= gate.seconds_paused - before


async def test_a_round_that_is_begun_again_paused_only_since_it_began():
    async with together() as pair:
        gate = pair.worker.generation
        hold = gate.hold("keep", owner="operator")
        await asyncio.sleep(0.3)
        hold.release()
        before = gate.seconds_paused
        await pair.worker.shutdown()
        report = await pair.assert_next_round_works()
        assert report.recovered
        assert 0 < report.pause_seconds <= gate.seconds_paused - before


async def test_another_owners_round_is_not_taken_for_one_that_began():
    async with by_hand() as engine:
        await owned(engine)
        await engine.start_weight_update(header=header(engine, 1, 1))
        assert engine.peer_state().detail["paused_before"] == 0
        await engine.abort_weight_update(header=header(engine, 1))
        await owned(engine, "other")
        await engine.abort_weight_update("too late", header=header(engine, 1, 1))
        assert engine.peer_state().detail["round"] == 1
        assert engine.peer_state().detail["paused_before"] is None


async def test_a_round_that_did_not_begin_there_paused_nothing():
    async with together() as pair:
        pair.worker.gate("start", lambda _: False)
        hold = pair.worker.generation.hold("keep", owner="operator")
        await asyncio.sleep(0.05)
        with pytest.raises(GateRejected) as caught:
            await pair.trainer.send_weights(budget=BUDGET)
        assert caught.value.report.pause_seconds == 0
        hold.release()
