"""A worker engine driven by hand: order, owner, versions, weights."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from by_hand import (
    Init,
    Update,
    WithoutSink,
    by_hand,
    header,
    owned,
    tensors,
    values,
    version,
    whole_round,
)

import aiosync
from aiosync import (
    Busy,
    Coverage,
    Fenced,
    GateRejected,
    InvalidTransition,
    PhaseTimeout,
    Refused,
    RoundCancelled,
    RoundHeader,
    State,
    Validation,
    Weights,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from aiosync.worker import WeightTransferEngine

pytestmark = pytest.mark.asyncio


def snapshot(engine):
    return (
        engine.state,
        engine.machine.seq,
        engine.weights,
        engine.version,
        values(engine.model),
        engine.cycle.ownership.epoch,
        engine.cycle.ownership.last_round,
    )


CALLS = {
    "init": lambda e: e.init_transfer_engine({}),
    "start": lambda e: e.start_weight_update(),
    "update": lambda e: e.update_weights({"value": 1.0}),
    "prepare": lambda e: e.prepare_weight_update(),
    "finish": lambda e: e.finish_weight_update("1"),
    "abort": lambda e: e.abort_weight_update("no reason"),
    "shutdown": lambda e: e.shutdown(),
    "aclose": lambda e: e.aclose(),
}


async def bring_to(engine, state):
    if state == "idle":
        return
    if state == "closed":
        await engine.aclose()
        return
    await engine.init_transfer_engine({})
    if state == "initialized":
        return
    await engine.start_weight_update()
    if state == "failed":
        engine.errors["update"] = OSError("disk gone")
        with pytest.raises(OSError, match="disk gone"):
            await engine.update_weights({"value": 1.0})
        return
    await engine.update_weights({"value": 1.0})
    if state == "finalizing":
        await engine.prepare_weight_update()


LEGAL = {
    "idle": {"init": "initialized", "abort": "idle", "shutdown": "idle", "aclose": "closed"},
    "initialized": {
        "init": "initialized",
        "start": "updating",
        "abort": "initialized",
        "shutdown": "idle",
        "aclose": "closed",
    },
    "updating": {
        "update": "updating",
        "prepare": "finalizing",
        "finish": "initialized",
        "abort": "failed",
        "aclose": "closed",
    },
    "finalizing": {
        "prepare": "finalizing",
        "finish": "initialized",
        "abort": "failed",
        "aclose": "closed",
    },
    "failed": {"init": "initialized", "abort": "failed", "shutdown": "idle", "aclose": "closed"},
    "closed": {"abort": "closed", "shutdown": "closed", "aclose": "closed"},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("state", LEGAL)
async def test_every_call_in_every_state(state, call):
    async with by_hand(WithoutSink) as engine:
        await bring_to(engine, state)
        assert engine.state == state
        before, steps = snapshot(engine), list(engine.steps)
        dest = LEGAL[state].get(call)
        if dest is not None:
            await CALLS[call](engine)
            assert engine.state == dest
            return
        with pytest.raises((InvalidTransition, Busy)) as caught:
            await CALLS[call](engine)
        assert snapshot(engine) == before
        assert engine.steps == steps
        assert caught.value.detail["state"] == state
        assert caught.value.detail["allowed"] == list(engine.machine.allowed())
        assert caught.value.phase == call
        busy = state in ("updating", "finalizing") and call in ("init", "shutdown")
        assert isinstance(caught.value, Busy if busy else InvalidTransition)


@pytest.mark.parametrize("call", ["update", "prepare", "finish"])
async def test_sink_engine_stays_usable_after_a_call_in_the_wrong_order(call):
    async with by_hand() as engine:
        await owned(engine)
        with pytest.raises(InvalidTransition):
            await {
                "update": lambda h: engine.update_weights({"value": 1.0}, header=h),
                "prepare": lambda h: engine.prepare_weight_update(header=h),
                "finish": lambda h: engine.finish_weight_update("1", header=h),
            }[call](header(engine, 5))
        await whole_round(engine, 1, 1)
        assert values(engine.model) == {1.0}


async def test_a_whole_life():
    async with by_hand() as engine:
        seen = []
        engine.on_transition(lambda t: seen.append((t.trigger, t.version, t.weights)))
        await owned(engine)
        await whole_round(engine, 1, 1)
        await whole_round(engine, 2, 2)
        assert values(engine.model) == {2.0}
        assert engine.version == version(2)
        await engine.shutdown(header=header(engine, 2))
        assert engine.state is State.IDLE
        await owned(engine)
        await whole_round(engine, 1, 3)
        await engine.aclose()
        assert [trigger for trigger, _, _ in seen] == [
            "initialize",
            *["start", "update", "finalize", "complete"] * 2,
            "release",
            "initialize",
            *["start", "update", "finalize", "complete"],
            "close",
        ]
        completed = [entry for entry in seen if entry[0] == "complete"]
        assert completed == [("complete", str(n), "intact") for n in (1, 2, 3)]


async def test_finish_without_prepare_prepares_first():
    async with by_hand() as engine:
        await owned(engine)
        this = header(engine, 1, 1)
        await engine.start_weight_update(header=this)
        await engine.update_weights({"value": 1.0}, header=this)
        await engine.finish_weight_update("1", header=this)
        assert engine.steps[-2:] == ["drain", "finish"]
        assert engine.state is State.INITIALIZED
        assert values(engine.model) == {1.0}


async def test_requests_are_taken_wherever_a_dict_is():
    async with by_hand() as engine:
        await engine.init_transfer_engine(WeightTransferInitRequest({"address": "there"}))
        await engine.start_weight_update()
        await engine.update_weights(WeightTransferUpdateRequest({"value": 1.0}))
        await engine.finish_weight_update("one")
        assert engine.version.label == "one"
        assert values(engine.model) == {1.0}


# -- repeated and stale calls


@pytest.mark.fault("A-HTTP-2")
async def test_repeated_calls_are_answered_from_the_record():
    async with by_hand() as engine:
        await owned(engine)
        this = header(engine, 1, 1)
        for _ in range(2):
            await engine.start_weight_update(header=this)
        await engine.update_weights({"value": 1.0}, header=this)
        for _ in range(2):
            await engine.prepare_weight_update(header=this)
        for _ in range(2):
            await engine.finish_weight_update("1", header=this)
        assert [engine.steps.count(s) for s in ("start", "drain", "finish")] == [1, 1, 1]
        assert engine.machine.seq == 5
        await engine.abort_weight_update("late", header=this)
        assert engine.state is State.INITIALIZED
        assert engine.version == version(1)


@pytest.mark.parametrize("step", ["start", "prepare", "finish"])
async def test_repeated_call_waits_for_the_first_one(step):
    async with by_hand() as engine:
        await owned(engine)
        this = header(engine, 1, 1)
        go = engine.hold("drain" if step == "prepare" else step)
        call = {
            "start": lambda: engine.start_weight_update(header=this),
            "prepare": lambda: engine.prepare_weight_update(header=this),
            "finish": lambda: engine.finish_weight_update("1", header=this),
        }[step]
        if step != "start":
            await engine.start_weight_update(header=this)
            await engine.update_weights({"value": 1.0}, header=this)
        first = asyncio.create_task(call())
        await engine.reached["drain" if step == "prepare" else step].wait()
        second = asyncio.create_task(call())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not second.done()
        first.cancel()  # its connection broke; the work goes on
        go.set()
        async with asyncio.timeout(5):
            await second
        assert engine.steps.count("drain" if step == "prepare" else step) == 1


async def test_repeated_finish_of_a_failed_round_gives_its_error_again():
    async with by_hand() as engine:
        await owned(engine)
        this = header(engine, 1, 1)
        await engine.start_weight_update(header=this)
        await engine.update_weights({"value": 1.0}, header=this)
        engine.errors["finish"] = OSError("cannot quantise")
        for _ in range(2):
            with pytest.raises(Exception, match="cannot quantise"):
                await engine.finish_weight_update("1", header=this)
        assert engine.steps.count("finish") == 1
        assert values(engine.model) == {0.0}
        assert engine.weights == Weights.INTACT


async def test_stale_rounds_and_strangers_are_fenced():
    async with by_hand() as engine:
        await owned(engine, "first")
        old = header(engine, 3, 3)
        await whole_round(engine, 3, 3)
        before = snapshot(engine)
        for number in (1, 2, 3):
            with pytest.raises(Fenced, match="not newer"):
                await engine.start_weight_update(header=header(engine, number, 4))
        stranger = header(engine, 4, 4, owner="stranger")
        for call in (
            engine.start_weight_update(header=stranger),
            engine.start_weight_update(),
            engine.abort_weight_update(header=stranger),
            engine.shutdown(header=stranger),
        ):
            with pytest.raises(Fenced, match="first") as caught:
                await call
            assert caught.value.detail["owner"] == "first"
        assert snapshot(engine) == before
        await owned(engine, "second")
        for call in (
            engine.start_weight_update(header=old),
            engine.update_weights({"value": 9.0}, header=old),
            engine.prepare_weight_update(header=old),
            engine.finish_weight_update("3", header=old),
            engine.abort_weight_update(header=old),
        ):
            with pytest.raises(Fenced, match="second"):
                await call
        assert values(engine.model) == {3.0}
        await whole_round(engine, 1, 4)


@pytest.mark.fault("A-STATE-4")
async def test_calls_of_an_older_round_do_not_touch_the_open_one():
    async with by_hand() as engine:
        await owned(engine)
        old = header(engine, 1, 1)
        await engine.start_weight_update(header=old)
        await engine.abort_weight_update(header=old)
        new = header(engine, 2, 2)
        await engine.start_weight_update(header=new)
        before = snapshot(engine)
        await engine.abort_weight_update("late", header=old)
        for call in (
            engine.update_weights({"value": 1.0}, header=old),
            engine.prepare_weight_update(header=old),
            engine.finish_weight_update("1", header=old),
        ):
            with pytest.raises(Fenced):
                await call
        assert snapshot(engine) == before
        await engine.update_weights({"value": 2.0}, header=new)
        await engine.finish_weight_update("2", header=new)
        assert values(engine.model) == {2.0}


@pytest.mark.fault("A-STATE-4")
async def test_update_that_arrives_behind_finish_is_refused_and_writes_nothing():
    async with by_hand(WithoutSink) as engine:
        await engine.init_transfer_engine({})
        await engine.start_weight_update()
        go = engine.hold("update")
        first = asyncio.create_task(engine.update_weights({"value": 1.0}))
        await engine.reached["update"].wait()
        finish = asyncio.create_task(engine.finish_weight_update("1"))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.update_weights({"value": 2.0}))
        await asyncio.sleep(0)
        go.set()
        await first
        await finish
        with pytest.raises(InvalidTransition):
            await late
        assert engine.steps.count("update") == 1
        assert engine.state is State.INITIALIZED
        assert engine.version.label == "1"


# -- versions


@pytest.mark.fault("A-VERSION-2")
@pytest.mark.parametrize("order", [5, 4, 1])
async def test_going_back_or_repeating_is_refused_before_anything_moves(order):
    async with by_hand() as engine:
        await owned(engine)
        await whole_round(engine, 1, 5)
        before = snapshot(engine)
        with pytest.raises(Refused, match="version"):
            await engine.start_weight_update(header=header(engine, 2, order))
        assert snapshot(engine) == before
        this = header(engine, 2, order, rollback=True)
        await engine.start_weight_update(header=this)
        await engine.update_weights({"value": float(order)}, header=this)
        await engine.finish_weight_update(str(order), header=this)
        assert engine.version == version(order)


async def test_new_lineage_may_start_anywhere():
    async with by_hand() as engine:
        await owned(engine)
        await whole_round(engine, 1, 5)
        other = version(1, "another run")
        this = header(engine, 2, None, version=other)
        await engine.start_weight_update(header=this)
        await engine.update_weights({"value": 1.0}, header=this)
        await engine.finish_weight_update("1", header=this)
        assert engine.version == other


async def test_versions_of_a_client_without_headers_count_up():
    async with by_hand() as engine:
        await engine.init_transfer_engine({})
        for label in ("a", "b", None):
            await engine.start_weight_update()
            await engine.update_weights({"value": 1.0})
            await engine.finish_weight_update(label)
        assert (engine.version.label, engine.version.order) == ("b", 2)


@pytest.mark.parametrize("label", [5, "", True, b"1"])
async def test_label_that_is_none_is_refused_and_the_round_stays_open(label):
    async with by_hand() as engine:
        await engine.init_transfer_engine({})
        await engine.start_weight_update()
        await engine.update_weights({"value": 1.0})
        with pytest.raises(Validation, match="version"):
            await engine.finish_weight_update(label)
        assert engine.state in (State.UPDATING, State.FINALIZING)
        await engine.finish_weight_update("1")
        assert values(engine.model) == {1.0}


async def test_finish_may_rename_the_version_that_start_announced():
    async with by_hand() as engine:
        await owned(engine)
        this = header(engine, 1, 7)
        await engine.start_weight_update(header=this)
        await engine.update_weights({"value": 7.0}, header=this)
        await engine.finish_weight_update("step-7", header=this)
        assert (engine.version.label, engine.version.order) == ("step-7", 7)


# -- abort, close, lease


@pytest.mark.fault("A-STATE-2")
@pytest.mark.parametrize("at", ["start", "update", "drain", "finish"])
@pytest.mark.parametrize("sink", ["staged", "in_place"])
async def test_abort_in_each_phase(at, sink):
    async with by_hand(sink=sink) as engine:
        await owned(engine)
        await whole_round(engine, 1, 1)
        engine.hold(at)
        running = asyncio.create_task(whole_round(engine, 2, 2))
        async with asyncio.timeout(5):
            await engine.reached[at].wait()
            await engine.abort_weight_update("gave up", header=header(engine, 2))
        with pytest.raises(RoundCancelled, match="aborted by the trainer: gave up"):
            await running
        torn = sink == "in_place" and at in ("drain", "finish")
        assert engine.state is (State.FAILED if torn else State.INITIALIZED)
        assert engine.weights == (Weights.TORN if torn else Weights.INTACT)
        if not torn:
            assert values(engine.model) == {1.0}
        engine.reached.clear()
        if torn:
            await owned(engine)
        await whole_round(engine, 3, 3)
        assert values(engine.model) == {3.0}
        assert engine.weights == Weights.INTACT


async def test_abort_of_nothing_is_a_no_op():
    async with by_hand() as engine:
        await engine.abort_weight_update()
        await owned(engine)
        await engine.abort_weight_update(header=header(engine, 1))
        assert engine.machine.seq == 1


async def test_close_during_a_round_fails_it_first():
    async with by_hand() as engine:
        triggers = []
        engine.on_transition(lambda t: triggers.append(t.trigger))
        await owned(engine)
        engine.hold("update")
        running = asyncio.create_task(whole_round(engine, 1, 1))
        await engine.reached["update"].wait()
        async with asyncio.timeout(5):
            await engine.aclose()
        with pytest.raises(RoundCancelled, match="closed"):
            await running
        assert engine.state is State.CLOSED
        assert triggers in (
            ["initialize", "start", "update", "fail", "close"],
            ["initialize", "start", "update", "abort", "close"],
        )
        assert values(engine.model) == {0.0}
        assert engine.steps[-1] == "shutdown"


async def test_close_during_commit_lets_it_finish():
    async with by_hand() as engine:
        await owned(engine)
        committing, go = asyncio.Event(), asyncio.Event()
        commit = engine.sink.commit
        loop = asyncio.get_running_loop()

        def slow():
            loop.call_soon_threadsafe(committing.set)
            asyncio.run_coroutine_threadsafe(go.wait(), loop).result(10)
            commit()

        engine.sink.commit = slow
        running = asyncio.create_task(whole_round(engine, 1, 1))
        await committing.wait()
        closing = asyncio.create_task(engine.aclose())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        go.set()
        await running
        await closing
        assert engine.state is State.CLOSED
        assert engine.version == version(1)
        assert values(engine.model) == {1.0}


@pytest.mark.fault("A-HTTP-2")
async def test_round_whose_handler_was_cancelled_goes_on_and_commits():
    async with by_hand() as engine:
        await owned(engine)
        this = header(engine, 1, 1)
        await engine.start_weight_update(header=this)
        await engine.update_weights({"value": 1.0}, header=this)
        go = engine.hold("finish")
        handler = asyncio.create_task(engine.finish_weight_update("1", header=this))
        await engine.reached["finish"].wait()
        handler.cancel()
        await asyncio.wait([handler])
        go.set()
        async with asyncio.timeout(5):
            await engine.wait_for(State.INITIALIZED)
        assert engine.version == version(1)


@pytest.mark.fault("A-STATE-2")
async def test_lease_ends_a_round_nobody_cares_for():
    async with by_hand(lease_s=0.3) as engine:
        await owned(engine)
        this = header(engine, 1, 1)
        await engine.start_weight_update(header=this)
        async with asyncio.timeout(5):
            await engine.wait_for(State.INITIALIZED, State.FAILED)
        assert engine.state is State.INITIALIZED
        assert engine.weights == Weights.INTACT
        with pytest.raises(PhaseTimeout, match="no sign of life"):
            await engine.finish_weight_update("1", header=this)
        await whole_round(engine, 2, 2)


async def test_calls_of_others_do_not_renew_the_lease():
    async with by_hand(lease_s=0.3) as engine:
        await owned(engine)
        await engine.start_weight_update(header=header(engine, 1, 1))
        strange = RoundHeader(owner="stranger", epoch=1, round=1)

        async def pester():
            while engine.state is State.UPDATING:
                engine.touch(None)
                with pytest.raises(Fenced):
                    engine.touch(strange)
                await asyncio.sleep(0.05)

        async with asyncio.timeout(5):
            await pester()


@pytest.mark.parametrize("lease", [0.2, None])
async def test_lease_of_the_config_wins_over_the_trainers(lease):
    async with by_hand(lease_s=lease) as engine:
        await owned(engine)
        await engine.start_weight_update(header=header(engine, 1, 1, lease_s=5.0))
        assert engine.cycle.session.lease == (lease or 5.0)


# -- gates


async def test_gate_vetoes_start_and_nothing_changes():
    async with by_hand() as engine:
        await owned(engine)
        before = snapshot(engine)
        remove = engine.gate("start", lambda context: context.version != "1")
        with pytest.raises(GateRejected):
            await engine.start_weight_update(header=header(engine, 1, 1))
        assert snapshot(engine) == before
        assert engine.steps == ["init"]
        await whole_round(engine, 1, 2)
        remove()
        await whole_round(engine, 2, 3)


async def test_gate_vetoes_complete_and_the_round_is_aborted():
    async with by_hand() as engine:
        await owned(engine)
        remove = engine.gate("complete", lambda _: False)
        with pytest.raises(GateRejected):
            await whole_round(engine, 1, 1)
        assert engine.state is State.INITIALIZED
        assert engine.weights == Weights.INTACT
        assert values(engine.model) == {0.0}
        assert engine.version is None
        remove()
        await whole_round(engine, 2, 1)
        assert values(engine.model) == {1.0}


async def test_gate_vetoes_initialize_and_the_owner_stays():
    async with by_hand() as engine:
        await owned(engine)
        before = snapshot(engine)
        remove = engine.gate("initialize", lambda _: False)
        with pytest.raises(GateRejected):
            await owned(engine, "another")
        assert snapshot(engine) == before
        assert engine.cycle.ownership.owner == "trainer"
        await whole_round(engine, 1, 1)
        remove()
        await owned(engine, "another")


async def test_gate_that_waits_is_followed_by_a_second_look_at_the_state():
    async with by_hand() as engine:
        await owned(engine)
        entered, go = asyncio.Event(), asyncio.Event()

        async def slow(_):
            entered.set()
            await go.wait()

        remove = engine.gate("start", slow)
        first = asyncio.create_task(engine.start_weight_update(header=header(engine, 1, 1)))
        await entered.wait()
        remove()
        await engine.start_weight_update(header=header(engine, 2, 2))
        go.set()
        with pytest.raises((InvalidTransition, Fenced)):
            await first
        assert engine.cycle.session.number == 2
        assert engine.state is State.UPDATING


# -- init


async def test_init_by_another_owner_takes_over_and_releases_first():
    async with by_hand() as engine:
        triggers = []
        await owned(engine)
        epoch = engine.cycle.ownership.epoch
        engine.on_transition(lambda t: triggers.append(t.trigger))
        await owned(engine, "another")
        assert triggers == ["release", "initialize"]
        assert engine.steps == ["init", "shutdown", "init"]
        assert engine.cycle.ownership.epoch == epoch + 1


async def test_init_during_an_init_is_busy():
    async with by_hand() as engine:
        go = engine.hold("init")
        first = asyncio.create_task(owned(engine))
        await engine.reached["init"].wait()
        with pytest.raises(Busy, match="init is under way"):
            await owned(engine, "another")
        go.set()
        await first
        assert engine.cycle.ownership.owner == "trainer"


async def test_init_ends_the_one_that_its_own_trainer_gave_up():
    async with by_hand() as engine:
        engine.hold("init")
        first = asyncio.create_task(owned(engine, "a"))
        await engine.reached["init"].wait()
        del engine.reached["init"]  # the second one does not wait
        async with asyncio.timeout(10):
            await owned(engine, "a")
        with pytest.raises(RoundCancelled, match="an init was given up by a"):
            await first
        assert (engine.state, engine.cycle.ownership.owner) == (State.INITIALIZED, "a")
        await whole_round(engine, 1, 1)


async def test_init_that_fails_leaves_a_failed_engine_that_can_be_initialised_again():
    async with by_hand() as engine:
        engine.errors["init"] = OSError("no such host")
        with pytest.raises(OSError, match="no such host"):
            await owned(engine)
        assert engine.state is State.FAILED
        assert engine.weights == Weights.INTACT
        await owned(engine)
        await whole_round(engine, 1, 1)


async def test_busy_names_the_owner_and_since_when():
    async with by_hand() as engine:
        await owned(engine)
        await engine.start_weight_update(header=header(engine, 1, 1))
        with pytest.raises(Busy, match="trainer") as caught:
            await owned(engine, "another")
        assert caught.value.detail["owner"] == "trainer"
        assert caught.value.detail["since"] > 0


async def test_close_during_init_leaves_nothing_open():
    async with by_hand() as engine:
        go = engine.hold("init")
        first = asyncio.create_task(owned(engine))
        await engine.reached["init"].wait()
        await engine.aclose()
        go.set()
        with pytest.raises(aiosync.AiosyncError):
            await first
        assert engine.state is State.CLOSED
        assert not engine.is_open


# -- payloads


@pytest.mark.fault("A-INPUT-3")
@pytest.mark.parametrize(
    ("payload", "path"),
    [
        ({"value": "much"}, r"\$\.value"),
        ({"value": 1.0, "vaule": 2.0}, "vaule"),
        ({}, "value"),
        ("text", "update_info"),
        (None, "update_info"),
        ({"value": 1.0, "batch": 1.5}, r"\$\.batch"),
    ],
)
async def test_malformed_payload_is_named_and_the_round_stays_open(payload, path):
    async with by_hand() as engine:
        await owned(engine)
        this = header(engine, 1, 1)
        await engine.start_weight_update(header=this)
        before = snapshot(engine)
        with pytest.raises(Validation, match=path) as caught:
            await engine.update_weights(payload, header=this)
        assert isinstance(caught.value, ValueError)
        assert snapshot(engine) == before
        await engine.update_weights({"value": 1.0}, header=this)
        await engine.finish_weight_update("1", header=this)
        assert values(engine.model) == {1.0}


@pytest.mark.fault("A-INPUT-3")
@pytest.mark.parametrize("info", [{"address": 5}, {"adress": "there"}, [], None])
async def test_malformed_init_info_changes_nothing(info):
    async with by_hand() as engine:
        await owned(engine)
        before = snapshot(engine)
        with pytest.raises(Validation, match=r"init_info"):
            await engine.init_transfer_engine(info, header=RoundHeader(owner="another"))
        assert snapshot(engine) == before
        await whole_round(engine, 1, 1)


async def test_list_payload_is_indexed_by_rank():
    async with by_hand() as engine:
        await owned(engine)
        engine.rank = 1
        this = header(engine, 1, 1)
        await engine.start_weight_update(header=this)
        with pytest.raises(Validation, match="rank is 1") as caught:
            await engine.update_weights([{"value": 1.0}], header=this)
        assert caught.value.rank == 1
        assert engine.state is State.UPDATING
        await engine.update_weights([{"value": 1.0}, {"value": 2.0}], header=this)
        await engine.finish_weight_update("1", header=this)
        assert values(engine.model) == {2.0}


@pytest.mark.fault("A-SILENT-1")
async def test_round_without_a_payload_is_not_a_success():
    async with by_hand() as engine:
        await owned(engine)
        this = header(engine, 1, 1)
        await engine.start_weight_update(header=this)
        with pytest.raises(Coverage, match="no tensors"):
            await engine.finish_weight_update("1", header=this)
        assert engine.version is None
        assert values(engine.model) == {0.0}


# -- what the weights are


@pytest.mark.fault("A-SILENT-3", "A-VERSION-3")
@pytest.mark.parametrize("fail_at", [0, 7, 49])
@pytest.mark.parametrize("sink", ["staged", "in_place"])
async def test_sink_that_fails_midway(sink, fail_at):
    async with by_hand(sink=sink) as engine:
        await owned(engine)
        await whole_round(engine, 1, 1)
        with pytest.raises(OSError, match=f"tensor {fail_at}"):
            await whole_round(engine, 2, 2, batch=7, fail_at=fail_at)
        assert engine.version == version(1)
        if sink == "in_place" and fail_at:
            assert engine.weights == Weights.TORN
            assert engine.state is State.FAILED
            assert engine.peer_state().weights == "torn"
            await owned(engine)
            assert engine.weights == Weights.TORN  # a new channel mends nothing
        else:
            assert engine.weights == Weights.INTACT
            assert engine.state is State.INITIALIZED
            assert values(engine.model) == {1.0}
        await whole_round(engine, 3, 3)
        assert values(engine.model) == {3.0}
        assert engine.weights == Weights.INTACT


async def test_in_place_round_under_way_says_that_the_weights_are_torn():
    async with by_hand(sink="in_place") as engine:
        await owned(engine)
        await whole_round(engine, 1, 1)
        this = header(engine, 2, 2)
        await engine.start_weight_update(header=this)
        assert engine.peer_state().weights == "intact"
        await engine.update_weights({"value": 2.0}, header=this)
        assert engine.weights == Weights.TORN
        assert engine.peer_state().weights == "torn"
        await engine.finish_weight_update("2", header=this)
        assert engine.peer_state().weights == "intact"


async def test_engine_without_a_sink_is_unknown_until_it_finishes():
    async with by_hand(WithoutSink) as engine:
        await engine.init_transfer_engine({})
        await engine.start_weight_update()
        assert engine.weights == Weights.INTACT
        await engine.update_weights({"value": 1.0})
        assert engine.weights == Weights.UNKNOWN
        await engine.abort_weight_update()
        assert engine.state is State.FAILED
        assert engine.weights == Weights.UNKNOWN
        await engine.init_transfer_engine({})
        await engine.start_weight_update()
        await engine.update_weights({"value": 1.0})
        await engine.finish_weight_update("1")
        assert engine.weights == Weights.INTACT


async def test_commit_that_fails_leaves_the_weights_torn():
    async with by_hand() as engine:
        await owned(engine)
        sink = engine.sink

        def broken():
            raise RuntimeError("fused kernel refused")

        sink.after_load = broken
        with pytest.raises(RuntimeError, match="fused kernel"):
            await whole_round(engine, 1, 1)
        assert engine.weights == Weights.TORN
        assert engine.state is State.FAILED
        assert engine.version is None
        sink.after_load = None
        await owned(engine)
        await whole_round(engine, 1, 2)
        assert engine.weights == Weights.INTACT


@pytest.mark.fault("A-VERSION-4")
@pytest.mark.parametrize("batch", [1, 7, 50])
async def test_reader_that_holds_the_gate_never_sees_two_versions(batch):
    async with by_hand() as engine:
        await owned(engine)
        seen, reads, done = set(), 0, asyncio.Event()

        async def reader():
            nonlocal reads
            while not done.is_set():
                async with engine.generation.request():
                    found, label = set(), engine.version
                    for tensor in engine.model.values():
                        found.add(float(tensor[0]))
                        found.add(float(tensor[-1]))
                        if reads % 5 == 0:
                            await asyncio.sleep(0)
                    assert len(found) == 1
                    assert engine.version is label
                    if label is not None:
                        assert found == {float(label.order)}
                    seen.update(found)
                    reads += 1
                await asyncio.sleep(0)

        readers = [asyncio.create_task(reader()) for _ in range(3)]
        for number in range(1, 21):
            await whole_round(engine, number, number, batch=batch)
        done.set()
        await asyncio.gather(*readers)
        assert reads > 20
        assert len(seen) > 5


async def test_swap_that_cannot_have_the_gate_keeps_the_old_version(monkeypatch):
    short = msgspec.structs.replace(aiosync.DEFAULTS, pause_s=0.1)
    monkeypatch.setattr("aiosync.worker_commit.DEFAULTS", short)
    async with by_hand() as engine:
        await owned(engine)
        await whole_round(engine, 1, 1)
        async with engine.generation.request():
            with pytest.raises(PhaseTimeout, match="still running"):
                await whole_round(engine, 2, 2)
            assert values(engine.model) == {1.0}
        assert engine.state is State.INITIALIZED
        assert engine.version == version(1)
        await whole_round(engine, 3, 3)


async def test_a_finish_waits_for_requests_as_long_as_its_call_may_take():
    async with by_hand() as engine:
        await owned(engine)
        this = header(engine, 1, 1)
        await engine.start_weight_update(header=this)
        await engine.update_weights({"value": 1.0}, header=this)
        async with engine.generation.request(id="chat-7"):
            late = msgspec.structs.replace(this, deadline_s=0.2)
            with pytest.raises(PhaseTimeout, match=r"after 0\.\d+ s: chat-7") as caught:
                await engine.finish_weight_update(header=late)
            assert (caught.value.phase, "checkpoint()" in caught.value.next_step) == (
                "finish",
                True,
            )
        assert (values(engine.model), engine.version, engine.weights) == ({0.0}, None, "intact")
        await whole_round(engine, 2, 2)


async def test_a_start_that_comes_after_its_abort_opens_nothing():
    async with by_hand() as engine:
        await owned(engine)
        late = header(engine, 1, 1)
        await engine.abort_weight_update("cancelled", header=late)
        with pytest.raises(Fenced, match="round 1 is not newer"):
            await engine.start_weight_update(header=late)
        assert engine.state is State.INITIALIZED
        await whole_round(engine, 2, 1)


async def test_what_was_meant_for_an_earlier_process_is_fenced():
    async with by_hand() as before:
        await owned(before)
        late = header(before, 1, 1)
    async with by_hand() as after:
        await owned(after)
        with pytest.raises(Fenced, match="is not the owner"):
            await after.start_weight_update(header=late)


# -- what it says of itself


async def test_peer_state_is_json_and_follows_the_round():
    async with by_hand() as engine:
        assert engine.peer_state().state == "idle"
        await owned(engine)
        await engine.start_weight_update(header=header(engine, 1, 1))
        peer = engine.peer_state()
        assert (peer.state, peer.owner) == ("updating", "trainer")
        assert peer.epoch == engine.cycle.ownership.epoch
        assert peer.detail["round"] == 1
        assert not peer.detail["settled"]
        await engine.abort_weight_update("why not", header=header(engine, 1))
        peer = json.loads(msgspec.json.encode(engine.peer_state()))
        assert peer["detail"]["settled"]
        assert "why not" in peer["detail"]["outcome"]
        assert peer["detail"]["allowed"] == list(engine.machine.allowed())


async def test_repr_says_what_matters():
    async with by_hand() as engine:
        await owned(engine)
        await whole_round(engine, 1, 1)
        assert repr(engine) == "<ByHand worker initialized weights=intact version=1>"


async def test_plain_def_steps_run_on_the_lane_and_super_does_not_flip_again():
    class Base(WeightTransferEngine[Init, Update]):
        init_info_cls = Init
        update_info_cls = Update

        def init_transfer_engine(self, init_info):
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            self.address = init_info.address

        def start_weight_update(self):
            self.opened = True

        def receive_weights(self, update_info):
            for tensor in self.model.values():
                tensor.fill_(update_info.value)

        def finish_weight_update(self):
            self.opened = False

        def shutdown(self):
            self.address = None

    class Derived(Base):
        def start_weight_update(self):
            super().start_weight_update()
            assert self.opened

        async def finish_weight_update(self):
            super().finish_weight_update()

    engine = Derived(aiosync.WeightTransferConfig("derived"), None, "cpu", tensors())
    triggers = []
    engine.on_transition(lambda t: triggers.append(t.trigger))
    async with engine:
        await engine.init_transfer_engine({"address": "there"})
        await engine.start_weight_update()
        await engine.update_weights({"value": 4.0})
        await engine.finish_weight_update()
        assert values(engine.model) == {4.0}
        assert not engine.opened
        await engine.shutdown()
        assert engine.address is None
    assert triggers == [
        "initialize", "start", "update", "finalize", "complete", "release", "close",
    ]  # fmt: skip


async def test_two_engines_of_one_class_do_not_share_the_mark_of_a_running_step():
    async with by_hand() as one, by_hand() as two:
        await owned(one)
        await owned(two)

        async def drive_the_other():
            await whole_round(two, 1, 1)

        one.drain_pending = drive_the_other
        await whole_round(one, 1, 1)
        assert two.state is State.INITIALIZED
        assert two.version == version(1)


@pytest.mark.parametrize("state", ["initialized", "failed"])
async def test_shutdown_is_idempotent_and_init_works_again(state):
    async with by_hand() as engine:
        await bring_to(engine, state)
        for _ in range(2):
            await engine.shutdown()
            assert engine.state is State.IDLE
        await engine.init_transfer_engine({})
        assert engine.state is State.INITIALIZED


async def test_engine_needs_all_five_steps():
    class Half(WeightTransferEngine[Init, Update]):
        init_info_cls = Init
        update_info_cls = Update

        async def init_transfer_engine(self, init_info):
            pass

    with pytest.raises(TypeError, match=r"finish_weight_update.*receive_weights.*shutdown"):
        Half(aiosync.WeightTransferConfig("half"), None, "cpu", tensors())
